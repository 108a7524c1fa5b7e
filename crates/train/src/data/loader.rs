//! Batches of token windows from any number of sources, in a seeded order that a checkpoint can continue.
//!
//! An epoch cuts every source into windows of T tokens, starting at a phase drawn anew for each epoch and source, and
//! visits each window once, in the order of a keyed permutation: no table, however many windows there are. A batch that
//! the epoch cannot fill continues with the next epoch, so no window is dropped.

use std::ops::Range;
use std::path::Path;

use serde::{Deserialize, Serialize};

use super::Tokens;
use super::permute::Permutation;
use crate::format::shards::{check_tokens, position_name};
use crate::rng::{Rng, mix64};
use crate::{Error, Result};

/// What the batches look like and in which order they come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LoaderConfig {
    /// B: windows per batch.
    pub batch: usize,
    /// T: tokens per window.
    pub seq: usize,
    /// V: every token must be below this.
    pub vocab: usize,
    /// Seed of the order; not used without `shuffle`.
    pub seed: u64,
    /// True for training. False for validation: windows in file order from token 0, every epoch the same.
    pub shuffle: bool,
}

/// The position of a loader, for a checkpoint.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LoaderState {
    /// Samples (windows) given out since the start of epoch 0.
    pub samples: u64,
    /// Hash of everything that determines the order: T, the seed and the lengths of the sources; and of their contents,
    /// if [`Loader::set_content`] was called.
    pub fingerprint: u64,
}

/// The largest epoch of a position. Epochs are walked one by one, so a damaged number could otherwise take hours.
const MOST_EPOCHS: u64 = 100_000_000;

/// Produces batches of (x, y), where y is x shifted by one token.
pub struct Loader {
    config: LoaderConfig,
    sources: Vec<Box<dyn Tokens>>,
    /// Hash of T, the seed and the lengths of the sources.
    shape: u64,
    /// Hash of the contents of the sources.
    content: Option<u64>,
    epoch: Epoch,
    /// Windows of this epoch already given out.
    position: u64,
    /// One window and the token after it.
    window: Vec<u32>,
}

impl Loader {
    /// A loader at the start of epoch 0. Sources too short for one window are ignored; it is an error if all are.
    pub fn new(sources: Vec<Box<dyn Tokens>>, config: LoaderConfig) -> Result<Self> {
        for (name, value) in [("batch", config.batch), ("seq", config.seq), ("vocab", config.vocab)] {
            if value == 0 || value > i32::MAX as usize {
                return Err(Error::input(format!("data: {name}"), value, format!("1 to {}", i32::MAX)));
            }
        }
        let need = config.seq as u64 + 1;
        let longest = sources.iter().map(|s| s.len()).max().unwrap_or(0);
        if longest < need {
            let (count, seq) = (sources.len(), config.seq);
            return Err(Error::input(
                format!("data: the longest of {count} sources"),
                format!("{longest} tokens long"),
                format!("at least {need} for one window of seq {seq}; give more data or a smaller seq"),
            ));
        }
        let parts = [config.seq as u64, config.seed, u64::from(config.shuffle)];
        let shape = hash(parts.into_iter().chain(sources.iter().map(|s| s.len())));
        let mut epoch = Epoch::new(sources.len());
        epoch.start(0, 0, &config, &sources);
        Ok(Self {
            config,
            sources,
            shape,
            content: None,
            epoch,
            position: 0,
            window: vec![0; config.seq + 1],
        })
    }

    /// Fills `x` and `y`, B*T tokens each, row by row. Allocates nothing.
    pub fn next_batch(&mut self, x: &mut [i32], y: &mut [i32]) -> Result<()> {
        let (batch, seq) = (self.config.batch, self.config.seq);
        for (name, found) in [("x", x.len()), ("y", y.len())] {
            if found != batch * seq {
                let expected = format!("{batch} x {seq} elements");
                return Err(Error::input(format!("data: the size of `{name}`"), found, expected));
            }
        }
        for (x, y) in x.chunks_exact_mut(seq).zip(y.chunks_exact_mut(seq)) {
            self.next_window()?;
            // Checked to be below the vocabulary, which fits i32.
            x.iter_mut().zip(&self.window).for_each(|(x, &token)| *x = token as i32);
            y.iter_mut().zip(&self.window[1..]).for_each(|(y, &token)| *y = token as i32);
        }
        Ok(())
    }

