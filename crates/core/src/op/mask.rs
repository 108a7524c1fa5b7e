//! Which keys a query of causal attention reaches: documents that share a sequence, and a sliding window.

use super::spec::{Checker, SlotField};
use crate::{DType, Error, Result, Slot};

/// Limits of causal attention. Query `t` at position `p` of its document reaches the keys `t - min(p, window - 1)` to `t`:
/// those of its own document and, of these, the last `window`.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct AttentionMask {
    /// (B,T) i32, the position of each token inside its document: 0 where a document begins, then counting up. Without it
    /// a sequence is one document.
    pub positions: Option<Slot>,
    /// How many keys a query reaches at most, its own included.
    pub window: Option<usize>,
}

impl AttentionMask {
    /// Every query reaches all keys up to its own.
    pub const CAUSAL: Self = Self { positions: None, window: None };

    /// Whether every query reaches all keys up to its own, whatever the inputs of the program.
    pub fn is_causal(&self) -> bool {
        *self == Self::CAUSAL
    }

    /// The first key that query `t` reaches, at `position` of its document.
    pub fn first_key(&self, t: usize, position: usize) -> usize {
        t - self.window.map_or(position, |window| position.min(window.saturating_sub(1)))
    }

    /// Checks that `positions` has an element for each token of `out` (B,T,C).
    pub(super) fn check(&self, c: &Checker, out: &Slot) -> Result<()> {
        if self.window == Some(0) {
            return c.fail("the window is 0 keys, expected 1 or more".into());
        }
        self.positions.map_or(Ok(()), |positions| check_shape(c, &positions, out.shape.dims()))
    }

    /// Pairs of query and key of a sequence that is one document: documents only lower it, by what the inputs say.
    pub(super) fn pairs(&self, seq: u64) -> u64 {
        let window = self.window.map_or(seq, |window| seq.min(window as u64));
        window * (window + 1) / 2 + (seq - window) * window
    }
}

impl SlotField for AttentionMask {
    fn slot_mut(&mut self) -> Option<&mut Slot> {
        self.positions.as_mut()
    }
}

/// Checks that `positions` is (B,T) i32, where `dims` begins with B and T.
pub(super) fn check_shape(c: &Checker, positions: &Slot, dims: &[usize]) -> Result<()> {
    c.dtype("positions", positions, DType::I32)?;
    match *dims {
        [batch, seq, ..] => c.shape("positions", positions, [batch, seq]),
        _ => c.fail("`positions` needs sequences".into()),
    }
}

/// Refuses positions (B,T) that do not start at 0 and count up in each document of each sequence of `seq` tokens.
pub fn check_positions(positions: &[i32], seq: usize) -> Result<()> {
    let mut before = -1;
    for (index, &position) in positions.iter().enumerate() {
        if index % seq == 0 {
            before = -1;
        }
        if position != 0 && position != before + 1 {
            return Err(Error::Input(bad_position(position, index)));
        }
        before = position;
    }
    Ok(())
}

/// The error of a position that continues no document; `index` counts the tokens of the batch.
pub fn bad_position(position: i32, index: usize) -> String {
    format!("position {position} at index {index} is neither 0 nor the position before it plus 1")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_query_reaches_its_document_and_its_window() {
        let mask = |window| AttentionMask { positions: None, window };
        assert_eq!(AttentionMask::CAUSAL.first_key(7, 7), 0);
        assert_eq!(AttentionMask::CAUSAL.first_key(7, 2), 5);
        let reached = [Some(1), Some(2), Some(3), Some(4), None].map(|window| mask(window).first_key(7, 2));
        assert_eq!(reached, [7, 6, 5, 5, 5]);
        for window in [1, 2, 5, 9, 10, 11, 1000] {
            let one_by_one: usize = (0..10).map(|t| t + 1 - mask(Some(window)).first_key(t, t)).sum();
            assert_eq!(mask(Some(window)).pairs(10), one_by_one as u64);
        }
        assert_eq!(AttentionMask::CAUSAL.pairs(10), 55);
    }

    #[test]
    fn positions_count_up_in_every_sequence() {
        check_positions(&[0, 1, 2, 0, 0, 1, 0, 1, 2, 3, 4, 0], 6).unwrap();
        check_positions(&[], 6).unwrap();
        for (wrong, at) in [([1, 2, 0, 1], 0), ([0, 2, 0, 1], 1), ([0, 1, 2, 3], 2), ([0, -1, 0, 1], 1)] {
            let text = check_positions(&wrong, 2).unwrap_err().to_string();
            assert_eq!(text, bad_position(wrong[at], at));
        }
    }
}
