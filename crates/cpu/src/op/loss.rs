//! Softmax cross-entropy and the mean.

use super::elementwise::scale_in_place;
use super::{Ctx, check_ids};
use crate::math::{exp_flush, max, sum_inline};
use crate::multiversion;
use ironhorse_core::Result;
use ironhorse_core::op::{CrossEntropy, LossMean};

/// Columns summed in f32 before they are added to an f64: keeps the sum of 50,000 exponentials exact to f32.
const BLOCK: usize = 512;

multiversion! {
    /// Σ exp(x - max), leaving x alone.
    fn sum_exp<const FMA: bool>(x: &[f32], max: f32) -> f64 {
        let mut total = 0.0_f64;
        let mut block = [0.0_f32; BLOCK];
        for x in x.chunks(BLOCK) {
            let exps = &mut block[..x.len()];
            for (e, x) in exps.iter_mut().zip(x) {
                *e = exp_flush::<FMA>(x - max);
            }
            total += f64::from(sum_inline(exps));
        }
        total
    }

    /// x = exp(x - max); returns their sum.
    fn exp_in_place<const FMA: bool>(x: &mut [f32], max: f32) -> f64 {
        let mut total = 0.0_f64;
        for x in x.chunks_mut(BLOCK) {
            for x in x.iter_mut() {
                *x = exp_flush::<FMA>(*x - max);
            }
            total += f64::from(sum_inline(x));
        }
        total
    }
}

pub fn cross_entropy(ctx: &mut Ctx<'_>, op: &CrossEntropy) -> Result<()> {
    let (losses, logits, targets) = (ctx.f32(op.losses)?, ctx.f32(op.logits)?, ctx.i32(op.targets)?);
    let (isa, cols, vocab, grad) = (ctx.isa, op.logits.shape.cols(), op.vocab, op.grad);
    let loss_scale = ctx.scalars.loss_scale;
    // SAFETY: nothing writes the targets while the op runs.
    let targets = unsafe { targets.all() };
    check_ids("target", targets, vocab)?;
    ctx.rows(targets.len(), cols, |rows, _| {
        for row in rows {
            let target = targets[row] as usize;
            // SAFETY: tasks have disjoint rows of `losses` and `logits`, which share no memory.
            unsafe {
                let loss = &mut losses.get_mut(row..row + 1)[0];
                if !grad {
                    let x = logits.get(row * cols..row * cols + vocab);
                    let max = max(isa, x);
                    *loss = (sum_exp(isa, x, max).ln() - f64::from(x[target] - max)) as f32;
                    continue;
                }
                let (x, padding) = logits.get_mut(row * cols..(row + 1) * cols).split_at_mut(vocab);
                let max = max(isa, x);
                let shifted = x[target] - max;
                let sum = exp_in_place(isa, x, max);
                *loss = (sum.ln() - f64::from(shifted)) as f32;
                scale_in_place(isa, x, (f64::from(loss_scale) / sum) as f32);
                // (p - 1)·scale, rounded once
                let p = f64::from(shifted).exp() / sum;
                x[target] = ((p - 1.0) * f64::from(loss_scale)) as f32;
                padding.fill(0.0);
            }
        }
    })
}

pub fn loss_mean(ctx: &mut Ctx<'_>, op: &LossMean) -> Result<()> {
    let (loss, losses) = (ctx.f32(op.loss)?, ctx.f32(op.losses)?);
    let adds = op.accum.adds(ctx.scalars.micro_step);
    // SAFETY: one thread, and the two slots share no memory.
    unsafe {
        let sum: f64 = losses.all().iter().map(|&x| f64::from(x)).sum();
        let mean = [(sum * f64::from(ctx.scalars.loss_scale)) as f32];
        super::store(loss.all_mut(), &mean, adds);
    }
    Ok(())
}
