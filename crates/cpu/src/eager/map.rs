//! Loops over elements, and sums of them, that become vector code inside [`versions!`](super::versions).

// Lanes and places in blocks are numbered: an index says more than an iterator here.
#![allow(clippy::needless_range_loop)]

use super::elem::Elem;
use super::ptr::Ptr;
use super::real::Real;
use crate::math::{LANES, tree};

/// Elements of a block: three of f32 fit the first-level cache beside what they are made of.
const BLOCK: usize = 512;
/// Elements that are summed in lanes; the totals of such stretches are added in f64.
const STRETCH: usize = 4096;

/// outputs\[i\] = f(inputs\[i\]) for i < len. An output may be the same array as an input: a block is read before it is
/// written. What is null is not written.
///
/// # Safety
/// Inputs and wanted outputs have `len` elements; this caller alone uses the outputs; an output that is not an input shares
/// no memory with anything.
#[inline(always)]
pub unsafe fn map<T: Elem, const IN: usize, const OUT: usize>(
    inputs: [Ptr<T>; IN],
    outputs: [Ptr<T>; OUT],
    len: usize,
    f: impl Fn([T::Acc; IN]) -> [T::Acc; OUT],
) {
    let mut wide = [[T::Acc::ZERO; BLOCK]; IN];
    let mut made = [[T::Acc::ZERO; BLOCK]; OUT];
    let mut start = 0;
    while start < len {
        let n = BLOCK.min(len - start);
        for k in 0..IN {
            // SAFETY: start + n <= len; nothing is written while the slice lives.
            let x = unsafe { inputs[k].at(start).slice(n) };
            wide[k][..n].iter_mut().zip(x).for_each(|(wide, x)| *wide = x.load());
        }
        for i in 0..n {
            let mut x = [T::Acc::ZERO; IN];
            for k in 0..IN {
                x[k] = wide[k][i];
            }
            let y = f(x);
            for k in 0..OUT {
                made[k][i] = y[k];
            }
        }
        for k in 0..OUT {
            if outputs[k].wanted() {
                // SAFETY: start + n <= len; nothing is read while the slice lives.
                let y = unsafe { outputs[k].at(start).slice_mut(n) };
                y.iter_mut().zip(&made[k][..n]).for_each(|(y, &made)| *y = T::store(made));
            }
        }
        start += n;
    }
}

/// Σ of what `add(x, sum)` adds, over all elements.
#[inline(always)]
pub fn total<T: Elem>(x: &[T], add: impl Fn(T::Acc, T::Acc) -> T::Acc) -> f64 {
    let mut total = 0.0;
    for stretch in x.chunks(STRETCH) {
        let mut lanes = [T::Acc::ZERO; LANES];
        let (full, rest) = stretch.as_chunks::<LANES>();
        for part in full {
            for i in 0..LANES {
                lanes[i] = add(part[i].load(), lanes[i]);
            }
        }
        for (lane, x) in lanes.iter_mut().zip(rest) {
            *lane = add(x.load(), *lane);
        }
        // The compiler must not see the tree (see `math::sum_inline`).
        total += tree(std::hint::black_box(lanes), |a, b| a + b).wide();
    }
    total
}

/// Σ of what `add([x, y], sum)` adds, over all elements of two slices of equal length.
#[inline(always)]
pub fn total2<T: Elem>(x: &[T], y: &[T], add: impl Fn([T::Acc; 2], T::Acc) -> T::Acc) -> f64 {
    let mut total = 0.0;
    for (x, y) in x.chunks(STRETCH).zip(y.chunks(STRETCH)) {
        let mut lanes = [T::Acc::ZERO; LANES];
        let ((xs, x_rest), (ys, y_rest)) = (x.as_chunks::<LANES>(), y.as_chunks::<LANES>());
        for (x, y) in xs.iter().zip(ys) {
            for i in 0..LANES {
                lanes[i] = add([x[i].load(), y[i].load()], lanes[i]);
            }
        }
        for ((lane, x), y) in lanes.iter_mut().zip(x_rest).zip(y_rest) {
            *lane = add([x.load(), y.load()], *lane);
        }
        total += tree(std::hint::black_box(lanes), |a, b| a + b).wide();
    }
    total
}

/// The largest; -inf for none. NaN is passed over.
#[inline(always)]
pub fn largest<T: Elem>(x: &[T]) -> T::Acc {
    let greater = |a: T::Acc, b: T::Acc| if b > a { b } else { a };
    let mut lanes = [T::Acc::NEG_INFINITY; LANES];
    let (full, rest) = x.as_chunks::<LANES>();
    for part in full {
        for i in 0..LANES {
            lanes[i] = greater(lanes[i], part[i].load());
        }
    }
    for (lane, x) in lanes.iter_mut().zip(rest) {
        *lane = greater(*lane, x.load());
    }
    tree(lanes, greater)
}

/// Σ e^(x - max)
#[inline(always)]
pub fn sum_exp<T: Elem, const FMA: bool>(x: &[T], max: T::Acc) -> f64 {
    let mut powers = [T::Acc::ZERO; BLOCK];
    let mut sum = 0.0;
    for block in x.chunks(BLOCK) {
        powers.iter_mut().zip(block).for_each(|(power, x)| *power = (x.load() - max).exp::<FMA>());
        sum += total(&powers[..block.len()], |power, sum| sum + power);
    }
    sum
}
