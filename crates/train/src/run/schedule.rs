//! The learning rate of every step: a linear warm-up to the peak, then a decay to a fraction of it.

use serde::{Deserialize, Serialize};

use crate::{Error, Result};

/// How the rate falls after the warm-up.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Decay {
    /// Half a cosine wave from the peak to the final rate.
    #[default]
    Cosine,
    /// A straight line from the peak to the final rate.
    Linear,
    /// Stays at the peak; `final_fraction` is not used.
    Constant,
    /// Warm-up, stable, decay: stays at the peak, then a straight line to the final rate over the last `decay_fraction` of the
    /// steps.
    Wsd,
}

/// The learning rate as a function of the step.
///
/// ```
/// use ironhorse_train::run::schedule::{Decay, LrSchedule};
/// let lr = LrSchedule {
///     kind: Decay::Linear,
///     peak: 1.0,
///     warmup_steps: 2,
///     total_steps: 5,
///     final_fraction: 0.25,
///     decay_fraction: 0.4,
/// };
/// let rates: Vec<f32> = (0..5).map(|step| lr.at(step)).collect();
/// assert_eq!(rates, [0.5, 1.0, 0.75, 0.5, 0.25]);
/// let lr = LrSchedule { kind: Decay::Wsd, ..lr }; // decays in two of the five steps
/// let rates: Vec<f32> = (0..5).map(|step| lr.at(step)).collect();
/// assert_eq!(rates, [0.5, 1.0, 1.0, 0.625, 0.25]);
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LrSchedule {
    /// The shape of the decay.
    #[serde(default)]
    pub kind: Decay,
    /// The highest rate, reached at step `warmup_steps - 1` (step 0 without warm-up).
    pub peak: f32,
    /// Steps of linear warm-up, from `peak / warmup_steps` to `peak`.
    #[serde(default)]
    pub warmup_steps: u64,
    /// Steps of the whole run, warm-up included.
    pub total_steps: u64,
    /// The rate of the last step, as a fraction of the peak.
    #[serde(default)]
    pub final_fraction: f32,
    /// The part of the steps in which the rate of [`Decay::Wsd`] falls; the others do not use it.
    #[serde(default = "usual_decay")]
    pub decay_fraction: f32,
}

/// The part of the steps that [`Decay::Wsd`] decays in, unless another is given.
pub const DECAY_FRACTION: f32 = 0.2;

fn usual_decay() -> f32 {
    DECAY_FRACTION
}

impl LrSchedule {
    /// Checks the settings; the error names the one that is invalid.
    pub fn validate(&self) -> Result<()> {
        let fail = |name: &str, found: &dyn std::fmt::Display, expected: String| {
            Err(Error::input(format!("learning-rate schedule: {name}"), found, expected))
        };
        if !(self.peak.is_finite() && self.peak >= 0.0) {
            return fail("peak", &self.peak, "a finite number >= 0".into());
        }
        if self.total_steps == 0 {
            return fail("total_steps", &0, "at least 1".into());
        }
        if self.warmup_steps > self.total_steps {
            let most = format!("at most total_steps ({})", self.total_steps);
            return fail("warmup_steps", &self.warmup_steps, most);
        }
        if !(0.0..=1.0).contains(&self.final_fraction) {
            return fail("final_fraction", &self.final_fraction, "0 to 1".into());
        }
        if !(0.0..=1.0).contains(&self.decay_fraction) {
            return fail("decay_fraction", &self.decay_fraction, "0 to 1".into());
        }
        if self.kind == Decay::Wsd && self.warmup_steps > self.total_steps - self.decay_steps() {
            let found = format!("{}, which is {} steps", self.decay_fraction, self.decay_steps());
            let left =
                format!("at most the {} steps after the warm-up", self.total_steps - self.warmup_steps);
            return fail("decay_fraction", &found, left);
        }
        Ok(())
    }

    /// Steps of the decay of [`Decay::Wsd`].
    fn decay_steps(&self) -> u64 {
        ((f64::from(self.decay_fraction) * self.total_steps as f64).round() as u64).min(self.total_steps)
    }

