//! How far an engine may be from the oracle: ‖got−want‖/‖want‖ per tensor, by op, argument and element type.
//!
//! **f32.** Measured against the same cases with the oracle's code compiled for f32 (every sum in plain order): all pass
//! but the gradient norm of 70,000 elements, which no engine should sum that way. Largest errors there: layer norms
//! 2.4e-6, linear 9.3e-7, attention 3.9e-6 (4e-7 where scores are small), cross-entropy 2.2e-7, AdamW 1.3e-6.
//!
//! **bf16.** Inputs are bf16 numbers, so both sides start from the same values. An engine computes in f32 and rounds what
//! it stores: `got = round(want + δ)` with δ the f32 error. Either that rounds like `want`, or a midpoint lies between
//! the two and both neighbours are half a step away, give or take δ; so `|got−want| ≤ |round(want)−want| + 2|δ|`. The
//! first term is known from the oracle's values ([`rounding`]) and the second is twice the f32 tolerance. Anything
//! worse, truncation say (twice the error), fails. Only where an op may round in between is more allowed
//! ([`between`]), [`BF16_UNIT`] for each such rounding: that holds for the worst mantissas and for tensors of one
//! element; over large tensors a rounding is 1.5e-3 by norm.

use ironhorse_core::op::{Accum, Arg, Op};
use ironhorse_core::{DType, bf16_to_f32, f32_to_bf16};

/// Half the distance from 1 to the next f32: the most one rounding can be off.
const UNIT: f64 = 5.960_464_477_539_063e-8;
/// The same of bf16, which keeps 8 bits: 2⁻⁸.
const BF16_UNIT: f64 = 1.0 / 256.0;
/// The same of tf32, which keeps 11: 2⁻¹¹.
const TF32_UNIT: f64 = 1.0 / 2048.0;
/// Tensor cores drop bits below the last one of the running sum, once for every 16 products: 192 times 2⁻²³ for 3072.
const TENSOR_CORE_SUM: f64 = 2.3e-5;
/// The hardware's tanh: 2⁻¹¹.
const FAST_TANH: f64 = 1.0 / 2048.0;

/// What is known of a case besides its op.
#[derive(Clone, Copy, Debug, Default)]
pub struct Terms {
    /// The engine may round the operands of products to tf32.
    pub tf32: bool,
    /// The case's largest attention score.
    pub scores: f64,
    /// The op must leave every bit as it was.
    pub exact: bool,
}

/// The largest error allowed for an argument that the op writes and that should hold `want`.
pub fn tolerance(op: &Op, arg: &Arg, want: &[f64], terms: Terms) -> f64 {
    let copies = matches!((op, arg.name), (Op::AttentionCached(_), "keys" | "values"));
    if terms.exact || copies || arg.slot.dtype == DType::I32 {
        return 0.0;
    }
    let sums = products(op, terms);
    let base = exact_tolerance(op).max(sums);
    if !op.args().iter().any(|arg| arg.slot.dtype == DType::BF16) {
        return base;
    }
    match arg.slot.dtype {
        DType::BF16 if matches!(op, Op::AdamW(_)) => spacing(want) + base,
        DType::BF16 => rounding(want) + 2.0 * base + between(op, arg.name),
        _ => base + between(op, arg.name),
    }
}

