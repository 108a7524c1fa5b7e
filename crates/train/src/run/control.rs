//! Requests to a running run: to stop, or to save.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

/// Flags that a signal handler or another thread sets and the run looks at between steps, between the batches of a
/// validation and between the tokens of a sample. Copies share them.
#[derive(Clone, Debug, Default)]
pub struct Control {
    stop: Arc<AtomicUsize>,
    save: Arc<AtomicBool>,
    deadline: Option<(Instant, Duration)>,
}

/// Why a run stops before its last step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StopReason {
    /// It was asked to; the number is what was stored in [`Control::stop_flag`], such as a signal's.
    Asked(usize),
    /// Its time limit is reached.
    Time(Duration),
}

impl Control {
    /// Stops by itself after this long.
    #[must_use]
    pub fn with_time(self, time: Option<Duration>) -> Self {
        Self { deadline: time.map(|time| (Instant::now() + time, time)), ..self }
    }

    /// Set it to any number but 0 to stop the run.
    pub fn stop_flag(&self) -> Arc<AtomicUsize> {
        self.stop.clone()
    }

    /// Set it to save now and continue.
    pub fn save_flag(&self) -> Arc<AtomicBool> {
        self.save.clone()
    }

    /// Whether to stop, and why.
    pub fn stop_reason(&self) -> Option<StopReason> {
        match self.stop.load(Ordering::Relaxed) {
            0 => {
                let over = self.deadline.filter(|(deadline, _)| Instant::now() >= *deadline);
                over.map(|(_, time)| StopReason::Time(time))
            }
            by => Some(StopReason::Asked(by)),
        }
    }

    /// Whether a save was asked for since the last look.
    pub(super) fn take_save(&self) -> bool {
        self.save.swap(false, Ordering::Relaxed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn copies_share_the_flags_and_time_runs_out() {
        let control = Control::default();
        let copy = control.clone();
        assert_eq!(control.stop_reason(), None);
        copy.save_flag().store(true, Ordering::Relaxed);
        assert!(control.take_save() && !control.take_save());
        copy.stop_flag().store(15, Ordering::Relaxed);
        assert_eq!(control.stop_reason(), Some(StopReason::Asked(15)));
        let over = Control::default().with_time(Some(Duration::ZERO));
        assert_eq!(over.stop_reason(), Some(StopReason::Time(Duration::ZERO)));
        assert_eq!(Control::default().with_time(Some(Duration::from_secs(3600))).stop_reason(), None);
    }
}
