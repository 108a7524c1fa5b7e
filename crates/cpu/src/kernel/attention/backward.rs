//! The gradients of attention.

use super::product::{Mat, product};
use super::softmax::{binary, row_stride, softmax_bwd_columns};
use super::{Forward, TILE, TileScratch, row_mut};
use crate::element::{Elem, Real, dot};
use crate::gemm::{Beta, LocalScratch};
use crate::isa::Isa;
use crate::kernel::elementwise::{add_to, narrow};
use crate::memory::Span;
use crate::team::{Done, Split};
use std::ops::Range;

/// The windows of a backward; the gradients are optional.
#[derive(Clone, Copy)]
pub struct Backward<T: Elem> {
    /// `out` and `lse` are the results of the forward.
    pub from: Forward<T>,
    pub d_out: Span<T>,
    pub d_q: Span<T>,
    pub d_k: Span<T>,
    pub d_v: Span<T>,
}

/// What the softmax of a tile needs of each query.
pub(super) struct Columns<A> {
    /// An exponent of 2.
    lse: [A; TILE],
    /// Σ d_out out
    delta: [A; TILE],
}

impl<T: Elem> Backward<T> {
    /// Elements of the gradients of keys and values that each query head accumulates separately before they are added;
    /// 0 where a head writes the result at once.
    pub fn own_elements(&self) -> usize {
        let s = &self.from.shape;
        let direct = T::IS_ACC && s.share() == 1;
        if direct { 0 } else { s.0.batch * s.0.heads * s.kv_elements() }
    }

    /// The gradients of `head`: of its queries, and of the keys and values that it uses.
    ///
    /// # Safety
    /// The caller may read the inputs and alone uses `scratch`, this head of `d_q`, and its part of `own`
    /// ([`Backward::own_elements`]) or, where that is empty, its head of `d_k` and `d_v`.
    pub unsafe fn head(&self, isa: Isa, scratch: &mut TileScratch<T::Acc>, own: Span<T::Acc>, head: usize) {
        let (s, a) = (&self.from.shape, &self.from.shape.0);
        let d_kv = self.keys_and_values(own, head);
        // SAFETY: guaranteed by the caller.
        unsafe { self.clear(d_kv, 0..a.kv_len) };
        for queries in (0..s.tiles()).flat_map(|block| self.from.tiles(head, block)) {
            let to = self.from.queries(self.d_q, a.q, head, &queries);
            let d_q = self.d_q.is_some().then(|| to.matrix(&mut scratch.wide[3]));
            // SAFETY: guaranteed by the caller.
            unsafe {
                if s.sees(queries.end - 1) == 0 {
                    self.clear([d_q, None], 0..queries.len());
                }
                let chunks = self.from.chunks(head, &queries);
                self.tile((isa, &mut *scratch), head, &queries, chunks, [d_q, d_kv[0], d_kv[1]]);
                if d_q.is_some() {
                    to.store(isa, &scratch.wide[3]);
                }
            }
        }
    }

    /// Sets rows of two matrices to 0.
    ///
    /// # Safety
    /// The caller alone uses these rows.
    pub(super) unsafe fn clear(&self, to: [Option<Mat<T::Acc>>; 2], rows: Range<usize>) {
        for d in to.into_iter().flatten() {
            // SAFETY: guaranteed by the caller.
            rows.clone()
                .for_each(|i| unsafe { row_mut(d, i, self.from.shape.0.head_dim) }.fill(T::Acc::ZERO));
        }
    }

