//! Loops over elements that also work in place.
//!
//! The compiler vectorises a loop over slices that cannot overlap, and one over a single mutable slice. Whether the
//! windows are the same is asked once per piece, and the loop exists for each case.

use super::Span;
use std::ops::Range;

/// out = f(x) on a range.
///
/// # Safety
/// The range is inside both; this caller alone uses it in `out`, which is `x` or shares no memory with it.
#[inline(always)]
pub(super) unsafe fn map1(out: Span<f32>, x: Span<f32>, r: Range<usize>, f: impl Fn(f32) -> f32) {
    // SAFETY: by the contract; each branch has one mutable slice that meets no other slice.
    unsafe {
        if out.is(x) {
            out.get_mut(r).iter_mut().for_each(|v| *v = f(*v));
        } else {
            out.get_mut(r.clone()).iter_mut().zip(x.get(r)).for_each(|(v, &x)| *v = f(x));
        }
    }
}

/// out = f(a, b) on a range; `a` and `b` may overlap as they like.
///
/// # Safety
/// The range is inside all; this caller alone uses it in `out`, which is the same window as a term or shares no memory
/// with it.
#[inline(always)]
pub(super) unsafe fn map2(
    out: Span<f32>,
    a: Span<f32>,
    b: Span<f32>,
    r: Range<usize>,
    f: impl Fn(f32, f32) -> f32,
) {
    // SAFETY: as in `map1`.
    unsafe {
        match (out.is(a), out.is(b)) {
            (true, true) => out.get_mut(r).iter_mut().for_each(|v| *v = f(*v, *v)),
            (true, false) => {
                out.get_mut(r.clone()).iter_mut().zip(b.get(r)).for_each(|(v, &b)| *v = f(*v, b));
            }
            (false, true) => {
                out.get_mut(r.clone()).iter_mut().zip(a.get(r)).for_each(|(v, &a)| *v = f(a, *v));
            }
            (false, false) => {
                let terms = a.get(r.clone()).iter().zip(b.get(r.clone()));
                out.get_mut(r).iter_mut().zip(terms).for_each(|(v, (&a, &b))| *v = f(a, b));
            }
        }
    }
}
