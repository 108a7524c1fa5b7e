//! Batches of a run, whether they are windows of token streams or packed samples.

use super::{BatchTokens, Loader, LoaderState, PackedLoader};
use crate::Result;
use ironhorse_core::op::IGNORED;
use std::ops::Range;

/// Where batches come from.
pub enum Batches {
    /// Windows of token streams.
    Tokens(Loader),
    /// Whole samples, several in a row.
    Packed(PackedLoader),
}

impl From<Loader> for Batches {
    fn from(loader: Loader) -> Self {
        Self::Tokens(loader)
    }
}

impl From<PackedLoader> for Batches {
    fn from(loader: PackedLoader) -> Self {
        Self::Packed(loader)
    }
}

impl Batches {
    /// Whether rows hold several documents, so that batches have positions.
    pub fn is_packed(&self) -> bool {
        matches!(self, Self::Packed(_))
    }

    /// Whether rows hold pairs, of which one text is preferred.
    pub fn is_pairs(&self) -> bool {
        self.pairs().is_some()
    }

    /// [`PackedLoader::pairs`] of the last batch.
    pub fn pairs(&self) -> Option<(&[i32], &[f32])> {
        match self {
            Self::Tokens(_) => None,
            Self::Packed(loader) => loader.pairs(),
        }
    }

    /// [`PackedLoader::measure_reference`], if there are pairs.
    pub fn measure_reference(&mut self, losses: impl FnMut([&[i32]; 3]) -> Result<Vec<f32>>) -> Result<()> {
        match self {
            Self::Tokens(_) => Ok(()),
            Self::Packed(loader) => loader.measure_reference(losses),
        }
    }

    /// Fills tokens and targets, B·T each, and for packed samples as many positions; those of windows are left as they are.
    pub fn next_batch(&mut self, [x, y, positions]: [&mut [i32]; 3]) -> Result<BatchTokens> {
        match self {
            Self::Tokens(loader) => {
                loader.next_batch(x, y)?;
                let counted = y.iter().filter(|&&target| target != IGNORED).count();
                Ok(BatchTokens { tokens: x.len(), counted })
            }
            Self::Packed(loader) => loader.next_batch([x, y, positions]),
        }
    }

    /// Batches of an epoch, at least 1.
    pub fn len_batches(&self) -> u64 {
        match self {
            Self::Tokens(loader) => loader.len_batches(),
            Self::Packed(loader) => loader.len_batches(),
        }
    }

    /// Goes back to the start of epoch 0, as every validation does.
    pub fn rewind(&mut self) {
        match self {
            Self::Tokens(loader) => loader.rewind(),
            Self::Packed(loader) => loader.rewind(),
        }
    }

    /// B: rows per batch.
    pub fn batch(&self) -> usize {
        match self {
            Self::Tokens(loader) => loader.batch(),
            Self::Packed(loader) => loader.batch(),
        }
    }

    /// T: positions per row.
    pub fn seq(&self) -> usize {
        match self {
            Self::Tokens(loader) => loader.seq(),
            Self::Packed(loader) => loader.seq(),
        }
    }

    /// The position; it counts rows.
    pub fn state(&self) -> LoaderState {
        match self {
            Self::Tokens(loader) => loader.state(),
            Self::Packed(loader) => loader.state(),
        }
    }

    /// Continues at the position of batches of the same data, T and seed; the batch size may differ.
    pub fn restore(&mut self, state: LoaderState) -> Result<()> {
        match self {
            Self::Tokens(loader) => loader.restore(state),
            Self::Packed(loader) => loader.restore(state),
        }
    }

    /// Where these rows, numbered from 0 over the whole run, come from.
    pub fn describe(&self, rows: Range<u64>) -> Result<Vec<String>> {
        match self {
            Self::Tokens(loader) => loader.describe(rows),
            Self::Packed(loader) => Ok(loader.describe(rows)),
        }
    }
}
