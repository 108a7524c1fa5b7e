//! Logits and losses of batches of any shape: cut into pieces of a few shapes, padded behind the tokens, where a causal model
//! does not look.

use super::{OpenModel, check_growth};
use crate::Refusal;
use crate::commands::model::batch_tokens;
use anyhow::Result;
use ironhorse::Device;
use ironhorse::train::Error;
use ironhorse::train::run::Control;
use ironhorse::train::session::{Session, Wanted, padded_seq};
use std::ops::Range;

/// Logits of more than one sequence that the device holds at a time.
const LOGITS_BYTES: usize = 256 << 20;
/// A label that is not counted.
const IGNORED: i64 = -100;

/// Rows of tokens, all of the same length.
#[derive(Clone, Copy, Debug)]
pub struct Ids<'a> {
    /// What they are called.
    pub name: &'static str,
    /// How many rows.
    pub rows: usize,
    /// Tokens of a row.
    pub cols: usize,
    /// Row after row.
    pub ids: &'a [i64],
}

impl Ids<'_> {
    /// Refuses no tokens, more than the model sees at once, and tokens that it does not have, but for `other`.
    fn check(&self, least: usize, session: &Session, other: Option<i64>) -> Result<()> {
        let Self { name, rows, cols, ids } = *self;
        let (vocab, context) = (session.config().vocab_size() as i64, session.config().max_seq_len());
        let refused = |found: String, expected: String| Err(Error::input(name, found, expected).into());
        if rows == 0 || cols < least {
            let expected = format!("at least one row of {least} or more tokens");
            return refused(format!("{rows} rows of {cols} tokens"), expected);
        }
        if cols > context {
            return refused(
                format!("{cols} tokens in a row"),
                format!("at most {context}, the model's context"),
            );
        }
        match ids.iter().position(|&id| !(0..vocab).contains(&id) && Some(id) != other) {
            None => Ok(()),
            Some(at) => {
                let field = format!("{name}[{}, {}]", at / cols, at % cols);
                let or = other.map_or_else(String::new, |other| format!(" or {other}"));
                Err(Error::input(field, ids[at], format!("0 to {}{or}", vocab - 1)).into())
            }
        }
    }
}

/// Pieces of at most so many rows: powers of two, so that a few programs serve every number of rows.
fn pieces(rows: usize, most: usize) -> Vec<Range<usize>> {
    let (mut pieces, mut done) = (Vec::new(), 0);
    while done < rows {
        let room = (rows - done).min(most.max(1));
        let take = 1 << room.ilog2();
        pieces.push(done..done + take);
        done += take;
    }
    pieces
}

impl OpenModel {
    /// The logits (rows, cols, V) after every token.
    pub fn logits(&mut self, ids: Ids<'_>, control: &Control) -> Result<Vec<f32>, Refusal> {
        self.all_logits(ids, control).map_err(|error| Refusal::of(&error))
    }

    fn all_logits(&mut self, ids: Ids<'_>, control: &Control) -> Result<Vec<f32>> {
        let tokens = self.tokens_at_once()?;
        let session = self.session(control)?;
        ids.check(1, session, None)?;
        let Ids { rows, cols, .. } = ids;
        let (vocab, padded) = (session.config().vocab_size(), session.config().padded_vocab_size());
        let seq = padded_seq(cols, session.config().max_seq_len());
        let most = (tokens / seq).min(LOGITS_BYTES / (4 * padded).max(1) / seq);
        let mut logits = no_memory_is_told(rows, cols * vocab)?;
        let mut x = Vec::new();
        for piece in pieces(rows, most) {
            go_on(control)?;
            let shape = (piece.len(), seq);
            ready(session, Wanted::Logits, shape)?;
            fill(&mut x, shape, piece.clone().map(|row| &ids.ids[row * cols..][..cols]));
            let out = &mut logits[piece.start * cols * vocab..piece.end * cols * vocab];
            session.logits_of(shape, &x, (cols, out))?;
        }
        Ok(logits)
    }

    /// The mean loss of the labels that are not -100, each predicted by the tokens before it; 0 if none is counted.
    pub fn loss(&mut self, ids: Ids<'_>, labels: Ids<'_>, control: &Control) -> Result<f64, Refusal> {
        self.mean_loss(ids, labels, control).map_err(|error| Refusal::of(&error))
    }

