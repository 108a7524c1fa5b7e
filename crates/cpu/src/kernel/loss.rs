//! Rows of cross entropy.

use super::softmax::row_sum;
use crate::element::{Elem, Real, map};
use crate::isa::Isa;
use crate::math::exp_flush;
use crate::memory::Span;
use crate::multiversion;

multiversion! {
    /// d = e^(x - lse) factor
    pub fn cross_entropy_d_row<const FMA: bool, T: Elem>(x: Span<T>, d: Span<T>, lse: T::Acc, factor: T::Acc) {
        // SAFETY: the caller alone uses `d`, which is `x` or shares no memory with it.
        unsafe { map([x], [d], |[x]| [(x - lse).exp::<FMA>() * factor]) }
    }

    /// out = x - max - log_sum
    fn shift<const FMA: bool>(x: Span<f32>, out: Span<f32>, max: f32, log_sum: f32) {
        // SAFETY: as in `cross_entropy_d_row`.
        unsafe { map([x], [out], |[x]| [(x - max) - log_sum]) }
    }

    /// x = e^(x - logit - loss) · scale: the probabilities of a row from the logit of its target and its loss. The differences
    /// are taken one after the other, so that logits far from 0 lose no digits.
    pub fn probabilities<const FMA: bool>(x: &mut [f32], logit: f32, loss: f32, scale: f32) {
        x.iter_mut().for_each(|x| *x = exp_flush::<FMA>((*x - logit) - loss) * scale);
    }

    /// d = e^log_probs · scale
    pub fn log_probs_d_row<const FMA: bool>(log_probs: Span<f32>, d: Span<f32>, scale: f32) {
        // SAFETY: as in `cross_entropy_d_row`.
        unsafe { map([log_probs], [d], |[x]| [exp_flush::<FMA>(x) * scale]) }
    }
}

/// The largest of a row, and ln Σ e^(x - largest).
pub fn log_sum<T: Elem>(isa: Isa, x: &[T]) -> (f64, f64) {
    let (max, sum) = row_sum(isa, x);
    (max.wide(), sum.ln())
}

/// log_probs = log softmax(x) of a row; returns the loss of its target.
///
/// # Safety
/// The caller alone uses `log_probs`, which is `x` or shares no memory with it.
pub unsafe fn log_probs_row(isa: Isa, x: Span<f32>, log_probs: Span<f32>, target: usize) -> f64 {
    // SAFETY: guaranteed by the caller; the slice ends before anything is written.
    let (at_target, (max, log_sum)) = unsafe { (x.value(target), log_sum(isa, x.all())) };
    shift(isa, x, log_probs, max as f32, log_sum as f32);
    log_sum - (f64::from(at_target) - max)
}

/// The index of the largest number, the lowest of equal ones; the first NaN, if there is one.
pub fn first_largest(x: &[f32]) -> usize {
    let mut best = (0, f32::NEG_INFINITY);
    for (at, &x) in x.iter().enumerate() {
        if x > best.1 {
            best = (at, x);
        } else if x.is_nan() {
            return at;
        }
    }
    best.0
}
