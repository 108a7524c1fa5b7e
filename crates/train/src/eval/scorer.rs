//! The loss of texts of any length: sorted by length, padded to a few fixed shapes, many at a time.

use std::ops::ControlFlow;

use crate::session::{Session, TokenScores};
use crate::{Error, Result};

/// The shortest sequence length of a program.
const SHORTEST: usize = 32;

/// Tokens of which the model predicts those from `from` on.
#[derive(Clone, Copy, Debug)]
pub struct Text<'a> {
    /// All tokens, at least 2.
    pub tokens: &'a [u32],
    /// The first token that counts, at least 1: the token before it predicts it.
    pub from: usize,
}

/// What the tokens that count cost.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Score {
    /// The sum of their losses in nats: the negative log-likelihood.
    pub nats: f64,
    /// How many tokens were counted.
    pub tokens: usize,
    /// Whether each of them is the most likely token after those before it; of equally likely ones, the lowest.
    pub greedy: bool,
    /// Tokens at the beginning that did not fit into the model's context and were left out.
    pub cut: usize,
}

/// Shapes (batch, seq) that together score texts of up to `longest` tokens, each with about `tokens` tokens of work: twice as
/// long, half as many.
pub fn shapes(longest: usize, tokens: usize) -> Vec<(usize, usize)> {
    let longest = longest.max(1);
    let mut lengths: Vec<usize> =
        std::iter::successors(Some(SHORTEST), |seq| Some(seq * 2)).take_while(|&seq| seq < longest).collect();
    lengths.push(longest);
    lengths.into_iter().map(|seq| ((tokens / seq).max(1), seq)).collect()
}

/// Scores texts with a session that was made for it ([`SessionSpec::score`](crate::session::SessionSpec)).
pub struct Scorer<'a> {
    session: &'a mut Session,
    /// (batch, seq) of the session's programs, shortest first, and which program it is.
    shapes: Vec<(usize, usize, usize)>,
}

impl<'a> Scorer<'a> {
    /// A scorer over the scoring programs of a session.
    pub fn new(session: &'a mut Session) -> Result<Self> {
        let mut shapes: Vec<(usize, usize, usize)> =
            session.score_shapes()?.into_iter().enumerate().map(|(at, (b, t))| (b, t, at)).collect();
        shapes.sort_by_key(|&(_, seq, _)| seq);
        if shapes.is_empty() {
            return Err(Error::Unsupported("this session was not made for evaluation".into()));
        }
        Ok(Self { session, shapes })
    }

    /// The most tokens that can be seen at once, the last of which is only predicted.
    pub fn longest(&self) -> usize {
        self.shapes.last().map_or(0, |&(_, seq, _)| seq) + 1
    }

    /// The scores in the order of the texts. `progress` is called with the number of texts done, and may stop.
    pub fn score(
        &mut self,
        texts: &[Text<'_>],
        progress: &mut dyn FnMut(usize) -> ControlFlow<()>,
    ) -> Result<Vec<Score>> {
        let vocab = self.session.config().vocab_size();
        let most = self.longest();
        let mut windows = Vec::with_capacity(texts.len());
        for (at, text) in texts.iter().enumerate() {
            windows.push(Window::of(text, at, most, vocab)?);
        }
        // Longest first: a machine that has too little memory fails at once, and the last batches are the short ones.
        windows.sort_by_key(|window| (std::cmp::Reverse(window.tokens.len()), window.at));
        let mut scores = vec![Score::default(); texts.len()];
        let (mut rest, mut done) = (&windows[..], 0);
        let (mut x, mut y, mut out) = (Vec::new(), Vec::new(), TokenScores::default());
        while let Some(first) = rest.first() {
            let (batch, seq, program) = self.shape_for(first.tokens.len() - 1);
            let (now, later) = rest.split_at(batch.min(rest.len()));
            fill(now, (batch, seq), &mut x, &mut y);
            self.session.score(program, [&x, &y], &mut out)?;
            for (row, window) in now.iter().enumerate() {
                let counted = row * seq + window.from - 1..row * seq + window.tokens.len() - 1;
                scores[window.at] = Score {
                    nats: out.losses[counted.clone()].iter().map(|&loss| f64::from(loss)).sum(),
                    tokens: counted.len(),
                    greedy: out.best[counted.clone()] == y[counted],
                    cut: window.cut,
                };
            }
            rest = later;
            done += now.len();
            if progress(done).is_break() {
                return Err(Error::Stopped);
            }
        }
        Ok(scores)
    }

    /// The shortest shape that holds this many tokens.
    fn shape_for(&self, tokens: usize) -> (usize, usize, usize) {
        let fits = self.shapes.iter().find(|&&(_, seq, _)| seq >= tokens);
        fits.or(self.shapes.last()).copied().unwrap_or((1, tokens, 0))
    }
}

/// The part of a text that the model sees.
struct Window<'a> {
    tokens: &'a [u32],
    from: usize,
    cut: usize,
    at: usize,
}