    fn mean_loss(&mut self, ids: Ids<'_>, labels: Ids<'_>, control: &Control) -> Result<f64> {
        let tokens = self.tokens_at_once()?;
        let session = self.session(control)?;
        ids.check(2, session, None)?;
        if (labels.rows, labels.cols) != (ids.rows, ids.cols) {
            let found = format!("({}, {})", labels.rows, labels.cols);
            let expected = format!("({}, {}), as {}", ids.rows, ids.cols, ids.name);
            return Err(Error::input(labels.name, found, expected).into());
        }
        labels.check(2, session, Some(IGNORED))?;
        let (cols, shown) = (ids.cols, ids.cols - 1);
        let seq = padded_seq(shown, session.config().max_seq_len());
        let (mut x, mut y, mut losses) = (Vec::new(), Vec::new(), Vec::new());
        let (mut nats, mut counted) = (0.0_f64, 0_usize);
        for piece in pieces(ids.rows, tokens / seq) {
            go_on(control)?;
            let shape = (piece.len(), seq);
            ready(session, Wanted::Losses, shape)?;
            let targets = |row: usize| &labels.ids[row * cols + 1..][..shown];
            fill(&mut x, shape, piece.clone().map(|row| &ids.ids[row * cols..][..shown]));
            fill(&mut y, shape, piece.clone().map(targets));
            session.losses_of(shape, [&x, &y], &mut losses)?;
            for (row, losses) in piece.zip(losses.chunks_exact(seq)) {
                let of_row = losses.iter().zip(targets(row)).filter(|(_, label)| **label != IGNORED);
                for (loss, _) in of_row {
                    nats += f64::from(*loss);
                    counted += 1;
                }
            }
        }
        Ok(nats / counted.max(1) as f64)
    }

    fn tokens_at_once(&self) -> Result<usize> {
        Ok(batch_tokens(self.flags.engine.device()? == Device::Cpu))
    }
}

/// Plans a shape and makes room for it.
fn ready(session: &mut Session, wanted: Wanted, shape: (usize, usize)) -> Result<()> {
    let layout = session.plan(wanted, shape)?;
    check_growth(session, &layout)?;
    Ok(session.reserve(&layout)?)
}

fn go_on(control: &Control) -> Result<()> {
    if control.stop_reason().is_some() { Err(Error::Stopped.into()) } else { Ok(()) }
}

/// Rows as a program takes them. What is not there, and labels that are not counted, are token 0.
fn fill<'a>(out: &mut Vec<i32>, (batch, seq): (usize, usize), rows: impl Iterator<Item = &'a [i64]>) {
    out.clear();
    out.resize(batch * seq, 0);
    for (out, row) in out.chunks_exact_mut(seq).zip(rows) {
        out.iter_mut().zip(row).for_each(|(out, &id)| *out = i32::try_from(id.max(0)).unwrap_or(0));
    }
}

/// Zeros; too many are an error, not the end of the process.
fn no_memory_is_told(rows: usize, cols: usize) -> Result<Vec<f32>> {
    let count = rows.saturating_mul(cols);
    let mut values = Vec::new();
    values.try_reserve_exact(count).map_err(|_| {
        let what = format!("cannot allocate {count} numbers for the logits; give fewer sequences");
        ironhorse::core::Error::OutOfMemory { engine: "cpu", what }
    })?;
    values.resize(count, 0.0);
    Ok(values)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_row_is_in_one_piece_of_few_sizes() {
        assert_eq!(pieces(7, 100), [0..4, 4..6, 6..7]);
        assert_eq!(pieces(7, 3), [0..2, 2..4, 4..6, 6..7]);
        assert_eq!(pieces(2, 0), [0..1, 1..2]);
        for rows in 1..70 {
            let all: Vec<usize> = pieces(rows, 16).into_iter().flatten().collect();
            assert_eq!(all, (0..rows).collect::<Vec<_>>());
        }
    }

    #[test]
    fn rows_are_padded_and_what_is_not_counted_is_a_token() {
        let mut x = vec![7; 3];
        fill(&mut x, (2, 4), [&[1, 2, 3][..], &[4, -100, 6]].into_iter());
        assert_eq!(x, [1, 2, 3, 0, 4, 0, 6, 0]);
    }
}
