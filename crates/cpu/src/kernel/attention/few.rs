//! Attention of single queries: one new position against the keys and values that are kept.

use super::Forward;
use super::product::{Mat, dots, product};
use crate::element::{Elem, Real, dot, largest, sum_inline};
use crate::gemm::{Beta, LocalScratch};
use crate::isa::Isa;
use crate::kernel::elementwise::{add_scaled, narrow};
use crate::multiversion;

multiversion! {
    /// s = exp(s·scale - max) / sum; returns max and the sum.
    pub(super) fn softmax_row<const FMA: bool, A: Real>(s: &mut [A], scale: A) -> (A, A) {
        let max = largest(s) * scale;
        for s in s.iter_mut() {
            *s = A::fma::<FMA>(*s, scale, -max).exp_flush::<FMA>();
        }
        let sum = A::of(sum_inline(s, usize::MAX));
        for s in s.iter_mut() {
            *s = *s / sum;
        }
        (max, sum)
    }
}

/// Queries up to which one at a time is faster than a tile, which would be empty for the most part.
pub const FEW: usize = 4;

/// Attention of query `position` of `head`.
///
/// # Safety
/// The caller may read q, k and v, and alone uses this row of `out` and this element of `lse`.
pub unsafe fn one_query<T: Elem>(
    isa: Isa,
    room: &mut QueryScratch<T::Acc>,
    call: &Forward<T>,
    [head, position]: [usize; 2],
) {
    let (s, a, hd) = (&call.shape, &call.shape.0, call.shape.0.head_dim);
    let reached = call.reached(head, position);
    let scores = &mut room.scores[..reached.len()];
    // Floats are matrices as they are.
    let in_place = T::IS_ACC && <T::Acc as Real>::IS_F32 && hd > 0;
    let [k, v] = call.keys([reached.start, head], reached.len());
    // SAFETY: guaranteed by the caller.
    unsafe {
        let at = s.query(a.q, head, position);
        let q = call.q.get(at..at + hd);
        if in_place {
            let q = Mat { ptr: q.as_ptr().cast_mut().cast(), rs: hd, cs: 1 };
            dots(isa, hd, [q, k.matrix(&mut []).transposed()], scores);
        } else {
            for (t, score) in scores.iter_mut().enumerate() {
                *score = dot(isa, q, k.row(t).all());
            }
        }
        let factor = s.factor(isa, scores);
        let (max, sum) = softmax_row(isa, scores, factor);
        let out = &mut room.out[..hd];
        if in_place {
            let size = [1, hd, reached.len()];
            let (p, v) = (Mat::new(scores, reached.len()), v.matrix(&mut []));
            product((&mut room.gemm, isa), size, [p, v], Mat::new(out, hd), Beta::Overwrite);
        } else {
            out.fill(T::Acc::ZERO);
            for (t, p) in scores.iter().enumerate() {
                add_scaled(isa, out, *p, v.row(t).all());
            }
        }
        let at = s.query(a.out, head, position);
        narrow(isa, call.out.get_mut(at..at + hd), out);
        let lse = if reached.is_empty() { T::Acc::NEG_INFINITY } else { max + sum.ln() };
        call.lse.set(head * a.q_len + position, lse);
    }
}

/// A worker's own memory for single queries.
#[derive(Default)]
pub struct QueryScratch<A> {
    scores: Vec<A>,
    out: Vec<A>,
    gemm: LocalScratch,
}

impl<A: Real> QueryScratch<A> {
    /// Memory with room for `keys` keys and `head_dim` elements of a head.
    pub fn new(keys: usize, head_dim: usize) -> Self {
        Self { scores: vec![A::ZERO; keys], out: vec![A::ZERO; head_dim], gemm: LocalScratch::new() }
    }

    /// Room for `keys` scores and `sums` sums of values.
    pub(super) fn parts(&mut self, [keys, sums]: [usize; 2]) -> (&mut [A], &mut [A]) {
        self.reserve(keys, sums);
        (&mut self.scores[..keys], &mut self.out[..sums])
    }

    /// Makes room for `keys` keys and `head_dim` elements of a head.
    pub fn reserve(&mut self, keys: usize, head_dim: usize) {
        if self.scores.len() < keys {
            self.scores.resize(keys, A::ZERO);
        }
        if self.out.len() < head_dim {
            self.out.resize(head_dim, A::ZERO);
        }
    }
}
