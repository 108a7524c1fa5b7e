//! Layer and RMS normalisation.

use super::Ctx;
use super::columns::column_sums;
use crate::element::Whole;
use crate::kernel::norm::{Norm, NormBwd, column_sums as add_row};
use crate::memory::Span;
use ironhorse_core::op::{
    Accum, LayerNormApply, LayerNormBwd, LayerNormFwd, ResidualLayerNormFwd, ResidualRmsNormFwd,
    RmsNormApply, RmsNormBwd, RmsNormFwd,
};
use ironhorse_core::{Result, Slot};

/// The slots of a norm; a layer norm has `mean` and `bias`.
struct Slots {
    x: Slot,
    weight: Slot,
    bias: Option<Slot>,
    y: Slot,
    mean: Option<Slot>,
    rstd: Slot,
    terms: Option<[Slot; 2]>,
}

impl Slots {
    fn windows(&self, ctx: &Ctx<'_>) -> Result<Norm<f32>> {
        Ok(Norm {
            x: ctx.f32(self.x)?,
            terms: self.terms.map(|[a, b]| Ok([ctx.f32(a)?, ctx.f32(b)?])).transpose()?,
            weight: ctx.f32(self.weight)?,
            bias: self.bias.map(|slot| ctx.f32(slot)).transpose()?,
            y: ctx.f32(self.y)?,
            mean: ctx.f32_or_none(self.mean)?,
            rstd: ctx.f32(self.rstd)?,
            rows: self.x.shape.rows(),
        })
    }

    fn forward(&self, ctx: &Ctx<'_>, eps: f32) -> Result<()> {
        // SAFETY: `Op::check` made sure of sizes and aliasing.
        ctx.done(unsafe { self.windows(ctx)?.forward::<Whole>(&ctx.split(), eps.into()) })
    }

    fn apply(&self, ctx: &Ctx<'_>) -> Result<()> {
        // SAFETY: as in `forward`.
        ctx.done(unsafe { self.windows(ctx)?.apply(&ctx.split()) })
    }
}

pub fn layernorm_fwd(ctx: &mut Ctx<'_>, op: &LayerNormFwd) -> Result<()> {
    let &LayerNormFwd { out, mean, rstd, inp, weight, bias, eps } = op;
    Slots { x: inp, weight, bias: Some(bias), y: out, mean: Some(mean), rstd, terms: None }.forward(ctx, eps)
}

pub fn residual_layernorm_fwd(ctx: &mut Ctx<'_>, op: &ResidualLayerNormFwd) -> Result<()> {
    let &ResidualLayerNormFwd { residual, out, mean, rstd, a, b, weight, bias, eps } = op;
    let terms = Some([a, b]);
    Slots { x: residual, weight, bias: Some(bias), y: out, mean: Some(mean), rstd, terms }.forward(ctx, eps)
}

pub fn layernorm_apply(ctx: &mut Ctx<'_>, op: &LayerNormApply) -> Result<()> {
    let &LayerNormApply { out, inp, mean, rstd, weight, bias } = op;
    Slots { x: inp, weight, bias: Some(bias), y: out, mean: Some(mean), rstd, terms: None }.apply(ctx)
}

pub fn rmsnorm_fwd(ctx: &mut Ctx<'_>, op: &RmsNormFwd) -> Result<()> {
    let &RmsNormFwd { out, rstd, inp, weight, eps } = op;
    Slots { x: inp, weight, bias: None, y: out, mean: None, rstd, terms: None }.forward(ctx, eps)
}

pub fn residual_rmsnorm_fwd(ctx: &mut Ctx<'_>, op: &ResidualRmsNormFwd) -> Result<()> {
    let &ResidualRmsNormFwd { residual, out, rstd, a, b, weight, eps } = op;
    Slots { x: residual, weight, bias: None, y: out, mean: None, rstd, terms: Some([a, b]) }.forward(ctx, eps)
}

pub fn rmsnorm_apply(ctx: &mut Ctx<'_>, op: &RmsNormApply) -> Result<()> {
    let &RmsNormApply { out, inp, rstd, weight } = op;
    Slots { x: inp, weight, bias: None, y: out, mean: None, rstd, terms: None }.apply(ctx)
}

/// The windows of a norm's gradient; that of a layer norm has means.
fn gradient(ctx: &Ctx<'_>, op: &RmsNormBwd, mean: Option<Slot>) -> Result<NormBwd<f32>> {
    Ok(NormBwd {
        d_y: ctx.f32(op.d_out)?,
        x: ctx.f32(op.inp)?,
        weight: ctx.f32(op.weight)?,
        mean: ctx.f32_or_none(mean)?,
        rstd: ctx.f32(op.rstd)?,
        d_x: ctx.f32(op.d_inp)?,
    })
}

/// The gradient of the input, row by row, then those of the weight and, if there are two of `sums`, of the bias.
fn backward<const N: usize>(
    ctx: &Ctx<'_>,
    norm: &NormBwd<f32>,
    sums: [Span<f32>; N],
    [accum_inp, accum]: [Accum; 2],
) -> Result<()> {
    let (isa, cols, micro_step) = (ctx.isa, norm.weight.len(), ctx.scalars.micro_step);
    let adds = accum_inp.adds(micro_step);
    ctx.rows(norm.rstd.len(), cols, |row| {
        // SAFETY: rows have one task each; `Op::check` made sure that `d_inp` shares no memory with anything read.
        unsafe { norm.d_x_row::<Whole>(isa, row, adds) }
    })?;
    column_sums(ctx, sums, norm.rstd.len(), accum.adds(micro_step), |row, part, blocks| {
        let mut blocks = blocks.into_iter();
        let (dots, sums) = (blocks.next().unwrap_or_default(), blocks.next().unwrap_or_default());
        // SAFETY: nothing writes the inputs while the op runs.
        unsafe {
            let [d, x] = [norm.d_y, norm.x].map(|x| x.row(row, cols).get(part.clone()));
            add_row(isa, dots, sums, d, x, norm.statistics(row));
        }
    })
}

pub fn layernorm_bwd(ctx: &mut Ctx<'_>, op: &LayerNormBwd) -> Result<()> {
    let &LayerNormBwd { d_inp, d_weight, d_bias, d_out, inp, mean, rstd, weight, accum_inp, accum } = op;
    let without_mean = RmsNormBwd { d_inp, d_weight, d_out, inp, rstd, weight, accum_inp, accum };
    let norm = gradient(ctx, &without_mean, Some(mean))?;
    backward(ctx, &norm, [ctx.f32(d_weight)?, ctx.f32(d_bias)?], [accum_inp, accum])
}

pub fn rmsnorm_bwd(ctx: &mut Ctx<'_>, op: &RmsNormBwd) -> Result<()> {
    let norm = gradient(ctx, op, None)?;
    backward(ctx, &norm, [ctx.f32(op.d_weight)?], [op.accum_inp, op.accum])
}
