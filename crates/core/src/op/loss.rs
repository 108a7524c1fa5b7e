//! Softmax cross-entropy, with forward and gradient in one pass over each row, the mean over rows, and the most likely token.

use super::numerics::{Arithmetic, Numerics};
use super::spec::{Accum, Checker, named, op};
use crate::{DType, Result, Slot};

/// The target of a row that does not count: its loss and its gradient are 0. PyTorch ignores the same number.
pub const IGNORED: i32 = -100;

op! {
    /// `losses = logsumexp(logits) - logits[target]` per row over the first `vocab` columns. With `grad`, the same pass
    /// replaces `logits` by `d_logits = (softmax - onehot)·loss_scale`; padding columns become 0. Rows whose target is
    /// [`IGNORED`] have loss 0 and gradient 0, whatever their logits.
    pub struct CrossEntropy {
        /// (B,T) f32
        pub losses: Slot = Write,
        /// (B,T,Vp), replaced by its gradient with `grad`
        pub logits: Slot = update_if(grad),
        /// (B,T) i32, each a column below `vocab` or [`IGNORED`]
        pub targets: Slot = Read,
        /// V, the number of columns that are not padding
        pub vocab: usize,
        /// Whether to write the gradient to `logits`.
        pub grad: bool,
    }
    name "cross_entropy"
    check(op, c) {
        c.dtype("targets", &op.targets, DType::I32)?;
        c.dtype("losses", &op.losses, DType::F32)?;
        c.same_float(named!(op: logits))?;
        let rows = op.targets.numel();
        c.numel("losses", &op.losses, rows)?;
        c.matrix("logits", &op.logits, rows, op.logits.shape.cols())?;
        check_vocab(c, op.vocab, &op.logits)
    }
    numerics {
        // Like attention, with logits at most 30 apart.
        Numerics::new(Arithmetic::Sum(3e-6))
    }
    flops(op) { (if op.grad { 8 } else { 5 }) * op.logits.numel() as u64 }
}

op! {
    /// `d_logits = (softmax(logits) - onehot)·loss_scale·weight` per row, in place of the logits: the gradient of
    /// `loss_scale·Σ weights·losses` from the losses that [`CrossEntropy`] without `grad` left. Padding columns become 0, and
    /// so do rows whose target is [`IGNORED`], whatever their logits and weights.
    pub struct CrossEntropyBwd {
        /// (B,T,Vp), replaced by its gradient
        pub logits: Slot = Update,
        /// (B,T) i32, each a column below `vocab` or [`IGNORED`]
        pub targets: Slot = Read,
        /// (B,T) f32
        pub losses: Slot = Read,
        /// (B,T) f32
        pub weights: Slot = Read,
        /// V, the number of columns that are not padding
        pub vocab: usize,
    }
    name "cross_entropy_bwd"
    check(op, c) {
        c.dtype("targets", &op.targets, DType::I32)?;
        c.dtypes(named!(op: losses, weights), DType::F32)?;
        c.same_float(named!(op: logits))?;
        let rows = op.targets.numel();
        c.numels(named!(op: losses, weights), rows)?;
        c.matrix("logits", &op.logits, rows, op.logits.shape.cols())?;
        check_vocab(c, op.vocab, &op.logits)
    }
    numerics {
        // A probability is e^(logit - that of the target - loss). With logits and losses of at most 15 the exponent has two
        // roundings of 15·2⁻²⁴ each, and a third where it is turned into a power of 2.
        Numerics::new(Arithmetic::Sum(5e-6))
    }
    flops(op) { 4 * op.logits.numel() as u64 }
}

op! {
    /// `best` = the index of the largest of the first `vocab` columns of each row, the lowest of equal ones; 0 and -0 are
    /// equal. A NaN is larger than every number, as for PyTorch.
    pub struct Argmax {
        /// (B,T) i32
        pub best: Slot = Write,
        /// (B,T,Vp)
        pub logits: Slot = Read,
        /// V, the number of columns that are not padding
        pub vocab: usize,
    }
    name "argmax"
    check(op, c) {
        c.dtype("best", &op.best, DType::I32)?;
        c.same_float(named!(op: logits))?;
        c.matrix("logits", &op.logits, op.best.numel(), op.logits.shape.cols())?;
        check_vocab(c, op.vocab, &op.logits)
    }
    numerics { Numerics::EXACT }
    flops(op) { op.logits.numel() as u64 }
}

op! {
    /// `loss (+)= loss_scale · Σ losses`: the mean over the whole step with `loss_scale` = 1/(rows of
    /// the step that count).
    pub struct LossMean {
        /// one f32
        pub loss: Slot = Accumulate(accum),
        /// (B,T) f32
        pub losses: Slot = Read,
        /// Whether `loss` is overwritten or added to.
        pub accum: Accum,
    }
    name "loss_mean"
    check(op, c) {
        c.dtypes(named!(op: loss, losses), DType::F32)?;
        c.numel("loss", &op.loss, 1)
    }
    numerics {
        // Up to 250,000 terms: this bound requires partial sums or a wider accumulator.
        Numerics::new(Arithmetic::PositiveSum(2e-6))
    }
    flops(op) { op.losses.numel() as u64 }
}

/// Rows of logits have at least one column that is not padding.
fn check_vocab(c: &Checker, vocab: usize, logits: &Slot) -> Result<()> {
    let cols = logits.shape.cols();
    match vocab == 0 || vocab > cols {
        true => c.fail(format!("`vocab` is {vocab}, but `logits` has {cols} columns")),
        false => Ok(()),
    }
}
