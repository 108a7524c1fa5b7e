//! What a session computes with.

use super::io;
use super::pairs::BatchPairs;
use crate::{Error, Result};
use ironhorse_core::{Engine, EngineExt, Program, Scalars};

/// What a step or an evaluation is computed of, (B,T) each.
#[derive(Clone, Copy, Debug, Default)]
pub struct Batch<'a> {
    /// Tokens.
    pub x: &'a [i32],
    /// Targets.
    pub y: &'a [i32],
    /// Positions of the tokens inside their documents, where sequences hold several ([`SessionSpec::packed`](super::SessionSpec::packed)).
    pub positions: Option<&'a [i32]>,
    /// The pairs of documents, where one of two is preferred ([`SessionSpec::preference`](super::SessionSpec::preference)).
    pub pairs: Option<BatchPairs<'a>>,
}

impl<'a> Batch<'a> {
    /// Every sequence is one document.
    pub fn plain(x: &'a [i32], y: &'a [i32]) -> Self {
        Self { x, y, ..Self::default() }
    }

    /// The scalars of a step of this batch alone: its loss is the mean over its pairs or, without any, over the targets that
    /// count.
    pub fn counting(&self, scalars: Scalars) -> Scalars {
        match &self.pairs {
            Some(pairs) => scalars.counting_pairs(pairs.count(), self.y.len()),
            None => scalars.counting(self.y),
        }
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
        match (program.io("pairs"), &self.pairs) {
            (Some(_), Some(pairs)) => pairs.write(engine, program)?,
            (None, None) => {}
            (Some(_), None) => {
                return Err(Error::input(
                    "batch",
                    "without pairs",
                    "those that a preference is learned from",
                ));
            }
            (None, Some(_)) => return Err(Error::input("batch", "of pairs", "texts to learn one by one")),
        }
        engine.write_i32(io(program, "x")?, self.x)?;
        Ok(engine.write_i32(io(program, "y")?, self.y)?)
    }
}

/// A batch that owns what it holds.
#[derive(Clone, Debug, Default)]
pub struct OwnedBatch {
    /// Tokens.
    pub x: Vec<i32>,
    /// Targets.
    pub y: Vec<i32>,
    /// Positions inside documents.
    pub positions: Option<Vec<i32>>,
    /// Rows of the pairs, and the losses that the reference gives the tokens.
    pub pairs: Option<(Vec<i32>, Vec<f32>)>,
}

impl OwnedBatch {
    /// The same, borrowed.
    pub fn get(&self) -> Batch<'_> {
        let pairs = self.pairs.as_ref().map(|(bounds, reference)| BatchPairs { bounds, reference });
        Batch { x: &self.x, y: &self.y, positions: self.positions.as_deref(), pairs }
    }
}