/// In f32. Never above 1e-5, the bound of the design.
fn exact_tolerance(op: &Op) -> f64 {
    match op {
        // No arithmetic: the bits must be the same.
        Op::Fill(_) | Op::CopySlot(_) | Op::RouteSort(_) | Op::Permute(_) => 0.0,
        // One rounded addition per element.
        Op::EmbeddingFwd(_) | Op::Add(_) => 1.1 * UNIT,
        // tanh or exp of a few roundings per element; 1 + tanh cancels for negative inputs, but those results are small.
        Op::GeluFwd(_) | Op::GeluBwd(_) | Op::SwigluFwd(_) | Op::SwigluBwd(_) => 1e-6,
        // Sine and cosine rounded once, two products and a sum: at most 3 UNIT, the largest where the sum cancels.
        Op::Rope(_) => 2e-7,
        // Exponentials of logits at most 30 apart, sums of at most 128 of them; gradients are differences of their like.
        Op::RouterFwd(_) | Op::RouterBwd(_) | Op::RouterLoad(_) => 2e-6,
        // Sums of as many terms as experts are chosen, in their order; the gradient of a weight is a dot product.
        Op::PermuteBwd(_) | Op::Combine(_) => 1e-6,
        Op::CombineBwd(_) => 3e-6,
        // Sums of at most two thousand terms: error about UNIT·√terms/2 if summed in order.
        Op::EmbeddingBwd(_) => 2e-6,
        // The same, with x - mean cancelling digits where the mean is larger than the spread.
        Op::LayerNormFwd(_) | Op::ResidualLayerNormFwd(_) | Op::LayerNormApply(_) | Op::LayerNormBwd(_) => {
            5e-6
        }
        // Sums of squares: nothing cancels in the forward.
        Op::RmsNormFwd(_) | Op::ResidualRmsNormFwd(_) | Op::RmsNormApply(_) | Op::RmsNormBwd(_) => 3e-6,
        // Dot products of up to 3072 terms.
        Op::LinearFwd(_) | Op::LinearBwdInput(_) | Op::LinearBwdWeight(_) => 3e-6,
        Op::GroupedLinearFwd(_) | Op::GroupedLinearBwdInput(_) | Op::GroupedLinearBwdWeight(_) => 3e-6,
        // exp(score - lse) turns the absolute error of a score, UNIT·|score|, into a relative one; scores reach 110.
        Op::AttentionFwd(_) | Op::AttentionBwd(_) | Op::AttentionCached(_) => 1e-5,
        // As attention, with logits at most 30 apart.
        Op::CrossEntropy(_) => 3e-6,
        // Positive sums of up to 250,000 terms: asks for partial sums or a wider accumulator, as it should.
        Op::LossMean(_) | Op::GradNorm(_) => 2e-6,
        // A dozen roundings per element.
        Op::AdamW(_) => 2e-6,
    }
}

/// What matrix products on tensor cores add: nothing in f32, where none are used, or as many as keep its digits.
fn products(op: &Op, terms: Terms) -> f64 {
    let bf16 = op.args().iter().any(|arg| arg.slot.dtype == DType::BF16);
    match op {
        // Both operands rounded, each off by at most half a step.
        Op::LinearFwd(_) | Op::LinearBwdInput(_) | Op::LinearBwdWeight(_) if terms.tf32 && !bf16 => {
            2.0 * TF32_UNIT
        }
        Op::GroupedLinearFwd(_) | Op::GroupedLinearBwdInput(_) | Op::GroupedLinearBwdWeight(_)
            if terms.tf32 && !bf16 =>
        {
            2.0 * TF32_UNIT
        }
        Op::GroupedLinearFwd(_) | Op::GroupedLinearBwdInput(_) | Op::GroupedLinearBwdWeight(_) if bf16 => {
            TENSOR_CORE_SUM
        }
        // The error of a score becomes one of its exponential; the products with values and gradients come on top.
        Op::AttentionFwd(_) | Op::AttentionBwd(_) | Op::AttentionCached(_) if terms.tf32 && !bf16 => {
            2.0 * TF32_UNIT * (1.0 + terms.scores)
        }
        Op::LinearFwd(_) | Op::LinearBwdInput(_) | Op::LinearBwdWeight(_) if bf16 => TENSOR_CORE_SUM,
        // Scores are sums of at most 160 products, and their absolute error is a relative one of the exponential.
        Op::AttentionFwd(_) | Op::AttentionBwd(_) if bf16 => TENSOR_CORE_SUM.max(2.0 * UNIT * terms.scores),
        _ => 0.0,
    }
}

