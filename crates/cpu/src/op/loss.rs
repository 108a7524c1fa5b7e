//! Softmax cross-entropy, the mean, and the most likely token.

use super::{Ctx, check_ids};
use crate::isa::Isa;
use crate::kernel::elementwise::scale_by;
use crate::kernel::loss::{first_largest, probabilities};
use crate::kernel::softmax::{exp_in_place, row_sum};
use crate::memory::Span;
use ironhorse_core::Result;
use ironhorse_core::op::{Argmax, CrossEntropy, CrossEntropyBwd, IGNORED, LossMean};

pub fn cross_entropy(ctx: &mut Ctx<'_>, op: &CrossEntropy) -> Result<()> {
    let rows = LossRows::new(ctx, op)?;
    ctx.rows(op.targets.numel(), op.logits.shape.cols(), |row| rows.row(row))
}

/// The windows of a cross entropy.
pub(super) struct LossRows<'a> {
    losses: Span<f32>,
    logits: Span<f32>,
    targets: &'a [i32],
    cols: usize,
    vocab: usize,
    /// Whether the logits become their gradients.
    grad: bool,
    scale: f32,
    isa: Isa,
}

impl LossRows<'_> {
    /// Refuses targets outside the vocabulary.
    pub fn new(ctx: &Ctx<'_>, op: &CrossEntropy) -> Result<Self> {
        let (losses, logits, targets) = (ctx.f32(op.losses)?, ctx.f32(op.logits)?, ctx.i32(op.targets)?);
        // SAFETY: nothing writes the targets while the op runs.
        let targets = unsafe { targets.all() };
        check_ids("target", targets, op.vocab, Some(IGNORED))?;
        let &CrossEntropy { vocab, grad, .. } = op;
        let (cols, scale) = (op.logits.shape.cols(), ctx.scalars.loss_scale);
        Ok(Self { losses, logits, targets, cols, vocab, grad, scale, isa: ctx.isa })
    }

    /// The loss of a row, which one task has, and the gradients in the place of its logits.
    pub fn row(&self, row: usize) {
        let &Self { losses, logits, targets, cols, vocab, grad, scale, isa } = self;
        let (target, row_of) = (targets[row] as usize, row * cols..(row + 1) * cols);
        if targets[row] == IGNORED {
            // SAFETY: as below.
            unsafe {
                losses.set(row, 0.0);
                if grad {
                    logits.get_mut(row_of).fill(0.0);
                }
            }
            return;
        }
        // SAFETY: rows have one task each; `losses` and `logits` share no memory (`Op::check`).
        unsafe {
            let (x, padding) = logits.get_mut(row_of).split_at_mut(vocab);
            let logit = x[target];
            let (max, sum) = if grad { exp_in_place(isa, x) } else { row_sum(isa, x) };
            let shifted = f64::from(logit - max);
            losses.set(row, (sum.ln() - shifted) as f32);
            if grad {
                scale_by(isa, x, (f64::from(scale) / sum) as f32);
                // (p - 1)·scale, rounded once
                x[target] = ((shifted.exp() / sum - 1.0) * f64::from(scale)) as f32;
                padding.fill(0.0);
            }
        }
    }
}

pub fn cross_entropy_bwd(ctx: &mut Ctx<'_>, op: &CrossEntropyBwd) -> Result<()> {
    let (logits, targets) = (ctx.f32(op.logits)?, ctx.i32(op.targets)?);
    let (losses, weights) = (ctx.f32(op.losses)?, ctx.f32(op.weights)?);
    let (isa, cols, vocab) = (ctx.isa, op.logits.shape.cols(), op.vocab);
    let loss_scale = f64::from(ctx.scalars.loss_scale);
    // SAFETY: nothing writes targets, losses or weights while the op runs.
    let (targets, losses, weights) = unsafe { (targets.all(), losses.all(), weights.all()) };
    check_ids("target", targets, vocab, Some(IGNORED))?;
    ctx.rows(targets.len(), cols, |row| {
        // SAFETY: rows have one task each; `logits` shares no memory with what is read (`Op::check`).
        let (x, padding) = unsafe { logits.get_mut(row * cols..(row + 1) * cols) }.split_at_mut(vocab);
        padding.fill(0.0);
        if targets[row] == IGNORED {
            return x.fill(0.0);
        }
        let (target, loss) = (targets[row] as usize, losses[row]);
        let scale = loss_scale * f64::from(weights[row]);
        let logit = x[target];
        probabilities(isa, x, logit, loss, scale as f32);
        // p - 1 keeps its digits where p is almost 1
        x[target] = ((-f64::from(loss)).exp_m1() * scale) as f32;
    })
}

pub fn argmax(ctx: &mut Ctx<'_>, op: &Argmax) -> Result<()> {
    let (best, logits) = (ctx.i32(op.best)?, ctx.f32(op.logits)?);
    let (cols, vocab) = (op.logits.shape.cols(), op.vocab);
    ctx.rows(op.best.numel(), cols, |row| {
        // SAFETY: rows have one task each; `best` and `logits` share no memory (`Op::check`).
        unsafe { best.set(row, first_largest(logits.get(row * cols..row * cols + vocab)) as i32) }
    })
}

pub fn loss_mean(ctx: &mut Ctx<'_>, op: &LossMean) -> Result<()> {
    let (loss, losses) = (ctx.f32(op.loss)?, ctx.f32(op.losses)?);
    let adds = op.accum.adds(ctx.scalars.added());
    // SAFETY: one thread, and the two slots share no memory.
    unsafe {
        let sum: f64 = losses.all().iter().map(|&x| f64::from(x)).sum();
        let mean = [(sum * f64::from(ctx.scalars.loss_scale)) as f32];
        super::store(loss.all_mut(), &mean, adds);
    }
    Ok(())
}
