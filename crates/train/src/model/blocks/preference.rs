//! The loss of pairs of answers (DPO) in place of the mean cross-entropy.

use super::{Blocks, LossIo};
use crate::Result;
use ironhorse_core::op::{Accum, CrossEntropy, CrossEntropyBwd, Preference};
use ironhorse_core::{DType, Slot};

/// What the loss of pairs needs of the host besides what every loss does.
#[derive(Clone, Copy)]
pub(in crate::model) struct PairIo {
    /// (P,3) i32, the rows of each pair
    pairs: Slot,
    /// (B,T) f32, the losses that the reference gives the tokens
    reference: Slot,
    /// (P,2) f32
    rewards: Slot,
    /// (3) f32, of the step
    means: Slot,
    beta: f32,
}

impl Blocks {
    /// Declares the pairs of a batch: as many as have a token in each text. Io: `pairs`, `reference`, `rewards`,
    /// `reward_means`.
    pub fn pair_io(&mut self, beta: f32) -> PairIo {
        let (batch, seq) = self.batch;
        let most = (batch * seq / 2).max(1);
        PairIo {
            pairs: self.b.io("pairs", [most, 3], DType::I32),
            reference: self.b.io("reference", [batch, seq], DType::F32),
            rewards: self.b.io("rewards", [most, 2], DType::F32),
            means: self.b.io("reward_means", [3], DType::F32),
            beta,
        }
    }

    /// The loss of pairs; where it is to be learned from, the logits become their gradient. The losses of all tokens come
    /// first, because a token's gradient depends on all of its pair.
    pub(super) fn preference(
        &mut self,
        logits: Slot,
        (io, pairs): (&LossIo, &PairIo),
        vocab: usize,
        grad: bool,
    ) -> Result<()> {
        let LossIo { targets, losses, mean: loss, .. } = *io;
        let PairIo { pairs, reference, rewards, means, beta } = *pairs;
        self.b.push(CrossEntropy { losses, logits, targets, vocab, grad: false })?;
        let weights = grad.then(|| self.per_token());
        let accum = Accum::FirstWrites;
        self.b.push(Preference { loss, means, rewards, weights, losses, reference, pairs, beta, accum })?;
        if let Some(weights) = weights {
            self.b.push(CrossEntropyBwd { logits, targets, losses, weights, vocab })?;
        }
        Ok(())
    }
}
