//! The pairs of batches, and the losses that a reference model gives their tokens.

use super::PackedLoader;
use crate::Result;
use crate::data::Sample;
use ironhorse_core::op::IGNORED;
use std::ops::Range;

/// What pairs have besides samples.
pub(super) struct References {
    /// For every sample, the losses of its targets that count, in their order.
    losses: Vec<Box<[f32]>>,
    /// Three rows of each pair of the last batch.
    bounds: Vec<i32>,
    /// The losses of the last batch (B·T).
    batch: Vec<f32>,
    /// Rows of the batch that were written.
    rows: usize,
}

impl References {
    pub fn new(samples: &[Sample], positions: usize) -> Self {
        let losses = samples.iter().map(|sample| vec![0.0; sample.targets()].into()).collect();
        Self { losses, bounds: Vec::new(), batch: vec![0.0; positions], rows: 0 }
    }

    /// Forgets the rows of the last batch.
    pub fn clear(&mut self) {
        self.bounds.clear();
        self.batch.fill(0.0);
        self.rows = 0;
    }

    /// A sample was written to these positions of the row, with these targets; of a pair the chosen one comes first.
    pub fn write(&mut self, number: usize, at: Range<usize>, targets: &[i32]) {
        let at = self.rows + at.start..self.rows + at.end;
        if number.is_multiple_of(2) {
            self.bounds.push(at.start as i32);
        }
        self.bounds.push(at.end as i32);
        let mut losses = self.losses[number].iter();
        for (to, _) in self.batch[at].iter_mut().zip(targets).filter(|(_, target)| **target != IGNORED) {
            *to = losses.next().copied().unwrap_or(0.0);
        }
    }

    /// A row of so many positions is complete.
    pub fn end_row(&mut self, positions: usize) {
        self.rows += positions;
    }

    /// The pairs of the last batch, and the losses of its tokens.
    pub fn batch(&self) -> (&[i32], &[f32]) {
        (&self.bounds, &self.batch)
    }
}

impl PackedLoader {
    /// The pairs of the last batch: three rows of each, as [`BatchPairs`](crate::session::BatchPairs) has them, and the
    /// losses that the reference gives its tokens (B·T). `None` of samples that are no pairs.
    pub fn pairs(&self) -> Option<(&[i32], &[f32])> {
        self.references.as_ref().map(References::batch)
    }

    /// Measures what the reference gives the tokens of all pairs: `losses` gets tokens, targets and positions of a batch and
    /// gives the loss of each token. The place in the data stays; batches that were given out before are forgotten.
    pub fn measure_reference(
        &mut self,
        mut losses: impl FnMut([&[i32]; 3]) -> Result<Vec<f32>>,
    ) -> Result<()> {
        let Some(references) = &mut self.references else { return Ok(()) };
        let (seq, rows) = (self.config.seq, &self.epoch.rows);
        let [mut x, mut y, mut positions] = [(); 3].map(|()| vec![0; self.config.batch * seq]);
        for first in (0..rows.len()).step_by(self.config.batch) {
            let here: Vec<&[u32]> = (first..first + self.config.batch)
                .map(|row| if row < rows.len() { rows.row(row) } else { &[] })
                .collect();
            let parts = x.chunks_exact_mut(seq).zip(y.chunks_exact_mut(seq));
            for (units, ((x, y), positions)) in here.iter().zip(parts.zip(positions.chunks_exact_mut(seq))) {
                Self::write_units(&self.samples, None, units, [x, y, positions]);
            }
            let found = losses([&x, &y, &positions])?;
            for ((units, y), found) in here.iter().zip(y.chunks_exact(seq)).zip(found.chunks_exact(seq)) {
                let mut at = 0;
                for number in units.iter().flat_map(|&unit| self.samples.range(unit)) {
                    let tokens = at..at + self.samples.all[number].ids.len();
                    let counted = y[tokens.clone()].iter().zip(&found[tokens.clone()]);
                    let counted = counted.filter(|(target, _)| **target != IGNORED);
                    references.losses[number] = counted.map(|(_, &loss)| loss).collect();
                    at = tokens.end;
                }
            }
        }
        references.clear();
        Ok(())
    }
}
