//! Batches of whole samples, several in a row, in a seeded order that a checkpoint can continue.
//!
//! An epoch has every sample once. Its samples are put in a new order, packed by best fit, and the rows are visited in the order
//! of a keyed permutation. Positions restart in each sample, so attention and position embedding treat it as if it were alone.
//!
//! Pairs of samples, of which one is preferred, are packed as one: both are in the same row, the chosen one first.

mod reference;

use self::reference::References;
use super::loader::hash;
use super::pack::Rows;
use super::permute::Permutation;
use super::shift::shift;
use super::{LoaderConfig, LoaderState, Sample};
use crate::rng::Rng;
use crate::{Error, Result};
use ironhorse_core::op::IGNORED;
use std::ops::Range;

/// The token of positions that hold none: any token will do, because nothing attends to it and its target is ignored.
const PADDING: i32 = 0;

/// What packing makes of all samples: the same in every epoch.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PackStats {
    /// Samples, or pairs of them.
    pub samples: u64,
    /// Rows of T tokens.
    pub rows: u64,
    /// Tokens of all samples.
    pub tokens: u64,
    /// Tokens that are learned: targets that are not [`IGNORED`].
    pub counted: u64,
    /// Positions of all rows: rows · T.
    pub positions: u64,
}

impl PackStats {
    /// The share of positions that hold no token.
    pub fn padding(&self) -> f64 {
        1.0 - self.tokens as f64 / (self.positions as f64).max(1.0)
    }
}

/// What a batch holds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct BatchTokens {
    /// Tokens of samples; the other positions are padding.
    pub tokens: usize,
    /// Targets that are not [`IGNORED`].
    pub counted: usize,
}

/// Produces batches of packed samples.
pub struct PackedLoader {
    config: LoaderConfig,
    samples: Samples,
    /// What the reference says about pairs.
    references: Option<References>,
    /// Hash of T, the seed and the samples.
    fingerprint: u64,
    stats: PackStats,
    epoch: Epoch,
    /// Rows of this epoch already given out.
    position: usize,
}

/// Samples by units: what is packed as one.
struct Samples {
    all: Vec<Sample>,
    /// Samples of a unit: 1, or 2 of a pair.
    of_unit: usize,
}

impl Samples {
    fn units(&self) -> usize {
        self.all.len() / self.of_unit
    }

    /// The indices of the samples of a unit.
    fn range(&self, unit: u32) -> Range<usize> {
        unit as usize * self.of_unit..(unit as usize + 1) * self.of_unit
    }

    fn length(&self, unit: u32) -> usize {
        self.all[self.range(unit)].iter().map(|sample| sample.ids.len()).sum()
    }
}

/// One pass through the samples.
struct Epoch {
    number: u64,
    rows: Rows,
    order: Permutation,
}

impl Epoch {
    fn new(number: u64, config: &LoaderConfig, samples: &Samples) -> Self {
        let mut rng = Rng::new(config.seed).fork(number);
        let units = samples.units();
        let order = Permutation::new(units as u64, &mut rng);
        // The number of samples fits 32 bits: `PackedLoader::new` checks it.
        let at = |i: u32| if config.shuffle { order.at(u64::from(i)) as u32 } else { i };
        let rows = Rows::best_fit((0..units as u32).map(at), |unit| samples.length(unit), config.seq);
        let order = Permutation::new(rows.len() as u64, &mut rng);
        Self { number, rows, order }
    }

    /// The units of the row at this place of the order.
    fn row(&self, position: usize, shuffle: bool) -> &[u32] {
        self.rows.row(if shuffle { self.order.at(position as u64) as usize } else { position })
    }
}

impl PackedLoader {
    /// A loader at the start of epoch 0.
    pub fn new(samples: Vec<Sample>, config: LoaderConfig) -> Result<Self> {
        Self::of_units(Samples { all: samples, of_unit: 1 }, config)
    }

    /// A loader of pairs, the chosen sample before the rejected one, which are in a row together. Their losses by the
    /// reference are 0 until they are [measured](Self::measure_reference).
    pub fn of_pairs(pairs: Vec<[Sample; 2]>, config: LoaderConfig) -> Result<Self> {
        let all = pairs.into_iter().flatten().collect();
        let mut loader = Self::of_units(Samples { all, of_unit: 2 }, config)?;
        loader.references = Some(References::new(&loader.samples.all, config.batch * config.seq));
        Ok(loader)
    }

