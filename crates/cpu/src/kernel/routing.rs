//! A router's choice for one token, the sort of the routes by expert, and the sums over a token's routes.

use super::elementwise::{add_scaled, add_to, scaled};
use crate::element::{dot, dot_inline, largest, sum_inline};
use crate::isa::Isa;
use crate::math::exp_f32;
use crate::memory::Span;
use crate::multiversion;
use std::ops::Range;

multiversion! {
    /// p = softmax(x); says whether all of x are finite.
    fn softmax<const FMA: bool>(p: &mut [f32], x: &[f32]) -> bool {
        let max = largest(x);
        for (p, x) in p.iter_mut().zip(x) {
            *p = exp_f32::<FMA>(x - max);
        }
        let sum = sum_inline(p, usize::MAX) as f32;
        for p in p.iter_mut() {
            *p /= sum;
        }
        x.iter().fold(true, |all, x| all & x.is_finite())
    }

    /// d = scale·p·(load - Σ p·load), with loads counted from `top`.
    fn balance_bwd<const FMA: bool>(d: &mut [f32], p: &[f32], load: &[f32], top: f32, scale: f32) {
        for (d, load) in d.iter_mut().zip(load) {
            *d = load - top;
        }
        let mean = dot_inline::<f32, FMA>(p, d);
        for (d, p) in d.iter_mut().zip(p) {
            *d = scale * (p * (*d - mean));
        }
    }
}

/// The largest of the logits that come after `(value, index)` in their order: descending, equal ones by number.
fn next_largest(x: &[f32], after: Option<(f32, usize)>) -> (f32, usize) {
    let mut best = (f32::NEG_INFINITY, 0);
    for (i, &x) in x.iter().enumerate() {
        let left = after.is_none_or(|(value, index)| x < value || (x == value && i > index));
        if left && x > best.0 {
            best = (x, i);
        }
    }
    best
}

/// The softmax of the logits, and the experts with the largest logits with their probabilities divided by their sum. False,
/// and experts 0, if a logit is NaN or infinite.
pub fn choose(isa: Isa, logits: &[f32], probs: &mut [f32], weights: &mut [f32], experts: &mut [i32]) -> bool {
    if !softmax(isa, probs, logits) {
        experts.fill(0);
        return false;
    }
    let (mut last, mut sum) = (None, 0.0_f32);
    for (weight, expert) in weights.iter_mut().zip(experts) {
        let (logit, index) = next_largest(logits, last);
        (*weight, *expert) = (probs[index], index as i32);
        sum += *weight;
        last = Some((logit, index));
    }
    weights.iter_mut().for_each(|weight| *weight /= sum);
    true
}

/// What [`choose`] made for a token.
#[derive(Clone, Copy)]
pub struct Made<'a> {
    pub probs: &'a [f32],
    pub weights: &'a [f32],
    pub experts: &'a [i32],
}

/// The gradient of the logits: through the weights, which are the softmax of the chosen logits alone, and through
/// `scale·Σ load·probs`.
///
/// Gradients and loads are counted from those of the first choice: where it has nearly all the probability, their differences
/// from the mean would otherwise be small differences of large numbers.
pub fn choose_bwd(
    isa: Isa,
    d_logits: &mut [f32],
    d_weights: &[f32],
    made: Made<'_>,
    (load, scale): (&[f32], f32),
) {
    let Made { probs, weights, experts } = made;
    balance_bwd(isa, d_logits, probs, load, load[experts[0] as usize], scale);
    let first = d_weights[0];
    let mean: f32 = weights.iter().zip(d_weights).map(|(w, d)| w * (d - first)).sum();
    for ((&expert, w), d) in experts.iter().zip(weights).zip(d_weights) {
        d_logits[expert as usize] += w * ((d - first) - mean);
    }
}

/// Routes of each expert, counted.
pub fn count_routes(experts: &[i32], counts: &mut [i32]) {
    counts.fill(0);
    experts.iter().for_each(|&e| counts[e as usize] += 1);
}

/// Makes the counts of pieces the rows where each piece's routes of each expert begin, and `offsets` where each expert's do.
pub fn first_rows(counts: &mut [i32], offsets: &mut [i32]) {
    let (all, mut next) = (offsets.len().saturating_sub(1), 0);
    for e in 0..all {
        offsets[e] = next;
        for piece in counts.chunks_exact_mut(all) {
            next += std::mem::replace(&mut piece[e], next);
        }
    }
    if let Some(end) = offsets.last_mut() {
        *end = next;
    }
}

/// Gives the routes of a piece their rows. `next`: of each expert, the row of the piece's next route.
///
/// # Safety
/// `next` comes from [`first_rows`], and nobody else uses the rows of `order` that the piece's counts gave it.
pub unsafe fn place_routes(
    experts: &[i32],
    routes: Range<usize>,
    next: &mut [i32],
    places: &mut [i32],
    order: Span<i32>,
) {
    for (place, route) in places.iter_mut().zip(routes) {
        let row = &mut next[experts[route] as usize];
        *place = *row;
        // SAFETY: guaranteed by the caller.
        unsafe { order.set(*row as usize, route as i32) };
        *row += 1;
    }
}

/// out = or += the sum of the rows of a token's routes, in their order.
///
/// # Safety
/// Nobody writes the rows.
pub unsafe fn sum_routes(isa: Isa, out: &mut [f32], rows: Span<f32>, places: &[i32], adds: bool) {
    for (j, &place) in places.iter().enumerate() {
        // SAFETY: guaranteed by the caller.
        let from = unsafe { rows.row(place as usize, out.len()).all() };
        if j == 0 && !adds {
            out.copy_from_slice(from);
        } else {
            add_to(isa, out, from);
        }
    }
}

/// out = the sum of the rows of a token's routes, each times its weight, in their order.
///
/// # Safety
/// Nobody writes the rows.
pub unsafe fn combine_routes(isa: Isa, out: &mut [f32], rows: Span<f32>, places: &[i32], weights: &[f32]) {
    for (j, (&place, &weight)) in places.iter().zip(weights).enumerate() {
        // SAFETY: guaranteed by the caller.
        let from = unsafe { rows.row(place as usize, out.len()).all() };
        if j == 0 {
            scaled(isa, out, weight, from);
        } else {
            add_scaled(isa, out, weight, from);
        }
    }
}

/// The gradients of one route of [`combine_routes`]: of its row, and of its weight, which is returned. `d_row` may be `row`.
///
/// # Safety
/// The caller may read `row` and alone uses `d_row`.
pub unsafe fn combine_route_bwd(
    isa: Isa,
    d_row: Span<f32>,
    d_out: &[f32],
    row: Span<f32>,
    weight: f32,
) -> f32 {
    // SAFETY: guaranteed by the caller; the row is not used any more when `d_row` is written.
    unsafe {
        let d_weight = dot(isa, d_out, row.all());
        scaled(isa, d_row.all_mut(), weight, d_out);
        d_weight
    }
}

/// Whether every place is below their number and no two are equal: two tasks would write the same row otherwise. `seen` has
/// an element for each.
pub fn is_permutation(places: &[i32], seen: &mut [i32]) -> bool {
    seen.fill(0);
    places.iter().all(|&place| {
        let seen = usize::try_from(place).ok().and_then(|place| seen.get_mut(place));
        seen.is_some_and(|seen| std::mem::replace(seen, 1) == 0)
    })
}
