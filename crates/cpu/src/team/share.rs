//! The tasks of a run that one worker begins with.

use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};

/// The tasks of a worker's share that nobody has taken yet. It has its own cache line: whoever takes one changes it.
#[derive(Default)]
#[repr(align(128))]
pub(super) struct Share {
    next: AtomicUsize,
    end: AtomicUsize,
}

impl Share {
    /// Sets the share. Nobody takes from it meanwhile.
    pub(super) fn give(&self, tasks: Range<usize>) {
        self.next.store(tasks.start, Ordering::Relaxed);
        self.end.store(tasks.end, Ordering::Relaxed);
    }

    /// The next task, if there is one left.
    pub(super) fn take(&self) -> Option<usize> {
        let end = self.end.load(Ordering::Relaxed);
        // Others look before they change it.
        if self.next.load(Ordering::Relaxed) >= end {
            return None;
        }
        Some(self.next.fetch_add(1, Ordering::Relaxed)).filter(|&number| number < end)
    }
}
