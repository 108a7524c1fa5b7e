//! Choosing tokens.

use crate::border::answer;
use facade::ops::{self, Stream};
use std::ffi::{c_int, c_void};

/// out[b] = index of the largest of logits[b], the lowest among equals, the first NaN if there is one; `batch` rows
/// of `vocab`.
///
/// # Safety
/// `logits` has batch * vocab elements, `out` has batch.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuda_argmax(
    logits: *const f32,
    out: *mut i32,
    batch: c_int,
    vocab: c_int,
    stream: *mut c_void,
) -> i32 {
    // SAFETY: the caller's.
    answer(|| unsafe { ops::argmax(logits, out, batch.into(), vocab.into(), Stream(stream)) })
}

/// out[b] = an index drawn from softmax(logits[b] / temperature); a temperature of 0 takes the largest. The random
/// number of row b is the first output of SplitMix64 in the state seeds[b], its upper 53 bits divided by 2^53. NaN
/// or +inf, or a row of -inf alone, is IH_INVALID_VALUE.
///
/// # Safety
/// `logits` has batch * vocab elements, `out` and `seeds` have batch.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuda_sample(
    logits: *const f32,
    out: *mut i32,
    seeds: *const u64,
    batch: c_int,
    vocab: c_int,
    temperature: f32,
    stream: *mut c_void,
) -> i32 {
    // SAFETY: the caller's.
    answer(|| unsafe {
        ops::sample(logits, out, seeds, batch.into(), vocab.into(), temperature, Stream(stream))
    })
}

/// cuda_sample from the k most likely only, and those that tie with the k-th.
///
/// # Safety
/// As cuda_sample.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuda_topk_sample(
    logits: *const f32,
    out: *mut i32,
    seeds: *const u64,
    batch: c_int,
    vocab: c_int,
    k: c_int,
    temperature: f32,
    stream: *mut c_void,
) -> i32 {
    // SAFETY: the caller's.
    answer(|| unsafe {
        ops::topk_sample(
            logits,
            out,
            seeds,
            batch.into(),
            vocab.into(),
            k.into(),
            temperature,
            Stream(stream),
        )
    })
}

/// cuda_sample from the smallest set of the most likely that together have at least the probability p, 0 < p <= 1.
///
/// # Safety
/// As cuda_sample.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuda_topp_sample(
    logits: *const f32,
    out: *mut i32,
    seeds: *const u64,
    batch: c_int,
    vocab: c_int,
    p: f32,
    temperature: f32,
    stream: *mut c_void,
) -> i32 {
    // SAFETY: the caller's.
    answer(|| unsafe {
        ops::topp_sample(logits, out, seeds, batch.into(), vocab.into(), p, temperature, Stream(stream))
    })
}
