//! The loss of a whole data set: every token predicted once, from the tokens before it in its window.

use std::ops::ControlFlow;
use std::path::Path;

use super::scorer::{Scorer, Text};
use crate::data::Tokens;
use crate::format::shards::{check_tokens, position_name};
use crate::{Error, Result};

/// Windows read and scored at a time.
const AT_ONCE: usize = 256;

/// The loss of a data set.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct StreamLoss {
    /// The sum of the losses in nats.
    pub nats: f64,
    /// The mean losses of the windows, for the standard error.
    windows: Windows,
    /// Tokens predicted: all but the first of every source.
    pub tokens: u64,
    /// Bytes of text that the predicted tokens stand for; 0 if it is not known.
    pub bytes: u64,
}

/// Running sums over windows.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
struct Windows {
    count: f64,
    sum: f64,
    squares: f64,
}

impl StreamLoss {
    /// The mean loss per token in nats.
    pub fn mean(&self) -> f64 {
        self.nats / self.tokens as f64
    }

    /// The standard error of the mean loss, from the spread between windows.
    pub fn error(&self) -> f64 {
        let Windows { count, sum, squares } = self.windows;
        if count < 2.0 {
            return f64::NAN;
        }
        let mean = sum / count;
        ((squares / count - mean * mean).max(0.0) / (count - 1.0)).sqrt()
    }

    /// e to the mean loss.
    pub fn perplexity(&self) -> f64 {
        self.mean().exp()
    }

    /// The loss in bits, per byte of the text instead of per token, so that tokenizers can be compared.
    pub fn bits_per_byte(&self) -> Option<f64> {
        (self.bytes > 0).then(|| self.nats / std::f64::consts::LN_2 / self.bytes as f64)
    }
}

/// Scores every token of the sources. `bytes_of` is the number of bytes of text a token stands for; `progress` is called
/// with the tokens done, and may stop.
pub fn stream_loss(
    scorer: &mut Scorer<'_>,
    sources: &mut [Box<dyn Tokens>],
    (vocab, bytes_of): (usize, Option<&dyn Fn(u32) -> usize>),
    progress: &mut dyn FnMut(u64) -> ControlFlow<()>,
) -> Result<StreamLoss> {
    let mut all = StreamLoss::default();
    let step = (scorer.longest() - 1) as u64;
    for source in sources {
        let len = source.len();
        let mut starts = (0..len.saturating_sub(1)).step_by(step.max(1) as usize).peekable();
        while starts.peek().is_some() {
            let windows: Vec<Vec<u32>> = starts
                .by_ref()
                .take(AT_ONCE)
                .map(|start| read(source.as_mut(), start, step.min(len - 1 - start) as usize + 1, vocab))
                .collect::<Result<_>>()?;
            let texts: Vec<Text<'_>> = windows.iter().map(|tokens| Text { tokens, from: 1 }).collect();
            let scores = scorer.score(&texts, &mut |_| ControlFlow::Continue(()))?;
            for (score, window) in scores.iter().zip(&windows) {
                let mean = score.nats / score.tokens as f64;
                all.nats += score.nats;
                all.tokens += score.tokens as u64;
                all.windows.count += 1.0;
                all.windows.sum += mean;
                all.windows.squares += mean * mean;
                all.bytes +=
                    bytes_of.map_or(0, |bytes_of| window[1..].iter().map(|&t| bytes_of(t) as u64).sum());
            }
            if progress(all.tokens).is_break() {
                return Err(Error::Stopped);
            }
        }
    }
    if all.tokens == 0 {
        return Err(Error::input(
            "the data",
            "shorter than 2 tokens",
            "at least one token to predict from another",
        ));
    }
    Ok(all)
}

fn read(source: &mut dyn Tokens, start: u64, count: usize, vocab: usize) -> Result<Vec<u32>> {
    let mut window = vec![0; count];
    source.read_at(start, &mut window)?;
    check_tokens(Path::new(&source.name()), &window, vocab, |at| position_name(start + at as u64))?;
    Ok(window)
}
