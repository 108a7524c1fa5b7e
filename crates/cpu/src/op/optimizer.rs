//! Global gradient norm and AdamW over all parameters.

use super::Ctx;
use crate::math::{fma, sum_sq_inline};
use crate::multiversion;
use ironhorse_core::Result;
use ironhorse_core::op::{AdamW, GradNorm};

/// Elements whose squares one task sums; the partial sums are added in order.
pub(crate) const NORM_CHUNK: usize = 1 << 16;
/// Elements one AdamW task updates: four streams of 64 KiB.
pub(crate) const ADAM_CHUNK: usize = 1 << 14;
/// What PyTorch's clip_grad_norm_ adds to the norm before dividing.
pub(crate) const CLIP_EPS: f32 = 1e-6;

/// The constants of a step, the same for every element.
#[derive(Clone, Copy)]
pub(crate) struct Coefficients {
    /// 1 - lr·decay
    pub(crate) keep: f32,
    pub(crate) beta2: f32,
    /// 1 - β₁ and 1 - β₂, rounded once
    pub(crate) rest1: f32,
    pub(crate) rest2: f32,
    /// lr / (1 - β₁ᵗ)
    pub(crate) step_size: f32,
    /// 1 / √(1 - β₂ᵗ)
    pub(crate) root_correction: f32,
    pub(crate) eps: f32,
    /// gradients are multiplied by this: clipping
    pub(crate) grad_scale: f32,
}

/// Places a task reads at once: one stream per core does not fill the memory's bandwidth.
const STREAMS: usize = 4;
const LANES: usize = 16;

multiversion! {
    /// Σ x² in f64, reading four places of x at a time.
    pub(crate) fn sum_sq_streams<const FMA: bool>(x: &[f32]) -> f64 {
        let quarter = x.len() / (STREAMS * LANES) * LANES;
        let (parts, rest) = x.split_at(STREAMS * quarter);
        let [a, b, c, d]: [&[[f32; LANES]]; STREAMS] =
            std::array::from_fn(|s| parts[s * quarter..(s + 1) * quarter].as_chunks().0);
        let mut sums = [[0.0_f64; LANES]; STREAMS];
        for (((a, b), c), d) in a.iter().zip(b).zip(c).zip(d) {
            for i in 0..LANES {
                sums[0][i] += f64::from(a[i]) * f64::from(a[i]);
                sums[1][i] += f64::from(b[i]) * f64::from(b[i]);
                sums[2][i] += f64::from(c[i]) * f64::from(c[i]);
                sums[3][i] += f64::from(d[i]) * f64::from(d[i]);
            }
        }
        sums.iter().flatten().sum::<f64>() + sum_sq_inline(rest)
    }

    /// One stretch of AdamW.
    pub(crate) fn adamw_stretch<const FMA: bool>(w: &mut [f32], g: &[f32], m: &mut [f32], v: &mut [f32], k: Coefficients) {
        for (((w, g), m), v) in w.iter_mut().zip(g).zip(m.iter_mut()).zip(v.iter_mut()) {
            let g = g * k.grad_scale;
            *m = fma::<FMA>(k.rest1, g - *m, *m);
            *v = fma::<FMA>(k.beta2, *v, k.rest2 * (g * g));
            let denominator = fma::<FMA>(v.sqrt(), k.root_correction, k.eps);
            *w = fma::<FMA>(*w, k.keep, -(k.step_size * (*m / denominator)));
        }
    }
}

pub fn grad_norm(ctx: &mut Ctx<'_>, op: &GradNorm) -> Result<()> {
    let (norm, grads) = (ctx.f32(op.norm)?, ctx.f32(op.grads)?);
    let isa = ctx.isa;
    let tasks = grads.len().div_ceil(NORM_CHUNK);
    let partials = ctx.partials(tasks);
    ctx.chunks(grads.len(), NORM_CHUNK, |r, _| {
        let index = r.start / NORM_CHUNK;
        // SAFETY: nothing writes the gradients while the op runs; tasks write different partial sums.
        unsafe { partials.set(index, sum_sq_streams(isa, grads.get(r))) }
    })?;
    let (halt, loss) = (ctx.f32(op.halt)?, ctx.f32(op.loss)?);
    // SAFETY: all tasks are done; one thread, and the three slots share no memory.
    unsafe {
        let total = partials.sum(0..tasks).sqrt() as f32;
        norm.all_mut()[0] = total;
        let halt = &mut halt.all_mut()[0];
        let bad = !total.is_finite() || !loss.all()[0].is_finite();
        *halt = if *halt != 0.0 || bad { 1.0 } else { 0.0 };
    }
    Ok(())
}

pub fn adamw(ctx: &mut Ctx<'_>, op: &AdamW) -> Result<()> {
    let (w, g, norm) = (ctx.f32(op.params)?, ctx.f32(op.grads)?, ctx.f32(op.norm)?);
    let (m, v, halt) = (ctx.f32(op.moment1)?, ctx.f32(op.moment2)?, ctx.f32(op.halt)?);
    let (s, isa, params) = (*ctx.scalars, ctx.isa, ctx.program.params());
    // SAFETY: nothing writes the norm or `halt` while the op runs.
    let (norm, halt) = unsafe { (norm.all()[0], halt.all()[0]) };
    if halt != 0.0 || !norm.is_finite() {
        return Ok(()); // neither a step that went wrong nor one after it may change the weights
    }
    let clip = if s.grad_clip > 0.0 { (s.grad_clip / (norm + CLIP_EPS)).min(1.0) } else { 1.0 };
    let correction = |beta: f64| 1.0 - beta.powi(s.step.min(i32::MAX as u32) as i32);
    let base = Coefficients {
        keep: 1.0,
        beta2: s.beta2 as f32,
        rest1: (1.0 - s.beta1) as f32,
        rest2: (1.0 - s.beta2) as f32,
        step_size: (f64::from(s.lr) / correction(s.beta1)) as f32,
        root_correction: (1.0 / correction(s.beta2).sqrt()) as f32,
        eps: s.eps,
        grad_scale: clip,
    };
    let decayed = (1.0 - f64::from(s.lr) * f64::from(s.weight_decay)) as f32;
    ctx.chunks(w.len(), ADAM_CHUNK, |r, _| {
        let first = params.partition_point(|p| p.weight.end() / 4 <= r.start);
        for param in &params[first..] {
            let (start, end) = (param.weight.offset / 4, param.weight.end() / 4);
            if start >= r.end {
                break;
            }
            let part = start.max(r.start)..end.min(r.end);
            let k = Coefficients { keep: if param.decay { decayed } else { 1.0 }, ..base };
            // SAFETY: tasks have disjoint ranges of the four pools, which share no memory.
            unsafe {
                let (w, g) = (w.get_mut(part.clone()), g.get(part.clone()));
                adamw_stretch(isa, w, g, m.get_mut(part.clone()), v.get_mut(part), k);
            }
        }
    })
}
