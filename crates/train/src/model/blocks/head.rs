//! The output head and the loss: of all tokens at once, or in training of some tokens after the others, each forward and backward, so that
//! only their logits need memory.

use super::adapter::is_frozen;
use super::{Blocks, Linear, LossIo, Norm, Purpose};
use crate::{Error, Result};
use ironhorse_core::op::{Accum, Argmax, CrossEntropy, LinearBwdInput, LinearBwdWeight, LinearFwd, LossMean};
use ironhorse_core::{DType, Section, Slot};
use std::ops::Range;

/// What the output head is called.
pub(super) const HEAD: &str = "lm_head";
/// What the tokens of a part are a multiple of, so that the rows of each begin at whole cache lines.
const MULTIPLE: usize = 64;

/// The head's result with what its backward needs.
#[derive(Clone, Copy)]
pub(in crate::model) struct Head {
    pub norm: Norm,
    /// (B,T,Vp), its gradient after the loss; of the last part where there are several.
    pub logits: Slot,
    /// (B,T,C), the gradient of the norm's result where the forward ends with it.
    d_norm: Option<Slot>,
}

impl Blocks {
    /// The mean cross-entropy or the loss of pairs; in training the logits become their gradient. With several `chunks`, the backward of
    /// the head is done as well.
    pub fn loss(
        &mut self,
        (norm, head): (Norm, Slot),
        io: &LossIo,
        vocab: usize,
        (purpose, chunks): (Purpose, usize),
    ) -> Result<Head> {
        let LossIo { targets, losses, mean: loss, .. } = *io;
        let grad = purpose == Purpose::Training;
        if grad && chunks > 1 {
            return self.loss_in_chunks((norm, head), io, vocab, chunks);
        }
        let logits = self.tokens_by(head.shape.rows());
        self.logits(norm.out, logits, head)?;
        self.b.at("loss");
        match &io.pairs {
            Some(pairs) => self.preference(logits, (io, pairs), vocab, grad)?,
            None => {
                self.b.push(CrossEntropy { losses, logits, targets, vocab, grad })?;
                if grad && self.is_fp8(HEAD, &Linear::plain(head)) {
                    self.gradient_fp8(HEAD, logits)?;
                }
                self.b.push(LossMean { loss, losses, accum: Accum::FirstWrites })?;
            }
        }
        Ok(Head { norm, logits, d_norm: None })
    }

    fn loss_in_chunks(
        &mut self,
        (norm, head): (Norm, Slot),
        io: &LossIo,
        vocab: usize,
        chunks: usize,
    ) -> Result<Head> {
        let refused = |with: &str, instead: &str| {
            Err(Error::input("--head-chunks", chunks, format!("1 {with}; {instead}")))
        };
        if io.pairs.is_some() {
            return refused("where preferences are learned", "a smaller --batch needs less memory");
        }
        if self.is_fp8(HEAD, &Linear::plain(head)) {
            return refused("with an output head in 8 bits", "--dtype fp8 has the head in bf16");
        }
        let LossIo { targets, losses, mean: loss, .. } = *io;
        let (tokens, dtype) = (self.tokens(), self.dtype());
        let parts = parts(tokens, chunks);
        let most = parts.iter().map(Range::len).max().unwrap_or(0);
        // one buffer for all parts: they follow each other
        let logits = self.b.activation([most, head.shape.rows()], dtype);
        let d_norm = self.hidden();
        let [targets, all_losses] = [targets, losses].map(|slot| slot.view([tokens, 1]));
        for (i, part) in parts.into_iter().enumerate() {
            let [inp, d_inp, targets, losses] =
                [norm.out, d_norm, targets, all_losses].map(|slot| slot.rows(part.clone()));
            let logits = logits.rows(0..part.len());
            self.b.at(HEAD);
            self.b.push(LinearFwd { out: logits, pre: None, inp, weight: head, bias: None })?;
            self.b.at("loss");
            self.b.push(CrossEntropy { losses, logits, targets, vocab, grad: true })?;
            self.b.at(HEAD);
            if !is_frozen(head) {
                let accum = if i == 0 { Accum::FirstWrites } else { Accum::Add };
                let d_weight = self.b.grad(head);
                self.b.push(LinearBwdWeight { d_weight, d_bias: None, d_out: logits, inp, accum })?;
            }
            self.b.push(LinearBwdInput { d_inp, d_out: logits, weight: head, pre: None })?;
        }
        self.b.at("loss");
        self.b.push(LossMean { loss, losses, accum: Accum::FirstWrites })?;
        Ok(Head { norm, logits, d_norm: Some(d_norm) })
    }

    /// The most likely token at each position. Io: `best`.
    pub fn best(&mut self, head: &Head, vocab: usize) -> Result<()> {
        let best = self.b.io("best", [self.batch.0, self.batch.1], DType::I32);
        self.b.at("loss");
        self.b.push(Argmax { best, logits: head.logits, vocab })?;
        Ok(())
    }

    /// Declares the logits of every token, (B,T,Vp).
    pub fn logits_io(&mut self, head: Slot) -> Slot {
        self.logits_of(self.batch, head)
    }

    /// Declares the logits of so many sequences and tokens.
    pub fn logits_of(&mut self, (batch, seq): (usize, usize), head: Slot) -> Slot {
        let dtype = self.dtype();
        self.b.io("logits", [batch, seq, head.shape.rows()], dtype)
    }

    pub fn logits(&mut self, inp: Slot, logits: Slot, head: Slot) -> Result<()> {
        self.linear_into(HEAD, logits, inp, Linear::plain(head))?;
        self.b.name("logits", logits);
        Ok(())
    }

    /// The backward of the head, unless it is done, and of the last norm. Gives the gradient of the residual stream: one buffer that
    /// every block adds to on the way down.
    pub fn head_bwd(&mut self, name: &str, saved: &Head, head: Slot) -> Result<Slot> {
        self.b.section(Section::Backward);
        let d_norm = match saved.d_norm {
            Some(done) => done,
            None => {
                let d_norm = self.hidden();
                self.linear_bwd(HEAD, Linear::plain(head), [d_norm, saved.logits, saved.norm.out], None)?;
                d_norm
            }
        };
        self.b.name_grad(name, d_norm);
        let d_res = self.hidden();
        self.norm_bwd(name, &saved.norm, [d_res, d_norm], Accum::Write)?;
        Ok(d_res)
    }
}

/// Tokens cut into at most so many parts of the same size, a multiple of [`MULTIPLE`]; the last may have fewer.
fn parts(tokens: usize, chunks: usize) -> Vec<Range<usize>> {
    let size = tokens.div_ceil(chunks.max(1)).next_multiple_of(MULTIPLE);
    (0..tokens).step_by(size).map(|start| start..tokens.min(start + size)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_are_all_tokens_in_order() {
        assert_eq!(parts(65536, 8).len(), 8);
        assert_eq!(parts(65536, 8)[7], 57344..65536);
        assert_eq!(parts(200, 3), [0..128, 128..200]);
        let few = parts(10, 4);
        assert_eq!((few.len(), few[0].clone()), (1, 0..10), "fewer than a cache line of targets");
        for (tokens, chunks) in [(1, 1), (64, 64), (1000, 7), (4096, 5), (129, 2)] {
            let parts = parts(tokens, chunks);
            assert!(parts.len() <= chunks, "{parts:?}");
            assert!(parts.windows(2).all(|pair| pair[0].end == pair[1].start), "{parts:?}");
            assert_eq!((parts[0].start, parts[parts.len() - 1].end), (0, tokens));
        }
    }
}
