//! The tokens of one step, kept until its results are known: a step that goes wrong is run again to find out where.

use crate::Result;
use crate::data::Batches;
use crate::session::Batch;

/// Tokens, targets and, of packed samples, positions of all micro-steps of a step, one after the other.
pub(super) struct StepTokens {
    x: Vec<i32>,
    y: Vec<i32>,
    positions: Vec<i32>,
    packed: bool,
    /// Positions of a micro-step.
    micro: usize,
    /// Positions of the step.
    used: usize,
    /// Tokens of the step: what is not padding.
    real: usize,
}

impl StepTokens {
    /// Room for steps of up to `most` micro-steps; until one is fetched it is a micro-step of zeros, with which weights that
    /// are not finite are found before the first step.
    pub fn new(micro: usize, most: usize, packed: bool) -> Self {
        let [x, y] = [(); 2].map(|()| vec![0; micro * most]);
        let positions = if packed { x.clone() } else { Vec::new() };
        Self { x, y, positions, packed, micro, used: micro, real: 0 }
    }

    /// Reads the next `count` batches.
    pub fn fetch(&mut self, from: &mut Batches, count: usize) -> Result<()> {
        (self.used, self.real) = (count * self.micro, 0);
        for i in 0..count {
            let range = i * self.micro..(i + 1) * self.micro;
            let positions = if self.packed { range.clone() } else { 0..0 };
            let (x, y) = (&mut self.x[range.clone()], &mut self.y[range]);
            self.real += from.next_batch([x, y, &mut self.positions[positions]])?.tokens;
        }
        Ok(())
    }

    /// The targets of all micro-steps.
    pub fn targets(&self) -> &[i32] {
        &self.y[..self.used]
    }

    /// How many tokens there are without padding.
    pub fn real(&self) -> u64 {
        self.real as u64
    }

    /// All micro-steps, one after the other.
    pub fn all(&self) -> Batch<'_> {
        self.part(0, self.used)
    }

    /// The micro-steps with their numbers.
    pub fn micro_steps(&self) -> impl Iterator<Item = (u32, Batch<'_>)> {
        let count = (self.used / self.micro.max(1)) as u32;
        (0..count).map(|i| (i, self.part(i as usize * self.micro, self.micro)))
    }

    fn part(&self, start: usize, length: usize) -> Batch<'_> {
        let range = start..start + length;
        let positions = self.packed.then(|| &self.positions[range.clone()]);
        Batch { x: &self.x[range.clone()], y: &self.y[range], positions }
    }
}
