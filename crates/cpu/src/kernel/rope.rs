//! Rotary position embedding.

use crate::element::Real;
use crate::isa::Isa;
use crate::multiversion;
use ironhorse_core::eager::Pairs;

multiversion! {
    fn rotate_interleaved<const FMA: bool, A: Real>(heads: &mut [A], cos: &[A], sin: &[A], sign: A) {
        for head in heads.chunks_exact_mut(2 * sin.len()) {
            for ((pair, &s), &c) in head.as_chunks_mut::<2>().0.iter_mut().zip(sin).zip(cos) {
                let ([a, b], s) = (*pair, s * sign);
                *pair = [a * c - b * s, a * s + b * c];
            }
        }
    }

    fn rotate_halves<const FMA: bool, A: Real>(heads: &mut [A], cos: &[A], sin: &[A], sign: A) {
        for head in heads.chunks_exact_mut(2 * sin.len()) {
            let (first, second) = head.split_at_mut(sin.len());
            for (((a, b), &s), &c) in first.iter_mut().zip(second).zip(sin).zip(cos) {
                let s = s * sign;
                (*a, *b) = (*a * c - *b * s, *a * s + *b * c);
            }
        }
    }
}

/// Rotates each pair of each head by its angle, given by cosine and sine; `back` rotates the other way, as for the gradient.
pub fn rotate<A: Real>(isa: Isa, pairs: Pairs, heads: &mut [A], [cos, sin]: [&[A]; 2], back: bool) {
    let sign = if back { -A::ONE } else { A::ONE };
    match pairs {
        Pairs::Interleaved => rotate_interleaved(isa, heads, cos, sin, sign),
        Pairs::Halves => rotate_halves(isa, heads, cos, sin, sign),
    }
}
