//! Layer normalisation over the last dimension, with or without the residual add before it.

use super::numerics::{Arithmetic, BF16_UNIT, Numerics};
use super::spec::{Accum, Checker, OpSpec, slots};
use crate::{Result, Slot};

/// Sums over a row; x - mean loses digits where the mean is larger than the spread.
const LAYERNORM: Numerics = Numerics::new(Arithmetic::Sum(5e-6));

/// The norm of a sum. PyTorch normalises the rounded sum; a fused kernel may normalise the f32 sum, and compute the
/// statistics from it.
pub(super) fn residual_numerics(norm: Numerics, arg: &str) -> Numerics {
    let norm = norm.bf16_engines(1.5 * BF16_UNIT);
    if arg == "residual" { norm } else { norm.inner_roundings(1.0) }
}

/// `out = (inp - mean) * rstd * weight + bias` per row of C; keeps `mean` and `rstd`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LayerNormFwd {
    /// (..,C)
    pub out: Slot,
    /// (rows) f32
    pub mean: Slot,
    /// (rows) f32, `1 / sqrt(var + eps)`
    pub rstd: Slot,
    /// (..,C)
    pub inp: Slot,
    /// (C)
    pub weight: Slot,
    /// (C)
    pub bias: Slot,
    /// Added to the variance.
    pub eps: f32,
}

impl OpSpec for LayerNormFwd {
    const NAME: &'static str = "layernorm_fwd";
    slots!(Write out, Write mean, Write rstd, Read inp, Read weight, Read bias);

    fn check(&self) -> Result<()> {
        let Self { out, inp, weight, bias, mean, rstd, .. } = self;
        check_normalise(&Checker(Self::NAME), [out, inp], [weight, bias], [mean, rstd])
    }

    fn numerics(&self, _: &str) -> Numerics {
        LAYERNORM
    }

    fn flops(&self) -> u64 {
        8 * self.inp.numel() as u64
    }
}

/// `residual = a + b`, then [`LayerNormFwd`] of it: one pass over memory instead of two.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ResidualLayerNormFwd {
    /// (..,C), the new residual stream
    pub residual: Slot,
    /// (..,C)
    pub out: Slot,
    /// (rows) f32
    pub mean: Slot,
    /// (rows) f32
    pub rstd: Slot,
    /// (..,C), the residual stream before the block
    pub a: Slot,
    /// (..,C), the output of the block
    pub b: Slot,
    /// (C)
    pub weight: Slot,
    /// (C)
    pub bias: Slot,
    /// Added to the variance.
    pub eps: f32,
}

impl OpSpec for ResidualLayerNormFwd {
    const NAME: &'static str = "residual_layernorm_fwd";
    slots!(Write residual, Write out, Write mean, Write rstd, Read a, Read b, Read weight, Read bias);

    fn check(&self) -> Result<()> {
        let c = Checker(Self::NAME);
        check_affine(&c, &self.a, &self.weight, &self.bias)?;
        let same = [("a", &self.a), ("b", &self.b), ("residual", &self.residual), ("out", &self.out)];
        c.same_float(&same)?;
        same.iter().try_for_each(|(name, slot)| c.shape(name, slot, self.a.shape))?;
        check_stats(&c, &self.a, &self.mean, &self.rstd)
    }

    fn numerics(&self, arg: &str) -> Numerics {
        residual_numerics(LAYERNORM, arg)
    }

    fn flops(&self) -> u64 {
        9 * self.a.numel() as u64
    }

    /// The sum may replace either term.
    fn in_place(&self) -> &'static [(&'static str, &'static str)] {
        &[("residual", "a"), ("residual", "b")]
    }
}

/// Recomputes `out` of [`LayerNormFwd`] from the saved statistics, with the same bits (activation checkpointing).
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LayerNormApply {
    /// (..,C)
    pub out: Slot,
    /// (..,C)
    pub inp: Slot,
    /// (rows) f32
    pub mean: Slot,
    /// (rows) f32
    pub rstd: Slot,
    /// (C)
    pub weight: Slot,
    /// (C)
    pub bias: Slot,
}

