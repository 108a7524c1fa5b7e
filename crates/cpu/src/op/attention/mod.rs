//! Causal attention by tiles of queries and chunks of keys with a running softmax: memory grows with T, not T².
//!
//! Scores stand with a row for each key and a column for each query: then the softmax goes down columns, many queries at
//! once, and all but one of the products find their operands as they lie.
//!
//! Forward tasks are (sequence, head, tile of queries). In the backward a task is a head of queries, because every tile of
//! them adds to the gradients of its keys and values: one owner, one order, the same bits. Heads that share keys and values
//! have gradients of their own, added up in the end: one head of keys and values keeps all cores busy too.

mod cached;
mod softmax;

use super::elementwise::{add_in_place, scale_in_place};
use super::{Ctx, Scratch};
use crate::gemm::{Beta, Gemm, LocalScratch, MatMut, MatRef, gemm_local};
use crate::isa::Isa;
use crate::math::dot;
use crate::memory::Span;
pub use cached::attention_cached;
use ironhorse_core::Result;
use ironhorse_core::op::{AttentionBwd, AttentionFwd};
use softmax::{row_stride, softmax_bwd_columns, softmax_columns};
use std::ops::Range;

/// Queries per tile.
const TILE: usize = 64;
/// Keys per chunk: its scores stay in the second-level cache.
const CHUNK: usize = 256;

/// The sizes of one attention, and where a head lies in the packed tensors. A `head` counts the heads of the queries of
/// all sequences; W = (NH + 2·NKV)·HD.
#[derive(Clone, Copy)]
struct Heads {
    seq: usize,
    /// C
    width: usize,
    heads: usize,
    kv_heads: usize,
    head_dim: usize,
    scale: f32,
}

/// What is packed: queries, keys, values.
#[derive(Clone, Copy)]
enum Part {
    Q,
    K,
    V,
}

impl Heads {
    fn new(seq: usize, width: usize, heads: usize, kv_heads: usize) -> Self {
        let head_dim = width / heads;
        Self { seq, width, heads, kv_heads, head_dim, scale: 1.0 / (head_dim as f32).sqrt() }
    }

    fn tiles(&self) -> usize {
        self.seq.div_ceil(TILE)
    }

    /// Positions of a tile.
    fn tile(&self, index: usize) -> Range<usize> {
        index * TILE..self.seq.min((index + 1) * TILE)
    }

    /// The keys that some query of a tile sees, a chunk at a time.
    fn chunks(&self, queries: &Range<usize>) -> impl Iterator<Item = Range<usize>> + use<> {
        let end = queries.end;
        (0..end).step_by(CHUNK).map(move |first| first..end.min(first + CHUNK))
    }

    /// Floats of a chunk of scores, at most.
    fn scores(&self) -> usize {
        CHUNK.min(self.seq) * row_stride(TILE.min(self.seq))
    }

    /// Heads of queries that use the same keys and values.
    fn share(&self) -> usize {
        self.heads / self.kv_heads
    }

    /// Floats of the gradients of a head's keys and values.
    fn kv_len(&self) -> usize {
        2 * self.seq * self.head_dim
    }

    /// The heads of queries that a head of keys and values serves.
    fn group(&self, kv_head: usize) -> Range<usize> {
        kv_head * self.share()..(kv_head + 1) * self.share()
    }

    /// W
    fn packed(&self) -> usize {
        (self.heads + 2 * self.kv_heads) * self.head_dim
    }

    /// First element of (batch, position, head) in (B,T,C).
    fn out_at(&self, head: usize, position: usize) -> usize {
        let (b, h) = (head / self.heads, head % self.heads);
        (b * self.seq + position) * self.width + h * self.head_dim
    }

    /// First element of (batch, position, head) in (B,T,W): of its queries, or of the keys or values it uses.
    fn qkv_at(&self, part: Part, head: usize, position: usize) -> usize {
        let (b, h) = (head / self.heads, head % self.heads);
        let before = match part {
            Part::Q => h,
            Part::K => self.heads + h / self.share(),
            Part::V => self.heads + self.kv_heads + h / self.share(),
        };
        (b * self.seq + position) * self.packed() + before * self.head_dim
    }