/// Roundings to bf16 that an op may make before the one of its result.
fn between(op: &Op, arg: &str) -> f64 {
    match (op, arg) {
        // PyTorch stores the sum and normalises what it stored; a fused kernel may keep the f32 sum.
        (Op::ResidualLayerNormFwd(_), "out" | "mean" | "rstd") => BF16_UNIT,
        (Op::ResidualRmsNormFwd(_), "out" | "rstd") => BF16_UNIT,
        // No rounding: the hardware's tanh, of which the logistic function is half.
        (Op::GeluFwd(_) | Op::GeluBwd(_), _) => FAST_TANH,
        (Op::SwigluFwd(_) | Op::SwigluBwd(_), _) => FAST_TANH,
        // Where the bias or the old gradient is not added inside the product's kernel, the product is rounded before it:
        // cuBLASLt does so in some of its own kernels too, and PyTorch's addmm with it.
        (Op::LinearFwd(op), "out") if op.pre.is_none() && op.bias.is_some() => BF16_UNIT,
        (Op::LinearFwd(op), "pre") if op.bias.is_some() => BF16_UNIT,
        (Op::LinearBwdWeight(op), "d_weight") if op.accum != Accum::Write => BF16_UNIT,
        (Op::GroupedLinearBwdWeight(op), "d_weight") if op.accum != Accum::Write => BF16_UNIT,
        // GELU of `pre` as stored or as computed: x·gelu'(x)/gelu(x) is at most 1.3 for positive x, and negative ones
        // weigh little.
        (Op::LinearFwd(op), "out") if op.pre.is_some() => 1.3 * BF16_UNIT + FAST_TANH,
        // SwiGLU of gate and up as stored or as computed: as GELU, and the rounding of up.
        (Op::GroupedLinearFwd(_), "act") => 2.3 * BF16_UNIT + FAST_TANH,
        // The product may be stored before it is multiplied by gelu'.
        (Op::LinearBwdInput(op), "d_inp") if op.gelu_pre.is_some() => BF16_UNIT + FAST_TANH,
        // Probabilities are rounded before they meet the values on tensor cores.
        (Op::AttentionFwd(_) | Op::AttentionCached(_), "out") => BF16_UNIT,
        // Probabilities (for d_v) and score gradients (for d_q and d_k) are; a library may round `d_score` twice, or each
        // head's share of d_k and d_v where heads share keys and values.
        (Op::AttentionBwd(_), _) => 2.0 * BF16_UNIT,
        _ => 0.0,
    }
}

/// ‖round(want) − want‖/‖want‖ with rounding to the nearest bf16.
fn rounding(want: &[f64]) -> f64 {
    relative(want, |x| f64::from(bf16_to_f32(f32_to_bf16(x as f32))) - x)
}

/// Rounding up or down at random is off by less than the distance of the two neighbours.
fn spacing(want: &[f64]) -> f64 {
    relative(want, |x| 2.0 * BF16_UNIT * x)
}

fn relative(want: &[f64], error: impl Fn(f64) -> f64) -> f64 {
    let (mut size, mut off) = (0.0, 0.0);
    for &x in want.iter().filter(|x| x.is_finite()) {
        size += x * x;
        off += error(x).powi(2);
    }
    if size > 0.0 { (off / size).sqrt() } else { 0.0 }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_rounding_is_within_its_unit_and_half_that_by_norm() {
        let mut rng = crate::Rng::new(1);
        let values: Vec<f64> = rng.uniforms(4000, -1.0, 1.0).into_iter().map(f64::from).collect();
        let error = rounding(&values);
        assert!((1.3e-3..1.7e-3).contains(&error), "{error}");
        assert!(values.iter().all(|&x| rounding(&[x]) <= BF16_UNIT));
        assert_eq!(rounding(&[1.0, -0.5, 0.0]), 0.0);
    }
}
