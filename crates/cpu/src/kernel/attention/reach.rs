//! Which keys queries reach, and the tiles of queries that follow from it.
//!
//! No tile has queries of two documents: a document begins a new tile, and its keys are the first of a chunk. So the bits of a
//! document's results do not depend on what else its sequence holds, and no work is done for keys of other documents.

use super::{Forward, Heads, row_stride};
use crate::element::{Elem, Real};
use crate::memory::Span;
use ironhorse_core::op::AttentionMask;
use std::ops::Range;

/// What limits the keys of a query, besides those that the shape lets it see.
#[derive(Clone, Copy)]
pub struct Reach {
    /// (batch, q_len), the position of each query in its document; only where there are as many keys as queries. Checked by
    /// [`check_positions`](ironhorse_core::op::check_positions).
    positions: Option<Span<i32>>,
    /// How many of the keys that it sees it reaches: the last ones.
    window: usize,
}

impl Reach {
    /// A query reaches all keys that the shape lets it see.
    pub const ALL: Self = Self { positions: None, window: usize::MAX };

    /// The reach of a mask with these positions.
    ///
    /// # Safety
    /// The positions are checked, and nobody writes them as long as this is used.
    pub unsafe fn new(positions: Option<Span<i32>>, mask: &AttentionMask) -> Self {
        Self { positions, window: mask.window.unwrap_or(usize::MAX) }
    }
}

impl<T: Elem> Forward<T> {
    /// The keys that a query reaches.
    pub(super) fn reached(&self, head: usize, position: usize) -> Range<usize> {
        let end = self.shape.sees(position);
        let most = self.reach.positions.map_or(end, |_| self.place(head, position) + 1);
        end - most.min(self.reach.window)..end
    }

    /// The position of a query in its document.
    fn place(&self, head: usize, position: usize) -> usize {
        let a = &self.shape.0;
        let at = head / a.heads * a.q_len + position;
        // SAFETY: guaranteed to `Reach::new`.
        self.reach.positions.map_or(position, |all| unsafe { all.get(at..at + 1) }[0] as usize)
    }

    /// The tiles of queries that begin among the positions of tile number `block`, in order: one without documents. A tile
    /// begins at every multiple of [`Heads::tile_len`] of a document and ends before the next or with the document.
    pub(super) fn tiles(&self, head: usize, block: usize) -> impl Iterator<Item = Range<usize>> + '_ {
        let len = self.shape.tile_len();
        // Without documents these searches would look at every position for nothing.
        let (positions, most) = match self.reach.positions {
            Some(_) => (true, len),
            None => (false, 1),
        };
        let begins = move |&t: &usize| self.place(head, t).is_multiple_of(len);
        self.shape.tile(block).take(most).filter(begins).map(move |first| {
            let end = self.shape.0.q_len.min(first + len);
            let next = positions.then(|| (first + 1..end).find(|&t| self.place(head, t) == 0));
            first..next.flatten().unwrap_or(end)
        })
    }

    /// The keys that some query of a tile reaches, a chunk at a time. The first chunk has keys of each query that reaches any:
    /// a tile has fewer queries than a chunk has keys.
    pub(super) fn chunks(
        &self,
        head: usize,
        queries: &Range<usize>,
    ) -> impl Iterator<Item = Range<usize>> + use<T> {
        let (first, end) = (self.reached(head, queries.start).start, self.shape.sees(queries.end - 1));
        let len = self.shape.chunk_len();
        (first..end).step_by(len).map(move |first| first..end.min(first + len))
    }

    /// Sets the scores of keys that their query does not reach.
    pub(super) fn hide(&self, s: &mut [T::Acc], queries: &Range<usize>, keys: &Range<usize>, value: T::Acc) {
        self.shape.hide_later(s, queries, keys, value);
        if self.reach.window < self.shape.0.kv_len {
            self.shape.hide_earlier(s, queries, keys, (self.reach.window, value));
        }
    }
}

impl Heads {
    /// Sets the scores of keys that come after what their query sees.
    fn hide_later<A: Real>(&self, s: &mut [A], queries: &Range<usize>, keys: &Range<usize>, value: A) {
        let (a, stride) = (&self.0, row_stride(queries.len()));
        if !a.causal {
            return;
        }
        // The first query sees the keys before this one, and so do all after it.
        let seen = self.sees(queries.start).saturating_sub(keys.start).min(keys.len());
        for (key, row) in (keys.start + seen..keys.end).zip(s.chunks_exact_mut(stride).skip(seen)) {
            // Queries before this one do not see the key.
            let first = (key + a.q_len).saturating_sub(a.kv_len + queries.start);
            row[..first.min(queries.len())].fill(value);
        }
    }

    /// Sets the scores of keys before the last `window` that their query sees, where query and key of a position have the
    /// same number.
    fn hide_earlier<A: Real>(
        &self,
        s: &mut [A],
        queries: &Range<usize>,
        keys: &Range<usize>,
        (window, value): (usize, A),
    ) {
        for (key, row) in keys.clone().zip(s.chunks_exact_mut(row_stride(queries.len()))) {
            // This query and those after it do not reach the key.
            let first = (key + window).saturating_sub(queries.start);
            row[first.min(queries.len())..queries.len()].fill(value);
        }
    }
}