impl<'a> Window<'a> {
    fn of(text: &Text<'a>, at: usize, most: usize, vocab: usize) -> Result<Self> {
        let len = text.tokens.len();
        if text.from == 0 || text.from >= len {
            let expected =
                format!("1 to {}, so that a token comes before it and one is counted", len.saturating_sub(1));
            return Err(Error::input(format!("text {at}: the first token that counts"), text.from, expected));
        }
        if let Some(bad) = text.tokens.iter().position(|&token| token as usize >= vocab) {
            let expected = format!("below the model's vocabulary of {vocab}");
            return Err(Error::input(format!("text {at}: token {bad}"), text.tokens[bad], expected));
        }
        let cut = len.saturating_sub(most);
        Ok(Self { tokens: &text.tokens[cut..], from: text.from.saturating_sub(cut).max(1), cut, at })
    }
}

/// Inputs and targets of a batch. Padding comes after the tokens, where a causal model's earlier positions do not see it.
fn fill(windows: &[Window<'_>], (batch, seq): (usize, usize), x: &mut Vec<i32>, y: &mut Vec<i32>) {
    for (out, first) in [(&mut *x, 0), (&mut *y, 1)] {
        out.clear();
        out.resize(batch * seq, 0);
        for (row, window) in out.chunks_exact_mut(seq).zip(windows) {
            let tokens = &window.tokens[first..window.tokens.len() - 1 + first];
            // below the vocabulary, which fits i32
            row.iter_mut().zip(tokens).for_each(|(slot, &token)| *slot = token as i32);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shapes_cover_every_length() {
        assert_eq!(shapes(100, 1024), [(32, 32), (16, 64), (10, 100)]);
        assert_eq!(shapes(64, 128), [(4, 32), (2, 64)]);
        assert_eq!(shapes(5, 2), [(1, 5)]);
        assert_eq!(shapes(0, 0), [(1, 1)]);
    }

    #[test]
    fn a_long_text_keeps_its_end() {
        let tokens: Vec<u32> = (0..10).collect();
        let window = Window::of(&Text { tokens: &tokens, from: 7 }, 0, 6, 10)
            .map(|w| (w.tokens.to_vec(), w.from, w.cut));
        assert_eq!(window.ok(), Some((vec![4, 5, 6, 7, 8, 9], 3, 4)));
        // when even what counts is too long, its beginning is left out
        let window = Window::of(&Text { tokens: &tokens, from: 1 }, 0, 6, 10).map(|w| (w.from, w.cut));
        assert_eq!(window.ok(), Some((1, 4)));
    }

    #[test]
    fn texts_that_cannot_be_scored_are_named() {
        let refusal = |tokens: &[u32], from| {
            Window::of(&Text { tokens, from }, 3, 6, 10)
                .err()
                .map(|error| error.to_string())
                .unwrap_or_default()
        };
        assert!(refusal(&[1, 2], 0).starts_with("text 3: the first token that counts is 0, expected 1 to 1"));
        assert!(refusal(&[1, 2], 2).starts_with("text 3: the first token that counts is 2"));
        assert_eq!(
            refusal(&[1, 10], 1),
            "text 3: token 1 is 10, expected below the model's vocabulary of 10"
        );
    }
}
