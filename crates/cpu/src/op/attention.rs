//! Causal attention by tiles of queries and keys with a running softmax: memory grows with T, not T².
//!
//! Forward tasks are (sequence, head, tile of queries). In the backward a task owns a head of keys and values with all
//! heads of queries it serves, because every tile of them adds to its gradients: one owner, one order, the same bits.

use super::elementwise::scale_in_place;
use super::{Ctx, Scratch};
use crate::gemm::{Beta, Gemm, LocalScratch, MatMut, MatRef, gemm_local};
use crate::isa::Isa;
use crate::math::{LANES, dot, exp_flush, fma, max_inline, sum_inline};
use crate::memory::Span;
use crate::multiversion;
use ironhorse_core::op::{AttentionBwd, AttentionCached, AttentionFwd};
use ironhorse_core::{Error, Result};

/// Queries and keys per tile.
const TILE: usize = 64;

/// Floats from one row of a tile of scores to the next: whole vectors, so that no row has a rest to go through one by one.
fn row_stride(keys: usize) -> usize {
    keys.next_multiple_of(LANES)
}

multiversion! {
    /// s = exp(s·scale - max) with the running maximum, 0 from `seen` on; returns (new maximum, sum).
    fn softmax_row<const FMA: bool>(s: &mut [f32], seen: usize, scale: f32, max_before: f32) -> (f32, f32) {
        s[seen..].fill(f32::NEG_INFINITY);
        let max = max_before.max(max_inline(s) * scale);
        for s in s.iter_mut() {
            *s = exp_flush::<FMA>(fma::<FMA>(*s, scale, -max));
        }
        (max, sum_inline(s))
    }

    /// s = exp(s·scale - lse), 0 from `seen` on.
    fn probabilities<const FMA: bool>(s: &mut [f32], seen: usize, scale: f32, lse: f32) {
        s[seen..].fill(f32::NEG_INFINITY);
        for s in s.iter_mut() {
            *s = exp_flush::<FMA>(fma::<FMA>(*s, scale, -lse));
        }
    }

    /// dp = p·(dp - delta)·scale
    fn softmax_bwd_row<const FMA: bool>(dp: &mut [f32], p: &[f32], delta: f32, scale: f32) {
        for (dp, p) in dp.iter_mut().zip(p) {
            *dp = p * (*dp - delta) * scale;
        }
    }

    /// out += factor·x
    fn axpy<const FMA: bool>(out: &mut [f32], factor: f32, x: &[f32]) {
        for (out, x) in out.iter_mut().zip(x) {
            *out = fma::<FMA>(factor, *x, *out);
        }
    }
}

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
    fn tile(&self, index: usize) -> std::ops::Range<usize> {
        index * TILE..self.seq.min((index + 1) * TILE)
    }

    /// Heads of queries that use the same keys and values.
    fn share(&self) -> usize {
        self.heads / self.kv_heads
    }

    /// The heads of queries that a head of keys and values serves.
    fn group(&self, kv_head: usize) -> std::ops::Range<usize> {
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

/// Columns of row `i` of the query tile that it may see in the key tile.
fn visible(queries: &std::ops::Range<usize>, keys: &std::ops::Range<usize>, i: usize) -> usize {
    (queries.start + i + 1).saturating_sub(keys.start).min(keys.len())
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
    ctx.reserve_scratch(TILE * TILE, g.head_dim.max(TILE));
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
    let (mut max, mut sum) = ([f32::NEG_INFINITY; TILE], [0.0_f32; TILE]);
    let o = matrix(out, g.out_at(head, queries.start), g.width);
    for key_tile in 0..=tile {
        let keys = g.tile(key_tile);
        let stride = row_stride(keys.len());
        let s = &mut scratch.tiles[..rows * stride];
        let s_out = MatMut { ptr: s.as_mut_ptr(), rs: stride };
        // SAFETY: q and k are only read; the score tile is this worker's own.
        unsafe {
            let q = g.part(qkv, Part::Q, head, queries.start);
            let k = g.part(qkv, Part::K, head, keys.start);
            mm.product([rows, keys.len(), g.head_dim], q, k.transposed(), s_out, Beta::Overwrite);
        }
        for (i, row) in s.chunks_exact_mut(stride).enumerate() {
            let (new_max, row_sum) = softmax_row(isa, row, visible(&queries, &keys, i), g.scale, max[i]);
            let shrink = if key_tile == 0 { 0.0 } else { (max[i] - new_max).exp() };
            sum[i] = sum[i] * shrink + row_sum;
            max[i] = new_max;
            if key_tile > 0 {
                let at = g.out_at(head, queries.start + i);
                // SAFETY: this row of `out` belongs to this task.
                scale_in_place(isa, unsafe { out.get_mut(at..at + g.head_dim) }, shrink);
            }
        }
        let beta = if key_tile == 0 { Beta::Overwrite } else { Beta::Accumulate };
        // SAFETY: v is only read; these rows of `out` belong to this task.
        unsafe {
            let v = g.part(qkv, Part::V, head, keys.start);
            let p = MatRef::row_major(s.as_ptr(), stride);
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
    ctx.reserve_scratch(2 * TILE * TILE, g.head_dim.max(TILE));
    let scratch = &*ctx.scratch;
    ctx.chunks(batch * op.kv_heads, 1, |task, worker| {
        for head in g.group(task.start) {
            // SAFETY: the team runs one task at a time per worker; a task owns its head of keys and values in `d_qkv` and
            // the queries it serves, which share no memory with anything read.
            unsafe { backward_head(isa, scratch.get(worker), &g, [d_qkv, d_out, qkv, out, lse], head) }
        }
    })
}

/// Writes a head's gradient of queries, and its share of the keys' and values': the first head of a group overwrites,
/// the others add.
///
/// # Safety
/// This task alone uses `scratch` and this head of `d_qkv`, with its keys and values.
unsafe fn backward_head(isa: Isa, scratch: &mut Scratch, g: &Heads, slots: [Span<f32>; 5], head: usize) {
    let [d_qkv, d_out, qkv, out, lse] = slots;
    let (p_tile, dp_tile) = scratch.tiles.split_at_mut(TILE * TILE);
    let mut mm = Tiles { isa, scratch: &mut scratch.gemm };
    let hd = g.head_dim;
    for tile in 0..g.tiles() {
        let queries = g.tile(tile);
        let rows = queries.len();
        let mut delta = [0.0_f32; TILE];
        for (i, delta) in delta[..rows].iter_mut().enumerate() {
            let at = g.out_at(head, queries.start + i);
            // SAFETY: only read while the op runs.
            *delta = unsafe { dot(isa, d_out.get(at..at + hd), out.get(at..at + hd)) };
        }
        let d_o = matrix(d_out, g.out_at(head, queries.start), g.width);
        let q = g.part(qkv, Part::Q, head, queries.start);
        let d_q = writable(g.part(d_qkv, Part::Q, head, queries.start));
        for key_tile in 0..=tile {
            let keys = g.tile(key_tile);
            let cols = keys.len();
            let [k, v] = [Part::K, Part::V].map(|part| g.part(qkv, part, head, keys.start));
            let [d_k, d_v] = [Part::K, Part::V].map(|part| writable(g.part(d_qkv, part, head, keys.start)));
            let stride = row_stride(cols);
            let (p, dp) = (&mut p_tile[..rows * stride], &mut dp_tile[..rows * stride]);
            let [p_out, dp_out] = [&mut *p, &mut *dp].map(|t| MatMut { ptr: t.as_mut_ptr(), rs: stride });
            // SAFETY: inputs are only read; the tiles are this worker's own.
            unsafe {
                mm.product([rows, cols, hd], q, k.transposed(), p_out, Beta::Overwrite);
                mm.product([rows, cols, hd], d_o, v.transposed(), dp_out, Beta::Overwrite);
            }
            for (i, &delta) in delta[..rows].iter().enumerate() {
                let seen = visible(&queries, &keys, i);
                let position = head * g.seq + queries.start + i;
                // SAFETY: only read while the op runs.
                let row_lse = unsafe { lse.get(position..position + 1)[0] };
                let row = i * stride..(i + 1) * stride;
                let (p, dp) = (&mut p[row.clone()], &mut dp[row]);
                probabilities(isa, p, seen, g.scale, row_lse);
                dp[cols..].fill(0.0); // was never written
                softmax_bwd_row(isa, dp, p, delta, g.scale);
                // The first position sees one key: its softmax is the constant 1, its gradient exactly 0. Rounding
                // noise in its place would be blown up by AdamW.
                let seen_dp = if queries.start + i == 0 { 0 } else { seen };
                dp[seen_dp..].fill(0.0);
            }
            let [p, ds] = [&*p, &*dp].map(|t| MatRef::row_major(t.as_ptr(), stride));
            // The first tile to reach a gradient writes it: queries see key tile 0 first, keys their own tile of the first
            // head that uses them.
            let beta_q = if key_tile == 0 { Beta::Overwrite } else { Beta::Accumulate };
            let beta_kv = if key_tile == tile && head.is_multiple_of(g.share()) {
                Beta::Overwrite
            } else {
                Beta::Accumulate
            };
            // SAFETY: these parts of `d_qkv` belong to this task.
            unsafe {
                mm.product([rows, hd, cols], ds, k, d_q, beta_q);
                mm.product([cols, hd, rows], ds.transposed(), q, d_k, beta_kv);
                mm.product([cols, hd, rows], p.transposed(), d_o, d_v, beta_kv);
            }
        }
    }
}

pub fn attention_cached(ctx: &mut Ctx<'_>, op: &AttentionCached) -> Result<()> {
    let (out, qkv) = (ctx.f32(op.out)?, ctx.f32(op.qkv)?);
    let (keys, values) = (ctx.f32(op.keys)?, ctx.f32(op.values)?);
    let (&[batch, context, width], &[_, _, out_width]) = (op.keys.shape.dims(), op.out.shape.dims()) else {
        return Ok(());
    };
    let position = ctx.scalars.position as usize;
    if position >= context {
        return Err(Error::Input(format!("position {position} is beyond the context of {context}")));
    }
    let (g, isa) = (Heads::new(1, out_width, op.heads, op.kv_heads), ctx.isa);
    ctx.reserve_scratch(context, 0);
    let scratch = &*ctx.scratch;
    // A task is a head of keys and values with all heads of queries it serves.
    ctx.chunks(batch * op.kv_heads, 1, |task, worker| {
        let (b, h, hd) = (task.start / g.kv_heads, task.start % g.kv_heads, g.head_dim);
        let row = |position: usize| {
            let first = (b * context + position) * width + h * hd;
            first..first + hd
        };
        let part = |part, head| {
            let first = g.qkv_at(part, head, 0);
            first..first + hd
        };
        // SAFETY: the team runs one task at a time per worker; a task owns its head of the cache and its heads of `out`,
        // and the mutable pieces of the cache are gone before it is read.
        unsafe {
            let first = g.group(task.start).start;
            keys.get_mut(row(position)).copy_from_slice(qkv.get(part(Part::K, first)));
            values.get_mut(row(position)).copy_from_slice(qkv.get(part(Part::V, first)));
            let scores = &mut scratch.get(worker).tiles[..=position];
            for head in g.group(task.start) {
                let q = qkv.get(part(Part::Q, head));
                for (t, score) in scores.iter_mut().enumerate() {
                    *score = dot(isa, q, keys.get(row(t)));
                }
                let (_, sum) = softmax_row(isa, scores, position + 1, g.scale, f32::NEG_INFINITY);
                let at = g.out_at(head, 0);
                let o = out.get_mut(at..at + hd);
                o.fill(0.0);
                for (t, score) in scores.iter().enumerate() {
                    axpy(isa, o, *score / sum, values.get(row(t)));
                }
            }
        }
    })
}
