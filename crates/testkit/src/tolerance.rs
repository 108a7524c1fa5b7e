//! How far an f32 engine may be from the oracle: ‖got−want‖/‖want‖ per tensor, by op.
//!
//! Measured against the same cases with the oracle's code compiled for f32 (every sum in plain order): all pass but the
//! gradient norm of 70,000 elements, which no engine should sum that way. Largest errors there: layer norms 2.4e-6,
//! linear 9.3e-7, attention 3.9e-6 (4e-7 where scores are small), cross-entropy 2.2e-7, AdamW 1.3e-6.

use ironhorse_core::op::Op;

/// Half the distance from 1 to the next f32: the most one rounding can be off.
const UNIT: f64 = 5.960_464_477_539_063e-8;

/// The largest error allowed. Never above 1e-5, the bound of the design.
pub fn tolerance(op: &Op) -> f64 {
    match op {
        // No arithmetic: the bits must be the same.
        Op::Fill(_) | Op::CopySlot(_) => 0.0,
        // One rounded addition per element.
        Op::EmbeddingFwd(_) | Op::Add(_) => 1.1 * UNIT,
        // tanh or exp of a few roundings per element; 1 + tanh cancels for negative inputs, but those results are small.
        Op::GeluFwd(_) | Op::GeluBwd(_) => 1e-6,
        // Sums of at most a few hundred terms: error about UNIT·√terms if summed in order.
        Op::EmbeddingBwd(_) => 2e-6,
        // The same, with x - mean cancelling digits where the mean is larger than the spread.
        Op::LayerNormFwd(_) | Op::ResidualLayerNormFwd(_) | Op::LayerNormApply(_) | Op::LayerNormBwd(_) => {
            5e-6
        }
        // Dot products of up to 1024 terms.
        Op::LinearFwd(_) | Op::LinearBwdInput(_) | Op::LinearBwdWeight(_) => 3e-6,
        // exp(score - lse) turns the absolute error of a score, UNIT·|score|, into a relative one; scores reach 110.
        Op::AttentionFwd(_) | Op::AttentionBwd(_) | Op::AttentionCached(_) => 1e-5,
        // As attention, with logits at most 30 apart.
        Op::CrossEntropy(_) => 3e-6,
        // Positive sums of up to 70,000 terms: asks for partial sums or a wider accumulator, as it should.
        Op::LossMean(_) | Op::GradNorm(_) => 2e-6,
        // A dozen roundings per element.
        Op::AdamW(_) => 2e-6,
    }
}
