//! Softmax over rows, and the gradient.

use super::elem::Elem;
use super::map::{largest, map, sum_exp, total2};
use super::ptr::Ptr;
use super::real::Real;
use super::{by_type, versions};
use crate::flat::pool::{isa, row_pieces};
use crate::flat::{self, Done, Span};
use ironhorse_core::eager::{Array, Float, Rows};

versions! {
    fn softmax_row<T: Elem, const FMA: bool>(x: Ptr<T>, y: Ptr<T>, cols: usize) {
        // SAFETY: the caller's (see `softmax`), passed down; the slice ends before `map` writes.
        unsafe {
            let row = x.slice(cols);
            let max = largest(row);
            let factor = T::Acc::of(1.0 / sum_exp::<_, FMA>(row, max));
            map([x], [y], cols, |[x]| [(x - max).exp::<FMA>() * factor]);
        }
    }

    fn softmax_bwd_row<T: Elem, const FMA: bool>(from: [Ptr<T>; 2], d_x: Ptr<T>, cols: usize) {
        // SAFETY: the caller's (see `softmax_bwd`), passed down; the slices end before `map` writes.
        unsafe {
            let [d_y, y] = from.map(|x| x.slice(cols));
            let mean = T::Acc::of(total2(d_y, y, |[d, y], sum| T::Acc::fma::<FMA>(d, y, sum)));
            map(from, [d_x], cols, |[d, y]| [y * (d - mean)]);
        }
    }
}

/// y = softmax(x) in each row; `y` may be `x`. A row with NaN or +inf, or of -inf alone, becomes NaN.
///
/// # Safety
/// See [the module](super).
///
/// # Errors
/// See [the module](super).
pub unsafe fn softmax(x: Array, y: Array, rows: Rows) -> Done {
    if x.float == Float::F32 {
        // SAFETY: the caller's.
        unsafe {
            let [x, y] = [x, y].map(|a| Span::from_raw(a.at.cast(), rows.elements()));
            return flat::softmax(x, y, rows.rows);
        }
    }
    let (isa, cols) = (isa(), rows.cols);
    by_type!(x.float, T => {
        let (x, y) = (Ptr::<T>::of(x), Ptr::of(y));
        row_pieces(rows.rows, cols, 24, |range| {
            range.for_each(|row| softmax_row(isa, x.at(row * cols), y.at(row * cols), cols));
        })
    })
}

/// d_x = y (d_y - Σ d_y y) in each row; `d_x` may be `d_y` or `y`.
///
/// # Safety
/// See [the module](super).
///
/// # Errors
/// See [the module](super).
pub unsafe fn softmax_bwd(from: [Array; 2], d_x: Array, rows: Rows) -> Done {
    if d_x.at.is_null() {
        return Ok(());
    }
    let (isa, cols) = (isa(), rows.cols);
    by_type!(d_x.float, T => {
        let (from, d_x) = (from.map(Ptr::<T>::of), Ptr::of(d_x));
        row_pieces(rows.rows, cols, 4, |range| {
            range.for_each(|row| softmax_bwd_row(isa, from.map(|x| x.at(row * cols)), d_x.at(row * cols), cols));
        })
    })
}
