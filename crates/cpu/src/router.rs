//! The router's arithmetic for one token, which the engine's op and the one-call op share.

use crate::isa::Isa;
use crate::math::{dot_inline, exp_f32, max_inline, sum_inline};
use crate::multiversion;

multiversion! {
    /// p = softmax(x); says whether all of x are finite.
    fn softmax<const FMA: bool>(p: &mut [f32], x: &[f32]) -> bool {
        let max = max_inline(x);
        for (p, x) in p.iter_mut().zip(x) {
            *p = exp_f32::<FMA>(x - max);
        }
        let sum = sum_inline(p);
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
        let mean = dot_inline::<FMA>(p, d);
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

/// Probabilities, the largest of them over their sum, and whose they are. False, and experts 0, where a logit is not finite.
pub(crate) fn choose(
    isa: Isa,
    logits: &[f32],
    probs: &mut [f32],
    weights: &mut [f32],
    experts: &mut [i32],
) -> bool {
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
pub(crate) struct Made<'a> {
    pub probs: &'a [f32],
    pub weights: &'a [f32],
    pub experts: &'a [i32],
}

/// The gradient of the logits: through the weights, which are the softmax of the chosen logits alone, and through
/// `scale·Σ load·probs`.
///
/// Gradients and loads are counted from those of the first choice: where that has nearly all the probability, they less their
/// mean are small differences of large numbers otherwise.
pub(crate) fn choose_bwd(
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
