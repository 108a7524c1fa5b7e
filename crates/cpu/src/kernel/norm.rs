//! RMS and layer normalisation of rows, and the gradients.

use super::elementwise::binary;
use crate::element::{Elem, LANES, Order, Real, map, sum_inline, totals};
use crate::isa::Isa;
use crate::memory::Span;
use crate::multiversion;
use crate::team::{Done, Split};
use ironhorse_core::eager::BinaryFn;

/// 1 / √(sum / n + eps)
#[inline(always)]
fn rstd<A: Real>(sum: f64, n: usize, eps: A) -> A {
    A::ONE / (A::of(sum / n as f64) + eps).sqrt()
}

multiversion! {
    /// 1 / √(mean(x²) + eps)
    pub fn rms_statistic<const FMA: bool, T: Elem, S: Order>(x: &[T], eps: T::Acc) -> T::Acc {
        let square = |[x]: [T::Acc; 1], [sum]: [T::Acc; 1]| [T::Acc::fma::<FMA>(x, x, sum)];
        rstd(totals::<T, 1, 1, LANES>([x], S::BLOCK, square)[0], x.len(), eps)
    }

    /// \[mean, 1 / √(var + eps)\], var over all elements, not one less.
    fn layer_statistics<const FMA: bool, T: Elem, S: Order>(x: &[T], eps: T::Acc) -> [T::Acc; 2] {
        let mean = T::Acc::of(sum_inline(x, S::BLOCK) / x.len() as f64);
        let square = |[x]: [T::Acc; 1], [sum]: [T::Acc; 1]| {
            let centred = x - mean;
            [T::Acc::fma::<FMA>(centred, centred, sum)]
        };
        let [squares] = if S::NARROW {
            totals::<T, 1, 1, 16>([x], S::BLOCK, square)
        } else {
            totals::<T, 1, 1, LANES>([x], S::BLOCK, square)
        };
        [mean, rstd(squares, x.len(), eps)]
    }

    /// y = x rstd w
    pub fn rms_apply<const FMA: bool, T: Elem>(from: [Span<T>; 2], y: Span<T>, rstd: T::Acc) {
        // SAFETY: guaranteed by the caller of `Norm::forward` or `Norm::apply`.
        unsafe { map(from, [y], |[x, w]| [x * rstd * w]) }
    }

    /// y = (x - mean) rstd w + b
    fn layer_apply<const FMA: bool, T: Elem>(from: [Span<T>; 3], y: Span<T>, stats: [T::Acc; 2]) {
        let [mean, rstd] = stats;
        // SAFETY: guaranteed by the caller of `Norm::forward` or `Norm::apply`.
        unsafe { map(from, [y], |[x, w, b]| [T::Acc::fma::<FMA>((x - mean) * rstd, w, b)]) }
    }

    /// d_x = or += rstd (d_y w - x rstd² mean(d_y w x)), from \[d_y, x, w\]
    pub fn rms_d_x<const FMA: bool, T: Elem, S: Order>(from: [Span<T>; 3], d_x: Span<T>, rstd: T::Acc, adds: bool) {
        // SAFETY: guaranteed by the caller of `d_x_row`; the slices end before `map` writes.
        unsafe {
            let add = |[d, x, w]: [T::Acc; 3], [dot]: [T::Acc; 1]| [T::Acc::fma::<FMA>(d * w, x, dot)];
            let [dot] = totals::<T, 3, 1, LANES>(from.map(|x| x.all()), S::BLOCK, add);
            let pull = rstd * rstd * T::Acc::of(dot / d_x.len() as f64);
            let [d_y, x, w] = from;
            let grad = |d: T::Acc, x: T::Acc, w: T::Acc| T::Acc::fma::<FMA>(-x, pull, d * w) * rstd;
            if adds {
                map([d_y, x, w, d_x], [d_x], |[d, x, w, old]| [old + grad(d, x, w)]);
            } else {
                map(from, [d_x], |[d, x, w]| [grad(d, x, w)]);
            }
        }
    }

    /// d_x = or += rstd (d_y w - mean(d_y w) - x̂ mean(d_y w x̂)), from \[d_y, x, w\]
    fn layer_d_x<const FMA: bool, T: Elem, S: Order>(from: [Span<T>; 3], d_x: Span<T>, stats: [T::Acc; 2], adds: bool) {
        let [mean, rstd] = stats;
        // SAFETY: guaranteed by the caller of `d_x_row`; the slices end before `map` writes.
        unsafe {
            let add = |[d, x, w]: [T::Acc; 3], [sum, dot]: [T::Acc; 2]| {
                let g = d * w;
                [sum + g, T::Acc::fma::<FMA>(g, (x - mean) * rstd, dot)]
            };
            let rows = from.map(|x| x.all());
            let sums = if S::NARROW {
                totals::<T, 3, 2, 16>(rows, S::BLOCK, add)
            } else {
                totals::<T, 3, 2, LANES>(rows, S::BLOCK, add)
            };
            let [mean_g, mean_gx] = sums.map(|sum| T::Acc::of(sum / d_x.len() as f64));
            let [d_y, x, w] = from;
            let grad = |d: T::Acc, x: T::Acc, w: T::Acc| (d * w - mean_g - (x - mean) * rstd * mean_gx) * rstd;
            if adds {
                map([d_y, x, w, d_x], [d_x], |[d, x, w, old]| [old + grad(d, x, w)]);
            } else {
                map(from, [d_x], |[d, x, w]| [grad(d, x, w)]);
            }
        }
    }

    /// dots += d_y (x - mean) rstd and, unless `sums` is empty, sums += d_y
    pub fn column_sums<const FMA: bool, T: Elem>(
        dots: &mut [T::Acc],
        sums: &mut [T::Acc],
        d_y: &[T],
        x: &[T],
        stats: [T::Acc; 2],
    ) {
        let [mean, rstd] = stats;
        let term = |d: T::Acc, x: T::Acc, dot: T::Acc| T::Acc::fma::<FMA>(d, (x - mean) * rstd, dot);
        if sums.is_empty() {
            for ((dot, d), x) in dots.iter_mut().zip(d_y).zip(x) {
                *dot = term(d.load(), x.load(), *dot);
            }
            return;
        }
        for (((dot, sum), d), x) in dots.iter_mut().zip(sums).zip(d_y).zip(x) {
            *sum += d.load();
            *dot = term(d.load(), x.load(), *dot);
        }
    }
}

