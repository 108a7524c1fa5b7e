//! What attention forward and backward share: tiles of 64 positions, widened.

use super::elem::Elem;
use super::map::{largest, total};
use super::ptr::Ptr;
use super::real::{Mat, Real};
use super::versions;
use crate::gemm::{Beta, LocalScratch};
use crate::isa::Isa;
use ironhorse_core::eager::{AttentionShape, Strides};
use std::ops::Range;

/// Queries and keys per tile.
pub const TILE: usize = 64;
/// Multiply-adds below which waking threads costs more than it gains.
pub const WORTH_IT: usize = 1 << 18;

versions! {
    /// to = x, widened
    pub fn widen<T: Elem, const FMA: bool>(to: &mut [T::Acc], x: &[T]) {
        to.iter_mut().zip(x).for_each(|(to, x)| *to = x.load());
    }

    /// to = x, rounded
    pub fn narrow<T: Elem, const FMA: bool>(to: &mut [T], x: &[T::Acc]) {
        to.iter_mut().zip(x).for_each(|(to, &x)| *to = T::store(x));
    }

    /// x *= factor
    pub fn scale<A: Real, const FMA: bool>(x: &mut [A], factor: A) {
        x.iter_mut().for_each(|x| *x = *x * factor);
    }

    /// s = e^(s - max) with the running maximum; returns (new maximum, sum).
    pub fn softmax_row<A: Real, const FMA: bool>(s: &mut [A], max_before: A) -> (A, A) {
        let seen = largest(s);
        let max = if seen > max_before { seen } else { max_before };
        s.iter_mut().for_each(|s| *s = (*s - max).exp::<FMA>());
        (max, A::of(total(s, |s, sum| sum + s)))
    }

    /// s = e^(s - lse)
    pub fn probabilities<A: Real, const FMA: bool>(s: &mut [A], lse: A) {
        s.iter_mut().for_each(|s| *s = (*s - lse).exp::<FMA>());
    }

    /// dp = p (dp - delta) scale
    pub fn d_scores<A: Real, const FMA: bool>(dp: &mut [A], p: &[A], delta: A, scale: A) {
        dp.iter_mut().zip(p).for_each(|(dp, &p)| *dp = p * (*dp - delta) * scale);
    }

    /// Σ x y
    pub fn dot<T: Elem, const FMA: bool>(x: &[T], y: &[T]) -> f64 {
        super::map::total2(x, y, |[x, y], sum| T::Acc::fma::<FMA>(x, y, sum))
    }
}

/// What the sizes say.
#[derive(Clone, Copy)]
pub struct Shape(pub AttentionShape);

impl Shape {
    /// How many keys the query at `position` sees.
    pub fn sees(&self, position: usize) -> usize {
        if self.0.causal {
            (self.0.kv_len + position + 1).saturating_sub(self.0.q_len)
        } else {
            self.0.kv_len
        }
    }

    /// Whether the work pays for threads.
    pub fn large(&self) -> bool {
        let a = &self.0;
        let work = [a.batch, a.heads, a.q_len, a.kv_len].iter().fold(a.head_dim, |x, &y| x.saturating_mul(y));
        work >= WORTH_IT
    }

    /// Heads of queries that use the same keys.
    pub fn share(&self) -> usize {
        self.0.heads / self.0.kv_heads.max(1)
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
}

/// The positions of a tile.
pub fn tile(index: usize, len: usize) -> Range<usize> {
    index * TILE..len.min((index + 1) * TILE)
}

/// Memory of one worker: tiles of (64, head_dim), and of (64, 64).
pub struct Scratch<A> {
    /// Tiles of positions.
    pub rows: [Vec<A>; 6],
    /// Tiles of scores.
    pub scores: [Vec<A>; 2],
    /// For products.
    pub gemm: LocalScratch,
}

impl<A: Real> Scratch<A> {
    /// For heads of this size.
    pub fn new(head_dim: usize) -> Self {
        Self {
            rows: std::array::from_fn(|_| vec![A::ZERO; TILE * head_dim]),
            scores: std::array::from_fn(|_| vec![A::ZERO; TILE * TILE]),
            gemm: LocalScratch::new(),
        }
    }
}

/// Widens `rows` rows of `hd` elements, `stride` apart.
///
/// # Safety
/// They exist and nobody writes them.
pub unsafe fn load_rows<T: Elem>(
    isa: Isa,
    to: &mut [T::Acc],
    from: Ptr<T>,
    stride: usize,
    rows: usize,
    hd: usize,
) {
    for (i, to) in to.chunks_exact_mut(hd).take(rows).enumerate() {
        // SAFETY: the caller's.
        widen(isa, to, unsafe { from.at(i * stride).slice(hd) });
    }
}

/// Rounds `rows` rows of `hd` elements into memory where they are `stride` apart.
///
/// # Safety
/// They exist and nobody else uses them.
pub unsafe fn store_rows<T: Elem>(
    isa: Isa,
    to: Ptr<T>,
    from: &[T::Acc],
    stride: usize,
    rows: usize,
    hd: usize,
) {
    for (i, from) in from.chunks_exact(hd).take(rows).enumerate() {
        // SAFETY: the caller's.
        narrow(isa, unsafe { to.at(i * stride).slice_mut(hd) }, from);
    }
}

/// Products of tiles.
pub struct Products<'a> {
    /// For packing.
    pub scratch: &'a mut LocalScratch,
    /// The instructions.
    pub isa: Isa,
}

impl Products<'_> {
    /// c (m,n) = or += alpha · a (m,k) · b (k,n)
    ///
    /// # Safety
    /// As [`Real::product`].
    pub unsafe fn multiply<A: Real>(
        &mut self,
        size: [usize; 3],
        alpha: A,
        ab: [Mat<A>; 2],
        c: Mat<A>,
        beta: Beta,
    ) {
        // SAFETY: the caller's.
        unsafe { A::product((self.scratch, self.isa), size, alpha, ab, c, beta) }
    }
}
