//! Matrix products, rotary embedding, attention.

use crate::border::answer;
use facade::ops::{self, Stream};
use std::ffi::{c_int, c_void};

/// C = alpha A B + beta C with A (m, k), B (k, n), C (m, n), row-major. With beta = 0 the old C is not read; with
/// alpha = 0 neither are A and B. C may not overlap A or B.
///
/// # Safety
/// A has m * k elements, B has k * n, C has m * n.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuda_gemm(
    a: *const f32,
    b: *const f32,
    c: *mut f32,
    m: c_int,
    n: c_int,
    k: c_int,
    alpha: f32,
    beta: f32,
    stream: *mut c_void,
) -> i32 {
    // SAFETY: the caller's.
    answer(|| unsafe { ops::gemm(a, b, c, m.into(), n.into(), k.into(), alpha, beta, Stream(stream)) })
}

/// cuda_gemm for `batch` triples of matrices that lie one after the other.
///
/// # Safety
/// `batch` times the elements of cuda_gemm.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuda_gemm_batched(
    a: *const f32,
    b: *const f32,
    c: *mut f32,
    batch: c_int,
    m: c_int,
    n: c_int,
    k: c_int,
    alpha: f32,
    beta: f32,
    stream: *mut c_void,
) -> i32 {
    // SAFETY: the caller's.
    answer(|| unsafe {
        ops::gemm_batched(a, b, c, batch.into(), m.into(), n.into(), k.into(), alpha, beta, Stream(stream))
    })
}

/// The angles of rotary embedding: freqs[p, i] = p / (base * alpha^(d / (d - 2)))^(2 i / d) for p < max_seq, i < d
/// / 2, with d = head_dim, which is even. alpha is the NTK factor, 1 for none.
///
/// # Safety
/// `freqs` has max_seq * head_dim / 2 elements.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuda_rope_freqs(
    freqs: *mut f32,
    max_seq: c_int,
    head_dim: c_int,
    base: f32,
    alpha: f32,
    stream: *mut c_void,
) -> i32 {
    // SAFETY: the caller's.
    answer(|| unsafe { ops::rope_freqs(freqs, max_seq.into(), head_dim.into(), base, alpha, Stream(stream)) })
}

/// out = input (batch, seq, heads, head_dim) with elements 2i and 2i + 1 of each head rotated by the angle
/// freqs[offset + s, i] at position s: (a cos - b sin, a sin + b cos). `freqs` is a table of cuda_rope_freqs with
/// at least offset + seq rows. `out` may be `input`.
///
/// # Safety
/// `input` and `out` have batch * seq * heads * head_dim elements, `freqs` has at least (offset + seq) * head_dim /
/// 2.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuda_rope_forward(
    input: *const f32,
    freqs: *const f32,
    out: *mut f32,
    batch: c_int,
    seq: c_int,
    heads: c_int,
    head_dim: c_int,
    offset: c_int,
    stream: *mut c_void,
) -> i32 {
    // SAFETY: the caller's.
    answer(|| unsafe {
        ops::rope_forward(
            input,
            freqs,
            out,
            batch.into(),
            seq.into(),
            heads.into(),
            head_dim.into(),
            offset.into(),
            Stream(stream),
        )
    })
}

/// cuda_rope_forward with elements i and i + head_dim / 2 rotated together (GPT-NeoX, Hugging Face).
///
/// # Safety
/// As cuda_rope_forward.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuda_rope_forward_half(
    input: *const f32,
    freqs: *const f32,
    out: *mut f32,
    batch: c_int,
    seq: c_int,
    heads: c_int,
    head_dim: c_int,
    offset: c_int,
    stream: *mut c_void,
) -> i32 {
    // SAFETY: the caller's.
    answer(|| unsafe {
        ops::rope_forward_half(
            input,
            freqs,
            out,
            batch.into(),
            seq.into(),
            heads.into(),
            head_dim.into(),
            offset.into(),
            Stream(stream),
        )
    })
}

