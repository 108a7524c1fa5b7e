//! A router's choice for one token, the sort of the routes by expert, and the sums over a token's routes.

use super::elementwise::{add_scaled, add_to, scaled};
use crate::element::{dot, dot_inline, largest, sum_inline};
use crate::isa::Isa;
use crate::math::exp_f32;
use crate::memory::Span;
use crate::multiversion;
use crate::team::{Done, Split};
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

/// `rows[s] = inp[order[s] / k]`: each token once for each of its experts.
///
/// # Safety
/// `order` has indices of routes. The caller may read `inp` and alone uses `rows`.
pub unsafe fn permute(on: &impl Split, rows: Span<f32>, inp: Span<f32>, order: &[i32], k: usize) -> Done {
    let width = rows.len() / order.len().max(1);
    on.rows(order.len(), width, 1, |row| {
        let from = inp.row(order[row] as usize / k, width);
        // SAFETY: guaranteed by the caller; rows have one task each.
        unsafe { rows.row(row, width).all_mut().copy_from_slice(from.all()) };
    })
}

/// Tokens whose routes have rows, k each: row `places[n·k + j]` belongs to route j of token n.
#[derive(Clone, Copy)]
pub struct Routed<'a> {
    /// (N·k, C)
    pub rows: Span<f32>,
    /// N·k, each below their number
    pub places: &'a [i32],
    pub tokens: usize,
    pub k: usize,
}

impl Routed<'_> {
    fn width(&self) -> usize {
        self.rows.len() / self.places.len().max(1)
    }

    /// Runs `task(token, its routes)` for each token.
    fn each(&self, on: &impl Split, weight: usize, task: impl Fn(usize, Range<usize>) + Sync) -> Done {
        on.rows(self.tokens, self.k * self.width(), weight, |token| {
            task(token, token * self.k..(token + 1) * self.k);
        })
    }

    /// The row of a route.
    fn row(&self, route: usize) -> Span<f32> {
        self.rows.row(self.places[route] as usize, self.width())
    }

    /// `out[n]` = or += the sum of the rows of the token's routes, each times its weight if there are weights, in their order.
    ///
    /// # Safety
    /// The caller may read the rows and alone uses `out`, which shares no memory with them.
    pub unsafe fn sum(&self, on: &impl Split, out: Span<f32>, weights: Option<&[f32]>, adds: bool) -> Done {
        let isa = on.isa();
        self.each(on, 1, |token, routes| {
            for route in routes.clone() {
                // SAFETY: guaranteed by the caller; tokens have one task each.
                let (out, from) = unsafe { (out.row(token, self.width()).all_mut(), self.row(route).all()) };
                match weights.map(|weights| weights[route]) {
                    None if route == routes.start && !adds => out.copy_from_slice(from),
                    None => add_to(isa, out, from),
                    Some(weight) if route == routes.start && !adds => scaled(isa, out, weight, from),
                    Some(weight) => add_scaled(isa, out, weight, from),
                }
            }
        })
    }

    /// The gradients of [`Routed::sum`] with weights: `d_rows`, which may be `rows`, and `d_weights`.
    ///
    /// # Safety
    /// No two places are the same. The caller may read `rows` and `d_out` and alone uses what is written, which shares no
    /// memory with `d_out`.
    pub unsafe fn sum_bwd(
        &self,
        on: &impl Split,
        (d_rows, d_weights): (Span<f32>, Span<f32>),
        (d_out, weights): (Span<f32>, &[f32]),
    ) -> Done {
        let (isa, d_rows) = (on.isa(), Self { rows: d_rows, ..*self });
        self.each(on, 2, |token, routes| {
            for route in routes {
                // SAFETY: guaranteed by the caller: tasks write disjoint rows; the row is not used any more when that of
                // `d_rows` is written.
                unsafe {
                    let d = d_out.row(token, self.width()).all();
                    d_weights.set(route, dot(isa, d, self.row(route).all()));
                    scaled(isa, d_rows.row(route).all_mut(), weights[route], d);
                }
            }
        })
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
