//! Element by element, and the gradients.

use super::elem::Elem;
use super::map::map;
use super::ptr::Ptr;
use super::real::{Real, gelu_erf, gelu_erf_grad, gelu_tanh, gelu_tanh_grad, silu, silu_grad};
use super::{by_type, versions};
use crate::flat::pool::{isa, pieces};
use crate::flat::{self, Done, Span};
use ironhorse_core::eager::{Array, BinaryFn, Float, UnaryFn};

/// Elements a task handles.
const CHUNK: usize = 1 << 14;

versions! {
    fn unary_piece<T: Elem, const FMA: bool>(op: UnaryFn, x: Ptr<T>, y: Ptr<T>, n: usize) {
        // SAFETY: the caller's (see `unary`), passed down.
        unsafe {
            match op {
                UnaryFn::Silu => map([x], [y], n, |[x]| [silu::<_, FMA>(x)]),
                UnaryFn::GeluTanh => map([x], [y], n, |[x]| [gelu_tanh::<_, FMA>(x)]),
                UnaryFn::GeluErf => map([x], [y], n, |[x]| [gelu_erf::<_, FMA>(x)]),
                UnaryFn::Square => map([x], [y], n, |[x]| [x * x]),
                UnaryFn::Scale(a) => map([x], [y], n, |[x]| [T::Acc::of(a) * x]),
            }
        }
    }

    fn unary_bwd_piece<T: Elem, const FMA: bool>(op: UnaryFn, from: [Ptr<T>; 2], d_x: Ptr<T>, n: usize) {
        // SAFETY: the caller's (see `unary_bwd`), passed down.
        unsafe {
            match op {
                UnaryFn::Silu => map(from, [d_x], n, |[d, x]| [d * silu_grad::<_, FMA>(x)[1]]),
                UnaryFn::GeluTanh => map(from, [d_x], n, |[d, x]| [d * gelu_tanh_grad::<_, FMA>(x)]),
                UnaryFn::GeluErf => map(from, [d_x], n, |[d, x]| [d * gelu_erf_grad::<_, FMA>(x)]),
                UnaryFn::Square => map(from, [d_x], n, |[d, x]| [d * (x + x)]),
                UnaryFn::Scale(a) => map([from[0]], [d_x], n, |[d]| [T::Acc::of(a) * d]),
            }
        }
    }

    fn binary_piece<T: Elem, const FMA: bool>(op: BinaryFn, from: [Ptr<T>; 2], y: Ptr<T>, n: usize) {
        // SAFETY: the caller's (see `binary`), passed down.
        unsafe {
            match op {
                BinaryFn::Add => map(from, [y], n, |[a, b]| [a + b]),
                BinaryFn::Mul => map(from, [y], n, |[a, b]| [a * b]),
                BinaryFn::Swiglu => map(from, [y], n, |[a, b]| [silu::<_, FMA>(a) * b]),
            }
        }
    }

    fn swiglu_bwd_piece<T: Elem, const FMA: bool>(from: [Ptr<T>; 3], to: [Ptr<T>; 2], n: usize) {
        // SAFETY: the caller's (see `swiglu_bwd`), passed down.
        unsafe {
            map(from, to, n, |[d, gate, up]| {
                let [silu, slope] = silu_grad::<_, FMA>(gate);
                [d * up * slope, d * silu]
            });
        }
    }
}

/// # Safety
/// `array` is f32 and has n elements.
unsafe fn span(array: Array, n: usize) -> Span<f32> {
    // SAFETY: the caller's.
    unsafe { Span::from_raw(array.at.cast(), n) }
}

/// y = op(x); `y` may be `x`.
///
/// # Safety
/// See [the module](super); both n elements.
///
/// # Errors
/// See [the module](super).
pub unsafe fn unary(op: UnaryFn, x: Array, y: Array, n: usize) -> Done {
    // SAFETY: the caller's; tasks have disjoint ranges.
    unsafe {
        match (x.float, op) {
            (Float::F32, UnaryFn::Silu) => return flat::silu(span(x, n), span(y, n)),
            (Float::F32, UnaryFn::GeluTanh) => return flat::gelu(span(x, n), span(y, n)),
            (Float::F32, UnaryFn::Scale(a)) => return flat::scale(span(x, n), span(y, n), a as f32),
            _ => {}
        }
    }
    let (isa, weight) = (isa(), if op == UnaryFn::Square { 1 } else { 12 });
    by_type!(x.float, T => {
        let (x, y) = (Ptr::<T>::of(x), Ptr::of(y));
        pieces(n, CHUNK, weight, |r| unary_piece(isa, op, x.at(r.start), y.at(r.start), r.len()))
    })
}

/// d_x = d_y op'(x); `d_x` may be `d_y` or `x`. `Scale` does not read x.
///
/// # Safety
/// See [the module](super); all n elements.
///
/// # Errors
/// See [the module](super).
pub unsafe fn unary_bwd(op: UnaryFn, [d_y, x]: [Array; 2], d_x: Array, n: usize) -> Done {
    if d_x.at.is_null() {
        return Ok(());
    }
    let (isa, weight) = (isa(), if op == UnaryFn::Square { 1 } else { 12 });
    by_type!(d_y.float, T => {
        let (from, d_x) = ([d_y, x].map(Ptr::<T>::of), Ptr::of(d_x));
        pieces(n, CHUNK, weight, |r| {
            unary_bwd_piece(isa, op, from.map(|x| x.at(r.start)), d_x.at(r.start), r.len());
        })
    })
}

/// y = op(a, b); `y` may be `a` or `b`.
///
/// # Safety
/// See [the module](super); all n elements.
///
/// # Errors
/// See [the module](super).
pub unsafe fn binary(op: BinaryFn, [a, b]: [Array; 2], y: Array, n: usize) -> Done {
    if a.float == Float::F32 {
        // SAFETY: the caller's.
        let (a, b, y) = unsafe { (span(a, n), span(b, n), span(y, n)) };
        // SAFETY: the caller's.
        return unsafe {
            match op {
                BinaryFn::Add => flat::add(a, b, y),
                BinaryFn::Mul => flat::mul(a, b, y),
                BinaryFn::Swiglu => flat::swiglu(a, b, y),
            }
        };
    }
    let (isa, weight) = (isa(), if op == BinaryFn::Swiglu { 12 } else { 1 });
    by_type!(a.float, T => {
        let (from, y) = ([a, b].map(Ptr::<T>::of), Ptr::of(y));
        pieces(n, CHUNK, weight, |r| {
            binary_piece(isa, op, from.map(|x| x.at(r.start)), y.at(r.start), r.len());
        })
    })
}

/// d_gate = d_y up silu'(gate), d_up = d_y silu(gate); each may be the same array as an input.
///
/// # Safety
/// See [the module](super); all n elements.
///
/// # Errors
/// See [the module](super).
pub unsafe fn swiglu_bwd(from: [Array; 3], to: [Array; 2], n: usize) -> Done {
    let isa = isa();
    by_type!(from[0].float, T => {
        let (from, to) = (from.map(Ptr::<T>::of), to.map(Ptr::of));
        pieces(n, CHUNK, 12, |r| {
            swiglu_bwd_piece(isa, from.map(|x| x.at(r.start)), to.map(|x| x.at(r.start)), r.len());
        })
    })
}
