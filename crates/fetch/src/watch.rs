//! What the caller sees of a download, and how it stops one.

use std::ops::ControlFlow;
use std::time::{Duration, Instant};

/// How far a download is.
#[derive(Clone, Copy, Debug)]
pub struct Progress<'a> {
    /// The file that is being downloaded.
    pub file: &'a str,
    /// Bytes of all files that are on the disk.
    pub done: u64,
    /// Bytes of all files; 0 if the server does not say.
    pub total: u64,
}

/// Sees a download and may stop it.
pub trait Watch {
    /// Called several times a second, also while nothing arrives. `Break` stops; what has arrived is kept.
    fn progress(&mut self, progress: Progress<'_>) -> ControlFlow<()>;

    /// One line about something unusual: a retry, a wait for another process.
    fn note(&mut self, text: &str);

    /// Waits before the next try.
    fn pause(&mut self, time: Duration, progress: Progress<'_>) -> ControlFlow<()> {
        let until = Instant::now() + time;
        loop {
            self.progress(progress)?;
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return ControlFlow::Continue(());
            }
            std::thread::sleep(left.min(STEP));
        }
    }
}

/// Time between two calls of [`Watch::progress`].
pub(crate) const STEP: Duration = Duration::from_millis(100);
