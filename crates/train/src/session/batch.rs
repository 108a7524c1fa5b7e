//! What a session computes with.

use super::io;
use crate::{Error, Result};
use ironhorse_core::{Engine, EngineExt, Program};

/// What a step or an evaluation is computed of, (B,T) each.
#[derive(Clone, Copy, Debug)]
pub struct Batch<'a> {
    /// Tokens.
    pub x: &'a [i32],
    /// Targets.
    pub y: &'a [i32],
    /// Positions of the tokens inside their documents, where sequences hold several ([`SessionSpec::packed`](super::SessionSpec::packed)).
    pub positions: Option<&'a [i32]>,
}

impl<'a> Batch<'a> {
    /// Every sequence is one document.
    pub fn plain(x: &'a [i32], y: &'a [i32]) -> Self {
        Self { x, y, positions: None }
    }

    /// Copies it to the program's inputs.
    pub(crate) fn write(&self, engine: &mut dyn Engine, program: &Program) -> Result<()> {
        match (program.io("positions"), self.positions) {
            (Some(slot), Some(positions)) => engine.write_i32(slot, positions)?,
            (None, None) => {}
            (Some(_), None) => {
                return Err(Error::input("batch", "without positions", "those of packed sequences"));
            }
            (None, Some(_)) => {
                return Err(Error::input("batch", "of packed sequences", "one document for each sequence"));
            }
        }
        engine.write_i32(io(program, "x")?, self.x)?;
        Ok(engine.write_i32(io(program, "y")?, self.y)?)
    }
}
