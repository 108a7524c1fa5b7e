//! How ranks get on with their steps: what each says of itself in its heartbeats, and what the others make of it.

use crate::wire::Pulse;
use ironhorse_core::ranks::{AT_FIRST, Watched};
use std::sync::atomic::{AtomicU8, AtomicU64, AtomicUsize, Ordering};
use std::time::Duration;

/// A call that waits and has not looked around for this long hangs.
const LOOK_AGAIN: Duration = Duration::from_secs(2);
/// Counts of a step: more than the progress that a rank can make in one.
const STEP_BITS: u32 = 32;

/// The progress of this rank.
#[derive(Default)]
pub struct OwnWork {
    /// How often it has made progress: from the step's number on, so that ranks which did other things between steps can be compared.
    count: AtomicU64,
    /// How many times the usual limit the step may take; 0 between steps.
    limits: AtomicU8,
    /// Calls that wait for another rank.
    waiting: AtomicUsize,
    /// Milliseconds after the start at which such a call looked around last.
    looked: AtomicU64,
}

impl OwnWork {
    /// A step begins, or has ended.
    pub fn in_step(&self, step: Option<Watched>) {
        if let Some(Watched { step, .. }) = step {
            let number = step + 1; // before the first step it is 0
            if self.count.load(Ordering::Relaxed) >> STEP_BITS != number {
                self.count.store(number << STEP_BITS, Ordering::Relaxed);
            }
        }
        let limits = step.map_or(0, |step| if step.first { AT_FIRST as u8 } else { 1 });
        self.limits.store(limits, Ordering::Relaxed);
    }

    /// Counts that this rank has made progress.
    pub fn gets_on(&self) {
        self.count.fetch_add(1, Ordering::Relaxed);
    }

    /// Says, until it is dropped, that this rank waits for another.
    pub fn waits(&self, now: u64) -> Waits<'_> {
        self.looks(now);
        self.waiting.fetch_add(1, Ordering::Relaxed);
        Waits(self)
    }

    /// A call that waits has looked around.
    pub fn looks(&self, now: u64) {
        self.looked.store(now, Ordering::Relaxed);
    }

    /// What the next heartbeat says.
    pub fn pulse(&self, now: u64) -> Pulse {
        // one that hangs while it waits looks no more
        let looked = now.saturating_sub(self.looked.load(Ordering::Relaxed));
        let waits = self.waiting.load(Ordering::Relaxed) > 0 && looked < LOOK_AGAIN.as_millis() as u64;
        let limits = if waits { 0 } else { self.limits.load(Ordering::Relaxed) };
        Pulse { count: self.count.load(Ordering::Relaxed), limits }
    }
}

/// A call that waits for another rank.
pub struct Waits<'a>(&'a OwnWork);

impl Drop for Waits<'_> {
    fn drop(&mut self) {
        self.0.gets_on();
        self.0.waiting.fetch_sub(1, Ordering::Relaxed);
    }
}

/// The progress of another rank, as far as it is known.
#[derive(Default)]
pub struct Work {
    /// How often the rank has made progress.
    count: AtomicU64,
    /// [`Pulse::limits`]
    limits: AtomicU8,
    /// Milliseconds after the start at which it made progress, or did not work.
    at: AtomicU64,
}

impl Work {
    /// Takes what is known now.
    pub fn update(&self, pulse: Pulse, now: u64) {
        let before = self.count.swap(pulse.count, Ordering::Relaxed);
        let worked = self.limits.swap(pulse.limits, Ordering::Relaxed);
        if before != pulse.count || pulse.limits == 0 || worked == 0 {
            self.forgive(now);
        }
    }

    /// Gives the rank the full time limit again.
    pub fn forgive(&self, now: u64) {
        self.at.store(now, Ordering::Relaxed);
    }

    /// How often the rank has made progress.
    pub fn count(&self) -> u64 {
        self.count.load(Ordering::Relaxed)
    }

    /// How many times `limit`, the usual time in milliseconds, the rank had, if it has made no progress for longer than that; else `None`.
    pub fn stuck(&self, limit: u64, now: u64) -> Option<u8> {
        let limits = self.limits.load(Ordering::Relaxed);
        let stuck = now.saturating_sub(self.at.load(Ordering::Relaxed));
        (limits > 0 && stuck > limit * u64::from(limits)).then_some(limits)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_rank_that_works_and_does_not_get_on_is_stuck() {
        let work = Work::default();
        let stuck = |count, limits, now| {
            work.update(Pulse { count, limits }, now);
            work.stuck(1000, now)
        };
        assert_eq!(stuck(0, 0, 1000), None, "between steps nobody is watched");
        assert_eq!(stuck(0, 1, 5000), None, "the step begins");
        assert_eq!(stuck(0, 1, 7000), Some(1));
        assert_eq!(stuck(1, 1, 8000), None, "it got on");
        assert_eq!(stuck(1, 1, 9001), Some(1));
        assert_eq!(work.stuck(1000, 9500), Some(1), "also where no heartbeat has come since");
        assert_eq!(stuck(1, 0, 9900), None, "it waits for another");
        assert_eq!(stuck(2, 10, 12_000), None, "a first step");
        assert_eq!(stuck(2, 10, 21_900), None, "which has ten times as long");
        assert_eq!(stuck(2, 10, 22_100), Some(10));
    }

    /// A rank that has validated or sampled more than the others is not ahead of them in the next step.
    #[test]
    fn the_count_begins_with_the_step() {
        let [a, b] = [OwnWork::default(), OwnWork::default()];
        let begin =
            |step| [&a, &b].into_iter().for_each(|work| work.in_step(Some(Watched { step, first: false })));
        begin(6);
        (0..1000).for_each(|_| a.gets_on()); // a sample, which one rank draws
        begin(7);
        b.gets_on();
        assert!(a.pulse(0).count < b.pulse(0).count);
        assert_eq!((a.pulse(0).limits, b.pulse(0).limits), (1, 1));
        drop(a.waits(0));
        assert_eq!(a.pulse(0).count, b.pulse(0).count);
        a.in_step(None);
        assert_eq!(a.pulse(0).limits, 0);
    }
}
