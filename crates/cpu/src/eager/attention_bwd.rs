//! Gradient of attention: scores are computed again from q, k and lse, once for d_q by tiles of queries, once for d_k and d_v
//! by tiles of keys. So every gradient has one task that sums it, in a fixed order, in the type of sums.

use super::by_type;
use super::elem::Elem;
use super::ptr::Ptr;
use super::real::{Mat, Real};
use super::tiles::{
    Products, Scratch, Shape, TILE, d_scores, dot, load_rows, probabilities, scale, store_rows, tile,
};
use crate::flat::Done;
use crate::flat::pool::{isa, pieces, with_team};
use crate::gemm::Beta;
use crate::isa::Isa;
use crate::team::PerWorker;
use ironhorse_core::eager::{Array, AttentionShape};
use std::ops::Range;

/// The gradients of [`attention`](super::attention), with the strides of what they are of.
///
/// # Safety
/// See [the module](super); sizes as in [`AttentionShape`].
///
/// # Errors
/// See [the module](super).
pub unsafe fn attention_bwd(
    [d_out, q, k, v, out, lse]: [Array; 6],
    gradients: [Array; 3],
    shape: &AttentionShape,
) -> Done {
    by_type!(q.float, T => {
        let [d_out, q, k, v, out] = [d_out, q, k, v, out].map(Ptr::<T>::of);
        let call = Call { shape: Shape(*shape), isa: isa(), d_out, q, k, v, lse: Ptr::of(lse) };
        // SAFETY: the caller's.
        unsafe { run(&call, out, gradients.map(Ptr::of)) }
    })
}

/// What is read.
struct Call<T: Elem> {
    shape: Shape,
    isa: Isa,
    d_out: Ptr<T>,
    q: Ptr<T>,
    k: Ptr<T>,
    v: Ptr<T>,
    lse: Ptr<T::Acc>,
}

/// # Safety
/// As [`attention_bwd`].
unsafe fn run<T: Elem>(call: &Call<T>, out: Ptr<T>, [d_q, d_k, d_v]: [Ptr<T>; 3]) -> Done {
    let (shape, a, isa) = (call.shape, &call.shape.0, call.isa);
    let (heads, kv_heads) = (a.batch * a.heads, a.batch * a.kv_heads);
    if heads * a.head_dim == 0 {
        return Ok(());
    }
    // Σ d_out out of each query.
    let mut deltas = vec![T::Acc::ZERO; heads * a.q_len];
    let shared = Ptr::of_slice(&mut deltas);
    pieces(deltas.len(), 256, a.head_dim * 2, |range| {
        for i in range {
            let at = shape.query(a.out, i / a.q_len, i % a.q_len);
            // SAFETY: the caller's; tasks have disjoint elements of `deltas`.
            unsafe {
                let [x, y] = [call.d_out, out].map(|x| x.at(at).slice(a.head_dim));
                shared.at(i).set(T::Acc::of(dot(isa, x, y)));
            }
        }
    })?;
    with_team(shape.large(), |team, _| {
        let scratch = PerWorker::new(team, |_| Scratch::new(a.head_dim));
        if d_q.wanted() {
            let tiles = a.q_len.div_ceil(TILE);
            team.chunks(heads * tiles, 1, |task, worker| {
                let (head, index) = (task.start / tiles, tiles - 1 - task.start % tiles);
                // SAFETY: the team runs one task at a time per worker, and the scratch belongs to this run; tasks own
                // disjoint rows of `d_q`.
                unsafe { call.queries(scratch.get(worker), &deltas, d_q, head, index) }
            })?;
        }
        if d_k.wanted() || d_v.wanted() {
            let tiles = a.kv_len.div_ceil(TILE);
            team.chunks(kv_heads * tiles, 1, |task, worker| {
                let (head, index) = (task.start / tiles, task.start % tiles);
                // SAFETY: as above, with `d_k` and `d_v`.
                unsafe { call.keys(scratch.get(worker), &deltas, [d_k, d_v], head, index) }
            })?;
        }
        Ok(())
    })
}

