//! Softmax and normalisation of rows.

use crate::border::answer;
use facade::ops::{self, Stream};
use std::ffi::{c_int, c_void};

/// Softmax of each of `rows` rows of `cols`. `out` may be `input`. A row with NaN or +inf, or of -inf alone,
/// becomes NaN.
///
/// # Safety
/// Both have rows * cols elements.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuda_softmax(
    input: *const f32,
    out: *mut f32,
    rows: c_int,
    cols: c_int,
    stream: *mut c_void,
) -> i32 {
    // SAFETY: the caller's.
    answer(|| unsafe { ops::softmax(input, out, rows.into(), cols.into(), Stream(stream)) })
}

/// The choice of a router: per row, softmax over all `cols`, then the k largest, largest first, the lower index
/// first among equals. `weights` are their probabilities divided by their sum, `idx` is where they stand. k > cols
/// is IH_INVALID_VALUE.
///
/// # Safety
/// `input` has rows * cols elements, `weights` and `idx` have rows * k.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuda_softmax_topk(
    input: *const f32,
    weights: *mut f32,
    idx: *mut i32,
    rows: c_int,
    cols: c_int,
    k: c_int,
    stream: *mut c_void,
) -> i32 {
    // SAFETY: the caller's.
    answer(|| unsafe {
        ops::softmax_topk(input, weights, idx, rows.into(), cols.into(), k.into(), Stream(stream))
    })
}

/// out = x / sqrt(mean(x^2) + eps) * weight for each of `rows` rows x of `dim`. `out` may be `input`.
///
/// # Safety
/// `input` and `out` have rows * dim elements, `weight` has dim.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuda_rmsnorm(
    input: *const f32,
    weight: *const f32,
    out: *mut f32,
    rows: c_int,
    dim: c_int,
    eps: f32,
    stream: *mut c_void,
) -> i32 {
    // SAFETY: the caller's.
    answer(|| unsafe { ops::rmsnorm(input, weight, out, rows.into(), dim.into(), eps, Stream(stream)) })
}

/// residual_out = input + residual; out = rmsnorm(residual_out). `residual_out` may be `input` or `residual`; so
/// may `out`, if `residual_out` is another array.
///
/// # Safety
/// `weight` has dim elements, the others have rows * dim.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuda_rmsnorm_residual(
    input: *const f32,
    residual: *const f32,
    weight: *const f32,
    out: *mut f32,
    residual_out: *mut f32,
    rows: c_int,
    dim: c_int,
    eps: f32,
    stream: *mut c_void,
) -> i32 {
    // SAFETY: the caller's.
    answer(|| unsafe {
        ops::rmsnorm_residual(
            input,
            residual,
            weight,
            out,
            residual_out,
            rows.into(),
            dim.into(),
            eps,
            Stream(stream),
        )
    })
}

/// out = (x - mean) / sqrt(var + eps) * weight + bias for each of `rows` rows x of `dim`; var is divided by dim.
/// `out` may be `input`.
///
/// # Safety
/// `input` and `out` have rows * dim elements, `weight` and `bias` have dim.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuda_layernorm(
    input: *const f32,
    weight: *const f32,
    bias: *const f32,
    out: *mut f32,
    rows: c_int,
    dim: c_int,
    eps: f32,
    stream: *mut c_void,
) -> i32 {
    // SAFETY: the caller's.
    answer(|| unsafe {
        ops::layernorm(input, weight, bias, out, rows.into(), dim.into(), eps, Stream(stream))
    })
}