/// cuda_rope_forward of q (batch, seq, q_heads, head_dim) and k (batch, seq, kv_heads, head_dim) in one call.
/// `q_out` may be `q` and `k_out` may be `k`.
///
/// # Safety
/// Elements as said; `freqs` as in cuda_rope_forward.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuda_rope_qk(
    q: *const f32,
    k: *const f32,
    freqs: *const f32,
    q_out: *mut f32,
    k_out: *mut f32,
    batch: c_int,
    seq: c_int,
    q_heads: c_int,
    kv_heads: c_int,
    head_dim: c_int,
    offset: c_int,
    stream: *mut c_void,
) -> i32 {
    // SAFETY: the caller's.
    answer(|| unsafe {
        ops::rope_qk(
            q,
            k,
            freqs,
            q_out,
            k_out,
            batch.into(),
            seq.into(),
            q_heads.into(),
            kv_heads.into(),
            head_dim.into(),
            offset.into(),
            Stream(stream),
        )
    })
}

/// cuda_rope_qk with elements i and i + head_dim / 2 rotated together.
///
/// # Safety
/// As cuda_rope_qk.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuda_rope_qk_half(
    q: *const f32,
    k: *const f32,
    freqs: *const f32,
    q_out: *mut f32,
    k_out: *mut f32,
    batch: c_int,
    seq: c_int,
    q_heads: c_int,
    kv_heads: c_int,
    head_dim: c_int,
    offset: c_int,
    stream: *mut c_void,
) -> i32 {
    // SAFETY: the caller's.
    answer(|| unsafe {
        ops::rope_qk_half(
            q,
            k,
            freqs,
            q_out,
            k_out,
            batch.into(),
            seq.into(),
            q_heads.into(),
            kv_heads.into(),
            head_dim.into(),
            offset.into(),
            Stream(stream),
        )
    })
}

/// out = softmax(scale Q K^T) V for each sequence and head; all four are (batch, seq, heads, head_dim). With
/// `causal` other than 0, position i sees positions up to i only. The usual scale is 1 / sqrt(head_dim).
///
/// # Safety
/// All have batch * seq * heads * head_dim elements.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuda_flash_attention(
    q: *const f32,
    k: *const f32,
    v: *const f32,
    out: *mut f32,
    batch: c_int,
    seq: c_int,
    heads: c_int,
    head_dim: c_int,
    scale: f32,
    causal: c_int,
    stream: *mut c_void,
) -> i32 {
    // SAFETY: the caller's.
    answer(|| unsafe {
        ops::flash_attention(
            q,
            k,
            v,
            out,
            batch.into(),
            seq.into(),
            heads.into(),
            head_dim.into(),
            scale,
            causal != 0,
            Stream(stream),
        )
    })
}

/// cuda_flash_attention with grouped heads: q, out (batch, q_len, heads, head_dim), k, v (batch, kv_len, kv_heads,
/// head_dim). Query head h uses key head h / (heads / kv_heads). With `causal`, query i sees keys up to kv_len -
/// q_len + i: the last query sees all. A query that sees no key gets zeros.
///
/// # Safety
/// Elements as said.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuda_attention(
    q: *const f32,
    k: *const f32,
    v: *const f32,
    out: *mut f32,
    batch: c_int,
    q_len: c_int,
    kv_len: c_int,
    heads: c_int,
    kv_heads: c_int,
    head_dim: c_int,
    scale: f32,
    causal: c_int,
    stream: *mut c_void,
) -> i32 {
    // SAFETY: the caller's.
    answer(|| unsafe {
        ops::attention(
            q,
            k,
            v,
            out,
            batch.into(),
            q_len.into(),
            kv_len.into(),
            heads.into(),
            kv_heads.into(),
            head_dim.into(),
            scale,
            causal != 0,
            Stream(stream),
        )
    })
}