impl<T: Elem> Call<T> {
    /// The rows 0..4 of the scratch are q, d_out, k, v; the scores become probabilities and their gradients.
    ///
    /// # Safety
    /// This task alone uses `scratch`.
    unsafe fn scores(
        &self,
        scratch: &mut Scratch<T::Acc>,
        deltas: &[T::Acc],
        head: usize,
        [queries, keys]: [Range<usize>; 2],
    ) {
        let (a, hd, isa) = (&self.shape.0, self.shape.0.head_dim, self.isa);
        let (rows, cols, factor) = (queries.len(), keys.len(), T::Acc::of(a.scale));
        let [q, d_out, k, v, ..] = &mut scratch.rows;
        let [p, dp] = &mut scratch.scores;
        let mut products = Products { scratch: &mut scratch.gemm, isa };
        let [q, d_out, k, v] = [q, d_out, k, v].map(|x| Mat::new(x, hd));
        // SAFETY: the tiles are this worker's own.
        unsafe {
            products.multiply(
                [rows, cols, hd],
                factor,
                [q, k.transposed()],
                Mat::new(p, cols),
                Beta::Overwrite,
            );
            let dp = Mat::new(dp, cols);
            products.multiply([rows, cols, hd], T::Acc::ONE, [d_out, v.transposed()], dp, Beta::Overwrite);
        }
        let all = p.chunks_exact_mut(cols).zip(dp.chunks_exact_mut(cols)).take(rows);
        for ((i, position), (p, dp)) in queries.enumerate().zip(all) {
            debug_assert!(i < rows);
            let sees = self.shape.sees(position);
            let seen = sees.saturating_sub(keys.start).min(cols);
            let at = head * a.q_len + position;
            // SAFETY: only read while the op runs.
            probabilities(isa, &mut p[..seen], unsafe { self.lse.at(at).get() });
            d_scores(isa, &mut dp[..seen], &p[..seen], deltas[at], factor);
            if sees == 1 {
                // The softmax of one score is the constant 1: its gradient is exactly 0 (or NaN), not rounding noise.
                scale(isa, &mut dp[..seen], T::Acc::ZERO);
            }
            p[seen..].fill(T::Acc::ZERO);
            dp[seen..].fill(T::Acc::ZERO);
        }
    }

    /// # Safety
    /// The head and its queries exist; this task alone uses `scratch`.
    unsafe fn load_queries(&self, scratch: &mut Scratch<T::Acc>, head: usize, queries: &Range<usize>) {
        let (s, a, hd) = (&self.shape, &self.shape.0, self.shape.0.head_dim);
        let [q, d_out, ..] = &mut scratch.rows;
        let (rows, first) = (queries.len(), queries.start);
        // SAFETY: the caller's.
        unsafe {
            load_rows(self.isa, q, self.q.at(s.query(a.q, head, first)), a.q.position, rows, hd);
            load_rows(self.isa, d_out, self.d_out.at(s.query(a.out, head, first)), a.out.position, rows, hd);
        }
    }

    /// # Safety
    /// The head and its keys exist; this task alone uses `scratch`.
    unsafe fn load_keys(&self, scratch: &mut Scratch<T::Acc>, head: usize, keys: &Range<usize>) {
        let (s, a, hd) = (&self.shape, &self.shape.0, self.shape.0.head_dim);
        let [_, _, k, v, ..] = &mut scratch.rows;
        let (rows, first) = (keys.len(), keys.start);
        // SAFETY: the caller's.
        unsafe {
            load_rows(self.isa, k, self.k.at(s.key(a.k, head, first)), a.k.position, rows, hd);
            load_rows(self.isa, v, self.v.at(s.key(a.v, head, first)), a.v.position, rows, hd);
        }
    }

