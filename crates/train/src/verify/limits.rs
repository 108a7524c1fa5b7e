//! The tolerance of each tensor against the reference: fixed in f32, derived from the error of the precision in bf16
//! and tf32, and of operands in bf16.

use super::compare::Allowed;
use super::reference::{self, MOST_FOR_LOSSES, MOST_FOR_ROUTER, ROUTER_ERRORS, Reference, TORCH_ERRORS};
use super::rounding::{Rounding, RoundingEngine};
use super::{Options, Tolerance, answers};
use crate::Result;
use ironhorse_core::{DType, Engine, Operands};
use serde::Serialize;
use std::collections::BTreeMap;

/// The error may be this many times that of PyTorch in the same precision, or of simulated rounding on the CPU.
const TIMES: f64 = 2.0;
/// A typical rounding error of bf16 (half of the largest) and of tf32 by truncation. They are added because a derived
/// error can be small by chance, above all for a scalar.
const BF16_FLOOR: f64 = 1.0 / 512.0;
const TF32_FLOOR: f64 = 1.0 / 1024.0;
/// Master weights are f32; bf16 affects only the direction in which AdamW steps. Where a gradient is noise, one side
/// may step up and the other down. The number of elements that may do so is that of PyTorch, plus `STRAYING`, plus one
/// in `ONE_STRAYS_IN`.
const STRAYING: f64 = 2.0;
const ONE_STRAYS_IN: f64 = 1000.0;
/// Upper bounds of the tolerance of a tensor, whatever a key claims, because a check must be able to fail. The larger
/// one is for a bias that starts at 0 and whose gradient is rounding noise: it can end anywhere within the steps taken.
const MOST: f64 = 0.5;
const MOST_FOR_AFTER: f64 = 2.0;

/// Where the limits come from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Basis {
    /// The given tolerances; for optimizer steps also PyTorch's own error in f32.
    Fixed,
    /// PyTorch's own error in bf16, recorded in the key.
    PyTorch,
    /// The error of the CPU engine with simulated rounding.
    Simulation,
}

/// The reason for the tolerance of a tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Reason {
    /// `--tolerance`, or `--loss-tolerance` for the loss.
    Fixed,
    /// Optimizer steps amplify rounding: three times PyTorch's own f32 error.
    Steps,
    /// The gradient of a router has strong cancellation: twice PyTorch's own f32 error.
    Router,
    /// Twice PyTorch's own error in bf16, and one rounding error.
    Bf16,
    /// Twice the error of the same rounding simulated on the CPU, and one rounding error.
    Simulated,
    /// Files are compared bit by bit.
    Bits,
}

impl Reason {
    /// Every reason, in the order in which a report explains them.
    pub(super) const ALL: [Self; 6] =
        [Self::Fixed, Self::Steps, Self::Router, Self::Bf16, Self::Simulated, Self::Bits];

    /// The reason for the tolerance `allowed` of a tensor, where `base` is the tolerance of a single f32 step.
    pub(super) fn of(basis: Basis, name: &str, allowed: f64, base: f64) -> Self {
        match basis {
            _ if allowed == base => Self::Fixed,
            Basis::PyTorch => Self::Bf16,
            Basis::Simulation => Self::Simulated,
            Basis::Fixed if name == "losses" || name.starts_with("after.") => Self::Steps,
            Basis::Fixed => Self::Router,
        }
    }

