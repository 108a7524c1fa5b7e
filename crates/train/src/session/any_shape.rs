//! Batches of any shape and texts of any length: programs that are planned when they are first needed, over the weights that are
//! there. A caller plans, sees what the engine must hold, reserves it, and then computes.

use super::{Batch, Serving, Session, forward_loss, io, not_evaluating, not_generating};
use crate::{Error, Result};
use ironhorse_core::{EngineExt, Layout, Program, Scalars, Section, Slot};

/// What is computed of a batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wanted {
    /// The logits after every token.
    Logits,
    /// The loss of every target.
    Losses,
}

/// The programs that were planned so far.
#[derive(Default)]
pub(super) struct AnyShape {
    /// Each with what it computes and its (batch, seq).
    programs: Vec<(Wanted, (usize, usize), Program)>,
    /// Positions in the cache of the session's decoding program, where it was planned here.
    positions: usize,
}

impl AnyShape {
    fn find(&self, wanted: Wanted, shape: (usize, usize)) -> Option<&Program> {
        self.programs.iter().find(|(what, of, _)| (*what, *of) == (wanted, shape)).map(|(_, _, found)| found)
    }
}

/// The shortest sequence length of a program.
const SHORTEST: usize = 32;

/// A sequence length of programs that holds this many tokens: at most a quarter longer, beyond the shortest ones, so that few
/// programs serve all lengths.
pub fn padded_seq(tokens: usize, longest: usize) -> usize {
    let step = SHORTEST.max(tokens.checked_next_power_of_two().unwrap_or(tokens) / 8);
    tokens.checked_next_multiple_of(step).unwrap_or(tokens).min(longest).max(1)
}

impl Session {
    /// Plans a program for batches of this shape, if it is not there. Gives what the engine must hold for it.
    pub fn plan(&mut self, wanted: Wanted, shape: (usize, usize)) -> Result<Layout> {
        if let Some(program) = self.any_shape.find(wanted, shape) {
            return Ok(*program.layout());
        }
        let precision = self.any_program()?.precision();
        let program = match wanted {
            Wanted::Logits => self.model.config.logits(shape, precision),
            Wanted::Losses => self.model.config.evaluation(shape, precision),
        }?;
        let layout = *program.layout();
        self.any_shape.programs.push((wanted, shape, program));
        Ok(layout)
    }

    /// Plans the decoding of one sequence of at most so many tokens, if that is not there. Gives what the engine must hold.
    pub fn plan_decoding(&mut self, positions: usize) -> Result<Layout> {
        if self.programs.decode.is_none() || self.any_shape.positions < positions {
            let precision = self.any_program()?.precision();
            self.programs.decode = Some(self.model.config.decoding_within(1, positions, precision)?);
            self.programs.serving = Serving::one(Some(positions)).programs(&self.model, precision)?;
            self.any_shape.positions = positions;
        }
        let decode = self.programs.decode.as_ref().ok_or_else(not_generating)?;
        let serving = self.programs.serving.iter().map(|serving| serving.program.layout());
        Ok(serving.fold(*decode.layout(), |all, layout| all.union(layout)))
    }

    /// Makes room for what was planned; weights stay.
    pub fn reserve(&mut self, layout: &Layout) -> Result<()> {
        Ok(self.engine.reserve(layout)?)
    }

    /// The logits (batch, kept, V) after the first `kept` tokens of each sequence of a planned shape.
    pub fn logits_of(
        &mut self,
        shape: (usize, usize),
        x: &[i32],
        (kept, out): (usize, &mut [f32]),
    ) -> Result<()> {
        let program = self.any_shape.find(Wanted::Logits, shape).ok_or_else(not_evaluating)?;
        self.engine.write_i32(io(program, "x")?, x)?;
        self.engine.run_section(program, Section::Forward, &Scalars::default())?;
        let (slot, vocab) = (io(program, "logits")?, self.model.config.vocab_size());
        let (seq, cols) = (shape.1, slot.shape.cols());
        if kept == 0 || kept > seq || out.len() != shape.0 * kept * vocab {
            let found = format!("{} numbers for {kept} tokens of {shape:?}", out.len());
            return Err(Error::input("the logits asked for", found, "those of a part of the batch"));
        }
        let mut padded = vec![0.0; if cols == vocab { 0 } else { kept * cols }];
        for (at, out) in out.chunks_exact_mut(kept * vocab).enumerate() {
            let offset = slot.offset + at * seq * cols * slot.dtype.size();
            let part = Slot { offset, shape: [kept, cols].into(), ..slot };
            if cols == vocab {
                self.engine.read_f32(part, out)?;
                continue;
            }
            self.engine.read_f32(part, &mut padded)?;
            for (row, padded) in out.chunks_exact_mut(vocab).zip(padded.chunks_exact(cols)) {
                row.copy_from_slice(&padded[..vocab]);
            }
        }
        Ok(())
    }

    /// The loss of every target of a batch of a planned shape.
    pub fn losses_of(
        &mut self,
        shape: (usize, usize),
        [x, y]: [&[i32]; 2],
        losses: &mut Vec<f32>,
    ) -> Result<()> {
        let program = self.any_shape.find(Wanted::Losses, shape).ok_or_else(not_evaluating)?;
        forward_loss(self.engine.as_mut(), program, Batch::plain(x, y))?;
        losses.resize(x.len(), 0.0);
        Ok(self.engine.read_f32(io(program, "losses")?, losses)?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lengths_are_rounded_up_a_little() {
        let rounded = |tokens| padded_seq(tokens, 40_960);
        assert_eq!([1, 32, 33, 200, 257].map(rounded), [32, 32, 64, 224, 320]);
        assert_eq!([1000, 1024, 1025, 40_000, 40_960].map(rounded), [1024, 1024, 1280, 40_960, 40_960]);
        assert_eq!(padded_seq(5, 11), 11);
        for tokens in 1..5000 {
            let seq = rounded(tokens);
            assert!(seq >= tokens && (seq <= 256 || (seq - tokens) * 4 < tokens), "{tokens}: {seq}");
        }
    }
}
