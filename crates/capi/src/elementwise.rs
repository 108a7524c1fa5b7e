//! Ops on single elements.

use crate::border::answer;
use facade::ops::{self, Stream};
use std::ffi::c_void;

/// out[i] = x / (1 + e^-x) with x = input[i], for i < n. `out` may be `input`.
///
/// # Safety
/// Both have n elements.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuda_silu(input: *const f32, out: *mut f32, n: i64, stream: *mut c_void) -> i32 {
    // SAFETY: the caller's.
    answer(|| unsafe { ops::silu(input, out, n, Stream(stream)) })
}

/// out[i] = a[i] + b[i] for i < n. `out` may be `a` or `b`.
///
/// # Safety
/// All have n elements.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuda_add(
    a: *const f32,
    b: *const f32,
    out: *mut f32,
    n: i64,
    stream: *mut c_void,
) -> i32 {
    // SAFETY: the caller's.
    answer(|| unsafe { ops::add(a, b, out, n, Stream(stream)) })
}

/// out[i] = a[i] * b[i] for i < n. `out` may be `a` or `b`.
///
/// # Safety
/// All have n elements.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuda_mul(
    a: *const f32,
    b: *const f32,
    out: *mut f32,
    n: i64,
    stream: *mut c_void,
) -> i32 {
    // SAFETY: the caller's.
    answer(|| unsafe { ops::mul(a, b, out, n, Stream(stream)) })
}

/// out[i] = scale * input[i] for i < n. `out` may be `input`.
///
/// # Safety
/// Both have n elements.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuda_scale(
    input: *const f32,
    out: *mut f32,
    scale: f32,
    n: i64,
    stream: *mut c_void,
) -> i32 {
    // SAFETY: the caller's.
    answer(|| unsafe { ops::scale(input, out, scale, n, Stream(stream)) })
}

/// GELU in its tanh form: out[i] = x (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3))) / 2 with x = input[i], for i < n.
/// `out` may be `input`.
///
/// # Safety
/// Both have n elements.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuda_gelu(input: *const f32, out: *mut f32, n: i64, stream: *mut c_void) -> i32 {
    // SAFETY: the caller's.
    answer(|| unsafe { ops::gelu(input, out, n, Stream(stream)) })
}

/// out[i] = silu(gate[i]) * up[i] for i < n. `out` may be `gate` or `up`.
///
/// # Safety
/// All have n elements.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuda_swiglu(
    gate: *const f32,
    up: *const f32,
    out: *mut f32,
    n: i64,
    stream: *mut c_void,
) -> i32 {
    // SAFETY: the caller's.
    answer(|| unsafe { ops::swiglu(gate, up, out, n, Stream(stream)) })
}
