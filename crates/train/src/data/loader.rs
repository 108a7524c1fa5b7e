//! Batches of token windows from any number of sources, in a seeded order that a checkpoint can continue.
//!
//! An epoch cuts every source into windows of T tokens, starting at a phase drawn anew for each epoch and source, and
//! visits each window once, in the order of a keyed permutation: no table, however many windows there are. A batch that
//! the epoch cannot fill goes on with the next epoch, so no window is dropped.

use std::path::Path;

use serde::{Deserialize, Serialize};

use super::Tokens;
use super::permute::Permutation;
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

/// Where a loader stands, for a checkpoint.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LoaderState {
    /// Epochs finished.
    pub epoch: u64,
    /// Windows of this epoch already given out.
    pub position: u64,
    /// Hash of what decides the order: T, the seed, the lengths of the sources.
    pub fingerprint: u64,
}

/// One source's part in an epoch.
#[derive(Clone, Copy, Debug)]
struct Span {
    /// Number, within the epoch, of the source's first window.
    first: u64,
    /// Token at which that window starts.
    phase: u64,
}

/// Gives out batches of (x, y), y being x one token later.
pub struct Loader {
    config: LoaderConfig,
    sources: Vec<Box<dyn Tokens>>,
    fingerprint: u64,
    epoch: u64,
    position: u64,
    /// Windows in this epoch.
    windows: u64,
    spans: Vec<Span>,
    order: Permutation,
    /// One window and the token after it.
    window: Vec<u32>,
}

impl Loader {
    /// A loader at the start of epoch 0. Sources too short for one window take no part; if all are, that is an error.
    pub fn new(sources: Vec<Box<dyn Tokens>>, config: LoaderConfig) -> Result<Self> {
        for (name, value) in [("batch", config.batch), ("seq", config.seq), ("vocab", config.vocab)] {
            if value == 0 || value > i32::MAX as usize {
                return Err(Error::Config(format!("data: {name} is {value}, expected 1 to {}", i32::MAX)));
            }
        }
        let need = config.seq as u64 + 1;
        let longest = sources.iter().map(|s| s.len()).max().unwrap_or(0);
        if longest < need {
            let (count, seq) = (sources.len(), config.seq);
            return Err(Error::Config(format!(
                "data: the longest of {count} sources has {longest} tokens, expected at least {need} for one window of \
                 seq {seq}; give more data or a smaller seq"
            )));
        }
        let parts = [config.seq as u64, config.seed, u64::from(config.shuffle)];
        let fingerprint =
            parts.into_iter().chain(sources.iter().map(|s| s.len())).fold(0, |h, v| mix64(h ^ mix64(v)));
        let mut loader = Self {
            config,
            spans: Vec::with_capacity(sources.len()),
            sources,
            fingerprint,
            epoch: 0,
            position: 0,
            windows: 0,
            order: Permutation::new(1, &mut Rng::new(0)),
            window: vec![0; config.seq + 1],
        };
        loader.start_epoch(0);
        Ok(loader)
    }

    /// Draws the phases and the order of an epoch.
    fn start_epoch(&mut self, epoch: u64) {
        let mut rng = Rng::new(self.config.seed).fork(epoch);
        let seq = self.config.seq as u64;
        (self.epoch, self.position, self.windows) = (epoch, 0, 0);
        self.spans.clear();
        for source in &self.sources {
            // Starts at which a window and its last target still fit.
            let starts = source.len().saturating_sub(seq);
            let phase = if self.config.shuffle { rng.below(starts.min(seq)) } else { 0 };
            self.spans.push(Span { first: self.windows, phase });
            self.windows += starts.saturating_sub(phase).div_ceil(seq);
        }
        self.order = Permutation::new(self.windows, &mut rng);
    }

    /// Fills `x` and `y`, B*T tokens each, row by row. Allocates nothing.
    pub fn next_batch(&mut self, x: &mut [i32], y: &mut [i32]) -> Result<()> {
        let (batch, seq) = (self.config.batch, self.config.seq);
        for (name, found) in [("x", x.len()), ("y", y.len())] {
            if found != batch * seq {
                let text = format!("data: `{name}` has {found} elements, expected {batch} x {seq}");
                return Err(Error::Config(text));
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
        if self.position == self.windows {
            self.start_epoch(self.epoch + 1);
        }
        let number = if self.config.shuffle { self.order.at(self.position) } else { self.position };
        // The last source that starts at or before the window; sources without windows lie before it.
        let index = self.spans.partition_point(|s| s.first <= number) - 1;
        let span = self.spans[index];
        let start = span.phase + (number - span.first) * self.config.seq as u64;
        let (source, vocab) = (&mut self.sources[index], self.config.vocab);
        source.read_at(start, &mut self.window)?;
        if let Some(bad) = self.window.iter().position(|&token| token as usize >= vocab) {
            let field = format!("token {}", start + bad as u64);
            return Err(Error::field(
                Path::new(&source.name()),
                field,
                self.window[bad],
                format!("< {vocab}"),
            ));
        }
        self.position += 1;
        Ok(())
    }

    /// Whole batches in this epoch, at least 1 (then the last one starts the data again).
    pub fn len_batches(&self) -> u64 {
        (self.windows / self.config.batch as u64).max(1)
    }

    /// Tokens in all sources together.
    pub fn len_tokens(&self) -> u64 {
        self.sources.iter().map(|s| s.len()).sum()
    }

    /// Goes back to the start of epoch 0: what validation does each time.
    pub fn rewind(&mut self) {
        self.start_epoch(0);
    }

    /// T: tokens per window.
    pub fn seq(&self) -> usize {
        self.config.seq
    }

    /// Where the loader stands.
    pub fn state(&self) -> LoaderState {
        LoaderState { epoch: self.epoch, position: self.position, fingerprint: self.fingerprint }
    }

    /// Continues where a loader of the same data, T and seed stood; the batch size may differ.
    pub fn restore(&mut self, state: LoaderState) -> Result<()> {
        if state.fingerprint != self.fingerprint {
            return Err(Error::Config(
                "data: the checkpoint was written with other data files, seq, seed or shuffle; give the same to resume"
                    .into(),
            ));
        }
        let stood = self.state();
        self.start_epoch(state.epoch);
        if state.position > self.windows {
            let (found, most) = (state.position, self.windows);
            self.start_epoch(stood.epoch);
            self.position = stood.position;
            return Err(Error::Config(format!("data: position is {found}, expected at most {most} windows")));
        }
        self.position = state.position;
        Ok(())
    }
}

#[cfg(test)]
#[path = "loader_tests.rs"]
mod tests;
