//! Loops over elements, and sums of them, that become vector code inside [`multiversion!`](crate::multiversion).

// Lanes are numbered: an index says more than an iterator here.
#![allow(clippy::needless_range_loop)]

use super::types::{Elem, Real};
use crate::memory::Span;
use crate::multiversion;

/// Lanes of sums and maxima.
pub const LANES: usize = 32;
/// Elements of a block: several blocks fit into the L1 cache together.
pub const BLOCK: usize = 512;

/// How many elements are summed in the accumulator's type before their sum joins an f64 total.
pub trait Order {
    /// Elements per sum.
    const BLOCK: usize;
    /// Whether a layer norm sums its rows in half of the lanes.
    const NARROW: bool;
}

/// One sum over the whole row: rows of a model, which have some thousand elements.
pub struct Whole;

impl Order for Whole {
    const BLOCK: usize = usize::MAX;
    const NARROW: bool = true;
}

/// Sums of 4096 elements, added in f64: rows of any length.
pub struct Blocks;

impl Order for Blocks {
    const BLOCK: usize = 4096;
    const NARROW: bool = false;
}

/// outputs\[i\] = f(inputs\[i\]) for every i. An output may be the same window as an input: elements are read before they are
/// written. An output that is not given is not written.
///
/// A single output that is apart from the inputs is written by one loop, of which the compiler can see that nothing overlaps. All
/// else goes by [`LANES`] elements that are read, computed and written one group after the other.
///
/// # Safety
/// The caller may read the inputs and alone uses the outputs; an output that is not the same window as an input shares no
/// memory with it.
#[inline(always)]
pub unsafe fn map<T: Elem, const IN: usize, const OUT: usize>(
    inputs: [Span<T>; IN],
    outputs: [Span<T>; OUT],
    f: impl Fn([T::Acc; IN]) -> [T::Acc; OUT],
) {
    let len = inputs[0].len();
    assert!(inputs.iter().chain(&outputs).all(|x| x.len() == len), "windows of different lengths");
    let (from, to) = (inputs.map(Span::ptr), outputs.map(Span::ptr));
    if OUT == 1 && T::IS_ACC && !from.contains(&to[0]) {
        if !to[0].is_null() {
            // SAFETY: guaranteed by the caller; every index is below the length of the windows.
            unsafe { map_group(from, to, 0, len, &f) };
        }
        return;
    }
    let mut first = 0;
    while first < len {
        // The number of elements is a constant for the compiler in every call but the last.
        // SAFETY: guaranteed by the caller; first + the number is at most the length of the windows.
        unsafe {
            if len - first >= LANES {
                map_lanes(from, to, first, LANES, &f);
            } else {
                map_lanes(from, to, first, len - first, &f);
            }
        }
        first += LANES;
    }
}

/// Elements `first` to `first + n` of [`map`] in one loop.
///
/// # Safety
/// As [`map`], for these elements. The outputs share no memory with the inputs.
#[inline(always)]
unsafe fn map_group<T: Elem, const IN: usize, const OUT: usize>(
    from: [*mut T; IN],
    to: [*mut T; OUT],
    first: usize,
    n: usize,
    f: &impl Fn([T::Acc; IN]) -> [T::Acc; OUT],
) {
    for i in first..first + n {
        let mut arguments = [T::Acc::ZERO; IN];
        for k in 0..IN {
            // SAFETY: guaranteed by the caller.
            arguments[k] = unsafe { from[k].add(i).read() }.load();
        }
        let results = f(arguments);
        for k in 0..OUT {
            // SAFETY: guaranteed by the caller.
            unsafe { to[k].add(i).write(T::store(results[k])) };
        }
    }
}

/// Up to [`LANES`] elements of [`map`]: all are read before one is written.
///
/// # Safety
/// As [`map`], for these elements.
#[inline(always)]
unsafe fn map_lanes<T: Elem, const IN: usize, const OUT: usize>(
    from: [*mut T; IN],
    to: [*mut T; OUT],
    first: usize,
    n: usize,
    f: &impl Fn([T::Acc; IN]) -> [T::Acc; OUT],
) {
    let (mut x, mut y) = ([[T::Acc::ZERO; LANES]; IN], [[T::Acc::ZERO; LANES]; OUT]);
    for k in 0..IN {
        for i in 0..n {
            // SAFETY: guaranteed by the caller.
            x[k][i] = unsafe { from[k].add(first + i).read() }.load();
        }
    }
    for i in 0..n {
        let mut arguments = [T::Acc::ZERO; IN];
        for k in 0..IN {
            arguments[k] = x[k][i];
        }
        let results = f(arguments);
        for k in 0..OUT {
            y[k][i] = results[k];
        }
    }
    for k in 0..OUT {
        if !to[k].is_null() {
            for i in 0..n {
                // SAFETY: guaranteed by the caller.
                unsafe { to[k].add(first + i).write(T::store(y[k][i])) };
            }
        }
    }
}

/// The lanes combined by a fixed tree: 32 to 16 to 8 ...
#[inline(always)]
pub fn tree<A: Copy, const W: usize>(mut lanes: [A; W], join: impl Fn(A, A) -> A) -> A {
    let mut width = W / 2;
    while width > 0 {
        for i in 0..width {
            lanes[i] = join(lanes[i], lanes[i + width]);
        }
        width /= 2;
    }
    lanes[0]
}