    /// The rows of a part from `position` on, as a matrix (positions, HD).
    fn part(&self, qkv: Span<f32>, part: Part, head: usize, position: usize) -> MatRef {
        matrix(qkv, self.qkv_at(part, head, position), self.packed())
    }
}

/// A row-major matrix inside a span.
fn matrix(span: Span<f32>, first: usize, stride: usize) -> MatRef {
    debug_assert!(first < span.len());
    MatRef::row_major(span.ptr().wrapping_add(first).cast_const(), stride)
}

fn writable(m: MatRef) -> MatMut {
    MatMut { ptr: m.ptr.cast_mut(), rs: m.rs }
}

/// Sets the scores of keys that come after their query.
fn hide(s: &mut [f32], stride: usize, queries: &Range<usize>, keys: &Range<usize>, value: f32) {
    let first = keys.start.max(queries.start + 1);
    for key in first..keys.end {
        let row = (key - keys.start) * stride;
        s[row..row + key - queries.start].fill(value);
    }
}

/// A product of tiles; `beta` says whether `c` is added to.
struct Tiles<'a> {
    isa: Isa,
    scratch: &'a mut LocalScratch,
}

impl Tiles<'_> {
    /// c (m,n) = or += a (m,k) · b (k,n)
    ///
    /// # Safety
    /// The three matrices lie in memory that this task may read (a, b) and alone may use (c).
    unsafe fn product(&mut self, [m, n, k]: [usize; 3], a: MatRef, b: MatRef, c: MatMut, beta: Beta) {
        // SAFETY: passed on to the caller.
        unsafe { gemm_local(self.scratch, self.isa, &Gemm::new((m, n, k), a, b, c).beta(beta)) };
    }
}

pub fn attention_fwd(ctx: &mut Ctx<'_>, op: &AttentionFwd) -> Result<()> {
    let (out, lse, qkv) = (ctx.f32(op.out)?, ctx.f32(op.lse)?, ctx.f32(op.qkv)?);
    let [batch, seq, width] = *op.out.shape.dims() else { return Ok(()) };
    let (g, isa) = (Heads::new(seq, width, op.heads, op.kv_heads), ctx.isa);
    ctx.reserve_scratch(g.scores(), g.head_dim.max(TILE));
    let (tiles, scratch) = (g.tiles(), &*ctx.scratch);
    // Long tiles (late queries) first, so that the short ones fill the gaps at the end.
    ctx.chunks(batch * op.heads * tiles, 1, |task, worker| {
        let (head, tile) = (task.start / tiles, tiles - 1 - task.start % tiles);
        // SAFETY: the team runs one task at a time per worker; tasks own disjoint rows of `out` and `lse`, which
        // share no memory with `qkv`.
        unsafe { forward_tile(isa, scratch.get(worker), &g, [out, lse, qkv], [head, tile]) }
    })
}

