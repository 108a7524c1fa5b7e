//! Attention by tiles of queries and chunks of keys with a running softmax: memory grows with the sequence, not its square.
//!
//! Scores have a row for each key and a column for each query: the softmax then goes down columns, many queries at once, and
//! all but one of the products find their operands as they are in memory.
//!
//! Forward tasks are (sequence, head, tile of queries). In the backward a task is a head of queries, because every tile of
//! queries adds to the gradients of its keys and values: one owner, one order, the same bits. Where there are fewer heads than
//! threads, a task is a chunk of keys of a head. Heads that share keys and values have gradients of their own, added up in the
//! end.
//!
//! Elements that are not computed in their own type are widened into scratch memory, a tile at a time.

mod backward;
mod dropout;
mod few;
mod kept;
mod product;
mod reach;
mod small;
mod softmax;
#[cfg(target_arch = "x86_64")]
mod softmax_x86;
mod split;

pub use backward::Backward;
pub use dropout::Drops;
pub use few::{FEW, QueryScratch, one_query};
pub use kept::Kept;
pub use reach::Reach;

use super::elementwise::{narrow, scale_by, widen};
use crate::buffer::Buffer;
use crate::element::{Elem, Real};
use crate::gemm::{Beta, HeadKernels, LocalScratch, QUERIES, are_small, head_kernels};
use crate::isa::Isa;
use crate::memory::Span;
use ironhorse_core::Operands;
use ironhorse_core::eager::{AttentionShape, Strides};
use product::{Mat, product};
use softmax::{natural, row_stride, softmax_columns};
use std::ops::Range;

/// Queries per tile, at most.
pub const TILE: usize = 64;
/// Keys per chunk, at most: its scores stay in the second-level cache.
const CHUNK: usize = 256;
/// Keys per chunk of small heads, whose scores stay in the first-level cache beside everything else.
const SMALL_CHUNK: usize = 128;
/// Tiles of queries that are as many as the keys of a chunk.
const TILES_OF_CHUNK: usize = CHUNK / TILE;
const _: () = assert!(TILES_OF_CHUNK * QUERIES == SMALL_CHUNK);

/// The sizes of one attention, and what its products round their operands to where the tile unit multiplies them. A `head` counts the heads
/// of the queries of all sequences.
#[derive(Clone, Copy)]
pub struct Heads(pub AttentionShape, pub Operands);

impl Heads {
    fn are_small(&self) -> bool {
        are_small(self.0.head_dim, self.1)
    }

    /// Queries of a tile. It depends on the size of a head, on what is rounded and on the machine alone, and so does [`Heads::chunk_len`]:
    /// they decide the order of sums.
    fn tile_len(&self) -> usize {
        if self.are_small() { QUERIES } else { TILE }
    }

    /// Keys of a chunk.
    fn chunk_len(&self) -> usize {
        if self.are_small() { SMALL_CHUNK } else { CHUNK }
    }

    /// Tiles of queries.
    pub fn tiles(&self) -> usize {
        self.0.q_len.div_ceil(self.tile_len())
    }

    /// Positions of a tile.
    fn tile(&self, index: usize) -> Range<usize> {
        index * self.tile_len()..self.0.q_len.min((index + 1) * self.tile_len())
    }

    /// How many keys the query at `position` sees.
    fn sees(&self, position: usize) -> usize {
        let a = &self.0;
        if a.causal { (a.kv_len + position + 1).saturating_sub(a.q_len) } else { a.kv_len }
    }

    /// Elements of a chunk of scores, at most.
    fn scores(&self) -> usize {
        self.chunk_len().min(self.0.kv_len) * row_stride(self.tile_len().min(self.0.q_len))
    }

    /// Heads of queries that use the same keys and values.
    pub fn share(&self) -> usize {
        self.0.heads / self.0.kv_heads.max(1)
    }

    /// Elements of the gradients of a head's keys and values.
    pub fn kv_elements(&self) -> usize {
        2 * self.0.kv_len * self.0.head_dim
    }

    /// First element of (batch, head of queries, position).
    pub fn query(&self, strides: Strides, head: usize, position: usize) -> usize {
        let (b, h) = (head / self.0.heads, head % self.0.heads);
        b * strides.batch + h * strides.head + position * strides.position
    }

    /// First element of (batch, head of keys that this head of queries uses, position).
    pub fn key(&self, strides: Strides, head: usize, position: usize) -> usize {
        let (b, h) = (head / self.0.heads, head % self.0.heads / self.share());
        b * strides.batch + h * strides.head + position * strides.position
    }

    /// The kernels for heads of this size, where this machine has some.
    fn kernels<A: Real>(&self, isa: Isa) -> Option<&'static HeadKernels> {
        head_kernels(isa, self.0.head_dim, self.1).filter(|_| A::IS_F32)
    }

    /// The factor of the scores inside the softmax. The softmax takes its maximum before it scales, which is right for a
    /// positive factor only: any other scale is applied to the scores before.
    fn factor<A: Real>(&self, isa: Isa, scores: &mut [A]) -> A {
        let scale = A::of(self.0.scale);
        if scale > A::ZERO {
            return scale;
        }
        scale_by(isa, scores, scale);
        A::ONE
    }
}

