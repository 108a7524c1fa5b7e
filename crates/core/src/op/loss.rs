//! Softmax cross-entropy, with forward and gradient in one pass over each row, and the mean over rows.

use super::numerics::{Arithmetic, Numerics};
use super::spec::{Accum, Checker, OpSpec, slots};
use crate::{DType, Result, Slot};

/// `losses = logsumexp(logits) - logits[target]` per row over the first `vocab` columns. With `grad`, the same pass
/// replaces `logits` by `d_logits = (softmax - onehot)·loss_scale`; padding columns become 0.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct CrossEntropy {
    /// (B,T) f32
    pub losses: Slot,
    /// (B,T,Vp), replaced by its gradient with `grad`
    pub logits: Slot,
    /// (B,T) i32
    pub targets: Slot,
    /// V, the number of columns that are not padding
    pub vocab: usize,
    /// Whether to write the gradient to `logits`.
    pub grad: bool,
}

impl OpSpec for CrossEntropy {
    const NAME: &'static str = "cross_entropy";

    fn visit(&mut self, f: &mut dyn FnMut(&'static str, super::Access, &mut Slot)) {
        use super::Access::{Read, Update, Write};
        f("losses", Write, &mut self.losses);
        f("logits", if self.grad { Update } else { Read }, &mut self.logits);
        f("targets", Read, &mut self.targets);
    }

    fn check(&self) -> Result<()> {
        let c = Checker(Self::NAME);
        c.dtype("targets", &self.targets, DType::I32)?;
        c.all_f32(&[("losses", &self.losses)])?;
        c.same_float(&[("logits", &self.logits)])?;
        let rows = self.targets.numel();
        c.numel("losses", &self.losses, rows)?;
        c.matrix("logits", &self.logits, rows, self.logits.shape.cols())?;
        if self.vocab == 0 || self.vocab > self.logits.shape.cols() {
            let cols = self.logits.shape.cols();
            return c.fail(format!("`vocab` is {}, but `logits` has {cols} columns", self.vocab));
        }
        Ok(())
    }

    fn numerics(&self, _: &str) -> Numerics {
        // Like attention, with logits at most 30 apart.
        Numerics::new(Arithmetic::Sum(3e-6))
    }

    fn flops(&self) -> u64 {
        (if self.grad { 8 } else { 5 }) * self.logits.numel() as u64
    }
}

/// `loss (+)= loss_scale · Σ losses`: the mean over the whole step with `loss_scale = 1/(rows·micro-steps)`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LossMean {
    /// one f32
    pub loss: Slot,
    /// (B,T) f32
    pub losses: Slot,
    /// Whether `loss` is overwritten or added to.
    pub accum: Accum,
}

impl OpSpec for LossMean {
    const NAME: &'static str = "loss_mean";
    slots!(Accumulate(accum) loss, Read losses);

    fn check(&self) -> Result<()> {
        let c = Checker(Self::NAME);
        c.all_f32(&[("loss", &self.loss), ("losses", &self.losses)])?;
        c.numel("loss", &self.loss, 1)
    }

    fn numerics(&self, _: &str) -> Numerics {
        // Up to 250,000 terms: this bound requires partial sums or a wider accumulator.
        Numerics::new(Arithmetic::PositiveSum(2e-6))
    }

    fn flops(&self) -> u64 {
        self.losses.numel() as u64
    }
}