/// A norm of rows: layer norm if there is a bias, else RMS norm.
#[derive(Clone, Copy)]
pub struct Norm<T: Elem> {
    /// rows · cols
    pub x: Span<T>,
    /// Two terms whose sum is written to `x` first.
    pub terms: Option<[Span<T>; 2]>,
    /// cols
    pub weight: Span<T>,
    /// cols
    pub bias: Option<Span<T>>,
    /// rows · cols; may be `x` or a term, but not both a term and the sum
    pub y: Span<T>,
    /// rows, optional
    pub mean: Span<T::Acc>,
    /// rows, optional
    pub rstd: Span<T::Acc>,
    pub rows: usize,
}

impl<T: Elem> Norm<T> {
    /// Normalises every row and keeps its statistics.
    ///
    /// # Safety
    /// The caller may read the inputs and alone uses what is written, which overlaps only as documented on the fields.
    pub unsafe fn forward<S: Order>(&self, on: &impl Split, eps: f64) -> Done {
        let (isa, cols, eps) = (on.isa(), self.weight.len(), T::Acc::of(eps));
        on.rows(self.rows, cols, 5, |row| {
            let x = self.x.row(row, cols);
            if let Some(terms) = self.terms {
                binary(isa, BinaryFn::Add, terms.map(|term| term.row(row, cols)), x);
            }
            // SAFETY: guaranteed by the caller; rows have one task each, and the slice ends before `y` is written.
            let stats = unsafe {
                match self.bias {
                    None => [T::Acc::ZERO, rms_statistic::<T, S>(isa, x.all(), eps)],
                    Some(_) => layer_statistics::<T, S>(isa, x.all(), eps),
                }
            };
            // SAFETY: rows have one task each, and the caller alone uses `mean` and `rstd`.
            unsafe {
                self.mean.set(row, stats[0]);
                self.rstd.set(row, stats[1]);
            }
            self.row(isa, row, stats);
        })
    }

    /// Normalises every row by its statistics.
    ///
    /// # Safety
    /// As [`Norm::forward`], with `mean` and `rstd` read.
    pub unsafe fn apply(&self, on: &impl Split) -> Done {
        let isa = on.isa();
        on.rows(self.rows, self.weight.len(), 3, |row| {
            // SAFETY: guaranteed by the caller.
            self.row(isa, row, unsafe { statistics(self.mean, self.rstd, row) });
        })
    }

    fn row(&self, isa: Isa, row: usize, stats: [T::Acc; 2]) {
        let cols = self.weight.len();
        let (x, y) = (self.x.row(row, cols), self.y.row(row, cols));
        match self.bias {
            None => rms_apply(isa, [x, self.weight], y, stats[1]),
            Some(bias) => layer_apply(isa, [x, self.weight, bias], y, stats),
        }
    }
}

/// \[mean, rstd\] of a row; the mean is 0 where none is kept.
///
/// # Safety
/// Nobody writes them.
unsafe fn statistics<A: Real>(mean: Span<A>, rstd: Span<A>, row: usize) -> [A; 2] {
    // SAFETY: guaranteed by the caller.
    unsafe { [if mean.is_some() { mean.value(row) } else { A::ZERO }, rstd.value(row)] }
}

/// The gradient of a norm: of a layer norm if means are given, else of an RMS norm.
#[derive(Clone, Copy)]
pub struct NormBwd<T: Elem> {
    /// rows · cols
    pub d_y: Span<T>,
    /// rows · cols
    pub x: Span<T>,
    /// cols
    pub weight: Span<T>,
    /// rows
    pub mean: Span<T::Acc>,
    /// rows
    pub rstd: Span<T::Acc>,
    /// rows · cols; may be `d_y` or `x`
    pub d_x: Span<T>,
}

impl<T: Elem> NormBwd<T> {
    /// \[mean, rstd\] of a row.
    ///
    /// # Safety
    /// Nobody writes the statistics.
    pub unsafe fn statistics(&self, row: usize) -> [T::Acc; 2] {
        // SAFETY: guaranteed by the caller.
        unsafe { statistics(self.mean, self.rstd, row) }
    }

    /// One row of `d_x`, added to what is there if `adds`.
    ///
    /// # Safety
    /// The caller may read the inputs and alone uses this row of `d_x`.
    pub unsafe fn d_x_row<S: Order>(&self, isa: Isa, row: usize, adds: bool) {
        let cols = self.weight.len();
        let (from, d_x) =
            ([self.d_y.row(row, cols), self.x.row(row, cols), self.weight], self.d_x.row(row, cols));
        // SAFETY: guaranteed by the caller.
        let stats = unsafe { self.statistics(row) };
        if self.mean.is_some() {
            layer_d_x::<T, S>(isa, from, d_x, stats, adds);
        } else {
            rms_d_x::<T, S>(isa, from, d_x, stats[1], adds);
        }
    }
}