    fn of_units(samples: Samples, config: LoaderConfig) -> Result<Self> {
        for (name, value) in [("batch", config.batch), ("seq", config.seq), ("vocab", config.vocab)] {
            if value == 0 || value > i32::MAX as usize {
                return Err(Error::input(format!("data: {name}"), value, format!("1 to {}", i32::MAX)));
            }
        }
        if samples.all.is_empty() || samples.all.len() > u32::MAX as usize {
            let expected = format!("1 to {}", u32::MAX);
            return Err(Error::input("data: the number of samples", samples.all.len(), expected));
        }
        samples.all.iter().enumerate().try_for_each(|(number, sample)| check(number, sample, &config))?;
        let too_long = |unit: &u32| samples.length(*unit) > config.seq;
        if let Some(unit) = (0..samples.units() as u32).find(too_long) {
            let what = format!("data: the length of both samples of pair {unit}");
            let expected =
                format!("at most {}, the length of a row; cut them off, or choose a larger seq", config.seq);
            return Err(Error::input(what, samples.length(unit), expected));
        }
        let epoch = Epoch::new(0, &config, &samples);
        let (rows, lengths) = (epoch.rows.len() as u64, samples.all.iter().map(|sample| sample.ids.len()));
        let stats = PackStats {
            samples: samples.units() as u64,
            rows,
            tokens: lengths.sum::<usize>() as u64,
            counted: samples.all.iter().map(Sample::targets).sum::<usize>() as u64,
            positions: rows * config.seq as u64,
        };
        let fingerprint = fingerprint(&samples, &config);
        Ok(Self { config, samples, references: None, fingerprint, stats, epoch, position: 0 })
    }

    /// What packing makes of all samples.
    pub fn stats(&self) -> PackStats {
        self.stats
    }

    /// Fills tokens, targets and positions, B·T each, row by row. A batch that the epoch cannot fill continues with the next
    /// epoch; without `shuffle`, for validation, it ends with empty rows, so that an epoch has every token once.
    pub fn next_batch(&mut self, batch: [&mut [i32]; 3]) -> Result<BatchTokens> {
        let seq = self.config.seq;
        for (name, found) in ["x", "y", "positions"].into_iter().zip(batch.each_ref().map(|to| to.len())) {
            if found != self.config.batch * seq {
                let expected = format!("{} x {seq} elements", self.config.batch);
                return Err(Error::input(format!("data: the size of `{name}`"), found, expected));
            }
        }
        let [x, y, positions] = batch;
        if self.position == self.epoch.rows.len() {
            self.start(self.epoch.number + 1);
        }
        let mut total = BatchTokens::default();
        if let Some(references) = &mut self.references {
            references.clear();
        }
        let rows = x.chunks_exact_mut(seq).zip(y.chunks_exact_mut(seq)).zip(positions.chunks_exact_mut(seq));
        for ((x, y), positions) in rows {
            if self.position == self.epoch.rows.len() && self.config.shuffle {
                self.start(self.epoch.number + 1);
            }
            let tokens = self.write_row([x, y, positions]);
            total.tokens += tokens.tokens;
            total.counted += tokens.counted;
        }
        Ok(total)
    }

    /// Writes the next row of the epoch, or an empty one after the last.
    fn write_row(&mut self, row: [&mut [i32]; 3]) -> BatchTokens {
        let mut units: &[u32] = &[];
        if self.position < self.epoch.rows.len() {
            units = self.epoch.row(self.position, self.config.shuffle);
            self.position += 1;
        }
        Self::write_units(&self.samples, self.references.as_mut(), units, row)
    }

    /// Writes a row of these units.
    fn write_units(
        samples: &Samples,
        mut references: Option<&mut References>,
        units: &[u32],
        [x, y, positions]: [&mut [i32]; 3],
    ) -> BatchTokens {
        let mut used = 0;
        for number in units.iter().flat_map(|&unit| samples.range(unit)) {
            let sample = &samples.all[number];
            let row = used..used + sample.ids.len();
            shift(sample, &mut x[row.clone()], &mut y[row.clone()]);
            positions[row.clone()].iter_mut().zip(0..).for_each(|(to, position)| *to = position);
            if let Some(references) = &mut references {
                references.write(number, row.clone(), &y[row.clone()]);
            }
            used = row.end;
        }
        if let Some(references) = references {
            references.end_row(x.len());
        }
        x[used..].fill(PADDING);
        y[used..].fill(IGNORED);
        positions[used..].fill(0); // documents of one token: attention does no more work than it must
        BatchTokens { tokens: used, counted: y.iter().filter(|&&target| target != IGNORED).count() }
    }

    fn start(&mut self, number: u64) {
        self.epoch = Epoch::new(number, &self.config, &self.samples);
        self.position = 0;
    }

