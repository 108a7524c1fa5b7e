//! Continuing several sequences at once: every step takes new tokens of any of them, at any positions.
//!
//! A program has a fixed number of tokens, so there is one for each power of two up to the most tokens of a step; what is left over is
//! not used. Where there is one sequence only, a single token goes through the decoding program, which is the fastest for it.

use super::{Session, io, not_generating};
use crate::model::{Adapted, ServingStep};
use crate::{Error, Result};
use ironhorse_core::{EngineExt, Precision, Program, Scalars, Section, Slot, TokenChoice};

/// Tokens of a step unless more are asked for, and of a prompt that are read at a time.
pub const PREFILL: usize = 64;

/// What a session that serves has room for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Serving {
    /// Sequences at a time.
    pub sequences: usize,
    /// Positions of each [default: the model's context].
    pub context: Option<usize>,
    /// The most new tokens of a step; at least one for each sequence.
    pub tokens: usize,
    /// Whether the logits of every token of a step can be asked for.
    pub all_logits: bool,
}

/// A new token of a sequence.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CacheToken {
    /// The sequence.
    pub row: usize,
    /// Its position there; all before it were given, in earlier steps or in this one.
    pub position: usize,
    /// The token.
    pub token: u32,
}

pub(super) struct ServingProgram {
    step: ServingStep,
    pub(super) program: Program,
}

impl Serving {
    /// One sequence.
    pub(super) fn one(context: Option<usize>) -> Self {
        Self { sequences: 1, context, tokens: PREFILL, all_logits: false }
    }

    /// The most tokens of a step.
    pub fn most(&self) -> usize {
        self.tokens.max(self.sequences).max(1)
    }

    /// Its programs, in the order of their tokens.
    pub(super) fn programs(&self, model: &Adapted, precision: Precision) -> Result<Vec<ServingProgram>> {
        if self.sequences == 0 {
            return Err(Error::input("sequences to serve", 0, "at least 1"));
        }
        let own = model.config.max_seq_len();
        let Self { sequences, context, .. } = *self;
        let context = Some(context.map_or(own, |context| context.clamp(1, own)));
        let most = self.most();
        // A single sequence has its own program for one token, and few prompts: these two are enough.
        let smallest = if sequences == 1 && !self.all_logits { 3 } else { 0 };
        let step = if smallest > 0 { 3 } else { 1 };
        let powers = (smallest..usize::BITS).step_by(step).map(|power| 1 << power);
        let mut widths: Vec<usize> = powers.take_while(|&width| width < most).collect();
        widths.push(most);
        // Of a prompt the last token has logits at most: one pick is all that a step needs while one prompt is read and nothing written.
        let steps = widths.into_iter().flat_map(|tokens| {
            let one = (tokens > sequences && sequences > 1).then_some(Some(1));
            let picks = one.into_iter().chain([(tokens > sequences).then_some(sequences)]);
            picks.map(move |picks| ServingStep { tokens, sequences, context, picks })
        });
        // where every program has fewer sequences than tokens only some have logits
        let all = ServingStep { tokens: most, sequences, context, picks: None };
        let all = (self.all_logits && most > sequences).then_some(all);
        let made = steps
            .chain(all)
            .map(|step| Ok(ServingProgram { step, program: model.serving(step, precision)? }));
        made.collect()
    }
}

/// Which logits a step gave, and where.
#[derive(Clone, Copy, Debug)]
pub struct Fed {
    logits: Slot,
    /// How many rows count.
    rows: usize,
    /// Whether they are those of the picks only.
    picked: bool,
}

impl Session {
    /// The sequences, their positions and the most tokens of a step that this session has room for.
    pub fn serves(&self) -> Result<Serving> {
        let (last, first) = (self.programs.serving.last(), self.programs.serving.first());
        let (last, _) = last.zip(first).ok_or_else(not_generating)?;
        let ServingStep { tokens, sequences, context, picks } = last.step;
        let own = self.model.config.max_seq_len();
        let all_logits = picks.is_none();
        Ok(Serving { sequences, context: Some(context.unwrap_or(own)), tokens, all_logits })
    }