/// A worker's own memory.
#[derive(Default)]
pub struct TileScratch<A> {
    gemm: LocalScratch,
    /// Scores.
    tiles: Vec<A>,
    /// Everything, where heads are small.
    small: Buffer,
    /// Widened rows; empty where elements are computed in their own type.
    wide: [Vec<A>; 5],
}

impl<A: Real> TileScratch<A> {
    /// The memory for a forward or backward with these sizes.
    pub fn new<T: Elem<Acc = A>>(isa: Isa, shape: &Heads) -> Self {
        let hd = if T::IS_ACC { 0 } else { shape.0.head_dim };
        let mut scratch = Self {
            wide: [TILE, CHUNK, CHUNK, TILE, TILE].map(|rows| vec![A::ZERO; rows * hd]),
            ..Self::default()
        };
        scratch.reserve(isa, shape);
        scratch
    }

    /// Makes room for a forward or backward with these sizes, of elements that are computed in their own type.
    pub fn reserve(&mut self, isa: Isa, shape: &Heads) {
        if let Some(kernels) = shape.kernels::<A>(isa) {
            return self.small.reserve(small::room(kernels));
        }
        if self.tiles.len() < 2 * shape.scores() {
            self.tiles.resize(2 * shape.scores(), A::ZERO);
        }
        let side = shape.0.head_dim.max(TILE);
        self.gemm.reserve(side, side);
    }
}

/// HeadRows of `hd` elements in memory, `stride` apart.
#[derive(Clone, Copy)]
struct HeadRows<T> {
    at: Span<T>,
    first: usize,
    stride: usize,
    count: usize,
    hd: usize,
}

impl<T: Elem> HeadRows<T> {
    fn row(&self, i: usize) -> Span<T> {
        let first = self.first + i * self.stride;
        self.at.part(first..first + self.hd)
    }

    /// The matrix to compute with: the rows in place, or `room`, which [`HeadRows::load`] and [`HeadRows::store`] use.
    fn matrix(&self, room: &mut [T::Acc]) -> Mat<T::Acc> {
        if T::IS_ACC {
            Mat { ptr: self.at.ptr().wrapping_add(self.first).cast(), rs: self.stride, cs: 1 }
        } else {
            Mat::new(room, self.hd)
        }
    }

    /// Widens the rows into `room` unless they can be used in place.
    ///
    /// # Safety
    /// Nobody writes the rows.
    unsafe fn load(&self, isa: Isa, room: &mut [T::Acc]) -> Mat<T::Acc> {
        if !T::IS_ACC {
            for (i, to) in room.chunks_exact_mut(self.hd).take(self.count).enumerate() {
                // SAFETY: guaranteed by the caller.
                widen(isa, to, unsafe { self.row(i).all() });
            }
        }
        self.matrix(room)
    }

    /// Rounds `room` into the rows unless they were used in place.
    ///
    /// # Safety
    /// The caller alone uses the rows.
    unsafe fn store(&self, isa: Isa, room: &[T::Acc]) {
        if !T::IS_ACC {
            for (i, from) in room.chunks_exact(self.hd).take(self.count).enumerate() {
                // SAFETY: guaranteed by the caller.
                narrow(isa, unsafe { self.row(i).all_mut() }, from);
            }
        }
    }
}

/// Row `i` of a matrix whose columns are side by side.
///
/// # Safety
/// It has `len` elements that the caller alone uses.
unsafe fn row_mut<'a, A>(m: Mat<A>, i: usize, len: usize) -> &'a mut [A] {
    // SAFETY: guaranteed by the caller.
    unsafe { std::slice::from_raw_parts_mut(m.ptr.wrapping_add(i * m.rs), len) }
}

/// The windows of a forward.
#[derive(Clone, Copy)]
pub struct Forward<T: Elem> {
    pub shape: Heads,
    pub q: Span<T>,
    pub k: Span<T>,
    pub v: Span<T>,
    pub out: Span<T>,
    /// (batch, heads, q_len), optional
    pub lse: Span<T::Acc>,
    /// Dropout of the probabilities, where there is some.
    pub drops: Option<Drops>,
    /// Documents and a window, where there are any.
    pub reach: Reach,
}

impl<T: Elem> Forward<T> {
    fn keys(&self, [at, head]: [usize; 2], count: usize) -> [HeadRows<T>; 2] {
        let (s, a) = (&self.shape, &self.shape.0);
        [(self.k, a.k), (self.v, a.v)].map(|(x, strides)| HeadRows {
            at: x,
            first: s.key(strides, head, at),
            stride: strides.position,
            count,
            hd: a.head_dim,
        })
    }

