//! Softmax over rows, the gradient, and the sums of exponentials that losses need too.

use crate::element::{BLOCK, Blocks, Elem, LANES, Order, Real, largest, map, sum_inline, totals};
use crate::memory::Span;
use crate::multiversion;
use std::mem::MaybeUninit;

/// Σ e^(x - max) in f64 of sums over [`BLOCK`] elements.
#[inline(always)]
fn sum_exp<T: Elem, const FMA: bool>(x: &[T], max: T::Acc) -> f64 {
    // Clearing a block would take as long as a short row.
    let mut powers = [const { MaybeUninit::<T::Acc>::uninit() }; BLOCK];
    let mut sum = 0.0;
    for block in x.chunks(BLOCK) {
        powers.iter_mut().zip(block).for_each(|(power, x)| {
            power.write((x.load() - max).exp_low::<FMA>());
        });
        // SAFETY: as many were just written.
        sum += sum_inline(unsafe { powers[..block.len()].assume_init_ref() }, BLOCK);
    }
    sum
}

multiversion! {
    /// The largest of a row, and Σ e^(x - largest).
    pub fn row_sum<const FMA: bool, T: Elem>(x: &[T]) -> (T::Acc, f64) {
        let max = largest(x);
        (max, sum_exp::<_, FMA>(x, max))
    }

    /// x = e^(x - max), max the largest; returns max and the sum.
    pub fn exp_in_place<const FMA: bool, A: Real>(x: &mut [A]) -> (A, f64) {
        let (max, mut sum) = (largest(x), 0.0);
        for block in x.chunks_mut(BLOCK) {
            block.iter_mut().for_each(|x| *x = (*x - max).exp_low::<FMA>());
            sum += sum_inline(block, BLOCK);
        }
        (max, sum)
    }

    /// y = softmax(x). NaN where x holds NaN or +inf, or nothing above -inf.
    pub fn softmax<const FMA: bool, T: Elem>(x: Span<T>, y: Span<T>) {
        // SAFETY: the caller alone uses `y`, which is `x` or shares no memory with it; slices end before the next is made.
        unsafe {
            let max = largest(x.all());
            if T::IS_ACC {
                map([x], [y], |[x]| [(x - max).exp::<FMA>()]);
                let factor = T::Acc::of(1.0 / sum_inline(y.all(), Blocks::BLOCK));
                y.all_mut().iter_mut().for_each(|y| *y = T::store(y.load() * factor));
            } else {
                // Rounded once: the exponentials are not kept, but computed again.
                let factor = T::Acc::of(1.0 / sum_exp::<_, FMA>(x.all(), max));
                map([x], [y], |[x]| [(x - max).exp::<FMA>() * factor]);
            }
        }
    }

    /// From \[d_y, y\]: d_x = y (d_y - Σ d_y y)
    pub fn softmax_bwd<const FMA: bool, T: Elem>(from: [Span<T>; 2], d_x: Span<T>) {
        // SAFETY: as in `softmax`, with `d_x` and both inputs.
        unsafe {
            let add = |[d, y]: [T::Acc; 2], [sum]: [T::Acc; 1]| [T::Acc::fma::<FMA>(d, y, sum)];
            let [dot] = totals::<T, 2, 1, LANES>(from.map(|x| x.all()), Blocks::BLOCK, add);
            let mean = T::Acc::of(dot);
            map(from, [d_x], |[d, y]| [y * (d - mean)]);
        }
    }
}
