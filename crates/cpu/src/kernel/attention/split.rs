//! The backward of fewer heads than threads: a task is a chunk of keys of a head.
//!
//! Chunks own their rows of `d_k` and `d_v`, to which tiles of queries are added in the same order as in
//! [`Backward::head`]. What a chunk adds to `d_q` is kept by itself and added to that of the chunks before it once all are
//! done: the same sums in the same order, so the bits are those of [`Backward::head`].

use super::backward::Backward;
use super::product::Mat;
use super::{TILES_OF_CHUNK, TileScratch};
use crate::element::{Elem, Real};
use crate::isa::Isa;
use crate::kernel::elementwise::{add_to, narrow};
use crate::memory::Span;
use crate::team::{Done, PerWorker, Team};
use ironhorse_core::Operands;
use std::ops::Range;

/// Elements that all chunks together may keep of `d_q`, unless [`LEAST_TILES`] have more: queries take turns to stay below. Few
/// in tests, so that they take turns there.
const KEPT: usize = if cfg!(test) { 1 << 12 } else { 1 << 22 };
/// Tiles of queries in a turn at least: as many queries as a chunk has keys, so that memory grows with the sequence, not with
/// its square.
const LEAST_TILES: usize = TILES_OF_CHUNK;

impl<T: Elem> Backward<T> {
    /// The gradients of all heads, before [`Backward::gather`].
    ///
    /// # Safety
    /// The caller may read the inputs and alone uses the gradients and `own` ([`Backward::own_elements`]); `scratch` is of
    /// this team and not in use.
    pub unsafe fn heads(
        &self,
        (team, isa): (&Team, Isa),
        scratch: &PerWorker<TileScratch<T::Acc>>,
        own: Span<T::Acc>,
    ) -> Done {
        let (s, a) = (&self.from.shape, &self.from.shape.0);
        // On tiles sums are not made apart from those before them, so these would have other bits.
        debug_assert!(s.1 != Operands::Bf16, "chunks of keys are added up in f32 only");
        let (heads, chunks, tile) = (a.batch * a.heads, a.kv_len.div_ceil(s.chunk_len()), s.tile_len());
        if heads >= team.threads() || chunks < 2 {
            return team.chunks(heads, 1, |task, worker| {
                // SAFETY: the team runs one task at a time per worker; tasks own disjoint heads of what is written.
                unsafe { self.head(isa, scratch.get(worker), own, task.start) }
            });
        }
        let all = s.tiles() * tile * a.head_dim * heads * chunks;
        let turn = s.tiles().div_ceil(all.div_ceil(KEPT).max(1)).max(LEAST_TILES.min(s.tiles()));
        let mut kept = vec![T::Acc::ZERO; if self.d_q.is_some() { all / s.tiles().max(1) * turn } else { 0 }];
        let turns = Turns { call: self, kept: Span::of_slice(&mut kept), rows: turn * tile, chunks };
        for first in (0..s.tiles().max(1)).step_by(turn.max(1)) {
            let tiles = first..s.tiles().min(first + turn);
            team.chunks(heads * chunks, 1, |task, worker| {
                let at = [task.start / chunks, task.start % chunks];
                // SAFETY: as above, with chunks of keys.
                unsafe { turns.chunk((isa, scratch.get(worker)), own, at, &tiles) }
            })?;
            if self.d_q.is_some() {
                // SAFETY: all chunks are done; tasks own disjoint tiles of `d_q` and of what was kept for them.
                team.chunks(heads * tiles.len(), 1, |task, _| unsafe {
                    turns.add_up(isa, task.start / tiles.len(), &tiles, task.start % tiles.len());
                })?;
            }
        }
        Ok(())
    }
}

/// What the chunks of keys keep of `d_q` in a turn: (heads, chunks, rows, head_dim).
struct Turns<'a, T: Elem> {
    call: &'a Backward<T>,
    kept: Span<T::Acc>,
    rows: usize,
    chunks: usize,
}

impl<T: Elem> Turns<'_, T> {
    /// The index in `kept` of a chunk's part of `d_q`, from query `position` of the turn on.
    fn kept_at(&self, [head, chunk]: [usize; 2], position: usize) -> usize {
        ((head * self.chunks + chunk) * self.rows + position) * self.call.from.shape.0.head_dim
    }

    /// The gradients of a chunk of keys for the queries of a turn.
    ///
    /// # Safety
    /// As [`Backward::heads`], for the rows of this chunk.
    unsafe fn chunk(
        &self,
        (isa, scratch): (Isa, &mut TileScratch<T::Acc>),
        own: Span<T::Acc>,
        [head, chunk]: [usize; 2],
        tiles: &Range<usize>,
    ) {
        let (call, s) = (self.call, &self.call.from.shape);
        let d_kv = call.keys_and_values(own, head);
        let first = chunk * s.chunk_len();
        if tiles.start == 0 {
            // SAFETY: guaranteed by the caller.
            unsafe { call.clear(d_kv, first..s.0.kv_len.min(first + s.chunk_len())) };
        }
        for tile in tiles.clone() {
            let queries = s.tile(tile);
            let Some(keys) = call.from.chunks(head, &queries).nth(chunk) else { continue };
            let d_q = call.d_q.is_some().then(|| {
                let at = self.kept_at([head, chunk], (tile - tiles.start) * s.tile_len());
                Mat { ptr: self.kept.ptr().wrapping_add(at), rs: s.0.head_dim, cs: 1 }
            });
            // SAFETY: guaranteed by the caller.
            unsafe {
                call.tile((isa, &mut *scratch), head, &queries, [keys].into_iter(), [d_q, d_kv[0], d_kv[1]])
            };
        }
    }

    /// Adds up what the chunks kept for tile `index` of the turn, and writes it to `d_q`.
    ///
    /// # Safety
    /// All chunks of the turn are done; the caller alone uses these rows.
    unsafe fn add_up(&self, isa: Isa, head: usize, tiles: &Range<usize>, index: usize) {
        let (call, s, hd) = (self.call, &self.call.from.shape, self.call.from.shape.0.head_dim);
        let queries = s.tile(tiles.start + index);
        let to = call.from.queries(call.d_q, s.0.q, head, &queries);
        let chunks = call.from.chunks(head, &queries).count();
        for i in 0..queries.len() {
            let part = |chunk: usize| {
                let at = self.kept_at([head, chunk], index * s.tile_len() + i);
                self.kept.part(at..at + hd)
            };
            // SAFETY: guaranteed by the caller; no slice of a chunk's part lives while another of it is made.
            unsafe {
                let sum = part(0).all_mut();
                if chunks == 0 {
                    sum.fill(T::Acc::ZERO);
                }
                (1..chunks).for_each(|chunk| add_to(isa, sum, part(chunk).all()));
                narrow(isa, to.row(i).all_mut(), sum);
            }
        }
    }
}