/// `OUT` sums over slices of equal length, each of what `add` adds to it. Element i of a block goes to lane i mod `W`, the
/// lanes are joined by a tree, and blocks of `block` elements are added in f64.
#[inline(always)]
pub fn totals<T: Elem, const IN: usize, const OUT: usize, const W: usize>(
    x: [&[T]; IN],
    block: usize,
    add: impl Fn([T::Acc; IN], [T::Acc; OUT]) -> [T::Acc; OUT],
) -> [f64; OUT] {
    let len = x[0].len();
    assert!(x.iter().all(|x| x.len() == len), "slices of different lengths");
    let mut total = [0.0; OUT];
    let mut start = 0;
    while start < len {
        let end = len.min(start.saturating_add(block));
        let mut lanes = [[T::Acc::ZERO; W]; OUT];
        let mut first = start;
        while end - first >= W {
            for i in 0..W {
                // SAFETY: first + i is below `end`, which is at most the length of every slice.
                unsafe { add_element(&x, first + i, &mut lanes, i, &add) };
            }
            first += W;
        }
        // If half of the lanes are left, they are added at once: rows of 16 elements need only this.
        let mut lane = 0;
        if end - first >= W / 2 {
            for i in 0..W / 2 {
                // SAFETY: first + W / 2 is at most `end`, which is at most the length of every slice.
                unsafe { add_element(&x, first + i, &mut lanes, i, &add) };
            }
            (first, lane) = (first + W / 2, W / 2);
        }
        for i in 0..end - first {
            // SAFETY: first + i is below `end`, which is at most the length of every slice; fewer than W / 2 are left after the
            // first half.
            unsafe { add_element(&x, first + i, &mut lanes, lane + i, &add) };
        }
        for k in 0..OUT {
            // The compiler must not see that the tree adds pairs: it would add in pairs from the start, two lanes at a time.
            total[k] += tree(std::hint::black_box(lanes[k]), |a, b| a + b).wide();
        }
        start = end;
    }
    total
}

/// Adds element `at` of every slice to lane `i` of every sum.
///
/// # Safety
/// The slices have such an element.
#[inline(always)]
unsafe fn add_element<T: Elem, const IN: usize, const OUT: usize, const W: usize>(
    x: &[&[T]; IN],
    at: usize,
    lanes: &mut [[T::Acc; W]; OUT],
    i: usize,
    add: &impl Fn([T::Acc; IN], [T::Acc; OUT]) -> [T::Acc; OUT],
) {
    let (mut elements, mut sums) = ([T::Acc::ZERO; IN], [T::Acc::ZERO; OUT]);
    for k in 0..IN {
        // SAFETY: guaranteed by the caller.
        elements[k] = unsafe { x[k].get_unchecked(at) }.load();
    }
    for k in 0..OUT {
        sums[k] = lanes[k][i];
    }
    let sums = add(elements, sums);
    for k in 0..OUT {
        lanes[k][i] = sums[k];
    }
}

/// Σ x y in the type of sums.
#[inline(always)]
pub fn dot_inline<T: Elem, const FMA: bool>(x: &[T], y: &[T]) -> T::Acc {
    let sums = totals::<T, 2, 1, LANES>([x, y], usize::MAX, |[x, y], [sum]| [T::Acc::fma::<FMA>(x, y, sum)]);
    T::Acc::of(sums[0])
}

/// Σ x, in blocks.
#[inline(always)]
pub fn sum_inline<T: Elem>(x: &[T], block: usize) -> f64 {
    totals::<T, 1, 1, LANES>([x], block, |[x], [sum]| [sum + x])[0]
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

multiversion! {
    /// Σ x y in the type of sums
    pub fn dot<const FMA: bool, T: Elem>(x: &[T], y: &[T]) -> T::Acc {
        dot_inline::<T, FMA>(x, y)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::isa::Isa;

    multiversion! {
        fn sum<const FMA: bool>(x: &[f32]) -> f32 {
            sum_inline(x, usize::MAX) as f32
        }

        fn greatest<const FMA: bool>(x: &[f32]) -> f32 {
            largest(x)
        }
    }

    fn random(len: usize) -> Vec<f32> {
        let mut state = 99_u32;
        let mut next = || {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (state >> 8) as f32 / (1 << 23) as f32 - 1.0
        };
        (0..len).map(|_| next()).collect()
    }

    #[test]
    fn reductions_agree_with_f64_and_between_instruction_sets() {
        for len in [0, 1, 15, 16, 17, 31, 32, 33, 63, 64, 65, 1000, 50257] {
            let x = random(len);
            let y: Vec<f32> = x.iter().map(|x| 0.3 - x).collect();
            let exact: f64 = x.iter().map(|&x| f64::from(x)).sum();
            let exact_dot: f64 = x.iter().zip(&y).map(|(&x, &y)| f64::from(x) * f64::from(y)).sum();
            let best = Isa::detect();
            for isa in Isa::supported() {
                let close = |got: f64, want: f64| (got - want).abs() <= 1e-5 * (len as f64).sqrt() + 1e-7;
                assert!(close(f64::from(sum(isa, &x)), exact));
                assert!(close(f64::from(dot(isa, &x, &y)), exact_dot));
                assert_eq!(greatest(isa, &x), x.iter().copied().fold(f32::NEG_INFINITY, f32::max));
                assert_eq!(sum(isa, &x).to_bits(), sum(best, &x).to_bits());
                if isa != Isa::PORTABLE {
                    assert_eq!(dot(isa, &x, &y).to_bits(), dot(best, &x, &y).to_bits());
                }
            }
        }
    }
}