    /// What some chunks of keys and a tile of queries add to the gradients: `d_q` is overwritten by the first chunk and added
    /// to by the others, `d_k` and `d_v` (of all keys) are added to.
    ///
    /// # Safety
    /// The caller may read the inputs and alone uses `scratch` and these rows of the gradients.
    pub(super) unsafe fn tile(
        &self,
        (isa, scratch): (Isa, &mut TileScratch<T::Acc>),
        head: usize,
        queries: &Range<usize>,
        chunks: impl Iterator<Item = Range<usize>>,
        [d_q, d_k, d_v]: [Option<Mat<T::Acc>>; 3],
    ) {
        let (s, a, hd) = (&self.from.shape, &self.from.shape.0, self.from.shape.0.head_dim);
        if let Some(kernels) = s.kernels::<T::Acc>(isa) {
            let to = [d_q, d_k, d_v];
            // SAFETY: guaranteed by the caller.
            return unsafe { self.small_tile((isa, kernels), scratch, (head, queries), chunks, to) };
        }
        let (rows, stride) = (queries.len(), row_stride(queries.len()));
        let TileScratch { gemm, tiles, wide: [q_room, k_room, v_room, _, d_o_room], .. } = scratch;
        let (p_scores, dp_scores) = tiles.split_at_mut(s.scores());
        // SAFETY: the inputs are only read; the widened rows are this worker's own.
        let [q, d_o] = unsafe {
            let q = self.from.queries(self.from.q, a.q, head, queries).load(isa, q_room);
            [q, self.from.queries(self.d_out, a.out, head, queries).load(isa, d_o_room)]
        };
        let [d_out, out] = [self.d_out, self.from.out].map(|x| self.from.queries(x, a.out, head, queries));
        // SAFETY: guaranteed by the caller.
        let columns =
            unsafe { self.columns(head, queries, |i| dot(isa, d_out.row(i).all(), out.row(i).all())) };
        for (number, keys) in chunks.enumerate() {
            let cols = keys.len();
            let mut scores = [&mut p_scores[..cols * stride], &mut dp_scores[..cols * stride]];
            let [d_k, d_v] = [d_k, d_v].map(|d| d.map(|d| d.rows_from(keys.start)));
            let beta = if number == 0 { Beta::Overwrite } else { Beta::Accumulate };
            // SAFETY: the inputs are only read; scores, widened rows and gradients belong to this task.
            unsafe {
                let [k, v] = self.from.keys([keys.start, head], cols);
                let (k, v) = (k.load(isa, k_room), v.load(isa, v_room));
                self.scores((gemm, isa), &mut scores, [q, d_o, k, v], &columns, (head, [queries, &keys]));
                let [p, ds] = scores.map(|scores| Mat::new(scores, stride));
                if let Some(d_q) = d_q {
                    product((gemm, isa), [rows, hd, cols], [ds.transposed(), k], d_q, beta);
                }
                for (ab, d) in [([ds, q], d_k), ([p, d_o], d_v)] {
                    if let Some(d) = d {
                        product((gemm, isa), [cols, hd, rows], ab, d, Beta::Accumulate);
                    }
                }
            }
        }
    }

    /// Computes the scores of a chunk again.
    ///
    /// # Safety
    /// The caller may read the inputs and alone uses the scores.
    unsafe fn scores(
        &self,
        (gemm, isa): (&mut LocalScratch, Isa),
        [p, dp]: &mut [&mut [T::Acc]; 2],
        [q, d_o, k, v]: [Mat<T::Acc>; 4],
        columns: &Columns<T::Acc>,
        (head, [queries, keys]): (usize, [&Range<usize>; 2]),
    ) {
        let s = &self.from.shape;
        let (stride, size) = (row_stride(queries.len()), [keys.len(), queries.len(), s.0.head_dim]);
        // SAFETY: guaranteed by the caller.
        unsafe {
            product((gemm, isa), size, [k, q.transposed()], Mat::new(p, stride), Beta::Overwrite);
            product((gemm, isa), size, [v, d_o.transposed()], Mat::new(dp, stride), Beta::Overwrite);
        }
        self.gradients_of_scores(isa, [p, dp], columns, (head, [queries, keys]));
    }