impl OpSpec for LayerNormApply {
    const NAME: &'static str = "layernorm_apply";
    slots!(Write out, Read inp, Read mean, Read rstd, Read weight, Read bias);

    fn check(&self) -> Result<()> {
        let Self { out, inp, weight, bias, mean, rstd, .. } = self;
        check_normalise(&Checker(Self::NAME), [out, inp], [weight, bias], [mean, rstd])
    }

    fn numerics(&self, _: &str) -> Numerics {
        LAYERNORM
    }

    fn flops(&self) -> u64 {
        4 * self.inp.numel() as u64
    }
}

/// Gradients of [`LayerNormFwd`]. With `x̂ = (inp - mean)·rstd` and `g = d_out·weight`, per row:
/// `d_inp (+)= rstd·(g - mean(g) - x̂·mean(g·x̂))`, and over all rows `d_weight (+)= Σ d_out·x̂`,
/// `d_bias (+)= Σ d_out`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LayerNormBwd {
    /// (..,C); see `accum_inp`
    pub d_inp: Slot,
    /// (C)
    pub d_weight: Slot,
    /// (C)
    pub d_bias: Slot,
    /// (..,C)
    pub d_out: Slot,
    /// (..,C), the input of the forward
    pub inp: Slot,
    /// (rows) f32
    pub mean: Slot,
    /// (rows) f32
    pub rstd: Slot,
    /// (C)
    pub weight: Slot,
    /// Whether `d_inp` is overwritten, or added to as for the gradient of the residual stream.
    pub accum_inp: Accum,
    /// Whether `d_weight` and `d_bias` are overwritten or added to.
    pub accum: Accum,
}

impl OpSpec for LayerNormBwd {
    const NAME: &'static str = "layernorm_bwd";
    slots!(
        Accumulate(accum_inp) d_inp, Accumulate(accum) d_weight, Accumulate(accum) d_bias, Read d_out, Read inp, Read mean,
        Read rstd, Read weight
    );

    fn check(&self) -> Result<()> {
        let c = Checker(Self::NAME);
        check_affine(&c, &self.inp, &self.weight, &self.weight)?;
        c.same_float(&[("inp", &self.inp), ("d_inp", &self.d_inp), ("d_out", &self.d_out)])?;
        c.shape("d_inp", &self.d_inp, self.inp.shape)?;
        c.shape("d_out", &self.d_out, self.inp.shape)?;
        c.same_float(&[("d_weight", &self.d_weight), ("d_bias", &self.d_bias)])?;
        c.shape("d_weight", &self.d_weight, self.weight.shape)?;
        c.shape("d_bias", &self.d_bias, self.weight.shape)?;
        check_stats(&c, &self.inp, &self.mean, &self.rstd)
    }

    fn numerics(&self, _: &str) -> Numerics {
        LAYERNORM
    }

    fn flops(&self) -> u64 {
        16 * self.inp.numel() as u64
    }
}

/// Checks the slots of `out`, which is `inp` normalised, scaled and shifted.
fn check_normalise(
    c: &Checker,
    [out, inp]: [&Slot; 2],
    [weight, bias]: [&Slot; 2],
    [mean, rstd]: [&Slot; 2],
) -> Result<()> {
    check_affine(c, inp, weight, bias)?;
    c.same_float(&[("out", out), ("inp", inp)])?;
    c.shape("out", out, inp.shape)?;
    check_stats(c, inp, mean, rstd)
}

fn check_affine(c: &Checker, inp: &Slot, weight: &Slot, bias: &Slot) -> Result<()> {
    let width = inp.shape.cols();
    if width == 0 {
        return c.fail("the last dimension is 0: nothing to normalise over".into());
    }
    c.same_float(&[("weight", weight), ("bias", bias)])?;
    c.shape("weight", weight, [width])?;
    c.shape("bias", bias, [width])
}

fn check_stats(c: &Checker, inp: &Slot, mean: &Slot, rstd: &Slot) -> Result<()> {
    c.all_f32(&[("mean", mean), ("rstd", rstd)])?;
    c.numel("mean", mean, inp.shape.rows())?;
    c.numel("rstd", rstd, inp.shape.rows())
}
