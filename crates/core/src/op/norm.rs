//! Layer and RMS normalisation over the last dimension, with or without the residual add before it.

use super::numerics::{Arithmetic, Numerics};
use super::spec::{Accum, Checker, Named, named, op};
use crate::{DType, Result, Slot};

/// What an RMS norm multiplies its normalised rows by.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Gain {
    /// The weight.
    Weight,
    /// 1 + weight, added in f32: a weight of 0 changes nothing.
    OnePlusWeight,
}

impl Gain {
    /// What is added to the weight.
    pub const fn offset(self) -> f32 {
        match self {
            Self::Weight => 0.0,
            Self::OnePlusWeight => 1.0,
        }
    }
}

/// Sums over a row; x - mean loses digits where the mean is larger than the spread.
const LAYERNORM: Numerics = Numerics::new(Arithmetic::Sum(5e-6));
/// Sums of squares over a row: nothing cancels in the forward.
pub(super) const RMSNORM: Numerics = Numerics::new(Arithmetic::Sum(3e-6));

/// The norm of a sum. The sum is rounded to its element type and then normalised, as by two ops; the oracle does not
/// round it. Two engines must agree on the sum itself.
fn residual_numerics(norm: Numerics, arg: &str) -> Numerics {
    if arg == "residual" { norm.bf16_engines(0.0) } else { norm.inner_roundings(1.0) }
}

op! {
    /// `out = (inp - mean) * rstd * weight + bias` per row of C; keeps `mean` and `rstd`.
    pub struct LayerNormFwd {
        /// (..,C)
        pub out: Slot = Write,
        /// (rows) f32
        pub mean: Slot = Write,
        /// (rows) f32, `1 / sqrt(var + eps)`
        pub rstd: Slot = Write,
        /// (..,C)
        pub inp: Slot = Read,
        /// (C)
        pub weight: Slot = Read,
        /// (C)
        pub bias: Slot = Read,
        /// Added to the variance.
        pub eps: f32,
    }
    name "layernorm_fwd"
    check(op, c) { check_norm(c, named!(op: out, inp), named!(op: weight, bias), named!(op: mean, rstd)) }
    numerics { LAYERNORM }
    flops(op) { 8 * op.inp.numel() as u64 }
}

op! {
    /// `residual = a + b`, then [`LayerNormFwd`] of what was stored: one pass over memory instead of two.
    pub struct ResidualLayerNormFwd {
        /// (..,C), the new residual stream
        pub residual: Slot = Write,
        /// (..,C)
        pub out: Slot = Write,
        /// (rows) f32
        pub mean: Slot = Write,
        /// (rows) f32
        pub rstd: Slot = Write,
        /// (..,C), the residual stream before the block
        pub a: Slot = Read,
        /// (..,C), the output of the block
        pub b: Slot = Read,
        /// (C)
        pub weight: Slot = Read,
        /// (C)
        pub bias: Slot = Read,
        /// Added to the variance.
        pub eps: f32,
    }
    name "residual_layernorm_fwd"
    check(op, c) {
        let same = named!(op: out, residual, b, a);
        check_norm(c, same, named!(op: weight, bias), named!(op: mean, rstd))
    }
    numerics(_op, arg) { residual_numerics(LAYERNORM, arg) }
    flops(op) { 9 * op.a.numel() as u64 }
    // The sum may replace either term.
    in_place (residual, a) (residual, b)
}

op! {
    /// Recomputes `out` of [`LayerNormFwd`] from the saved statistics, with the same bits (activation checkpointing).
    pub struct LayerNormApply {
        /// (..,C)
        pub out: Slot = Write,
        /// (..,C)
        pub inp: Slot = Read,
        /// (rows) f32
        pub mean: Slot = Read,
        /// (rows) f32
        pub rstd: Slot = Read,
        /// (C)
        pub weight: Slot = Read,
        /// (C)
        pub bias: Slot = Read,
    }
    name "layernorm_apply"
    check(op, c) { check_norm(c, named!(op: out, inp), named!(op: weight, bias), named!(op: mean, rstd)) }
    numerics { LAYERNORM }
    flops(op) { 4 * op.inp.numel() as u64 }
}

op! {
    /// Gradients of [`LayerNormFwd`]. With `x̂ = (inp - mean)·rstd` and `g = d_out·weight`, per row:
    /// `d_inp (+)= rstd·(g - mean(g) - x̂·mean(g·x̂))`, and over all rows `d_weight (+)= Σ d_out·x̂`,
    /// `d_bias (+)= Σ d_out`.
    pub struct LayerNormBwd {
        /// (..,C); see `accum_inp`
        pub d_inp: Slot = Accumulate(accum_inp),
        /// (C)
        pub d_weight: Slot = Accumulate(accum),
        /// (C)
        pub d_bias: Slot = Accumulate(accum),
        /// (..,C)
        pub d_out: Slot = Read,
        /// (..,C), the input of the forward
        pub inp: Slot = Read,
        /// (rows) f32
        pub mean: Slot = Read,
        /// (rows) f32
        pub rstd: Slot = Read,
        /// (C)
        pub weight: Slot = Read,
        /// Whether `d_inp` is overwritten, or added to as for the gradient of the residual stream.
        pub accum_inp: Accum,
        /// Whether `d_weight` and `d_bias` are overwritten or added to.
        pub accum: Accum,
    }
    name "layernorm_bwd"
    check(op, c) {
        check_norm(c, named!(op: d_out, d_inp, inp), named!(op: weight), named!(op: mean, rstd))?;
        c.same_float(named!(op: d_weight, d_bias))?;
        c.shapes(named!(op: d_weight, d_bias), op.weight.shape)
    }
    numerics { LAYERNORM }
    flops(op) { 16 * op.inp.numel() as u64 }
}

