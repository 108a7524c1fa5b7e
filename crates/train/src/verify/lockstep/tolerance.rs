//! How far two engines may be apart after one op from the same inputs: ‖got−want‖/‖want‖ per written tensor.

use ironhorse_core::DType;
use ironhorse_core::op::{Arg, Op};

/// Half the distance from 1 to the next f32: the most one rounding can be off.
const UNIT: f64 = 5.960_464_477_539_063e-8;
/// The most that one rounding to bf16 can be off. Over a tensor, rounding to the nearest is 0.4 of it and rounding at
/// random 0.6, so an op may round once more inside.
const BF16: f64 = 1.0 / 256.0;
/// Operands cut to 10 bits after the point are off by up to 2⁻¹⁰, each of two, all in one direction.
const TF32: f64 = 2e-3;

/// The largest error allowed of what an op writes to `arg`.
pub(super) fn tolerance(op: &Op, arg: &Arg, tf32: bool) -> f64 {
    let is_bf16 = op.args().iter().any(|arg| arg.slot.dtype == DType::BF16);
    let single = f32_tolerance(op);
    match op {
        Op::Fill(_) | Op::CopySlot(_) | Op::RouteSort(_) | Op::Permute(_) => single,
        // probabilities and their gradients are rounded for the second product
        Op::AttentionFwd(_) | Op::AttentionBwd(_) | Op::AttentionCached(_)
            if arg.slot.dtype == DType::BF16 =>
        {
            2.0 * BF16
        }
        Op::AttentionFwd(_) if is_bf16 => 1e-4,
        // the value before GELU may be rounded before GELU sees it
        Op::LinearFwd(_) | Op::LinearBwdInput(_) if arg.slot.dtype == DType::BF16 => 1.5 * BF16,
        // gate and up may be rounded before SwiGLU sees them
        Op::GroupedLinearFwd(_) if arg.name == "act" && is_bf16 => 1.5 * BF16,
        // statistics of the sum, before or after it is rounded
        Op::ResidualLayerNormFwd(_) | Op::ResidualRmsNormFwd(_) if is_bf16 => 1.5 * BF16,
        _ if arg.slot.dtype == DType::BF16 => BF16,
        // integers are the same or wrong
        _ if arg.slot.dtype == DType::I32 => 0.0,
        Op::LinearFwd(_) | Op::LinearBwdInput(_) | Op::LinearBwdWeight(_) if tf32 => TF32,
        Op::GroupedLinearFwd(_) | Op::GroupedLinearBwdInput(_) | Op::GroupedLinearBwdWeight(_) if tf32 => {
            TF32
        }
        Op::AttentionFwd(_) | Op::AttentionBwd(_) | Op::AttentionCached(_) if tf32 => TF32,
        _ => single,
    }
}

/// Two engines in f32, each with sums in an order of its own.
fn f32_tolerance(op: &Op) -> f64 {
    match op {
        // no arithmetic: the bits must be the same
        Op::Fill(_) | Op::CopySlot(_) | Op::RouteSort(_) | Op::Permute(_) => 0.0,
        // one rounded addition per element, on both sides
        Op::EmbeddingFwd(_) | Op::Add(_) => 2.2 * UNIT,
        // a few roundings per element
        Op::GeluFwd(_) | Op::GeluBwd(_) | Op::AdamW(_) => 2e-6,
        Op::SwigluFwd(_) | Op::SwigluBwd(_) | Op::Rope(_) | Op::PermuteBwd(_) | Op::Combine(_) => 2e-6,
        // sums of positive terms
        Op::LossMean(_) | Op::GradNorm(_) | Op::RouterLoad(_) => 5e-6,
        // sums over all tokens, dot products, exponentials of scores: the bound of the design
        Op::EmbeddingBwd(_)
        | Op::LayerNormFwd(_)
        | Op::ResidualLayerNormFwd(_)
        | Op::LayerNormApply(_)
        | Op::LayerNormBwd(_)
        | Op::RmsNormFwd(_)
        | Op::ResidualRmsNormFwd(_)
        | Op::RmsNormApply(_)
        | Op::RmsNormBwd(_)
        | Op::RouterFwd(_)
        | Op::RouterBwd(_)
        | Op::CombineBwd(_)
        | Op::GroupedLinearFwd(_)
        | Op::GroupedLinearBwdInput(_)
        | Op::GroupedLinearBwdWeight(_)
        | Op::LinearFwd(_)
        | Op::LinearBwdInput(_)
        | Op::LinearBwdWeight(_)
        | Op::AttentionFwd(_)
        | Op::AttentionBwd(_)
        | Op::AttentionCached(_)
        | Op::CrossEntropy(_) => 1e-5,
    }
}
