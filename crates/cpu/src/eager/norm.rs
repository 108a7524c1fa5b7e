//! RMS and layer normalisation of rows, and the gradients.

use super::columns::rows_and_columns;
use super::elem::Elem;
use super::map::{map, total};
use super::ptr::{Ptr, fill_nan};
use super::real::Real;
use super::{by_type, versions};
use crate::flat::Done;
use crate::flat::pool::{isa, row_pieces};
use ironhorse_core::eager::{Array, Rows};

/// Σ (x - shift)²
#[inline(always)]
fn sum_squares<T: Elem, const FMA: bool>(x: &[T], shift: T::Acc) -> f64 {
    total(x, |x, sum| {
        let centred = x - shift;
        T::Acc::fma::<FMA>(centred, centred, sum)
    })
}

/// The two sums of a norm's gradient over a row, with x̂ = (x - mean) rstd: Σ d_y w and Σ d_y w x̂.
#[inline(always)]
fn row_sums<T: Elem, const FMA: bool>([d_y, x, w]: [&[T]; 3], mean: T::Acc, rstd: T::Acc) -> [f64; 2] {
    /// Elements per sum in lanes.
    const STRETCH: usize = 512;
    let (mut plain, mut with_x) = (0.0, 0.0);
    let mut g = [T::Acc::ZERO; STRETCH];
    let mut gx = [T::Acc::ZERO; STRETCH];
    for ((d_y, x), w) in d_y.chunks(STRETCH).zip(x.chunks(STRETCH)).zip(w.chunks(STRETCH)) {
        let n = d_y.len();
        for ((((g, gx), d), x), w) in g.iter_mut().zip(&mut gx).zip(d_y).zip(x).zip(w) {
            *g = d.load() * w.load();
            *gx = *g * ((x.load() - mean) * rstd);
        }
        plain += total(&g[..n], |g, sum| sum + g);
        with_x += total(&gx[..n], |g, sum| sum + g);
    }
    [plain, with_x]
}

versions! {
    /// y = x rstd w; returns rstd.
    fn rms_row<T: Elem, const FMA: bool>(from: [Ptr<T>; 2], y: Ptr<T>, cols: usize, eps: f64) -> T::Acc {
        // SAFETY: the caller's (see `rmsnorm`), passed down; the slice ends before `map` writes.
        unsafe {
            let mean = sum_squares::<_, FMA>(from[0].slice(cols), T::Acc::ZERO) / cols as f64;
            let rstd = T::Acc::of(1.0 / (mean + eps).sqrt());
            map(from, [y], cols, |[x, w]| [x * rstd * w]);
            rstd
        }
    }

    /// y = (x - mean) rstd w + b; returns mean and rstd.
    fn layer_row<T: Elem, const FMA: bool>(from: [Ptr<T>; 3], y: Ptr<T>, cols: usize, eps: f64) -> [T::Acc; 2] {
        let n = cols as f64;
        // SAFETY: the caller's (see `layernorm`), passed down; the slice ends before `map` writes.
        unsafe {
            let row = from[0].slice(cols);
            let mean = T::Acc::of(total(row, |x, sum| sum + x) / n);
            let rstd = T::Acc::of(1.0 / (sum_squares::<_, FMA>(row, mean) / n + eps).sqrt());
            map(from, [y], cols, |[x, w, b]| [T::Acc::fma::<FMA>((x - mean) * rstd, w, b)]);
            [mean, rstd]
        }
    }

    /// d_x = rstd (d_y w - x̂ mean(d_y w x̂))
    fn rms_d_x<T: Elem, const FMA: bool>(from: [Ptr<T>; 3], d_x: Ptr<T>, cols: usize, rstd: T::Acc) {
        // SAFETY: the caller's (see `rmsnorm_bwd`), passed down; the slices end before `map` writes.
        unsafe {
            let [_, with_x] = row_sums::<_, FMA>(from.map(|x| x.slice(cols)), T::Acc::ZERO, rstd);
            let slope = T::Acc::of(with_x / cols as f64);
            map(from, [d_x], cols, |[d, x, w]| [rstd * (d * w - x * rstd * slope)]);
        }
    }

    /// d_x = rstd (d_y w - mean(d_y w) - x̂ mean(d_y w x̂))
    fn layer_d_x<T: Elem, const FMA: bool>(
        from: [Ptr<T>; 3],
        d_x: Ptr<T>,
        cols: usize,
        mean: T::Acc,
        rstd: T::Acc,
    ) {
        // SAFETY: the caller's (see `layernorm_bwd`), passed down; the slices end before `map` writes.
        unsafe {
            let sums = row_sums::<_, FMA>(from.map(|x| x.slice(cols)), mean, rstd);
            let [shift, slope] = sums.map(|sum| T::Acc::of(sum / cols as f64));
            map(from, [d_x], cols, |[d, x, w]| [rstd * ((d * w - shift) - (x - mean) * rstd * slope)]);
        }
    }

    /// sums += d_y (x - mean) rstd
    fn d_weight_row<T: Elem, const FMA: bool>(
        d_y: &[T],
        x: &[T],
        sums: &mut [T::Acc],
        mean: T::Acc,
        rstd: T::Acc,
    ) {
        for ((sum, d), x) in sums.iter_mut().zip(d_y).zip(x) {
            *sum = T::Acc::fma::<FMA>(d.load(), (x.load() - mean) * rstd, *sum);
        }
    }

    /// sums += d_y
    fn d_bias_row<T: Elem, const FMA: bool>(d_y: &[T], sums: &mut [T::Acc]) {
        sums.iter_mut().zip(d_y).for_each(|(sum, d)| *sum += d.load());
    }
}

