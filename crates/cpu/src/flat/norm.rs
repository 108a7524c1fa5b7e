//! RMS and layer normalisation of rows.

use super::map::{map1, map2};
use super::pool::{isa, row_pieces};
use super::{Done, Span};
use crate::math::{LANES, fma, tree};
use crate::multiversion;
use std::ops::Range;

/// Elements whose squares are summed in f32 lanes; the sums of the blocks are added in f64.
const BLOCK: usize = 4096;

/// Σ (x - shift)²
#[inline(always)]
fn sum_squares<const FMA: bool>(x: &[f32], shift: f32) -> f64 {
    let mut total = 0.0;
    for block in x.chunks(BLOCK) {
        let mut lanes = [0.0_f32; LANES];
        let (full, rest) = block.as_chunks::<LANES>();
        for part in full {
            for i in 0..LANES {
                let centred = part[i] - shift;
                lanes[i] = fma::<FMA>(centred, centred, lanes[i]);
            }
        }
        for (lane, x) in lanes.iter_mut().zip(rest) {
            let centred = x - shift;
            *lane = fma::<FMA>(centred, centred, *lane);
        }
        // The compiler must not see the tree (see `math::sum_inline`).
        total += f64::from(tree(std::hint::black_box(lanes), |a, b| a + b));
    }
    total
}

/// Σ x
#[inline(always)]
fn sum(x: &[f32]) -> f64 {
    x.chunks(BLOCK).map(|block| f64::from(crate::math::sum_inline(block))).sum()
}

/// The weights of a row as a window that starts where the row does.
///
/// # Safety
/// `weight` has the width of the rows.
unsafe fn row_of(all: Span<f32>, r: &Range<usize>) -> Span<f32> {
    assert!(r.end <= all.len());
    // SAFETY: inside `all`, as was just asked.
    unsafe { Span::from_raw(all.ptr().add(r.start), r.len()) }
}

multiversion! {
    /// out = x / √(mean(x²) + eps) · w on one row
    fn rms_row<const FMA: bool>(out: Span<f32>, x: Span<f32>, w: Span<f32>, eps: f32) {
        let all = 0..x.len();
        // SAFETY: the caller's (see `rmsnorm`), passed down; slices end before the next is made.
        unsafe {
            let mean = sum_squares::<FMA>(x.all(), 0.0) / x.len() as f64;
            let factor = (1.0 / (mean + f64::from(eps)).sqrt()) as f32;
            map2(out, x, w, all, |x, w| x * factor * w);
        }
    }

    /// out = a + b
    fn add_row<const FMA: bool>(out: Span<f32>, a: Span<f32>, b: Span<f32>) {
        // SAFETY: the caller's (see `rmsnorm_residual`), passed down.
        unsafe { map2(out, a, b, 0..out.len(), |a, b| a + b) }
    }

    /// out = (x - mean) / √(var + eps) · w + b on one row
    fn layer_row<const FMA: bool>(out: Span<f32>, x: Span<f32>, w: Span<f32>, b: Span<f32>, eps: f32) {
        let n = x.len() as f64;
        // SAFETY: the caller's (see `layernorm`), passed down; slices end before the next is made.
        unsafe {
            let mean = (sum(x.all()) / n) as f32;
            let rstd = (1.0 / (sum_squares::<FMA>(x.all(), mean) / n + f64::from(eps)).sqrt()) as f32;
            map1(out, x, 0..x.len(), |x| (x - mean) * rstd);
            for ((v, &w), &b) in out.all_mut().iter_mut().zip(w.all()).zip(b.all()) {
                *v = fma::<FMA>(*v, w, b);
            }
        }
    }
}

/// out = x / √(mean(x²) + eps) · weight in each row; `out` may be `x`.
///
/// # Safety
/// See [the module](super); x and out: rows·dim, weight: dim.
///
/// # Errors
/// See [the module](super).
pub unsafe fn rmsnorm(x: Span<f32>, weight: Span<f32>, out: Span<f32>, eps: f32) -> Done {
    let (isa, dim) = (isa(), weight.len());
    row_pieces(x.len().checked_div(dim).unwrap_or(0), dim, 2, |rows| {
        for row in rows {
            let r = row * dim..(row + 1) * dim;
            // SAFETY: the row is inside both; the contract.
            unsafe { rms_row(isa, row_of(out, &r), row_of(x, &r), weight, eps) }
        }
    })
}

/// residual_out = x + residual; out = rmsnorm(residual_out). `residual_out` may be `x` or `residual`; `out` may be `x` or
/// `residual` if `residual_out` is not the same, and is never `residual_out`.
///
/// # Safety
/// See [the module](super); weight: dim, all others: rows·dim.
///
/// # Errors
/// See [the module](super).
pub unsafe fn rmsnorm_residual(
    [x, residual, weight]: [Span<f32>; 3],
    out: Span<f32>,
    residual_out: Span<f32>,
    eps: f32,
) -> Done {
    let (isa, dim) = (isa(), weight.len());
    row_pieces(x.len().checked_div(dim).unwrap_or(0), dim, 3, |rows| {
        for row in rows {
            let r = row * dim..(row + 1) * dim;
            // SAFETY: the row is inside all; the contract.
            unsafe {
                let sum = row_of(residual_out, &r);
                add_row(isa, sum, row_of(x, &r), row_of(residual, &r));
                rms_row(isa, row_of(out, &r), sum, weight, eps);
            }
        }
    })
}

/// out = (x - mean) / √(var + eps) · weight + bias in each row, var over dim, not dim - 1; `out` may be `x`.
///
/// # Safety
/// See [the module](super); x and out: rows·dim, weight and bias: dim.
///
/// # Errors
/// See [the module](super).
pub unsafe fn layernorm([x, weight, bias]: [Span<f32>; 3], out: Span<f32>, eps: f32) -> Done {
    let (isa, dim) = (isa(), weight.len());
    row_pieces(x.len().checked_div(dim).unwrap_or(0), dim, 3, |rows| {
        for row in rows {
            let r = row * dim..(row + 1) * dim;
            // SAFETY: the row is inside both; the contract.
            unsafe { layer_row(isa, row_of(out, &r), row_of(x, &r), weight, bias, eps) }
        }
    })
}
