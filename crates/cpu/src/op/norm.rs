//! Layer and RMS normalisation.

use super::Ctx;
use super::columns::{beside_len, sums_beside};
use crate::element::Whole;
use crate::kernel::norm::{Norm, NormBwd, column_sums};
use crate::memory::Span;
use ironhorse_core::op::{
    Gain, LayerNormApply, LayerNormBwd, LayerNormFwd, ResidualLayerNormFwd, ResidualRmsNormFwd, RmsNormApply,
    RmsNormBwd, RmsNormFwd,
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
    gain: Gain,
}

/// What rows are multiplied by: the weight where it is, or 1 + weight; and room for `more` floats. The memory is valid until the next call.
fn factors(ctx: &mut Ctx<'_>, weight: Slot, gain: Gain, more: usize) -> Result<[Span<f32>; 2]> {
    let weight = ctx.f32(weight)?;
    let own = if gain == Gain::Weight { 0 } else { weight.len() };
    let floats = ctx.floats(more + own);
    let (more, factors) = (floats.part(0..more), floats.part(more..floats.len()));
    if gain == Gain::Weight {
        return Ok([weight, more]);
    }
    // SAFETY: nothing else uses this memory, and nothing writes the weight while the op runs.
    unsafe { shifted(factors.all_mut(), gain.offset(), weight.all()) };
    Ok([factors, more])
}

/// out = offset + weight
pub(super) fn shifted(out: &mut [f32], offset: f32, weight: &[f32]) {
    out.iter_mut().zip(weight).for_each(|(out, weight)| *out = offset + weight);
}

impl Slots {
    fn windows(&self, ctx: &mut Ctx<'_>) -> Result<Norm<f32>> {
        let [weight, _] = factors(ctx, self.weight, self.gain, 0)?;
        Ok(Norm {
            x: ctx.f32(self.x)?,
            terms: self.terms.map(|[a, b]| Ok([ctx.f32(a)?, ctx.f32(b)?])).transpose()?,
            weight,
            bias: self.bias.map(|slot| ctx.f32(slot)).transpose()?,
            y: ctx.f32(self.y)?,
            mean: ctx.f32_or_none(self.mean)?,
            rstd: ctx.f32(self.rstd)?,
            rows: self.x.shape.rows(),
        })
    }

    fn forward(&self, ctx: &mut Ctx<'_>, eps: f32) -> Result<()> {
        let norm = self.windows(ctx)?;
        // SAFETY: `Op::check` made sure of sizes and aliasing.
        ctx.done(unsafe { norm.forward::<Whole>(&ctx.split(), eps.into()) })
    }

    fn apply(&self, ctx: &mut Ctx<'_>) -> Result<()> {
        let norm = self.windows(ctx)?;
        // SAFETY: as in `forward`.
        ctx.done(unsafe { norm.apply(&ctx.split()) })
    }
}

pub fn layernorm_fwd(ctx: &mut Ctx<'_>, op: &LayerNormFwd) -> Result<()> {
    let &LayerNormFwd { out, mean, rstd, inp, weight, bias, eps } = op;
    let (bias, mean, terms, gain) = (Some(bias), Some(mean), None, Gain::Weight);
    Slots { x: inp, weight, bias, y: out, mean, rstd, terms, gain }.forward(ctx, eps)
}

pub fn residual_layernorm_fwd(ctx: &mut Ctx<'_>, op: &ResidualLayerNormFwd) -> Result<()> {
    let &ResidualLayerNormFwd { residual, out, mean, rstd, a, b, weight, bias, eps } = op;
    let (bias, mean, terms, gain) = (Some(bias), Some(mean), Some([a, b]), Gain::Weight);
    Slots { x: residual, weight, bias, y: out, mean, rstd, terms, gain }.forward(ctx, eps)
}