/// y = x rstd weight with rstd = 1 / √(mean(x²) + eps) of each row; `y` may be `x`, `rstd` may be null. Without columns
/// `rstd` is NaN: the mean of nothing is.
///
/// # Safety
/// See [the module](super); weight: cols, rstd: rows.
///
/// # Errors
/// See [the module](super).
pub unsafe fn rmsnorm([x, weight]: [Array; 2], [y, rstd]: [Array; 2], rows: Rows, eps: f64) -> Done {
    let (isa, cols) = (isa(), rows.cols);
    if cols == 0 {
        // SAFETY: the caller's.
        unsafe { fill_nan([rstd], rows.rows) };
        return Ok(());
    }
    by_type!(x.float, T => {
        let (x, weight, y, rstd) = (Ptr::<T>::of(x), Ptr::of(weight), Ptr::of(y), Ptr::of(rstd));
        row_pieces(rows.rows, cols, 4, |range| {
            for row in range {
                let scale = rms_row(isa, [x.at(row * cols), weight], y.at(row * cols), cols, eps);
                // SAFETY: the caller's; tasks have disjoint rows.
                unsafe { rstd.at(row).set(scale) }
            }
        })
    })
}

/// The gradients of [`rmsnorm`]; `d_x` may be `d_y` or `x`.
///
/// # Safety
/// See [the module](super); weight and d_weight: cols, rstd: rows.
///
/// # Errors
/// See [the module](super).
pub unsafe fn rmsnorm_bwd(
    [d_y, x, weight, rstd]: [Array; 4],
    [d_x, d_weight]: [Array; 2],
    rows: Rows,
) -> Done {
    let (isa, cols) = (isa(), rows.cols);
    by_type!(x.float, T => {
        let [d_y, x, weight, d_x, d_weight] = [d_y, x, weight, d_x, d_weight].map(Ptr::<T>::of);
        let rstd = Ptr::<<T as Elem>::Acc>::of(rstd);
        // SAFETY: the caller's; rows of `d_x` are written by one task each, after they were read.
        unsafe {
            rows_and_columns(rows, 4, [d_weight], |row, sums| {
                let [d_y, x] = [d_y, x].map(|x| x.at(row * cols));
                let (rstd, [for_weight]) = (rstd.at(row).get(), sums.get());
                if d_weight.wanted() {
                    d_weight_row(isa, d_y.slice(cols), x.slice(cols), for_weight, Real::ZERO, rstd);
                }
                if d_x.wanted() {
                    rms_d_x(isa, [d_y, x, weight], d_x.at(row * cols), cols, rstd);
                }
            })
        }
    })
}

/// y = (x - mean) rstd weight + bias with rstd = 1 / √(var + eps) of each row, var over cols, not cols - 1; `y` may be `x`,
/// `mean` and `rstd` may be null. Without columns they are NaN.
///
/// # Safety
/// See [the module](super); weight and bias: cols, mean and rstd: rows.
///
/// # Errors
/// See [the module](super).
pub unsafe fn layernorm(
    [x, weight, bias]: [Array; 3],
    [y, mean, rstd]: [Array; 3],
    rows: Rows,
    eps: f64,
) -> Done {
    let (isa, cols) = (isa(), rows.cols);
    if cols == 0 {
        // SAFETY: the caller's.
        unsafe { fill_nan([mean, rstd], rows.rows) };
        return Ok(());
    }
    by_type!(x.float, T => {
        let [x, weight, bias, y] = [x, weight, bias, y].map(Ptr::<T>::of);
        let kept = [mean, rstd].map(Ptr::of);
        row_pieces(rows.rows, cols, 5, |range| {
            for row in range {
                let made = layer_row(isa, [x.at(row * cols), weight, bias], y.at(row * cols), cols, eps);
                // SAFETY: the caller's; tasks have disjoint rows.
                kept.iter().zip(made).for_each(|(kept, made)| unsafe { kept.at(row).set(made) });
            }
        })
    })
}

/// The gradients of [`layernorm`]; `d_x` may be `d_y` or `x`.
///
/// # Safety
/// See [the module](super); weight, d_weight and d_bias: cols, mean and rstd: rows.
///
/// # Errors
/// See [the module](super).
pub unsafe fn layernorm_bwd(
    [d_y, x, weight, mean, rstd]: [Array; 5],
    [d_x, d_weight, d_bias]: [Array; 3],
    rows: Rows,
) -> Done {
    let (isa, cols) = (isa(), rows.cols);
    by_type!(x.float, T => {
        let [d_y, x, weight] = [d_y, x, weight].map(Ptr::<T>::of);
        let [d_x, d_weight, d_bias] = [d_x, d_weight, d_bias].map(Ptr::of);
        let kept = [mean, rstd].map(Ptr::<<T as Elem>::Acc>::of);
        // SAFETY: the caller's; rows of `d_x` are written by one task each, after they were read.
        unsafe {
            rows_and_columns(rows, 5, [d_weight, d_bias], |row, sums| {
                let [d_y, x] = [d_y, x].map(|x| x.at(row * cols));
                let ([mean, rstd], [for_weight, for_bias]) = (kept.map(|x| x.at(row).get()), sums.get());
                if d_weight.wanted() {
                    d_weight_row(isa, d_y.slice(cols), x.slice(cols), for_weight, mean, rstd);
                }
                if d_bias.wanted() {
                    d_bias_row(isa, d_y.slice(cols), for_bias);
                }
                if d_x.wanted() {
                    layer_d_x(isa, [d_y, x, weight], d_x.at(row * cols), cols, mean, rstd);
                }
            })
        }
    })
}
