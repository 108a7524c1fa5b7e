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

/// Refuses positions (B,T) of tokens that continue sequences in a cache: each is below `context`, or -1 for a token that is
/// not used.
pub fn check_at_positions(positions: &[i32], context: usize) -> Result<()> {
    let wrong =
        |&(_, &position): &(usize, &i32)| position < -1 || position >= 0 && position as usize >= context;
    match positions.iter().enumerate().find(wrong) {
        Some((index, &position)) => Err(Error::Input(bad_at_position(position, index, context))),
        None => Ok(()),
    }
}

/// The error of a position that a cache does not have; `index` counts the tokens of the batch.
pub fn bad_at_position(position: i32, index: usize, context: usize) -> String {
    format!("position {position} at index {index} is beyond the context of {context}")
}

/// Refuses tokens that do not go by sequence of the cache and then by position, each once, those that are not used last: two
/// tokens in one place of the cache would race.
pub fn check_cache_rows(rows: &[i32], positions: &[i32], [sequences, context]: [usize; 2]) -> Result<()> {
    check_at_positions(positions, context)?;
    let mut before = Some((-1, -1));
    for (index, (&row, &position)) in rows.iter().zip(positions).enumerate() {
        if position < 0 {
            before = None;
            continue;
        }
        if row < 0 || row as usize >= sequences || before.is_none_or(|before| before >= (row, position)) {
            return Err(Error::Input(bad_cache_row(row, index, sequences)));
        }
        before = Some((row, position));
    }
    Ok(())
}

/// The error of a token whose sequence the cache does not have, or that is out of order.
pub fn bad_cache_row(row: i32, index: usize, sequences: usize) -> String {
    format!(
        "row {row} at index {index} is not one of the {sequences} sequences of the cache, or not in order of rows and positions"
    )
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
    fn tokens_of_a_cache_are_in_order_and_inside() {
        let check = |rows: &[i32], positions: &[i32]| check_cache_rows(rows, positions, [3, 5]);
        check(&[0, 0, 2, 2, 9, 0], &[3, 4, 0, 1, -1, -1]).unwrap();
        check(&[], &[]).unwrap();
        let text = |rows: &[i32], positions: &[i32]| check(rows, positions).unwrap_err().to_string();
        for (rows, positions, at) in [
            ([0, 0, 1], [3, 3, 0], 1), // twice in one place
            ([0, 1, 0], [3, 3, 4], 2),
            ([0, 3, 4], [3, 3, 4], 1),
            ([-1, 0, 1], [3, 3, 4], 0),
            ([0, 0, 1], [3, -1, 4], 2), // after one that is not used
        ] {
            assert_eq!(text(&rows, &positions), bad_cache_row(rows[at], at, 3));
        }
        for wrong in [5, -2, i32::MIN, i32::MAX] {
            assert_eq!(text(&[0, 1], &[0, wrong]), bad_at_position(wrong, 1, 5));
        }
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
