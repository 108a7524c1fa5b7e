//! Global gradient norm and AdamW over all parameters.

use super::collective::share_pieces;
use super::{Ctx, engine_error};
use crate::kernel::update::{
    self as kernel, ADAM_CHUNK, AdamWSettings, CLIP_EPS, Coefficients, NORM_CHUNK, adamw_update,
};
use ironhorse_core::op::{AdamW, GradNorm};
use ironhorse_core::{Result, Slot, Update};

pub fn grad_norm(ctx: &mut Ctx<'_>, op: &GradNorm) -> Result<()> {
    let (norm, grads) = (ctx.f32(op.norm)?, ctx.f32(op.grads)?);
    let (halt, loss) = (ctx.f32(op.halt)?, ctx.f32(op.loss)?);
    let pieces = grads.len().div_ceil(NORM_CHUNK);
    let partials = ctx.partials(pieces);
    let total = match op.slices {
        // SAFETY: nothing writes the gradients while the op runs.
        None => unsafe { kernel::norm(&ctx.split(), grads, partials) }.map_err(engine_error)?,
        Some(slices) => {
            for part in slices.parts(grads.len()) {
                let (first, count) = (part.start / NORM_CHUNK, part.len().div_ceil(NORM_CHUNK));
                let sums = partials.part(first..first + count);
                // SAFETY: nothing writes the gradients while the op runs, and nothing else uses these partial sums.
                unsafe { kernel::norm_parts(&ctx.split(), grads.part(part), sums) }.map_err(engine_error)?;
            }
            share_pieces(ctx, slices, grads.len())?;
            kernel::norm_of(&ctx.partials[..pieces])
        }
    };
    // SAFETY: one thread, and the three slots share no memory.
    unsafe {
        norm.all_mut()[0] = total;
        let halt = &mut halt.all_mut()[0];
        let bad = !total.is_finite() || !loss.all()[0].is_finite();
        *halt = if *halt != 0.0 || bad { 1.0 } else { 0.0 };
    }
    Ok(())
}

/// The factor of the gradients; `None` if neither weights nor moments may change, because the step or one before it went
/// wrong.
pub(super) fn clip(ctx: &Ctx<'_>, [norm, halt]: [Slot; 2]) -> Result<Option<f32>> {
    let (norm, halt, most) = (ctx.f32(norm)?, ctx.f32(halt)?, ctx.scalars.grad_clip);
    // SAFETY: nothing writes the norm or `halt` while the op runs.
    let (norm, halt) = unsafe { (norm.all()[0], halt.all()[0]) };
    if halt != 0.0 || !norm.is_finite() {
        return Ok(None);
    }
    Ok(Some(if most > 0.0 { (most / (norm + CLIP_EPS)).min(1.0) } else { 1.0 }))
}

pub fn adamw(ctx: &mut Ctx<'_>, op: &AdamW) -> Result<()> {
    let (w, g) = (ctx.f32(op.params)?, ctx.f32(op.grads)?);
    let (m, v) = (ctx.f32(op.moment1)?, ctx.f32(op.moment2)?);
    let (s, isa, params) = (*ctx.scalars, ctx.isa, ctx.program.params());
    let Some(clip) = clip(ctx, [op.norm, op.halt])? else { return Ok(()) };
    let with_decay = Coefficients::new(&AdamWSettings {
        lr: s.lr,
        beta1: s.beta1,
        beta2: s.beta2,
        eps: s.eps,
        weight_decay: s.weight_decay,
        step: s.step.min(i32::MAX as u32) as i32,
        grad_scale: clip,
    });
    let here = op.first;
    ctx.chunks(w.len(), ADAM_CHUNK, |r, _| {
        let r = r.start + here..r.end + here;
        let first = params.partition_point(|p| p.weight.end() / 4 <= r.start);
        for param in &params[first..] {
            let (start, end) = (param.weight.offset / 4, param.weight.end() / 4);
            if start >= r.end {
                break;
            }
            let Update::AdamW { skipped } = param.update else { continue };
            let part = start.max(r.start)..end.min(r.end);
            // moments of a slice begin with its first element; without a slice those of other optimizers are left out
            let skipped = if here == 0 { skipped } else { here };
            let second = part.start - skipped..part.end - skipped;
            let part = part.start - here..part.end - here;
            let k = if param.decay { with_decay } else { Coefficients { keep: 1.0, ..with_decay } };
            // SAFETY: tasks have disjoint ranges of the four pools, which share no memory.
            unsafe {
                let (w, g) = (w.get_mut(part.clone()), g.get(part.clone()));
                adamw_update(isa, w, g, m.get_mut(part), v.get_mut(second), k);
            }
        }
    })
}