op! {
    /// `out = inp · rstd · weight` per row of C with `rstd = 1 / √(mean(inp²) + eps)`; keeps `rstd`. `gain` may put 1 + weight in the
    /// weight's place.
    pub struct RmsNormFwd {
        /// (..,C)
        pub out: Slot = Write,
        /// (rows) f32, `1 / √(mean(inp²) + eps)`
        pub rstd: Slot = Write,
        /// (..,C)
        pub inp: Slot = Read,
        /// (C)
        pub weight: Slot = Read,
        /// Added to the mean of the squares.
        pub eps: f32,
        /// The weight, or 1 + weight.
        pub gain: Gain,
    }
    name "rmsnorm_fwd"
    check(op, c) { check_norm(c, named!(op: out, inp), named!(op: weight), named!(op: rstd)) }
    numerics { RMSNORM }
    flops(op) { 4 * op.inp.numel() as u64 }
}

op! {
    /// `residual = a + b`, then [`RmsNormFwd`] of what was stored: one pass over memory instead of two.
    pub struct ResidualRmsNormFwd {
        /// (..,C), the new residual stream
        pub residual: Slot = Write,
        /// (..,C)
        pub out: Slot = Write,
        /// (rows) f32
        pub rstd: Slot = Write,
        /// (..,C), the residual stream before the block
        pub a: Slot = Read,
        /// (..,C), the output of the block
        pub b: Slot = Read,
        /// (C)
        pub weight: Slot = Read,
        /// Added to the mean of the squares.
        pub eps: f32,
        /// The weight, or 1 + weight.
        pub gain: Gain,
    }
    name "residual_rmsnorm_fwd"
    check(op, c) { check_norm(c, named!(op: out, residual, b, a), named!(op: weight), named!(op: rstd)) }
    numerics(_op, arg) { residual_numerics(RMSNORM, arg) }
    flops(op) { 5 * op.a.numel() as u64 }
    // The sum may replace either term.
    in_place (residual, a) (residual, b)
}

op! {
    /// Recomputes `out` of [`RmsNormFwd`] from the saved statistic, with the same bits (activation checkpointing).
    pub struct RmsNormApply {
        /// (..,C)
        pub out: Slot = Write,
        /// (..,C)
        pub inp: Slot = Read,
        /// (rows) f32
        pub rstd: Slot = Read,
        /// (C)
        pub weight: Slot = Read,
        /// The weight, or 1 + weight.
        pub gain: Gain,
    }
    name "rmsnorm_apply"
    check(op, c) { check_norm(c, named!(op: out, inp), named!(op: weight), named!(op: rstd)) }
    numerics { RMSNORM }
    flops(op) { 2 * op.inp.numel() as u64 }
}

op! {
    /// Gradients of [`RmsNormFwd`]. With `x̂ = inp·rstd` and `g = d_out·weight`, or `d_out·(1 + weight)`, per row
    /// `d_inp (+)= rstd·(g - x̂·mean(g·x̂))`, and over all rows `d_weight (+)= Σ d_out·x̂`.
    pub struct RmsNormBwd {
        /// (..,C); see `accum_inp`
        pub d_inp: Slot = Accumulate(accum_inp),
        /// (C)
        pub d_weight: Slot = Accumulate(accum),
        /// (..,C)
        pub d_out: Slot = Read,
        /// (..,C), the input of the forward
        pub inp: Slot = Read,
        /// (rows) f32
        pub rstd: Slot = Read,
        /// (C)
        pub weight: Slot = Read,
        /// Whether `d_inp` is overwritten, or added to as for the gradient of the residual stream.
        pub accum_inp: Accum,
        /// Whether `d_weight` is overwritten or added to.
        pub accum: Accum,
        /// The weight, or 1 + weight.
        pub gain: Gain,
    }
    name "rmsnorm_bwd"
    check(op, c) {
        check_norm(c, named!(op: d_out, d_inp, inp), named!(op: weight), named!(op: rstd))?;
        c.same_float(named!(op: d_weight))?;
        c.shape("d_weight", &op.d_weight, op.weight.shape)
    }
    numerics { RMSNORM }
    flops(op) { 11 * op.inp.numel() as u64 }
}

/// Checks a norm: `rows` have the shape and the float type of its input, which is the last of them; `params` are (C) in one
/// float type; `stats` are f32 with an element for each row.
fn check_norm(c: &Checker, rows: &[Named<'_>], params: &[Named<'_>], stats: &[Named<'_>]) -> Result<()> {
    let Some((_, inp)) = rows.last() else { return Ok(()) };
    let width = inp.shape.cols();
    if width == 0 {
        return c.fail("the last dimension is 0: nothing to normalise over".into());
    }
    c.same_float(params)?;
    c.shapes(params, [width])?;
    c.same_float(rows)?;
    c.shapes(rows, inp.shape)?;
    c.dtypes(stats, DType::F32)?;
    c.numels(stats, inp.shape.rows())
}