    /// Batches of an epoch: whole ones, at least 1, in training; all with a token in validation.
    pub fn len_batches(&self) -> u64 {
        let (rows, batch) = (self.stats.rows, self.config.batch as u64);
        if self.config.shuffle { (rows / batch).max(1) } else { rows.div_ceil(batch) }
    }

    /// Goes back to the start of epoch 0, as every validation does.
    pub fn rewind(&mut self) {
        self.start(0);
    }

    /// B: rows per batch.
    pub fn batch(&self) -> usize {
        self.config.batch
    }

    /// T: positions per row.
    pub fn seq(&self) -> usize {
        self.config.seq
    }

    /// Rows given out since the start of epoch 0.
    pub fn rows(&self) -> u64 {
        self.epoch.number * self.stats.rows + self.position as u64
    }

    /// The epoch, from 0, that the last row came from.
    pub fn epoch(&self) -> u64 {
        self.epoch.number
    }

    /// The loader's position: its `samples` are rows.
    pub fn state(&self) -> LoaderState {
        LoaderState { samples: self.rows(), fingerprint: self.fingerprint }
    }

    /// Continues at the position of a loader with the same samples, T and seed; the batch size may differ.
    pub fn restore(&mut self, state: LoaderState) -> Result<()> {
        if state.fingerprint != self.fingerprint {
            return Err(Error::OtherData);
        }
        let (number, position) = self.place(state.samples);
        if number != self.epoch.number {
            self.start(number);
        }
        self.position = position;
        Ok(())
    }

    /// The epoch and the place in it after so many rows: the end of an epoch, not the start of the next.
    fn place(&self, rows: u64) -> (u64, usize) {
        let number = rows.saturating_sub(1) / self.stats.rows;
        (number, (rows - number * self.stats.rows) as usize)
    }

    /// Which samples these rows, numbered from 0 over the whole run, hold: "samples 4, 17 and 2".
    pub fn describe(&self, rows: Range<u64>) -> Vec<String> {
        let mut texts = Vec::new();
        let mut other: Option<Epoch> = None;
        for row in rows {
            let (number, position) = (row / self.stats.rows, (row % self.stats.rows) as usize);
            if number != self.epoch.number && other.as_ref().is_none_or(|epoch| epoch.number != number) {
                other = Some(Epoch::new(number, &self.config, &self.samples));
            }
            let epoch = other.as_ref().filter(|epoch| epoch.number == number).unwrap_or(&self.epoch);
            let units = epoch.row(position, self.config.shuffle).iter().map(u32::to_string);
            let what = if self.references.is_some() { "pairs" } else { "samples" };
            texts.push(format!("{what} {}", units.collect::<Vec<_>>().join(", ")));
        }
        texts
    }
}

/// Refuses a sample that is empty or longer than a row, or whose tokens are not in the vocabulary.
fn check(number: usize, sample: &Sample, config: &LoaderConfig) -> Result<()> {
    let (length, seq) = (sample.ids.len(), config.seq);
    if sample.learned.len() != length {
        let what = format!("data: sample {number}");
        let found = format!("{length} tokens, and {} that say what is learned", sample.learned.len());
        return Err(Error::input(what, found, "as many of both"));
    }
    if length == 0 || length > seq {
        let expected = format!("1 to {seq}, the length of a row; cut it off, or choose a larger seq");
        return Err(Error::input(format!("data: the length of sample {number}"), length, expected));
    }
    let is_outside = |id: &i32| !usize::try_from(*id).is_ok_and(|id| id < config.vocab);
    match sample.ids.iter().position(is_outside) {
        Some(at) => {
            let what = format!("data: token {at} of sample {number}");
            let expected = format!("a token of the vocabulary, 0 to {}", config.vocab - 1);
            Err(Error::input(what, sample.ids[at], expected))
        }
        None => Ok(()),
    }
}

/// A hash of everything that determines the batches, but for their size.
fn fingerprint(samples: &Samples, config: &LoaderConfig) -> u64 {
    let sample = |sample: &Sample| {
        let tokens = sample.ids.iter().zip(&sample.learned);
        let tokens = tokens.map(|(&id, &learned)| u64::from(id as u32) << 1 | u64::from(learned));
        hash(tokens.chain([sample.ids.len() as u64]))
    };
    let parts = [config.seq as u64, config.seed, u64::from(config.shuffle), samples.all.len() as u64];
    let pairs = (samples.of_unit > 1).then_some(samples.of_unit as u64);
    hash(parts.into_iter().chain(pairs).chain(samples.all.iter().map(sample)))
}

#[cfg(test)]
#[path = "packed_tests.rs"]
mod tests;
