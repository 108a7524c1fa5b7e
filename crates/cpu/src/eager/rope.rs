//! Rotary position embedding; its gradient turns the other way.

use super::elem::Elem;
use super::ptr::Ptr;
use super::real::Real;
use super::tiles::{narrow, widen};
use super::{by_type, versions};
use crate::flat::Done;
use crate::flat::pool::{isa, row_pieces};
use ironhorse_core::eager::{Array, Pairs, RopeShape};

versions! {
    fn rotate_interleaved<A: Real, const FMA: bool>(heads: &mut [A], sin: &[A], cos: &[A]) {
        for head in heads.chunks_exact_mut(2 * sin.len()) {
            for ((pair, &s), &c) in head.as_chunks_mut::<2>().0.iter_mut().zip(sin).zip(cos) {
                let [a, b] = *pair;
                *pair = [a * c - b * s, a * s + b * c];
            }
        }
    }

    fn rotate_halves<A: Real, const FMA: bool>(heads: &mut [A], sin: &[A], cos: &[A]) {
        for head in heads.chunks_exact_mut(2 * sin.len()) {
            let (first, second) = head.split_at_mut(sin.len());
            for (((a, b), &s), &c) in first.iter_mut().zip(second).zip(sin).zip(cos) {
                (*a, *b) = (*a * c - *b * s, *a * s + *b * c);
            }
        }
    }
}

/// y = x, each pair of a head turned by the angle of its position; `y` may be `x`.
///
/// # Safety
/// See [the module](super); sizes as in [`RopeShape`].
///
/// # Errors
/// See [the module](super).
pub unsafe fn rope([x, cos, sin]: [Array; 3], y: Array, shape: &RopeShape, back: bool) -> Done {
    let (isa, half, width) = (isa(), shape.head_dim / 2, shape.heads * shape.head_dim);
    if half == 0 || width == 0 || y.at.is_null() {
        return Ok(());
    }
    by_type!(x.float, T => {
        type Acc = <T as Elem>::Acc;
        let (x, y, cos, sin) = (Ptr::<T>::of(x), Ptr::<T>::of(y), Ptr::<Acc>::of(cos), Ptr::<Acc>::of(sin));
        let rotate = if shape.pairs == Pairs::Interleaved { rotate_interleaved::<Acc> } else { rotate_halves::<Acc> };
        row_pieces(shape.batch * shape.seq, width, 2, |tokens| {
            let (mut token, mut turn) = (vec![Acc::ZERO; width], vec![Acc::ZERO; half]);
            for t in tokens {
                let angles = t % shape.seq * half;
                // SAFETY: the caller's; tasks have disjoint tokens, each read before it is written.
                unsafe {
                    let (cos, sin) = (cos.at(angles).slice(half), sin.at(angles).slice(half));
                    turn.iter_mut().zip(sin).for_each(|(turn, &s)| *turn = if back { -s } else { s });
                    widen(isa, &mut token, x.at(t * width).slice(width));
                    rotate(isa, &mut token, &turn, cos);
                    narrow(isa, y.at(t * width).slice_mut(width), &token);
                }
            }
        })
    })
}
