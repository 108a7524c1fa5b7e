//! Ops on single elements. In each, `out` may be the same window as an input.

use super::map::{map1, map2};
use super::pool::{isa, pieces};
use super::{Done, Span};
use crate::math;
use crate::multiversion;
use std::ops::Range;

/// Elements a task handles.
const CHUNK: usize = 1 << 14;

/// x / (1 + e^-x)
#[inline(always)]
fn silu_of<const FMA: bool>(x: f32) -> f32 {
    x / (1.0 + math::exp_f32::<FMA>(-x))
}

multiversion! {
    fn silu_piece<const FMA: bool>(out: Span<f32>, x: Span<f32>, r: Range<usize>) {
        // SAFETY: the caller's (see `silu`), passed down.
        unsafe { map1(out, x, r, silu_of::<FMA>) }
    }

    fn gelu_piece<const FMA: bool>(out: Span<f32>, x: Span<f32>, r: Range<usize>) {
        // SAFETY: as in `silu_piece`.
        unsafe { map1(out, x, r, math::gelu::<FMA>) }
    }

    fn scale_piece<const FMA: bool>(out: Span<f32>, x: Span<f32>, factor: f32, r: Range<usize>) {
        // SAFETY: as in `silu_piece`.
        unsafe { map1(out, x, r, |x| x * factor) }
    }

    fn add_piece<const FMA: bool>(out: Span<f32>, a: Span<f32>, b: Span<f32>, r: Range<usize>) {
        // SAFETY: as in `silu_piece`.
        unsafe { map2(out, a, b, r, |a, b| a + b) }
    }

    fn mul_piece<const FMA: bool>(out: Span<f32>, a: Span<f32>, b: Span<f32>, r: Range<usize>) {
        // SAFETY: as in `silu_piece`.
        unsafe { map2(out, a, b, r, |a, b| a * b) }
    }

    fn swiglu_piece<const FMA: bool>(out: Span<f32>, gate: Span<f32>, up: Span<f32>, r: Range<usize>) {
        // SAFETY: as in `silu_piece`.
        unsafe { map2(out, gate, up, r, |gate, up| silu_of::<FMA>(gate) * up) }
    }
}

/// out = x / (1 + e^-x)
///
/// # Safety
/// See [the module](super); equal lengths.
///
/// # Errors
/// See [the module](super).
pub unsafe fn silu(x: Span<f32>, out: Span<f32>) -> Done {
    let isa = isa();
    pieces(out.len(), CHUNK, 4, |r| silu_piece(isa, out, x, r))
}

/// out = x (1 + tanh(√(2/π) (x + 0.044715 x³))) / 2
///
/// # Safety
/// See [the module](super); equal lengths.
///
/// # Errors
/// See [the module](super).
pub unsafe fn gelu(x: Span<f32>, out: Span<f32>) -> Done {
    let isa = isa();
    pieces(out.len(), CHUNK, 4, |r| gelu_piece(isa, out, x, r))
}

/// out = factor x
///
/// # Safety
/// See [the module](super); equal lengths.
///
/// # Errors
/// See [the module](super).
pub unsafe fn scale(x: Span<f32>, out: Span<f32>, factor: f32) -> Done {
    let isa = isa();
    pieces(out.len(), CHUNK, 1, |r| scale_piece(isa, out, x, factor, r))
}

/// out = a + b
///
/// # Safety
/// See [the module](super); equal lengths.
///
/// # Errors
/// See [the module](super).
pub unsafe fn add(a: Span<f32>, b: Span<f32>, out: Span<f32>) -> Done {
    let isa = isa();
    pieces(out.len(), CHUNK, 1, |r| add_piece(isa, out, a, b, r))
}

/// out = a b
///
/// # Safety
/// See [the module](super); equal lengths.
///
/// # Errors
/// See [the module](super).
pub unsafe fn mul(a: Span<f32>, b: Span<f32>, out: Span<f32>) -> Done {
    let isa = isa();
    pieces(out.len(), CHUNK, 1, |r| mul_piece(isa, out, a, b, r))
}

/// out = silu(gate) up
///
/// # Safety
/// See [the module](super); equal lengths.
///
/// # Errors
/// See [the module](super).
pub unsafe fn swiglu(gate: Span<f32>, up: Span<f32>, out: Span<f32>) -> Done {
    let isa = isa();
    pieces(out.len(), CHUNK, 4, |r| swiglu_piece(isa, out, gate, up, r))
}
