//! The batch-size ramp-up: the first steps have fewer micro-steps than the others.

use crate::{Error, Result};

/// How the number of micro-steps grows, in whole micro-steps along a straight line. The programs are the same all along: how
/// often a step runs them is all that changes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rampup {
    /// Micro-steps of the first step.
    pub from: u32,
    /// The first step that has all micro-steps, counted from 0.
    pub steps: u64,
}

impl Rampup {
    /// Checks the settings of a run of `steps` steps with up to `most` micro-steps; the error names the one that is invalid.
    pub fn validate(&self, most: u32, steps: u64) -> Result<()> {
        let fail = |name: &str, found: u64, expected: String| {
            Err(Error::input(format!("batch-size ramp-up: {name}"), found, expected))
        };
        if self.from == 0 || self.from >= most {
            let expected = format!("at least 1 and fewer than the {most} micro-steps of a full step");
            return fail("the first number of micro-steps", self.from.into(), expected);
        }
        if self.steps == 0 || self.steps > steps {
            return fail("its length", self.steps, format!("1 to {steps}, the steps of the run"));
        }
        Ok(())
    }

    /// The micro-steps of a step, counted from 0, where a full step has `most`.
    pub fn at(&self, step: u64, most: u32) -> u32 {
        if step >= self.steps {
            return most;
        }
        let more = u128::from(most.saturating_sub(self.from)) * u128::from(step) / u128::from(self.steps);
        self.from + more as u32 // less than `most`, because the step is before the last one of the ramp-up
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn grows_in_whole_micro_steps() {
        let counts = |from, steps, most| -> Vec<u32> {
            (0..steps + 2).map(|step| Rampup { from, steps }.at(step, most)).collect()
        };
        assert_eq!(counts(1, 6, 4), [1, 1, 2, 2, 3, 3, 4, 4]);
        assert_eq!(counts(2, 2, 8), [2, 5, 8, 8]);
        assert_eq!(counts(1, 1, 8), [1, 8, 8]);
        assert_eq!(counts(3, 5, 4), [3, 3, 3, 3, 3, 4, 4]);
        let long = Rampup { from: 1, steps: u64::MAX };
        assert_eq!([long.at(u64::MAX - 1, u32::MAX), long.at(u64::MAX, u32::MAX)], [u32::MAX - 1, u32::MAX]);
    }

    #[test]
    fn bad_settings_are_named() {
        Rampup { from: 3, steps: 10 }.validate(4, 10).unwrap();
        for (from, steps, text) in [
            (0, 5, "the first number of micro-steps is 0"),
            (4, 5, "the first number of micro-steps is 4, expected at least 1 and fewer than the 4"),
            (1, 0, "its length is 0"),
            (1, 11, "its length is 11, expected 1 to 10"),
        ] {
            let error = Rampup { from, steps }.validate(4, 10).unwrap_err().to_string();
            assert!(error.contains(text), "{error}");
        }
    }
}
