//! The tokens of one step, kept until its results are known: a step that goes wrong is run again to find out where.

use crate::Result;
use crate::data::Batches;
use crate::run::{TrainSettings, scalars_of};
use crate::session::{Batch, BatchPairs};
use ironhorse_core::Scalars;

/// Tokens, targets and, of packed samples, positions of all micro-steps of a step, one after the other.
pub(super) struct StepTokens {
    x: Vec<i32>,
    y: Vec<i32>,
    positions: Vec<i32>,
    packed: bool,
    pairs: Option<StepPairs>,
    /// Positions of a micro-step.
    micro: usize,
    /// Positions of the step.
    used: usize,
    /// Tokens of the step: what is not padding.
    real: usize,
}

/// The pairs of all micro-steps, where preferences are learned.
struct StepPairs {
    /// Three rows of each pair, with room for as many as a micro-step can have; those that it has not are empty.
    bounds: Vec<i32>,
    reference: Vec<f32>,
}

impl StepTokens {
    /// Room for steps of up to `most` micro-steps of these batches; until one is fetched it is a micro-step of zeros, with
    /// which weights that are not finite are found before the first step.
    pub fn new(micro: usize, most: usize, of: &Batches) -> Self {
        let [x, y] = [(); 2].map(|()| vec![0; micro * most]);
        let positions = if of.is_packed() { x.clone() } else { Vec::new() };
        let pairs = of.is_pairs().then(|| StepPairs {
            bounds: vec![0; rows_of_pairs(micro) * most],
            reference: vec![0.0; micro * most],
        });
        Self { x, y, positions, packed: of.is_packed(), pairs, micro, used: micro, real: 0 }
    }

    /// Reads the next `count` batches.
    pub fn fetch(&mut self, from: &mut Batches, count: usize) -> Result<()> {
        (self.used, self.real) = (count * self.micro, 0);
        for i in 0..count {
            let range = i * self.micro..(i + 1) * self.micro;
            let positions = if self.packed { range.clone() } else { 0..0 };
            let (x, y) = (&mut self.x[range.clone()], &mut self.y[range.clone()]);
            self.real += from.next_batch([x, y, &mut self.positions[positions]])?.tokens;
            if let (Some(pairs), Some((bounds, reference))) = (&mut self.pairs, from.pairs()) {
                let room = rows_of_pairs(self.micro);
                let (here, rest) = pairs.bounds[i * room..(i + 1) * room].split_at_mut(bounds.len());
                here.copy_from_slice(bounds);
                rest.fill(bounds.last().copied().unwrap_or(0));
                pairs.reference[range].copy_from_slice(reference);
            }
        }
        Ok(())
    }

    /// The targets of all micro-steps.
    pub fn targets(&self) -> &[i32] {
        &self.y[..self.used]
    }

    /// The numbers of this step.
    pub fn scalars(&self, settings: &TrainSettings, step: u64) -> Scalars {
        let scalars = scalars_of(settings, step, self.targets());
        self.all().pairs.map_or(scalars, |pairs| scalars.counting_pairs(pairs.count(), self.used))
    }

    /// How many tokens there are without padding.
    pub fn real(&self) -> u64 {
        self.real as u64
    }

    /// All micro-steps, one after the other; rows of pairs are those of their micro-step.
    pub fn all(&self) -> Batch<'_> {
        self.part(0, self.used / self.micro.max(1))
    }

    /// How many micro-steps there are, of all ranks together.
    pub fn count(&self) -> usize {
        self.used / self.micro.max(1)
    }

    /// A micro-step by its number.
    pub fn micro_step(&self, number: usize) -> Batch<'_> {
        self.part(number, 1)
    }

    fn part(&self, first: usize, count: usize) -> Batch<'_> {
        let range = first * self.micro..(first + count) * self.micro;
        let positions = self.packed.then(|| &self.positions[range.clone()]);
        let room = rows_of_pairs(self.micro);
        let pairs = self.pairs.as_ref().map(|pairs| BatchPairs {
            bounds: &pairs.bounds[first * room..(first + count) * room],
            reference: &pairs.reference[range.clone()],
        });
        Batch { x: &self.x[range.clone()], y: &self.y[range], positions, pairs }
    }
}

/// Rows of all pairs that so many positions can have.
fn rows_of_pairs(positions: usize) -> usize {
    3 * (positions / 2).max(1)
}
