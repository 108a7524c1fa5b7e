//! Attention by tiles of queries and keys with a running softmax: memory grows with the sequence, not its square.

use super::pool::{isa, with_team};
use super::{Done, Span};
use crate::gemm::{Beta, Gemm, LocalScratch, MatMut, MatRef, gemm_local};
use crate::isa::Isa;
use crate::math::{exp_f32, max_inline, sum_inline};
use crate::multiversion;
use crate::op::elementwise::scale_in_place;
use crate::team::PerWorker;
use std::ops::Range;

/// Queries and keys per tile.
const TILE: usize = 64;
/// Multiply-adds below which waking threads costs more than it gains.
const WORTH_IT: usize = 1 << 18;

/// The sizes of one call.
#[derive(Clone, Copy, Debug)]
pub struct Attention {
    /// Sequences.
    pub batch: usize,
    /// Queries in each.
    pub q_len: usize,
    /// Keys and values in each.
    pub kv_len: usize,
    /// Heads of the queries.
    pub heads: usize,
    /// Heads of keys and values; divides `heads`.
    pub kv_heads: usize,
    /// Elements of a head.
    pub head_dim: usize,
    /// Scores are multiplied by this.
    pub scale: f32,
    /// Query i sees keys up to kv_len - q_len + i only: the last query sees all.
    pub causal: bool,
}

impl Attention {
    fn query(&self, b: usize, position: usize, head: usize) -> usize {
        ((b * self.q_len + position) * self.heads + head) * self.head_dim
    }

    fn key(&self, b: usize, position: usize, head: usize) -> usize {
        let head = head / (self.heads / self.kv_heads);
        ((b * self.kv_len + position) * self.kv_heads + head) * self.head_dim
    }

    /// How many keys the query at `position` sees.
    fn sees(&self, position: usize) -> usize {
        if self.causal { (self.kv_len + position + 1).saturating_sub(self.q_len) } else { self.kv_len }
    }

    fn work(&self) -> usize {
        [self.batch, self.heads, self.q_len, self.kv_len]
            .iter()
            .fold(self.head_dim, |a, &b| a.saturating_mul(b))
    }
}

#[derive(Default)]
struct Scratch {
    scores: Vec<f32>,
    gemm: LocalScratch,
}

multiversion! {
    /// s = exp(s - max) with the running maximum; returns (new maximum, sum).
    fn softmax_row<const FMA: bool>(s: &mut [f32], max_before: f32) -> (f32, f32) {
        let max = max_before.max(max_inline(s));
        for s in s.iter_mut() {
            *s = exp_f32::<FMA>(*s - max);
        }
        (max, sum_inline(s))
    }
}

/// out = softmax(scale q kᵀ) v for every head; q, out: (batch, q_len, heads, head_dim), k, v: (batch, kv_len, kv_heads,
/// head_dim); query head h uses key head h / (heads / kv_heads). A query that sees no key gets zeros.
///
/// # Safety
/// See [the module](super); lengths as said.
///
/// # Errors
/// See [the module](super).
pub unsafe fn attention([q, k, v]: [Span<f32>; 3], out: Span<f32>, at: &Attention) -> Done {
    if out.is_empty() {
        return Ok(());
    }
    let (isa, tiles) = (isa(), at.q_len.div_ceil(TILE));
    with_team(at.work() >= WORTH_IT, |team, _| {
        let scratch = PerWorker::new(team, |_| Scratch::default());
        // Late queries see more: they come first, so that the short tasks fill the gaps at the end.
        team.chunks(at.batch * at.heads * tiles, 1, |task, worker| {
            let (head, tile) = (task.start / tiles, tiles - 1 - task.start % tiles);
            let queries = tile * TILE..at.q_len.min((tile + 1) * TILE);
            // SAFETY: the team runs one task at a time per worker, and the scratch belongs to this run; tasks own
            // disjoint rows of `out`.
            unsafe { tile_fwd(isa, scratch.get(worker), at, [q, k, v, out], (head, queries)) }
        })
    })
}

/// # Safety
/// This task alone uses `scratch` and the rows of `out` of this head and these queries.
unsafe fn tile_fwd(
    isa: Isa,
    scratch: &mut Scratch,
    at: &Attention,
    [q, k, v, out]: [Span<f32>; 4],
    (head, queries): (usize, Range<usize>),
) {
    let (b, h, hd) = (head / at.heads, head % at.heads, at.head_dim);
    let rows = queries.len();
    let (mut max, mut sum) = ([f32::NEG_INFINITY; TILE], [0.0_f32; TILE]);
    let row_out = |i: usize| at.query(b, queries.start + i, h);
    let (q_stride, kv_stride) = (at.heads * hd, at.kv_heads * hd);
    let q_tile = MatRef::row_major(q.ptr().wrapping_add(row_out(0)), q_stride);
    let o_tile = MatMut { ptr: out.ptr().wrapping_add(row_out(0)), rs: q_stride };
    scratch.scores.resize(TILE * TILE, 0.0);
    // The last query of the tile sees the most.
    let seen_by_tile = at.sees(queries.end - 1);
    for start in (0..seen_by_tile).step_by(TILE) {
        let cols = TILE.min(seen_by_tile - start);
        let s = &mut scratch.scores[..rows * cols];
        let first = at.key(b, start, h);
        let [k_tile, v_tile] = [k, v].map(|x| MatRef::row_major(x.ptr().wrapping_add(first), kv_stride));
        let s_tile = MatMut { ptr: s.as_mut_ptr(), rs: cols };
        let scores = Gemm::new((rows, cols, hd), q_tile, k_tile.transposed(), s_tile).alpha(at.scale);
        // SAFETY: rows `queries` of q and `start..start + cols` of k are inside; the scores are this worker's own.
        unsafe { gemm_local(&mut scratch.gemm, isa, &scores) };
        for (i, row) in s.chunks_exact_mut(cols).enumerate() {
            let seen = at.sees(queries.start + i).saturating_sub(start).min(cols);
            let (seen, hidden) = row.split_at_mut(seen);
            hidden.fill(0.0);
            if seen.is_empty() {
                continue;
            }
            let (new_max, row_sum) = softmax_row(isa, seen, max[i]);
            let shrink = (max[i] - new_max).exp(); // 0 for the first tile: exp(-inf)
            sum[i] = sum[i] * shrink + row_sum;
            max[i] = new_max;
            if start > 0 {
                let r = row_out(i)..row_out(i) + hd;
                // SAFETY: this row of `out` belongs to this task.
                scale_in_place(isa, unsafe { out.get_mut(r) }, shrink);
            }
        }
        let beta = if start == 0 { Beta::Overwrite } else { Beta::Accumulate };
        let p_tile = MatRef::row_major(s.as_ptr(), cols);
        let product = Gemm::new((rows, hd, cols), p_tile, v_tile, o_tile).beta(beta);
        // SAFETY: the rows of v are inside; these rows of `out` belong to this task.
        unsafe { gemm_local(&mut scratch.gemm, isa, &product) };
    }
    for (i, sum) in sum[..rows].iter().enumerate() {
        // SAFETY: this row of `out` belongs to this task.
        let row = unsafe { out.get_mut(row_out(i)..row_out(i) + hd) };
        if at.sees(queries.start + i) == 0 {
            row.fill(0.0);
        } else {
            scale_in_place(isa, row, 1.0 / sum);
        }
    }
}