/// # Safety
/// This task alone uses `scratch` and the rows of `out` and `lse` of this head and tile.
unsafe fn forward_tile(
    isa: Isa,
    scratch: &mut Scratch,
    g: &Heads,
    [out, lse, qkv]: [Span<f32>; 3],
    [head, tile]: [usize; 2],
) {
    let queries = g.tile(tile);
    let rows = queries.len();
    let mut mm = Tiles { isa, scratch: &mut scratch.gemm };
    let (mut max, mut sum) = ([f32::NEG_INFINITY; TILE], [0.0; TILE]);
    let stride = row_stride(rows);
    let o = matrix(out, g.out_at(head, queries.start), g.width);
    let q = g.part(qkv, Part::Q, head, queries.start);
    for keys in g.chunks(&queries) {
        let s = &mut scratch.tiles[..keys.len() * stride];
        let s_out = MatMut { ptr: s.as_mut_ptr(), rs: stride };
        // SAFETY: q and k are only read; the scores are this worker's own.
        unsafe {
            let k = g.part(qkv, Part::K, head, keys.start);
            mm.product([keys.len(), rows, g.head_dim], k, q.transposed(), s_out, Beta::Overwrite);
        }
        hide(s, stride, &queries, &keys, f32::NEG_INFINITY);
        let shrink = softmax_columns(isa, s, stride, g.scale, &mut max, &mut sum);
        if keys.start > 0 {
            for (i, shrink) in shrink[..rows].iter().enumerate() {
                let at = g.out_at(head, queries.start + i);
                // SAFETY: this row of `out` belongs to this task.
                scale_in_place(isa, unsafe { out.get_mut(at..at + g.head_dim) }, *shrink);
            }
        }
        let beta = if keys.start == 0 { Beta::Overwrite } else { Beta::Accumulate };
        // SAFETY: v is only read; these rows of `out` belong to this task.
        unsafe {
            let v = g.part(qkv, Part::V, head, keys.start);
            let p = MatRef::row_major(s.as_ptr(), stride).transposed();
            mm.product([rows, g.head_dim, keys.len()], p, v, writable(o), beta);
        }
    }
    for i in 0..rows {
        let (at, position) = (g.out_at(head, queries.start + i), head * g.seq + queries.start + i);
        // SAFETY: these elements belong to this task.
        unsafe {
            scale_in_place(isa, out.get_mut(at..at + g.head_dim), 1.0 / sum[i]);
            lse.get_mut(position..position + 1)[0] = max[i] + sum[i].ln();
        }
    }
}

pub fn attention_bwd(ctx: &mut Ctx<'_>, op: &AttentionBwd) -> Result<()> {
    let (d_qkv, d_out, qkv) = (ctx.f32(op.d_qkv)?, ctx.f32(op.d_out)?, ctx.f32(op.qkv)?);
    let (out, lse) = (ctx.f32(op.out)?, ctx.f32(op.lse)?);
    let [batch, seq, width] = *op.out.shape.dims() else { return Ok(()) };
    let (g, isa) = (Heads::new(seq, width, op.heads, op.kv_heads), ctx.isa);
    ctx.reserve_scratch(2 * g.scores(), g.head_dim.max(TILE));
    if seq == 0 {
        return Ok(());
    }
    let shared = g.share() > 1;
    let own = ctx.floats(if shared { batch * g.heads * g.kv_len() } else { 0 });
    let scratch = &*ctx.scratch;
    ctx.chunks(batch * g.heads, 1, |task, worker| {
        let head = task.start;
        let d_kv = if shared {
            let first = head * g.kv_len();
            [first, first + g.kv_len() / 2].map(|first| writable(matrix(own, first, g.head_dim)))
        } else {
            [Part::K, Part::V].map(|part| writable(g.part(d_qkv, part, head, 0)))
        };
        // SAFETY: the team runs one task at a time per worker; a task owns its head of queries in `d_qkv` and the keys and
        // values in `d_kv`, which share no memory with anything read.
        unsafe { backward_head(isa, scratch.get(worker), &g, [d_qkv, d_out, qkv, out, lse], (head, d_kv)) }
    })?;
    if !shared {
        return Ok(());
    }
    let (kv_heads, hd) = (g.kv_heads, g.head_dim);
    ctx.rows(batch * kv_heads * seq, 2 * g.share() * hd, |rows, _| {
        for row in rows {
            let (kv_head, t) = (row / seq, row % seq);
            let first = kv_head / kv_heads * g.heads + kv_head % kv_heads * g.share();
            for (half, part) in [Part::K, Part::V].into_iter().enumerate() {
                let to = g.qkv_at(part, first, t);
                // SAFETY: this row of `d_qkv` belongs to this task; the heads' own gradients are only read.
                let to = unsafe { d_qkv.get_mut(to..to + hd) };
                for head in first..first + g.share() {
                    let from = head * g.kv_len() + (half * seq + t) * hd;
                    // SAFETY: as above.
                    let from = unsafe { own.get(from..from + hd) };
                    if head == first { to.copy_from_slice(from) } else { add_in_place(isa, to, from) }
                }
            }
        }
    })
}