    /// How many steps come before the decay: those of the warm-up and those at the peak.
    pub fn stable_steps(&self) -> u64 {
        match self.kind {
            Decay::Constant => u64::MAX,
            Decay::Wsd => self.total_steps.saturating_sub(self.decay_steps()).max(self.warmup_steps),
            Decay::Cosine | Decay::Linear => self.warmup_steps,
        }
    }

    /// Whether the first `steps` steps have the same rates with these settings as with `other`, because neither decays before.
    pub fn agrees(&self, other: &Self, steps: u64) -> bool {
        let rise = |s: &Self| (s.peak.to_bits(), s.warmup_steps);
        rise(self) == rise(other) && steps <= self.stable_steps().min(other.stable_steps())
    }

    /// The rate of a step, counted from 0. Steps past the end keep the rate of the last one.
    pub fn at(&self, step: u64) -> f32 {
        let peak = f64::from(self.peak);
        if step < self.warmup_steps {
            return (peak * (step + 1) as f64 / self.warmup_steps as f64) as f32;
        }
        // The last step that has the peak, and how far this one is from it to the last step.
        let top = self.stable_steps().saturating_sub(1);
        let span = self.total_steps.saturating_sub(1).saturating_sub(top);
        let past = step.saturating_sub(top);
        let progress = if span == 0 { 0.0 } else { (past as f64 / span as f64).min(1.0) };
        let left = match self.kind {
            Decay::Constant => return self.peak,
            Decay::Linear | Decay::Wsd => 1.0 - progress,
            Decay::Cosine => 0.5 + 0.5 * libm::cos(std::f64::consts::PI * progress),
        };
        let floor = f64::from(self.final_fraction);
        (peak * (floor + (1.0 - floor) * left)) as f32
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn schedule(kind: Decay) -> LrSchedule {
        LrSchedule {
            kind,
            peak: 6e-4,
            warmup_steps: 10,
            total_steps: 101,
            final_fraction: 0.1,
            decay_fraction: DECAY_FRACTION,
        }
    }

    #[test]
    fn corners_are_exact() {
        for kind in [Decay::Cosine, Decay::Linear] {
            let s = schedule(kind);
            let last = (f64::from(6e-4_f32) * f64::from(0.1_f32)) as f32;
            assert_eq!(s.at(0), (f64::from(6e-4_f32) / 10.0) as f32);
            assert_eq!(s.at(9), 6e-4);
            assert!(s.at(10) < 6e-4 && s.at(99) > last);
            assert_eq!([s.at(100), s.at(101), s.at(u64::MAX)], [last; 3]);
        }
        let s = schedule(Decay::Constant);
        assert_eq!([s.at(9), s.at(10), s.at(100), s.at(1000)], [6e-4; 4]);
    }

    #[test]
    fn half_way_is_the_mean() {
        for kind in [Decay::Cosine, Decay::Linear] {
            let s = LrSchedule { peak: 1.0, warmup_steps: 1, final_fraction: 0.5, ..schedule(kind) };
            assert_eq!(s.at(50), 0.75);
        }
    }

    #[test]
    fn falls_all_the_way() {
        for kind in [Decay::Cosine, Decay::Linear] {
            let s = schedule(kind);
            assert!((0..9).all(|i| s.at(i) < s.at(i + 1)) && (9..100).all(|i| s.at(i) > s.at(i + 1)));
        }
    }

    #[test]
    fn awkward_lengths() {
        let at = |warmup_steps, total_steps, step| {
            let s = LrSchedule { warmup_steps, total_steps, final_fraction: 0.0, ..schedule(Decay::Cosine) };
            s.validate().unwrap();
            s.at(step)
        };
        assert_eq!(at(0, 1, 0), 6e-4);
        assert_eq!(at(1, 1, 0), 6e-4);
        assert_eq!(at(0, 2, 0), 6e-4);
        assert_eq!(at(0, 2, 1), 0.0);
        assert_eq!(at(5, 5, 4), 6e-4);
    }

    #[test]
    fn bad_settings_are_named() {
        let good = schedule(Decay::Cosine);
        good.validate().unwrap();
        for (bad, name) in [
            (LrSchedule { peak: f32::NAN, ..good }, "peak is NaN"),
            (LrSchedule { peak: -1.0, ..good }, "peak is -1"),
            (LrSchedule { total_steps: 0, ..good }, "total_steps is 0"),
            (LrSchedule { warmup_steps: 102, ..good }, "warmup_steps is 102"),
            (LrSchedule { final_fraction: 1.5, ..good }, "final_fraction is 1.5"),
            (LrSchedule { decay_fraction: f32::NAN, ..good }, "decay_fraction is NaN"),
            (
                LrSchedule { kind: Decay::Wsd, decay_fraction: 0.95, ..good },
                "decay_fraction is 0.95, which is 96 steps, expected at most the 91 steps after the warm-up",
            ),
        ] {
            let text = bad.validate().unwrap_err().to_string();
            assert!(text.contains(name), "{text}");
        }
    }

    #[test]
    fn wsd_is_stable_and_then_a_straight_line() {
        let s = LrSchedule { total_steps: 100, ..schedule(Decay::Wsd) };
        s.validate().unwrap();
        assert_eq!(s.stable_steps(), 80);
        assert_eq!((0..10).map(|i| s.at(i)).collect::<Vec<_>>(), {
            let linear = LrSchedule { kind: Decay::Linear, ..s };
            (0..10).map(|i| linear.at(i)).collect::<Vec<_>>()
        });
        assert!((9..80).all(|i| s.at(i) == 6e-4), "the stable part");
        assert!((79..99).all(|i| s.at(i) > s.at(i + 1)), "the decay begins with step 80");
        let (peak, floor) = (f64::from(6e-4_f32), f64::from(0.1_f32));
        assert_eq!(s.at(89), (peak * (floor + (1.0 - floor) * 0.5)) as f32, "half of the twenty steps");
        assert_eq!([s.at(99), s.at(100), s.at(u64::MAX)], [(peak * floor) as f32; 3]);
        // the whole run is the line, none of it is the constant
        let all = LrSchedule { decay_fraction: 1.0, warmup_steps: 0, ..s };
        let line = LrSchedule { kind: Decay::Linear, ..all };
        assert!((0..101).all(|i| all.at(i) == line.at(i)));
        let none = LrSchedule { decay_fraction: 0.0, ..s };
        assert!((9..101).all(|i| none.at(i) == 6e-4));
    }

    #[test]
    fn longer_runs_agree_until_the_shorter_one_decays() {
        for kind in [Decay::Cosine, Decay::Linear, Decay::Constant, Decay::Wsd] {
            let short = schedule(kind);
            let long = LrSchedule { total_steps: 400, ..short };
            let same = (0..400).take_while(|&i| short.at(i) == long.at(i)).count() as u64;
            for steps in 0..=same {
                assert!(short.agrees(&long, steps) && long.agrees(&short, steps), "{kind:?} {steps}");
            }
            assert!(same == 400 || !short.agrees(&long, same + 1), "{kind:?} {same}");
            assert!(!short.agrees(&LrSchedule { peak: 1.0, ..long }, 0), "{kind:?}");
        }
    }

    #[test]
    fn reads_toml() {
        let s: LrSchedule = toml::from_str("kind = 'linear'\npeak = 1.0\ntotal_steps = 7").unwrap();
        assert_eq!((s.kind, s.warmup_steps, s.total_steps, s.final_fraction), (Decay::Linear, 0, 7, 0.0));
        assert!(toml::from_str::<LrSchedule>("peak = 1.0\ntotal_steps = 7\nwarmup = 3").is_err());
        assert!(serde_json::to_string(&schedule(Decay::Cosine)).unwrap().contains("\"cosine\""));
    }
}
