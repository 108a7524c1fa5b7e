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
        let terms = match self.terms {
            Some([a, b]) => Some([ctx.f32(a)?, ctx.f32(b)?]),
            None => None,
        };
        Ok(Norm {
            x: ctx.f32(self.x)?,
            terms,
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

/// The gradient of the input, row by row.
fn d_inp(ctx: &Ctx<'_>, norm: &NormBwd<f32>, accum: Accum) -> Result<()> {
    let (isa, cols, adds) = (ctx.isa, norm.weight.len(), accum.adds(ctx.scalars.micro_step));
    ctx.rows(norm.rstd.len(), cols, |row| {
        // SAFETY: rows have one task each; `Op::check` made sure that `d_inp` shares no memory with anything read.
        unsafe { norm.d_x_row::<Whole>(isa, row, adds) }
    })
}

pub fn layernorm_bwd(ctx: &mut Ctx<'_>, op: &LayerNormBwd) -> Result<()> {
    let norm = NormBwd {
        d_y: ctx.f32(op.d_out)?,
        x: ctx.f32(op.inp)?,
        weight: ctx.f32(op.weight)?,
        mean: ctx.f32(op.mean)?,
        rstd: ctx.f32(op.rstd)?,
        d_x: ctx.f32(op.d_inp)?,
    };
    let sums = [ctx.f32(op.d_weight)?, ctx.f32(op.d_bias)?];
    d_inp(ctx, &norm, op.accum_inp)?;
    let (isa, rows, adds) = (ctx.isa, norm.rstd.len(), op.accum.adds(ctx.scalars.micro_step));
    column_sums(ctx, sums, rows, adds, |row, cols, [dots, sums]| {
        // SAFETY: nothing writes the inputs while the op runs.
        unsafe {
            let [d, x] = [norm.d_y, norm.x].map(|x| piece(x, row, norm.weight.len(), &cols).all());
            add_row(isa, dots, sums, d, x, norm.statistics(row));
        }
    })
}

pub fn rmsnorm_bwd(ctx: &mut Ctx<'_>, op: &RmsNormBwd) -> Result<()> {
    let norm = NormBwd {
        d_y: ctx.f32(op.d_out)?,
        x: ctx.f32(op.inp)?,
        weight: ctx.f32(op.weight)?,
        mean: Span::none(0),
        rstd: ctx.f32(op.rstd)?,
        d_x: ctx.f32(op.d_inp)?,
    };
    let d_weight = ctx.f32(op.d_weight)?;
    d_inp(ctx, &norm, op.accum_inp)?;
    let (isa, rows, adds) = (ctx.isa, norm.rstd.len(), op.accum.adds(ctx.scalars.micro_step));
    column_sums(ctx, [d_weight], rows, adds, |row, cols, [dots]| {
        // SAFETY: nothing writes the inputs while the op runs.
        unsafe {
            let [d, x] = [norm.d_y, norm.x].map(|x| piece(x, row, norm.weight.len(), &cols).all());
            add_row(isa, dots, &mut [], d, x, norm.statistics(row));
        }
    })
}

/// Some columns of a row.
fn piece(x: Span<f32>, row: usize, width: usize, cols: &std::ops::Range<usize>) -> Span<f32> {
    x.part(row * width + cols.start..row * width + cols.end)
}