    /// Reads the next window of the order and checks its tokens.
    fn next_window(&mut self) -> Result<()> {
        if self.position == self.epoch.windows {
            let (number, before) = (self.epoch.number + 1, self.samples());
            self.epoch.start(number, before, &self.config, &self.sources);
            self.position = 0;
        }
        let (index, start) = self.epoch.place(self.position, &self.config);
        let (source, vocab) = (&mut self.sources[index], self.config.vocab);
        source.read_at(start, &mut self.window)?;
        if self.window.iter().any(|&token| token as usize >= vocab) {
            check_tokens(source.name().as_ref(), &self.window, vocab, |at| position_name(start + at as u64))?;
        }
        self.position += 1;
        Ok(())
    }

    /// Whole batches in this epoch, at least 1; a batch larger than the epoch continues with the next epoch.
    pub fn len_batches(&self) -> u64 {
        (self.epoch.windows / self.config.batch as u64).max(1)
    }

    /// Goes back to the start of epoch 0, as every validation does.
    pub fn rewind(&mut self) {
        self.epoch.start(0, 0, &self.config, &self.sources);
        self.position = 0;
    }

    /// B: windows per batch.
    pub fn batch(&self) -> usize {
        self.config.batch
    }

    /// T: tokens per window.
    pub fn seq(&self) -> usize {
        self.config.seq
    }

    /// Samples (windows) given out since the start of epoch 0.
    pub fn samples(&self) -> u64 {
        self.epoch.before + self.position
    }

    /// The epoch, from 0, that the last sample came from.
    pub fn epoch(&self) -> u64 {
        self.epoch.number
    }

    /// Makes the state depend on the contents of the sources, not only on their lengths: `content` is a hash, such as
    /// [`survey::fingerprint`](super::survey::fingerprint).
    pub fn set_content(&mut self, content: &str) {
        let bytes = content.as_bytes().iter().map(|&byte| u64::from(byte));
        self.content = Some(hash(bytes));
    }

    fn fingerprint(&self) -> u64 {
        self.content.map_or(self.shape, |content| hash([self.shape, content].into_iter()))
    }

    /// The loader's position.
    pub fn state(&self) -> LoaderState {
        LoaderState { samples: self.samples(), fingerprint: self.fingerprint() }
    }

    /// Continues at the position of a loader with the same data, T and seed; the batch size may differ.
    pub fn restore(&mut self, state: LoaderState) -> Result<()> {
        if state.fingerprint != self.fingerprint() {
            return Err(Error::OtherData);
        }
        self.seek(state.samples)
    }

    /// Skips the next `samples` samples without reading them.
    pub fn skip(&mut self, samples: u64) -> Result<()> {
        self.seek(self.samples().saturating_add(samples))
    }

    /// Moves to the position after this many samples.
    fn seek(&mut self, samples: u64) -> Result<()> {
        let (number, before) = self.find(samples)?;
        if number != self.epoch.number {
            self.epoch.start(number, before, &self.config, &self.sources);
        }
        self.position = samples - before;
        Ok(())
    }

    /// The epoch of sample number `samples - 1`, and the number of samples before that epoch. Epochs differ in length
    /// because of the phases, so they are walked one by one from the current one, or from the first.
    fn find(&self, samples: u64) -> Result<(u64, u64)> {
        let (mut number, mut before) = match self.epoch.before {
            here if here < samples => (self.epoch.number, here),
            _ => (0, 0),
        };
        let seq = self.config.seq as u64;
        // the smallest number of windows in an epoch, which has the largest phases
        let fewest = |source: &dyn Tokens| {
            let starts = source.len().saturating_sub(seq);
            let most = if self.config.shuffle { starts.min(seq).saturating_sub(1) } else { 0 };
            (starts - most).div_ceil(seq)
        };
        let fewest: u64 = self.sources.iter().map(|source| fewest(source.as_ref())).sum();
        if !self.config.shuffle {
            // every epoch has the same windows
            let whole = (samples - before).saturating_sub(1) / fewest.max(1);
            return Ok((number + whole, before + whole * fewest));
        }
        if (samples - before) / fewest.max(1) > MOST_EPOCHS {
            return Err(Error::input(
                "data: position",
                format!("{samples} samples"),
                format!("at most {MOST_EPOCHS} times the data"),
            ));
        }
        loop {
            let (windows, _) = draw(number, &self.config, &self.sources, |_| {});
            if samples - before <= windows {
                return Ok((number, before));
            }
            (number, before) = (number + 1, before + windows);
        }
    }