    /// Scores become probabilities, and the gradients of probabilities those of the scores.
    pub(super) fn gradients_of_scores(
        &self,
        isa: Isa,
        [p, dp]: [&mut [T::Acc]; 2],
        columns: &Columns<T::Acc>,
        (head, [queries, keys]): (usize, [&Range<usize>; 2]),
    ) {
        let (s, stride) = (&self.from.shape, row_stride(queries.len()));
        let factors = [s.factor(isa, p), T::Acc::of(s.0.scale)];
        let first = head * s.0.q_len + queries.start;
        let dropped = |scores: &mut [T::Acc]| {
            if let Some(drops) = self.from.drops {
                drops.apply(isa, (scores, stride), first, [queries, keys]);
            }
        };
        dropped(dp); // the gradients of all probabilities, from those of the kept ones
        softmax_bwd_columns(isa, p, dp, stride, factors, &columns.lse, &columns.delta);
        dropped(p); // what was multiplied with the values
        self.from.hide(p, queries, keys, T::Acc::ZERO);
        self.from.hide(dp, queries, keys, T::Acc::ZERO);
        // The softmax of one score is the constant 1: its gradient is exactly 0. Rounding noise in its place would be blown up
        // by AdamW.
        // Later queries of a tile reach no fewer keys.
        for (i, t) in queries.clone().enumerate() {
            let reached = self.from.reached(head, t);
            if reached.len() > 1 {
                break;
            }
            if keys.contains(&reached.start) && !reached.is_empty() {
                dp[(reached.start - keys.start) * stride + i] = T::Acc::ZERO;
            }
        }
    }

    /// The matrices in which a head sums the gradients of its keys and values.
    pub(super) fn keys_and_values(&self, own: Span<T::Acc>, head: usize) -> [Option<Mat<T::Acc>>; 2] {
        let (s, a) = (&self.from.shape, &self.from.shape.0);
        let mut half = 0;
        [(self.d_k, a.k), (self.d_v, a.v)].map(|(d, strides)| {
            let first = head * s.kv_elements() + half * a.kv_len * a.head_dim;
            half += 1;
            let there = if own.is_empty() {
                let ptr = d.ptr().wrapping_add(s.key(strides, head, 0)).cast();
                Mat { ptr, rs: strides.position, cs: 1 }
            } else {
                Mat { ptr: own.ptr().wrapping_add(first), rs: a.head_dim, cs: 1 }
            };
            d.is_some().then_some(there)
        })
    }

    /// The lse and the delta of each query of a tile.
    ///
    /// # Safety
    /// The caller may read `lse`.
    pub(super) unsafe fn columns(
        &self,
        head: usize,
        queries: &Range<usize>,
        delta: impl Fn(usize) -> T::Acc,
    ) -> Columns<T::Acc> {
        let mut columns = Columns { lse: [T::Acc::ZERO; TILE], delta: [T::Acc::ZERO; TILE] };
        for (i, t) in queries.clone().enumerate() {
            // SAFETY: guaranteed by the caller.
            columns.lse[i] = binary(unsafe { self.from.lse.value(head * self.from.shape.0.q_len + t) });
            columns.delta[i] = delta(i);
        }
        columns
    }

    /// Adds up what the heads of queries have in `own`, and writes it to `d_k` and `d_v`.
    ///
    /// # Safety
    /// [`Backward::head`] is done for every head; the caller alone uses `own`, `d_k` and `d_v`.
    pub unsafe fn gather(&self, on: &impl Split, own: Span<T::Acc>) -> Done {
        let (s, a, isa) = (&self.from.shape, &self.from.shape.0, on.isa());
        let (hd, share) = (a.head_dim, s.share());
        on.rows(a.batch * a.kv_heads * a.kv_len, 2 * share * hd, 1, |row| {
            let (kv_head, t) = (row / a.kv_len, row % a.kv_len);
            let first = kv_head / a.kv_heads * a.heads + kv_head % a.kv_heads * share;
            for (half, (d, strides)) in [(self.d_k, a.k), (self.d_v, a.v)].into_iter().enumerate() {
                if !d.is_some() {
                    continue;
                }
                let at = |head: usize| own.row((head * s.kv_elements() / hd) + half * a.kv_len + t, hd);
                let to = s.key(strides, first, t);
                // SAFETY: this row of the gradient, and of every head's own gradient, belongs to this task.
                unsafe {
                    let sum = at(first).all_mut();
                    (first + 1..first + share).for_each(|head| add_to(isa, sum, at(head).all()));
                    narrow(isa, d.get_mut(to..to + hd), sum);
                }
            }
        })
    }
}