/// Writes a head's gradient of queries, and of the keys and values that it uses.
///
/// # Safety
/// This task alone uses `scratch`, this head of the queries in `d_qkv`, and `d_kv`, a row of HD for each position.
unsafe fn backward_head(
    isa: Isa,
    scratch: &mut Scratch,
    g: &Heads,
    slots: [Span<f32>; 5],
    (head, d_kv): (usize, [MatMut; 2]),
) {
    let [d_qkv, d_out, qkv, out, lse] = slots;
    let (p_scores, dp_scores) = scratch.tiles.split_at_mut(g.scores());
    let mut mm = Tiles { isa, scratch: &mut scratch.gemm };
    let hd = g.head_dim;
    for row in d_kv.into_iter().flat_map(|d| (0..g.seq).map(move |t| d.ptr.wrapping_add(t * d.rs))) {
        // SAFETY: a row of the gradients that belong to this task.
        unsafe { std::slice::from_raw_parts_mut(row, hd) }.fill(0.0);
    }
    for tile in 0..g.tiles() {
        let queries = g.tile(tile);
        let rows = queries.len();
        let stride = row_stride(rows);
        let (mut delta, mut row_lse) = ([0.0; TILE], [0.0; TILE]);
        for (i, delta) in delta[..rows].iter_mut().enumerate() {
            let at = g.out_at(head, queries.start + i);
            // SAFETY: only read while the op runs.
            *delta = unsafe { dot(isa, d_out.get(at..at + hd), out.get(at..at + hd)) };
        }
        let positions = head * g.seq + queries.start..head * g.seq + queries.end;
        // SAFETY: only read while the op runs.
        row_lse[..rows].copy_from_slice(unsafe { lse.get(positions) });
        let d_o = matrix(d_out, g.out_at(head, queries.start), g.width);
        let q = g.part(qkv, Part::Q, head, queries.start);
        let d_q = writable(g.part(d_qkv, Part::Q, head, queries.start));
        for keys in g.chunks(&queries) {
            let cols = keys.len();
            let [k, v] = [Part::K, Part::V].map(|part| g.part(qkv, part, head, keys.start));
            let [d_k, d_v] = d_kv.map(|d| MatMut { ptr: d.ptr.wrapping_add(keys.start * d.rs), ..d });
            let (p, dp) = (&mut p_scores[..cols * stride], &mut dp_scores[..cols * stride]);
            let [p_out, dp_out] = [&mut *p, &mut *dp].map(|t| MatMut { ptr: t.as_mut_ptr(), rs: stride });
            // SAFETY: inputs are only read; the scores are this worker's own.
            unsafe {
                mm.product([cols, rows, hd], k, q.transposed(), p_out, Beta::Overwrite);
                mm.product([cols, rows, hd], v, d_o.transposed(), dp_out, Beta::Overwrite);
            }
            softmax_bwd_columns(isa, p, dp, stride, g.scale, &row_lse, &delta);
            hide(p, stride, &queries, &keys, 0.0);
            hide(dp, stride, &queries, &keys, 0.0);
            if queries.start == 0 {
                // The first position sees one key: its softmax is the constant 1, its gradient exactly 0. Rounding
                // noise in its place would be blown up by AdamW.
                dp[0] = 0.0;
            }
            let [p, ds] = [&*p, &*dp].map(|t| MatRef::row_major(t.as_ptr(), stride));
            let beta = if keys.start == 0 { Beta::Overwrite } else { Beta::Accumulate };
            // SAFETY: these gradients belong to this task.
            unsafe {
                mm.product([rows, hd, cols], ds.transposed(), k, d_q, beta);
                mm.product([cols, hd, rows], ds, q, d_k, Beta::Accumulate);
                mm.product([cols, hd, rows], p, d_o, d_v, Beta::Accumulate);
            }
        }
    }
}
