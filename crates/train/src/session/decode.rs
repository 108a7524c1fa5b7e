//! Continuing texts token by token.

use super::{Session, io};
use crate::{Error, Result};
use ironhorse_core::{EngineExt, Scalars, Section, Timed, TokenChoice};

impl Session {
    /// Feeds one token per sequence at `position`; `logits` gets (B, Vp).
    pub fn decode(&mut self, tokens: &[i32], position: usize, logits: &mut Vec<f32>) -> Result<()> {
        self.feed(tokens, position)?;
        self.logits(logits)
    }

    /// Feeds one token per sequence at `position`, and does not wait for the logits.
    pub fn feed(&mut self, tokens: &[i32], position: usize) -> Result<()> {
        let program = self.programs.decode.as_ref().ok_or_else(not_generating)?;
        self.engine.write_i32(io(program, "x")?, tokens)?;
        let scalars = Scalars { position: position as u32, ..Scalars::default() };
        Ok(self.engine.run_section(program, Section::Forward, &scalars)?)
    }

    /// Feeds the last tokens once more, at `position`, and times each kernel.
    pub(crate) fn profile_feed(&mut self, position: usize) -> Result<Vec<Timed>> {
        let program = self.programs.decode.as_ref().ok_or_else(not_generating)?;
        let scalars = Scalars { position: position as u32, ..Scalars::default() };
        let mut record = Vec::new();
        self.engine.profile(program, program.range(Section::Forward), &[], &scalars, &mut record)?;
        Ok(record)
    }

    /// The logits (B, Vp) after the tokens fed last.
    pub fn logits(&mut self, logits: &mut Vec<f32>) -> Result<()> {
        let out = io(self.programs.decode.as_ref().ok_or_else(not_generating)?, "logits")?;
        logits.resize(out.numel(), 0.0);
        Ok(self.engine.read_f32(out, logits)?)
    }

    /// Lets the engine choose the next token of a single sequence among the first `vocab`; `None` if it leaves that to
    /// the host.
    pub fn pick(&mut self, vocab: usize, choice: &TokenChoice) -> Result<Option<u32>> {
        let out = io(self.programs.decode.as_ref().ok_or_else(not_generating)?, "logits")?;
        Ok(self.engine.pick_token(out, vocab, choice)?)
    }
}

pub(super) fn not_generating() -> Error {
    Error::Unsupported("this session was not made for generation".into())
}
