//! Requests to a running run: to stop, or to save.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

/// Flags that a signal handler or another thread sets and the run looks at between steps, between the batches of a
/// validation and between the tokens of a sample. Copies share them.
#[derive(Clone, Default)]
pub struct Control {
    stop: Arc<AtomicUsize>,
    save: Arc<AtomicBool>,
    deadline: Option<(Instant, Duration)>,
    ask: Option<Arc<Ask>>,
}

/// Asked at every look whether to stop: any number but 0.
type Ask = dyn Fn() -> usize + Send + Sync;

impl std::fmt::Debug for Control {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { stop, save, deadline, ask } = self;
        let (asks, name) = (ask.is_some(), "Control");
        f.debug_struct(name)
            .field("stop", stop)
            .field("save", save)
            .field("deadline", deadline)
            .field("asks", &asks)
            .finish()
    }
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

    /// Also asks `ask` at every look: any number but 0 stops the run. For a caller who gets no signals, but can look for them.
    #[must_use]
    pub fn asking(self, ask: impl Fn() -> usize + Send + Sync + 'static) -> Self {
        Self { ask: Some(Arc::new(ask)), ..self }
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
        match self.asked() {
            0 => {
                let over = self.deadline.filter(|(deadline, _)| Instant::now() >= *deadline);
                over.map(|(_, time)| StopReason::Time(time))
            }
            by => Some(StopReason::Asked(by)),
        }
    }

    /// What was stored in the stop flag, or is by the answer of [`Control::asking`].
    fn asked(&self) -> usize {
        let before = self.stop.load(Ordering::Relaxed);
        let Some(ask) = self.ask.as_ref().filter(|_| before == 0) else { return before };
        match ask() {
            0 => 0,
            by => {
                self.stop.store(by, Ordering::Relaxed);
                by
            }
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
        let asked = Control::default();
        let asking = asked.clone().asking(|| 7);
        assert_eq!(asked.stop_reason(), None);
        assert_eq!(asking.with_time(None).stop_reason(), Some(StopReason::Asked(7)));
        assert_eq!(asked.stop_reason(), Some(StopReason::Asked(7)), "once asked for, it stays");
        let over = Control::default().with_time(Some(Duration::ZERO));
        assert_eq!(over.stop_reason(), Some(StopReason::Time(Duration::ZERO)));
        assert_eq!(Control::default().with_time(Some(Duration::from_secs(3600))).stop_reason(), None);
    }
}
