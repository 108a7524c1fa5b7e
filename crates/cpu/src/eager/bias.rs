//! relu(x scale + bias), and the gradient.

use super::columns::rows_and_columns;
use super::elem::Elem;
use super::map::map;
use super::ptr::Ptr;
use super::real::Real;
use super::{by_type, versions};
use crate::flat::Done;
use crate::flat::pool::{isa, row_pieces};
use ironhorse_core::eager::{Array, Rows};

versions! {
    fn fwd_row<T: Elem, const FMA: bool>(from: [Ptr<T>; 2], y: Ptr<T>, cols: usize, scale: T::Acc) {
        // SAFETY: the caller's (see `scale_bias_relu`), passed down.
        unsafe {
            map(from, [y], cols, |[x, bias]| {
                let sum = T::Acc::fma::<FMA>(x, scale, bias);
                // NaN is not <= 0.
                [if sum <= T::Acc::ZERO { T::Acc::ZERO } else { sum }]
            });
        }
    }

    fn d_bias_row<T: Elem, const FMA: bool>(d_y: &[T], y: &[T], sums: &mut [T::Acc]) {
        for ((sum, d), y) in sums.iter_mut().zip(d_y).zip(y) {
            *sum += if y.load() <= T::Acc::ZERO { T::Acc::ZERO } else { d.load() };
        }
    }

    fn d_x_row<T: Elem, const FMA: bool>(from: [Ptr<T>; 2], d_x: Ptr<T>, cols: usize, scale: T::Acc) {
        // SAFETY: the caller's (see `scale_bias_relu_bwd`), passed down.
        unsafe {
            map(from, [d_x], cols, |[d, y]| [if y <= T::Acc::ZERO { T::Acc::ZERO } else { d * scale }]);
        }
    }
}

/// y = relu(x scale + bias), bias of `cols` for all rows; NaN stays NaN; `y` may be `x`.
///
/// # Safety
/// See [the module](super).
///
/// # Errors
/// See [the module](super).
pub unsafe fn scale_bias_relu([x, bias]: [Array; 2], y: Array, rows: Rows, scale: f64) -> Done {
    let (isa, cols) = (isa(), rows.cols);
    by_type!(x.float, T => {
        let (x, bias, y) = (Ptr::<T>::of(x), Ptr::of(bias), Ptr::of(y));
        row_pieces(rows.rows, cols, 1, |range| {
            range.for_each(|row| fwd_row(isa, [x.at(row * cols), bias], y.at(row * cols), cols, Real::of(scale)));
        })
    })
}

/// d_x = d_y scale and d_bias = Σ d_y over rows, where y is not <= 0; `d_x` may be `d_y` or `y`.
///
/// # Safety
/// See [the module](super).
///
/// # Errors
/// See [the module](super).
pub unsafe fn scale_bias_relu_bwd(
    from: [Array; 2],
    [d_x, d_bias]: [Array; 2],
    rows: Rows,
    scale: f64,
) -> Done {
    let (isa, cols) = (isa(), rows.cols);
    by_type!(from[0].float, T => {
        let (from, d_x, d_bias) = (from.map(Ptr::<T>::of), Ptr::of(d_x), Ptr::<T>::of(d_bias));
        // SAFETY: the caller's; rows of `d_x` are written by one task each, after they were read.
        unsafe {
            rows_and_columns(rows, 2, [d_bias], |row, sums| {
                let from = from.map(|x| x.at(row * cols));
                let [bias] = sums.get();
                if d_bias.wanted() {
                    d_bias_row(isa, from[0].slice(cols), from[1].slice(cols), bias);
                }
                if d_x.wanted() {
                    d_x_row(isa, from, d_x.at(row * cols), cols, Real::of(scale));
                }
            })
        }
    })
}