    /// d_q of a tile of queries.
    ///
    /// # Safety
    /// This task alone uses `scratch` and these rows of `d_q`.
    unsafe fn queries(
        &self,
        scratch: &mut Scratch<T::Acc>,
        deltas: &[T::Acc],
        d_q: Ptr<T>,
        head: usize,
        index: usize,
    ) {
        let (s, a, hd) = (&self.shape, &self.shape.0, self.shape.0.head_dim);
        let queries = tile(index, a.q_len);
        let rows = queries.len();
        // SAFETY: the tiles are this worker's own; the rest is the caller's.
        unsafe {
            self.load_queries(scratch, head, &queries);
            scratch.rows[4].fill(T::Acc::ZERO);
            let seen = s.sees(queries.end - 1);
            for start in (0..seen).step_by(TILE) {
                let keys = start..seen.min(start + TILE);
                let cols = keys.len();
                self.load_keys(scratch, head, &keys);
                self.scores(scratch, deltas, head, [queries.clone(), keys]);
                let ab = [Mat::new(&mut scratch.scores[1], cols), Mat::new(&mut scratch.rows[2], hd)];
                let c = Mat::new(&mut scratch.rows[4], hd);
                let mut products = Products { scratch: &mut scratch.gemm, isa: self.isa };
                products.multiply([rows, hd, cols], T::Acc::ONE, ab, c, Beta::Accumulate);
            }
            let to = d_q.at(s.query(a.q, head, queries.start));
            store_rows(self.isa, to, &scratch.rows[4], a.q.position, rows, hd);
        }
    }

    /// d_k and d_v of a tile of keys, over the queries of all heads that use it.
    ///
    /// # Safety
    /// This task alone uses `scratch` and these rows of `d_k` and `d_v`.
    unsafe fn keys(
        &self,
        scratch: &mut Scratch<T::Acc>,
        deltas: &[T::Acc],
        [d_k, d_v]: [Ptr<T>; 2],
        kv_head: usize,
        index: usize,
    ) {
        let (s, a, hd) = (&self.shape, &self.shape.0, self.shape.0.head_dim);
        let keys = tile(index, a.kv_len);
        let cols = keys.len();
        let first = kv_head * s.share();
        // SAFETY: the tiles are this worker's own; the rest is the caller's.
        unsafe {
            self.load_keys(scratch, first, &keys);
            scratch.rows[4].fill(T::Acc::ZERO);
            scratch.rows[5].fill(T::Acc::ZERO);
            for head in first..first + s.share() {
                for query_tile in 0..a.q_len.div_ceil(TILE) {
                    let queries = tile(query_tile, a.q_len);
                    let rows = queries.len();
                    if s.sees(queries.end - 1) <= keys.start {
                        continue;
                    }
                    self.load_queries(scratch, head, &queries);
                    self.scores(scratch, deltas, head, [queries, keys.clone()]);
                    let [p, ds] = &mut scratch.scores;
                    let [p, ds] = [p, ds].map(|x| Mat::new(x, cols).transposed());
                    let [q, d_out, _, _, for_k, for_v] = &mut scratch.rows;
                    let [q, d_out, for_k, for_v] = [q, d_out, for_k, for_v].map(|x| Mat::new(x, hd));
                    let mut products = Products { scratch: &mut scratch.gemm, isa: self.isa };
                    if d_k.wanted() {
                        products.multiply([cols, hd, rows], T::Acc::ONE, [ds, q], for_k, Beta::Accumulate);
                    }
                    if d_v.wanted() {
                        products.multiply([cols, hd, rows], T::Acc::ONE, [p, d_out], for_v, Beta::Accumulate);
                    }
                }
            }
            if d_k.wanted() {
                let to = d_k.at(s.key(a.k, first, keys.start));
                store_rows(self.isa, to, &scratch.rows[4], a.k.position, cols, hd);
            }
            if d_v.wanted() {
                let to = d_v.at(s.key(a.v, first, keys.start));
                store_rows(self.isa, to, &scratch.rows[5], a.v.position, cols, hd);
            }
        }
    }
}
