//! The results of conformance cases.

use ironhorse_core::{Error, Precision};
use std::fmt;

/// The result of a case that passed.
#[derive(Clone, Debug, PartialEq)]
pub struct Report {
    /// The op's name.
    pub op: &'static str,
    /// The case's name.
    pub case: String,
    /// Its element types.
    pub precision: Precision,
    /// ‖got−want‖/‖want‖ of the written slot that comes closest to its tolerance.
    pub error: f64,
    /// The name of that slot.
    pub slot: &'static str,
    /// The tolerance.
    pub tolerance: f64,
}

impl Report {
    /// The error as a fraction of the tolerance.
    pub fn share(&self) -> f64 {
        if self.error > 0.0 { self.error / self.tolerance } else { 0.0 }
    }
}

/// The result of a case that failed.
#[derive(Clone, Debug, PartialEq)]
pub struct Mismatch {
    /// The op's name.
    pub op: &'static str,
    /// The case's name.
    pub case: String,
    /// Its element types.
    pub precision: Precision,
    /// What is wrong.
    pub fault: Fault,
}

/// The ways in which a case can fail.
#[derive(Clone, Debug, PartialEq)]
pub enum Fault {
    /// The engine or the oracle returned an error.
    Refused(Error),
    /// The engine accepted an input that it must reject with `Error::Input`, or returned another error.
    NotRefused(String),
    /// The error of a slot is above the tolerance; `index` is the element with the largest error.
    Value {
        /// Which slot.
        slot: &'static str,
        /// Which element.
        index: usize,
        /// The oracle's value there.
        want: f64,
        /// The engine's value there.
        got: f64,
        /// ‖got−want‖/‖want‖ over the slot.
        error: f64,
        /// The tolerance.
        tolerance: f64,
    },
    /// An element is non-finite where the oracle's is finite: it was not written, or computed from memory that must not
    /// be read.
    NotFinite {
        /// Which slot.
        slot: &'static str,
        /// Which element.
        index: usize,
        /// The oracle's value there.
        want: f64,
        /// The engine's value there.
        got: f64,
    },
    /// A word outside the written slots has changed.
    Touched {
        /// The name of the slot, or of the pool outside of any slot.
        place: &'static str,
        /// The index in the slot or pool, in units of f32, or of bf16 if the case has any.
        index: usize,
        /// The value before the run.
        want: f32,
        /// The value after the run.
        got: f32,
    },
    /// A second run gave different bits.
    NotRepeated {
        /// The name of the slot, or of the pool outside of any slot.
        place: &'static str,
        /// The index in the slot or pool, in units of f32, or of bf16 if the case has any.
        index: usize,
        /// The value after the first run.
        first: f32,
        /// The value after the second run.
        second: f32,
    },
    /// A bf16 weight or moment is not the result of stochastic rounding.
    Rounding(String),
}

impl fmt::Display for Mismatch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} ({}): ", self.op, self.case)?;
        match &self.fault {
            Fault::Refused(error) => write!(f, "refused: {error}"),
            Fault::NotRefused(what) => write!(f, "expected an input error, but {what}"),
            Fault::Value { slot, index, want, got, error, tolerance } => write!(
                f,
                "`{slot}` has an error of {error:.2e}, allowed {tolerance:.2e}; worst at [{index}]: expected {want:e}, got {got:e}"
            ),
            Fault::NotFinite { slot, index, want, got } => {
                write!(f, "`{slot}`[{index}]: expected {want:e}, got {got}")
            }
            Fault::Touched { place, index, want, got } => {
                write!(f, "`{place}`[{index}] must not change: expected {want:e}, got {got:e}")
            }
            Fault::NotRepeated { place, index, first, second } => {
                write!(f, "`{place}`[{index}] is {first:e} in one run and {second:e} in the next")
            }
            Fault::Rounding(what) => f.write_str(what),
        }
    }
}

impl std::error::Error for Mismatch {}