    /// Feeds new tokens, and does not wait. They are in the order of rows, then positions. The logits after those numbered in `picks`
    /// can be read afterwards.
    pub fn feed_rows(&mut self, tokens: &[CacheToken], picks: &[usize]) -> Result<Fed> {
        if let ([one], Some(program)) = (tokens, &self.programs.decode)
            && self.programs.serving.last().is_some_and(|last| last.step.sequences == 1)
        {
            let (logits, one) = (io(program, "logits")?, *one);
            self.feed(&[one.token as i32], one.position)?;
            return Ok(Fed { logits, rows: 1, picked: false });
        }
        let fits = |serving: &&ServingProgram| {
            let step = serving.step;
            tokens.len() <= step.tokens && step.picks.is_none_or(|count| picks.len() <= count)
        };
        let found = self.programs.serving.iter().find(fits);
        let Some(ServingProgram { step, program }) = found else {
            let found = format!("{} tokens, {} of them with logits", tokens.len(), picks.len());
            return Err(Error::input("a step of serving", found, "as many as the session was made for"));
        };
        let column = |of: &dyn Fn(&CacheToken) -> i32, none: i32| {
            let mut values: Vec<i32> = tokens.iter().map(of).collect();
            values.resize(step.tokens, none);
            values
        };
        let engine = self.engine.as_mut();
        engine.write_i32(io(program, "x")?, &column(&|token| token.token as i32, 0))?;
        engine.write_i32(io(program, "rows")?, &column(&|token| token.row as i32, 0))?;
        engine.write_i32(io(program, "positions")?, &column(&|token| token.position as i32, -1))?;
        if let Some(count) = step.picks {
            let mut picks: Vec<i32> = picks.iter().map(|&pick| pick as i32).collect();
            picks.resize(count, 0);
            engine.write_i32(io(program, "picks")?, &picks)?;
        }
        engine.run_section(program, Section::Forward, &Scalars::default())?;
        let picked = step.picks.is_some();
        let rows = if picked { picks.len() } else { tokens.len() };
        Ok(Fed { logits: io(program, "logits")?, rows, picked })
    }

    /// The logits (Vp) of a row ([`Fed::row`]) of what was fed last.
    pub fn row_logits(&mut self, fed: Fed, at: usize, logits: &mut Vec<f32>) -> Result<()> {
        let row = fed.slot(at)?;
        logits.resize(row.numel(), 0.0);
        Ok(self.engine.read_f32(row, logits)?)
    }

    /// Lets the engine choose a token from such a row; `None` if it leaves that to the host.
    pub fn pick_row(
        &mut self,
        fed: Fed,
        at: usize,
        vocab: usize,
        choice: &TokenChoice,
    ) -> Result<Option<u32>> {
        Ok(self.engine.pick_token(fed.slot(at)?, vocab, choice)?)
    }

    /// Runs every program once on tokens that are not used, so that no request waits for what engines do the first time.
    pub fn warm_up(&mut self) -> Result<()> {
        for at in 0..self.programs.serving.len() {
            let ServingProgram { step, program } = &self.programs.serving[at];
            let engine = self.engine.as_mut();
            for (name, value) in [("x", 0), ("rows", 0), ("positions", -1)] {
                engine.write_i32(io(program, name)?, &vec![value; step.tokens])?;
            }
            if let Some(count) = step.picks {
                engine.write_i32(io(program, "picks")?, &vec![0; count])?;
            }
            for _ in 0..2 {
                engine.run_section(program, Section::Forward, &Scalars::default())?; // the second run is recorded
            }
        }
        Ok(self.engine.synchronize()?)
    }
}

impl Fed {
    /// The row of the logits after a token, by its number in the step and the number of its pick.
    pub fn row(&self, token: usize, pick: usize) -> usize {
        if self.picked { pick } else { token }
    }

    fn slot(&self, at: usize) -> Result<Slot> {
        let (cols, logits) = (self.logits.shape.cols(), self.logits);
        if at >= self.rows {
            return Err(Error::input("a row of logits", at, format!("less than {}", self.rows)));
        }
        let offset = logits.offset + at * cols * logits.dtype.size();
        Ok(Slot { offset, shape: [1, cols].into(), ..logits })
    }
}