    /// The rows of queries, or of what has their layout.
    fn queries(&self, at: Span<T>, strides: Strides, head: usize, queries: &Range<usize>) -> HeadRows<T> {
        let first = self.shape.query(strides, head, queries.start);
        HeadRows { at, first, stride: strides.position, count: queries.len(), hd: self.shape.0.head_dim }
    }

    /// Task `number` of `batch · heads · tiles`: computes the tiles that begin in one tile of a sequence without documents. Late
    /// queries, which see more keys, come first, so that short tasks fill the gaps at the end.
    ///
    /// # Safety
    /// The caller may read q, k and v, and alone uses `scratch` and the rows of `out` and `lse` of this head and tile.
    pub unsafe fn tile(&self, isa: Isa, scratch: &mut TileScratch<T::Acc>, number: usize) {
        let tiles = self.shape.tiles();
        let (head, block) = (number / tiles, tiles - 1 - number % tiles);
        for queries in self.tiles(head, block) {
            // SAFETY: guaranteed by the caller.
            unsafe { self.queries_of_one(isa, scratch, head, queries) };
        }
    }

    /// Attention of a tile of queries of one document.
    ///
    /// # Safety
    /// As [`Forward::tile`].
    unsafe fn queries_of_one(
        &self,
        isa: Isa,
        scratch: &mut TileScratch<T::Acc>,
        head: usize,
        queries: Range<usize>,
    ) {
        let (s, a, hd) = (&self.shape, &self.shape.0, self.shape.0.head_dim);
        if let Some(kernels) = s.kernels::<T::Acc>(isa) {
            // SAFETY: guaranteed by the caller.
            return unsafe { self.queries_of_small(isa, kernels, scratch, head, queries) };
        }
        let (rows, stride) = (queries.len(), row_stride(queries.len()));
        let (mut max, mut sum) = ([T::Acc::NEG_INFINITY; TILE], [T::Acc::ZERO; TILE]);
        let [q_room, k_room, v_room, o_room, _] = &mut scratch.wide;
        let out = self.queries(self.out, a.out, head, &queries);
        let o = out.matrix(o_room);
        // SAFETY: guaranteed by the caller.
        let q = unsafe { self.queries(self.q, a.q, head, &queries).load(isa, q_room) };
        for (number, keys) in self.chunks(head, &queries).enumerate() {
            let scores = &mut scratch.tiles[..keys.len() * stride];
            let beta = if number == 0 { Beta::Overwrite } else { Beta::Accumulate };
            // SAFETY: the inputs are only read; scores, widened rows and this part of `out` belong to this task.
            unsafe {
                let [k, v] = self.keys([keys.start, head], keys.len());
                let (k, v) = (k.load(isa, k_room), v.load(isa, v_room));
                let (mm, size) = (&mut scratch.gemm, [keys.len(), rows, hd]);
                let to = Mat::new(scores, stride);
                product((mm, isa), size, [k, q.transposed()], to, Beta::Overwrite);
                let factor = s.factor(isa, scores);
                self.hide(scores, &queries, &keys, T::Acc::NEG_INFINITY);
                let shrink = softmax_columns(isa, scores, stride, factor, &mut max, &mut sum);
                if number > 0 {
                    (0..rows).for_each(|i| scale_by(isa, row_mut(o, i, hd), shrink[i]));
                }
                if let Some(drops) = self.drops {
                    let first = head * a.q_len + queries.start;
                    drops.apply(isa, (scores, stride), first, [&queries, &keys]);
                }
                let p = Mat::new(scores, stride).transposed();
                product((mm, isa), [rows, hd, keys.len()], [p, v], o, beta);
            }
        }
        // SAFETY: these rows and elements belong to this task.
        unsafe {
            (0..rows).for_each(|i| scale_by(isa, row_mut(o, i, hd), T::Acc::ONE / sum[i]));
            self.finish(head, &queries, o, [&max, &sum]);
            out.store(isa, o_room);
        }
    }

    /// Writes `lse`, and zeros for queries that see nothing. The maxima are exponents of 2.
    ///
    /// # Safety
    /// The caller alone uses the rows of `out` and the elements of `lse` of these queries.
    unsafe fn finish(
        &self,
        head: usize,
        queries: &Range<usize>,
        out: Mat<T::Acc>,
        [max, sum]: [&[T::Acc; TILE]; 2],
    ) {
        let (s, a) = (&self.shape, &self.shape.0);
        for (i, position) in queries.clone().enumerate() {
            let sees = s.sees(position) > 0;
            // SAFETY: guaranteed by the caller.
            unsafe {
                if !sees {
                    row_mut(out, i, a.head_dim).fill(T::Acc::ZERO);
                }
                let lse = if sees { natural(max[i]) + sum[i].ln() } else { T::Acc::NEG_INFINITY };
                self.lse.set(head * a.q_len + position, lse);
            }
        }
    }
}
