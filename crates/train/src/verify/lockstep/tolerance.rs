//! The tolerance between two engines after one op with the same inputs: ‖got−want‖/‖want‖ per written tensor.

use ironhorse_core::op::{Arg, Arithmetic, BF16_UNIT, Op, Product};
use ironhorse_core::{DType, Operands};

/// Both operands are truncated to 10 bits after the point: each has an error of up to 2⁻¹⁰, always in the same
/// direction.
const TF32: f64 = 2e-3;
/// Both operands are rounded to the nearest bf16.
const BF16_OPERANDS: f64 = 2.0 * BF16_UNIT;

/// Whether what rounding the operands of an op costs has to be found by rounding them: the error of a score becomes one of its exponential,
/// the more the larger the score is.
pub(super) fn is_simulated(op: &Op, operands: Operands) -> bool {
    let attends = |arg: &Arg| op.numerics(arg.name).product == Some(Product::Attention);
    operands == Operands::Bf16 && op.args().iter().any(|arg| arg.access.writes() && attends(arg))
}

/// The same with this error by rounded operands, ‖rounded − want‖/‖want‖: twice that much, and what rounding between the products costs.
pub(super) fn simulated(error: f64) -> f64 {
    BF16_OPERANDS + 2.0 * error
}

/// The largest error allowed in `arg`, which the op writes.
pub(super) fn tolerance(op: &Op, arg: &Arg, operands: Operands) -> f64 {
    let numerics = op.numerics(arg.name);
    let has_bf16 = op.args().iter().any(|arg| matches!(arg.slot.dtype, DType::BF16 | DType::F8(_)));
    match (numerics.arithmetic, arg.slot.dtype, numerics.bf16_engines) {
        (Arithmetic::Exact, ..) | (_, DType::I32, _) => 0.0,
        (_, _, Some(apart)) if has_bf16 => apart,
        (_, DType::BF16, _) => BF16_UNIT,
        (arithmetic, ..) => match operands {
            Operands::Tf32 if numerics.product.is_some() => TF32,
            Operands::Bf16 if numerics.product.is_some() => BF16_OPERANDS,
            _ => arithmetic.between_engines(),
        },
    }
}
