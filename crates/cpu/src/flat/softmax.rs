//! Softmax over rows, and the top-k choice of a router.

use super::map::map1;
use super::pool::{isa, row_pieces};
use super::{Done, Span};
use crate::math::{exp_f32, max_inline, sum_inline};
use crate::multiversion;
use std::cmp::Ordering;
use std::ops::Range;

/// Elements whose sum is one f32 sum; the sums of the blocks are added in f64.
const BLOCK: usize = 4096;

/// Σ x, accurate for rows of any length.
#[inline(always)]
fn long_sum(x: &[f32]) -> f64 {
    x.chunks(BLOCK).map(|block| f64::from(sum_inline(block))).sum()
}

multiversion! {
    fn softmax_row<const FMA: bool>(out: Span<f32>, x: Span<f32>, r: Range<usize>) {
        // SAFETY: the caller's (see `softmax`), passed down; slices end before the next is made.
        unsafe {
            let max = max_inline(x.get(r.clone()));
            map1(out, x, r.clone(), |x| exp_f32::<FMA>(x - max));
            let factor = (1.0 / long_sum(out.get(r.clone()))) as f32;
            out.get_mut(r).iter_mut().for_each(|v| *v *= factor);
        }
    }
}

/// out = softmax(x) in each of `rows` rows; `out` may be `x`. A row with NaN or +inf, or of -inf alone, becomes NaN.
///
/// # Safety
/// See [the module](super); equal lengths, a multiple of `rows`.
///
/// # Errors
/// See [the module](super).
pub unsafe fn softmax(x: Span<f32>, out: Span<f32>, rows: usize) -> Done {
    let (isa, width) = (isa(), out.len().checked_div(rows).unwrap_or(0));
    if width == 0 {
        return Ok(());
    }
    row_pieces(rows, width, 4, |range| {
        range.for_each(|row| softmax_row(isa, out, x, row * width..(row + 1) * width));
    })
}

/// Largest first, NaN before all, the lower index first among equals: a total order, so any selection gives the same.
fn before(row: &[f32], a: u32, b: u32) -> Ordering {
    let (x, y) = (row[a as usize], row[b as usize]);
    let by_value = match (x.is_nan(), y.is_nan()) {
        (false, false) => y.partial_cmp(&x).unwrap_or(Ordering::Equal),
        (x, y) => y.cmp(&x),
    };
    by_value.then(a.cmp(&b))
}

/// Per row: softmax over all, the k largest, largest first, the lower index first among equals; `weights` are their
/// probabilities divided by their sum, `indices` where they stand.
///
/// # Safety
/// See [the module](super); x: rows·cols, weights and indices: rows·k, 1 <= k <= cols <= 2³¹.
///
/// # Errors
/// See [the module](super).
pub unsafe fn softmax_topk(
    x: Span<f32>,
    weights: Span<f32>,
    indices: Span<i32>,
    rows: usize,
    k: usize,
) -> Done {
    let cols = x.len().checked_div(rows).unwrap_or(0);
    row_pieces(rows, cols, 8, |range| {
        let mut order: Vec<u32> = Vec::with_capacity(cols);
        for row in range {
            let out = row * k..(row + 1) * k;
            // SAFETY: tasks have disjoint rows of what is written, which shares no memory with `x`.
            let (x, weights, indices) = unsafe {
                (x.get(row * cols..(row + 1) * cols), weights.get_mut(out.clone()), indices.get_mut(out))
            };
            order.clear();
            order.extend(0..cols as u32);
            if k < cols {
                order.select_nth_unstable_by(k - 1, |&a, &b| before(x, a, b));
            }
            order[..k].sort_unstable_by(|&a, &b| before(x, a, b));
            top_weights(x, &order[..k], weights, indices);
        }
    })
}

/// The probabilities of the chosen, divided by their sum: the sum over the rest of the row cancels. NaN if the softmax
/// of the row is.
fn top_weights(x: &[f32], chosen: &[u32], weights: &mut [f32], indices: &mut [i32]) {
    let max = chosen.first().map_or(f32::NAN, |&i| x[i as usize]);
    let share = |i: u32| f64::from(x[i as usize] - max).exp();
    let total: f64 = chosen.iter().map(|&i| share(i)).sum();
    for ((weight, index), &i) in weights.iter_mut().zip(indices).zip(chosen) {
        *weight = (share(i) / total) as f32;
        *index = i as i32;
    }
}