pub fn layernorm_apply(ctx: &mut Ctx<'_>, op: &LayerNormApply) -> Result<()> {
    let &LayerNormApply { out, inp, mean, rstd, weight, bias } = op;
    let (bias, mean, terms, gain) = (Some(bias), Some(mean), None, Gain::Weight);
    Slots { x: inp, weight, bias, y: out, mean, rstd, terms, gain }.apply(ctx)
}

pub fn rmsnorm_fwd(ctx: &mut Ctx<'_>, op: &RmsNormFwd) -> Result<()> {
    let &RmsNormFwd { out, rstd, inp, weight, eps, gain } = op;
    Slots { x: inp, weight, bias: None, y: out, mean: None, rstd, terms: None, gain }.forward(ctx, eps)
}

pub fn residual_rmsnorm_fwd(ctx: &mut Ctx<'_>, op: &ResidualRmsNormFwd) -> Result<()> {
    let &ResidualRmsNormFwd { residual, out, rstd, a, b, weight, eps, gain } = op;
    let (bias, mean, terms) = (None, None, Some([a, b]));
    Slots { x: residual, weight, bias, y: out, mean, rstd, terms, gain }.forward(ctx, eps)
}

pub fn rmsnorm_apply(ctx: &mut Ctx<'_>, op: &RmsNormApply) -> Result<()> {
    let &RmsNormApply { out, inp, rstd, weight, gain } = op;
    Slots { x: inp, weight, bias: None, y: out, mean: None, rstd, terms: None, gain }.apply(ctx)
}

/// The gradient of the input, and while its rows are in a cache those of the weight and, for a layer norm, which has means, of the bias.
fn backward<const N: usize>(
    ctx: &mut Ctx<'_>,
    op: &RmsNormBwd,
    mean: Option<Slot>,
    sums: [Span<f32>; N],
) -> Result<()> {
    let (rows, cols) = (op.inp.shape.rows(), op.weight.numel());
    let [weight, room] = factors(ctx, op.weight, op.gain, beside_len::<N>(rows, cols))?;
    let norm = NormBwd {
        d_y: ctx.f32(op.d_out)?,
        x: ctx.f32(op.inp)?,
        weight,
        mean: ctx.f32_or_none(mean)?,
        rstd: ctx.f32(op.rstd)?,
        d_x: ctx.f32(op.d_inp)?,
    };
    let (isa, micro_step) = (ctx.isa, ctx.scalars.added());
    let [adds_inp, adds] = [op.accum_inp, op.accum].map(|accum| accum.adds(micro_step));
    sums_beside(ctx, sums, (rows, room), adds, |row, blocks| {
        let mut blocks = blocks.into_iter();
        let (dots, sums) = (blocks.next().unwrap_or_default(), blocks.next().unwrap_or_default());
        // SAFETY: rows have one task each; `Op::check` made sure that `d_inp` shares no memory with anything read, which nothing writes.
        unsafe {
            let [d, x] = [norm.d_y, norm.x].map(|x| x.row(row, cols).all());
            column_sums(isa, dots, sums, d, x, norm.statistics(row));
            norm.d_x_row::<Whole>(isa, row, adds_inp);
        }
    })
}

pub fn layernorm_bwd(ctx: &mut Ctx<'_>, op: &LayerNormBwd) -> Result<()> {
    let &LayerNormBwd { d_inp, d_weight, d_bias, d_out, inp, mean, rstd, weight, accum_inp, accum } = op;
    let gain = Gain::Weight;
    let without_mean = RmsNormBwd { d_inp, d_weight, d_out, inp, rstd, weight, accum_inp, accum, gain };
    let sums = [ctx.f32(d_weight)?, ctx.f32(d_bias)?];
    backward(ctx, &without_mean, Some(mean), sums)
}

pub fn rmsnorm_bwd(ctx: &mut Ctx<'_>, op: &RmsNormBwd) -> Result<()> {
    let sums = [ctx.f32(op.d_weight)?];
    backward(ctx, op, None, sums)
}
