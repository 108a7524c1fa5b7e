//! The tolerance of an engine against the oracle: ‖got−want‖/‖want‖ per tensor, by op, argument and element type.
//!
//! **f32.** Each op declares its tolerance ([`Numerics`]).
//!
//! **bf16.** Inputs are bf16 numbers, so both sides start from the same values. An engine computes in f32 and rounds
//! its results: `got = round(want + δ)`, where δ is the f32 error. Either `want + δ` rounds like `want`, or there is a
//! midpoint between the two, and both neighbours are within δ of half a step away. So
//! `|got−want| ≤ |round(want)−want| + 2|δ|`. The first term follows from the oracle's values (`rounding`) and the
//! second is twice the f32 tolerance. Anything worse fails, such as truncation, which doubles the error. An op that may
//! round intermediate results is allowed one [`BF16_UNIT`] more for each such rounding: this holds for the worst
//! mantissas and for tensors of one element; over large tensors the error of a rounding is 1.5e-3 by norm.

use ironhorse_core::op::{Arg, BF16_UNIT, F32_UNIT, Numerics, Op, Product};
use ironhorse_core::{DType, Operands, bf16_to_f32, f32_to_bf16};

/// The largest relative error of one rounding to tf32, which keeps 11 significant bits: 2⁻¹¹.
const TF32_UNIT: f64 = 1.0 / 2048.0;
/// Tensor cores truncate the running sum once for every 16 products: 192 times 2⁻²³ for 3072 products.
const TENSOR_CORE_SUM: f64 = 2.3e-5;
/// The error of the hardware's tanh: 2⁻¹¹.
const FAST_TANH: f64 = 1.0 / 2048.0;

/// What the tolerance depends on besides the op.
#[derive(Clone, Copy, Debug, Default)]
pub struct Terms {
    /// What the engine may round the operands of products of f32 to.
    pub operands: Operands,
    /// The case's largest attention score.
    pub scores: f64,
    /// The op must not change any bit.
    pub exact: bool,
}

/// The largest error allowed for an argument that the op writes and whose expected contents are `want`.
pub fn tolerance(op: &Op, arg: &Arg, want: &[f64], terms: Terms) -> f64 {
    if terms.exact || arg.slot.dtype == DType::I32 {
        return 0.0;
    }
    let numerics = op.numerics(arg.name);
    let bf16 = op.args().iter().any(|arg| matches!(arg.slot.dtype, DType::BF16 | DType::F8(_)));
    let base = numerics.arithmetic.error().max(products(numerics.product, bf16, terms));
    match arg.slot.dtype {
        _ if !bf16 => base,
        DType::BF16 if numerics.random_rounding => spacing(want) + base,
        DType::BF16 => rounding(want) + 2.0 * base + between(numerics),
        _ => base + between(numerics),
    }
}

/// The additional error of matrix products on tensor cores. It is 0 in f32, where an engine does not use tensor cores,
/// or combines several products so that no digits are lost.
fn products(product: Option<Product>, bf16: bool, terms: Terms) -> f64 {
    let unit = match terms.operands {
        Operands::F32 => 0.0,
        Operands::Tf32 => TF32_UNIT,
        Operands::Bf16 => BF16_UNIT,
    };
    match product {
        Some(Product::Linear) if bf16 => TENSOR_CORE_SUM,
        Some(Product::Fp8 { sum }) if bf16 => sum,
        // Scores are sums of at most 160 products, and their absolute error is a relative error of the exponential.
        Some(Product::Attention) if bf16 => TENSOR_CORE_SUM.max(2.0 * F32_UNIT * terms.scores),
        // Both operands are rounded, each with an error of at most half a step.
        Some(Product::Linear) => 2.0 * unit,
        // The error of a score becomes a relative error of its exponential; the products with values and gradients add
        // to it.
        Some(Product::Attention | Product::CachedAttention) if !bf16 => 2.0 * unit * (1.0 + terms.scores),
        _ => 0.0,
    }
}

/// The additional error of a bf16 engine before it rounds the result.
fn between(numerics: Numerics) -> f64 {
    numerics.inner_roundings * BF16_UNIT + if numerics.fast_tanh { FAST_TANH } else { 0.0 }
}

/// ‖round(want) − want‖/‖want‖ with rounding to the nearest bf16.
fn rounding(want: &[f64]) -> f64 {
    relative(want, |x| f64::from(bf16_to_f32(f32_to_bf16(x as f32))) - x)
}

/// The error of stochastic rounding, which is less than the distance between the two neighbours.
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
