//! Pairs of answers, of which one is preferred: what a batch of them has besides tokens, and what comes of it.

use super::{Batch, PendingUpdate, Session, forward_loss, io, not_evaluating, not_trained};
use crate::{Error, Result};
use ironhorse_core::{Engine, EngineExt, Pending, Program, Shape, Slot};

/// The pairs of a batch.
#[derive(Clone, Copy, Debug, Default)]
pub struct BatchPairs<'a> {
    /// Three rows of each pair: where its chosen text begins, where the rejected one, and the end. Rows count the tokens of the
    /// batch and do not fall; (B·T)/2 pairs at most.
    pub bounds: &'a [i32],
    /// (B,T), the losses that the reference gives the tokens; only those of pairs are read.
    pub reference: &'a [f32],
}

impl BatchPairs<'_> {
    /// How many pairs have a token.
    pub fn count(&self) -> usize {
        self.bounds.chunks_exact(3).filter(|pair| pair[0] < pair[2]).count()
    }

    /// Copies them to the program's inputs; pairs that are not there begin and end after the last.
    pub(super) fn write(&self, engine: &mut dyn Engine, program: &Program) -> Result<()> {
        let (slot, reference) = (io(program, "pairs")?, io(program, "reference")?);
        let room = slot.numel();
        if self.bounds.len() > room || !self.bounds.len().is_multiple_of(3) {
            let found = format!("{} rows", self.bounds.len());
            let expected = format!("three rows of each, {} pairs at most", room / 3);
            return Err(Error::input("the pairs of a batch", found, expected));
        }
        let mut bounds = self.bounds.to_vec();
        bounds.resize(room, self.bounds.last().copied().unwrap_or(0));
        engine.write_i32(slot, &bounds)?;
        Ok(engine.write_f32(reference, self.reference)?)
    }
}

/// Means over the pairs of a step or an evaluation.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Rewards {
    /// β·ln(π/π_ref) of the chosen texts.
    pub chosen: f32,
    /// The same of the rejected ones.
    pub rejected: f32,
    /// The share of pairs whose chosen text has the larger reward.
    pub accuracy: f32,
}

/// The slots of the three means.
fn means(program: &Program) -> Option<[Slot; 3]> {
    let all = program.io("reward_means")?;
    let one = |i: usize| Slot { offset: all.offset + 4 * i, shape: Shape::new([]), ..all };
    Some([0, 1, 2].map(one))
}

impl Session {
    /// The mean loss of the pairs of a batch, and their rewards.
    pub fn evaluate_pairs(&mut self, batch: Batch<'_>) -> Result<(f32, Rewards)> {
        let loss = self.evaluate_batch(batch)?;
        let program = self.programs.eval.as_ref().ok_or_else(not_evaluating)?;
        let slots = means(program).ok_or_else(no_pairs)?;
        let [chosen, rejected, accuracy] = slots.map(|slot| self.engine.read_scalar(slot));
        Ok((loss, Rewards { chosen: chosen?, rejected: rejected?, accuracy: accuracy? }))
    }

    /// The loss of every token of a batch; 0 where its target is ignored. What a reference is made of.
    pub fn token_losses(&mut self, batch: Batch<'_>, losses: &mut Vec<f32>) -> Result<()> {
        let program = self.programs.eval.as_ref().ok_or_else(not_evaluating)?;
        forward_loss(self.engine.as_mut(), program, batch)?;
        losses.resize(batch.x.len(), 0.0);
        Ok(self.engine.read_f32(io(program, "losses")?, losses)?)
    }

    /// Starts to copy the rewards of a step to the host, if it learns from pairs.
    pub(super) fn start_rewards(&mut self) -> Result<Option<[Pending; 3]>> {
        let program = self.programs.train.as_ref().ok_or_else(not_trained)?;
        let Some(slots) = means(program) else { return Ok(None) };
        let [chosen, rejected, accuracy] = slots.map(|slot| self.engine.start_read(slot));
        Ok(Some([chosen?, rejected?, accuracy?]))
    }

    /// Waits for the rewards of an update; `None` if it does not learn from pairs.
    pub fn finish_rewards(&mut self, pending: &PendingUpdate) -> Result<Option<Rewards>> {
        let Some(pending) = pending.rewards else { return Ok(None) };
        let [chosen, rejected, accuracy] = pending.map(|pending| self.engine.finish_read(pending));
        Ok(Some(Rewards { chosen: chosen?, rejected: rejected?, accuracy: accuracy? }))
    }
}

fn no_pairs() -> Error {
    Error::Unsupported("this session was not made for pairs".into())
}