    /// The word in the table.
    pub(super) fn word(self) -> &'static str {
        match self {
            Self::Fixed => "fixed",
            Self::Steps => "steps",
            Self::Router => "router",
            Self::Bf16 => "bf16",
            Self::Simulated => "simulated",
            Self::Bits => "bits",
        }
    }

    /// A sentence for the verdict.
    pub(super) fn text(self, tolerance: Tolerance) -> String {
        match self {
            Self::Fixed => format!(
                "{:e} of a tensor's norm, {:e} of the loss (--tolerance, --loss-tolerance)",
                tolerance.tensor, tolerance.loss
            ),
            Self::Steps => format!(
                "{TORCH_ERRORS} times PyTorch's own f32 error, because optimizer steps amplify rounding; at most {:e} for \
                 losses, {:e} for weights",
                MOST_FOR_LOSSES,
                reference::MOST_FOR_AFTER
            ),
            Self::Router => format!(
                "{ROUTER_ERRORS} times PyTorch's own f32 error, because nearly all of a router's gradient cancels; at most \
                 {MOST_FOR_ROUTER:e}"
            ),
            Self::Bf16 => "twice PyTorch's own error in bf16, and one rounding".into(),
            Self::Simulated => {
                "twice the error of the same rounding simulated on the CPU, and one rounding".into()
            }
            Self::Bits => "files are compared bit by bit".into(),
        }
    }
}

/// The limits of one verification.
pub(super) struct Limits {
    pub basis: Basis,
    tolerance: Tolerance,
    floor: f64,
    /// The error of the precision, by tensor.
    errors: BTreeMap<String, f64>,
}

impl Limits {
    /// Determines them from the reference, or by simulating the precision on an f32 engine.
    pub fn new(
        reference: &mut dyn Reference,
        options: &Options,
        cpu: &mut dyn FnMut() -> Box<dyn Engine>,
    ) -> Result<Self> {
        let low = options.precision.weights == DType::BF16;
        // the key's errors are those of PyTorch in bf16; of 8-bit products there are none
        let fp8 = options.precision.fp8.is_some();
        let (basis, errors, floor) = match (low, reference.bf16_errors()) {
            (false, _) if options.operands == Operands::F32 => (Basis::Fixed, BTreeMap::new(), 0.0),
            (true, Some(errors)) if !fp8 => (Basis::PyTorch, errors.clone(), BF16_FLOOR),
            _ => {
                let rounding = match (low, fp8) {
                    (true, true) => Rounding::Fp8,
                    (true, false) => Rounding::Bf16,
                    (false, _) => Rounding::Operands(options.operands),
                };
                let engine = Box::new(RoundingEngine::new(cpu(), rounding));
                let (rows, _) = answers(engine, reference, options, &Self::unlimited())?;
                let errors = rows.into_iter().map(|row| (row.name, row.comparison.rel_error)).collect();
                let tf32 = !low && options.operands == Operands::Tf32;
                (Basis::Simulation, errors, if tf32 { TF32_FLOOR } else { BF16_FLOOR })
            }
        };
        Ok(Self { basis, tolerance: options.tolerance, floor, errors })
    }

    fn unlimited() -> Self {
        let tolerance = Tolerance { tensor: f64::INFINITY, loss: f64::INFINITY };
        Self { basis: Basis::Fixed, tolerance, floor: 0.0, errors: BTreeMap::new() }
    }

    /// The tolerance of a tensor of `numel` elements.
    pub fn of(&self, reference: &dyn Reference, name: &str, numel: usize) -> Allowed {
        let is_loss = matches!(name, "loss" | "losses");
        let after = name.starts_with("after.");
        let base = if is_loss { self.tolerance.loss } else { self.tolerance.tensor };
        let (relative, element) = (reference.tolerance_of(name, base), reference.slack_of(name));
        if self.basis == Basis::Fixed {
            return Allowed { relative, element, elements: 0.0 };
        }
        // the error of truncation to tf32 is systematic, not random
        let tf32_tensor = self.floor == TF32_FLOOR && !is_loss;
        let floor = if after || tf32_tensor { relative } else { self.floor };
        let error = self.errors.get(name).copied().unwrap_or(0.0);
        let most = if after { MOST_FOR_AFTER } else { MOST };
        Allowed {
            // `min` also replaces a NaN by the upper bound
            relative: relative.max((TIMES * error + floor).min(most)),
            element: 2.0 * element,
            elements: if after { STRAYING + numel as f64 / ONE_STRAYS_IN } else { 0.0 },
        }
    }
}