    /// Where these samples, numbered from 0 over the whole run, come from: "train_000.bin token 12288".
    pub fn describe(&self, samples: Range<u64>) -> Result<Vec<String>> {
        let mut texts = Vec::new();
        let mut epoch = Epoch::new(self.sources.len());
        for sample in samples {
            if sample < epoch.before || sample - epoch.before >= epoch.windows {
                // the epoch of a sample is that of the loader right after reading it
                let (number, before) = self.find(sample.saturating_add(1))?;
                epoch.start(number, before, &self.config, &self.sources);
            }
            let (index, start) = epoch.place(sample - epoch.before, &self.config);
            let name = self.sources[index].name();
            let short = Path::new(&name).file_name().map(|file| file.display().to_string());
            texts.push(format!("{} token {start}", short.unwrap_or(name)));
        }
        Ok(texts)
    }
}

/// A hash of several numbers.
pub(super) fn hash(values: impl Iterator<Item = u64>) -> u64 {
    values.fold(0, |h, v| mix64(h ^ mix64(v)))
}

/// One pass through the data.
struct Epoch {
    number: u64,
    /// Windows in all earlier epochs.
    before: u64,
    /// Windows in this epoch.
    windows: u64,
    spans: Vec<Span>,
    order: Permutation,
}

/// One source's part in an epoch.
#[derive(Clone, Copy, Debug)]
struct Span {
    /// Number, within the epoch, of the source's first window.
    first: u64,
    /// Token at which that window starts.
    phase: u64,
}

impl Epoch {
    /// An epoch without windows, with capacity for this many sources.
    fn new(sources: usize) -> Self {
        let order = Permutation::new(1, &mut Rng::new(0));
        Self { number: 0, before: 0, windows: 0, spans: Vec::with_capacity(sources), order }
    }

    /// Draws the phases and the order of an epoch. Allocates nothing.
    fn start(&mut self, number: u64, before: u64, config: &LoaderConfig, sources: &[Box<dyn Tokens>]) {
        self.spans.clear();
        let (windows, mut rng) = draw(number, config, sources, |span| self.spans.push(span));
        (self.number, self.before, self.windows) = (number, before, windows);
        self.order = Permutation::new(windows, &mut rng);
    }

    /// The source of the window at this place of the order, and the token at which the window starts.
    fn place(&self, position: u64, config: &LoaderConfig) -> (usize, u64) {
        let number = if config.shuffle { self.order.at(position) } else { position };
        // The last source that starts at or before the window; sources without windows come before it.
        let index = self.spans.partition_point(|s| s.first <= number) - 1;
        let span = self.spans[index];
        (index, span.phase + (number - span.first) * config.seq as u64)
    }
}

/// Draws the phases of an epoch. Returns its number of windows, and the generator that draws the order next.
fn draw(
    number: u64,
    config: &LoaderConfig,
    sources: &[Box<dyn Tokens>],
    mut each: impl FnMut(Span),
) -> (u64, Rng) {
    let mut rng = Rng::new(config.seed).fork(number);
    let seq = config.seq as u64;
    let mut windows = 0;
    for source in sources {
        // The number of start positions at which a window and its last target fit.
        let starts = source.len().saturating_sub(seq);
        let phase = if config.shuffle { rng.below(starts.min(seq)) } else { 0 };
        each(Span { first: windows, phase });
        windows += starts.saturating_sub(phase).div_ceil(seq);
    }
    (windows, rng)
}

#[cfg(test)]
#[path = "loader_tests.rs"]
mod tests;
