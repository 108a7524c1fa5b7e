//! RMS normalisation over the last dimension, with or without the residual add before it.

use super::layernorm::residual_numerics;
use super::numerics::{Arithmetic, Numerics};
use super::spec::{Accum, Checker, OpSpec, slots};
use crate::{Result, Slot};

/// Sums of squares over a row: nothing cancels in the forward.
const RMSNORM: Numerics = Numerics::new(Arithmetic::Sum(3e-6));

/// `out = inp · rstd · weight` per row of C with `rstd = 1 / √(mean(inp²) + eps)`; keeps `rstd`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RmsNormFwd {
    /// (..,C)
    pub out: Slot,
    /// (rows) f32, `1 / √(mean(inp²) + eps)`
    pub rstd: Slot,
    /// (..,C)
    pub inp: Slot,
    /// (C)
    pub weight: Slot,
    /// Added to the mean of the squares.
    pub eps: f32,
}

impl OpSpec for RmsNormFwd {
    const NAME: &'static str = "rmsnorm_fwd";
    slots!(Write out, Write rstd, Read inp, Read weight);

    fn check(&self) -> Result<()> {
        check_normalise(&Checker(Self::NAME), [&self.out, &self.inp, &self.weight, &self.rstd])
    }

    fn numerics(&self, _: &str) -> Numerics {
        RMSNORM
    }

    fn flops(&self) -> u64 {
        4 * self.inp.numel() as u64
    }
}

/// `residual = a + b`, then [`RmsNormFwd`] of it: one pass over memory instead of two.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ResidualRmsNormFwd {
    /// (..,C), the new residual stream
    pub residual: Slot,
    /// (..,C)
    pub out: Slot,
    /// (rows) f32
    pub rstd: Slot,
    /// (..,C), the residual stream before the block
    pub a: Slot,
    /// (..,C), the output of the block
    pub b: Slot,
    /// (C)
    pub weight: Slot,
    /// Added to the mean of the squares.
    pub eps: f32,
}

impl OpSpec for ResidualRmsNormFwd {
    const NAME: &'static str = "residual_rmsnorm_fwd";
    slots!(Write residual, Write out, Write rstd, Read a, Read b, Read weight);

    fn check(&self) -> Result<()> {
        let c = Checker(Self::NAME);
        check_weight(&c, &self.a, &self.weight)?;
        let same = [("a", &self.a), ("b", &self.b), ("residual", &self.residual), ("out", &self.out)];
        c.same_float(&same)?;
        same.iter().try_for_each(|(name, slot)| c.shape(name, slot, self.a.shape))?;
        check_rstd(&c, &self.a, &self.rstd)
    }

    fn numerics(&self, arg: &str) -> Numerics {
        residual_numerics(RMSNORM, arg)
    }

    fn flops(&self) -> u64 {
        5 * self.a.numel() as u64
    }

    /// The sum may replace either term.
    fn in_place(&self) -> &'static [(&'static str, &'static str)] {
        &[("residual", "a"), ("residual", "b")]
    }
}

/// Recomputes `out` of [`RmsNormFwd`] from the saved statistic, with the same bits (activation checkpointing).
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RmsNormApply {
    /// (..,C)
    pub out: Slot,
    /// (..,C)
    pub inp: Slot,
    /// (rows) f32
    pub rstd: Slot,
    /// (C)
    pub weight: Slot,
}

impl OpSpec for RmsNormApply {
    const NAME: &'static str = "rmsnorm_apply";
    slots!(Write out, Read inp, Read rstd, Read weight);

    fn check(&self) -> Result<()> {
        check_normalise(&Checker(Self::NAME), [&self.out, &self.inp, &self.weight, &self.rstd])
    }

    fn numerics(&self, _: &str) -> Numerics {
        RMSNORM
    }

    fn flops(&self) -> u64 {
        2 * self.inp.numel() as u64
    }
}

/// Gradients of [`RmsNormFwd`]. With `x̂ = inp·rstd` and `g = d_out·weight`, per row
/// `d_inp (+)= rstd·(g - x̂·mean(g·x̂))`, and over all rows `d_weight (+)= Σ d_out·x̂`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RmsNormBwd {
    /// (..,C); see `accum_inp`
    pub d_inp: Slot,
    /// (C)
    pub d_weight: Slot,
    /// (..,C)
    pub d_out: Slot,
    /// (..,C), the input of the forward
    pub inp: Slot,
    /// (rows) f32
    pub rstd: Slot,
    /// (C)
    pub weight: Slot,
    /// Whether `d_inp` is overwritten, or added to as for the gradient of the residual stream.
    pub accum_inp: Accum,
    /// Whether `d_weight` is overwritten or added to.
    pub accum: Accum,
}

impl OpSpec for RmsNormBwd {
    const NAME: &'static str = "rmsnorm_bwd";
    slots!(
        Accumulate(accum_inp) d_inp, Accumulate(accum) d_weight, Read d_out, Read inp, Read rstd, Read weight
    );

    fn check(&self) -> Result<()> {
        let c = Checker(Self::NAME);
        check_weight(&c, &self.inp, &self.weight)?;
        c.same_float(&[("inp", &self.inp), ("d_inp", &self.d_inp), ("d_out", &self.d_out)])?;
        c.shape("d_inp", &self.d_inp, self.inp.shape)?;
        c.shape("d_out", &self.d_out, self.inp.shape)?;
        c.same_float(&[("d_weight", &self.d_weight)])?;
        c.shape("d_weight", &self.d_weight, self.weight.shape)?;
        check_rstd(&c, &self.inp, &self.rstd)
    }

    fn numerics(&self, _: &str) -> Numerics {
        RMSNORM
    }

    fn flops(&self) -> u64 {
        11 * self.inp.numel() as u64
    }
}

/// Checks the slots of `out`, which is `inp` normalised and scaled.
fn check_normalise(c: &Checker, [out, inp, weight, rstd]: [&Slot; 4]) -> Result<()> {
    check_weight(c, inp, weight)?;
    c.same_float(&[("out", out), ("inp", inp)])?;
    c.shape("out", out, inp.shape)?;
    check_rstd(c, inp, rstd)
}

fn check_weight(c: &Checker, inp: &Slot, weight: &Slot) -> Result<()> {
    let width = inp.shape.cols();
    if width == 0 {
        return c.fail("the last dimension is 0: nothing to normalise over".into());
    }
    c.same_float(&[("weight", weight)])?;
    c.shape("weight", weight, [width])
}

fn check_rstd(c: &Checker, inp: &Slot, rstd: &Slot) -> Result<()> {
    c.all_f32(&[("rstd", rstd)])?;
    c.numel("rstd", rstd, inp.shape.rows())
}
