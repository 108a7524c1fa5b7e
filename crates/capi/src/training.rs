//! Losses, gradients, the optimizer.

use crate::border::answer;
use facade::ops::{self, Stream};
use std::ffi::{c_int, c_void};

/// log_probs = log softmax(logits) for each of `rows` rows of `vocab`; loss[0] = mean over the rows of
/// -log_probs[r, targets[r]]. `log_probs` may be `logits`. A target outside 0..vocab-1 is IH_INVALID_VALUE.
///
/// # Safety
/// `logits` and `log_probs` have rows * vocab elements, `targets` has rows, `loss` has 1.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuda_cross_entropy_forward(
    logits: *const f32,
    targets: *const i32,
    loss: *mut f32,
    log_probs: *mut f32,
    rows: c_int,
    vocab: c_int,
    stream: *mut c_void,
) -> i32 {
    // SAFETY: the caller's.
    answer(|| unsafe {
        ops::cross_entropy_forward(
            logits,
            targets,
            loss,
            log_probs,
            rows.into(),
            vocab.into(),
            Stream(stream),
        )
    })
}

/// d_logits = (e^log_probs - onehot(targets)) * scale. The gradient of the mean loss has scale 1 / rows. `d_logits`
/// may be `log_probs`.
///
/// # Safety
/// `log_probs` and `d_logits` have rows * vocab elements, `targets` has rows.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuda_cross_entropy_backward(
    log_probs: *const f32,
    targets: *const i32,
    d_logits: *mut f32,
    rows: c_int,
    vocab: c_int,
    scale: f32,
    stream: *mut c_void,
) -> i32 {
    // SAFETY: the caller's.
    answer(|| unsafe {
        ops::cross_entropy_backward(
            log_probs,
            targets,
            d_logits,
            rows.into(),
            vocab.into(),
            scale,
            Stream(stream),
        )
    })
}

/// The load-balancing loss of a router: f_counts[e] = share of the rows sent to expert e, p_means[e] = mean of
/// probs[:, e], aux[0] = alpha * experts * sum(f_counts * p_means).
///
/// # Safety
/// `probs` has rows * experts elements, `idx` has rows * k, `aux` has 1, `f_counts` and `p_means` have experts.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuda_aux_loss_forward(
    probs: *const f32,
    idx: *const i32,
    aux: *mut f32,
    f_counts: *mut f32,
    p_means: *mut f32,
    rows: c_int,
    experts: c_int,
    k: c_int,
    alpha: f32,
    stream: *mut c_void,
) -> i32 {
    // SAFETY: the caller's.
    answer(|| unsafe {
        ops::aux_loss_forward(
            probs,
            idx,
            aux,
            f_counts,
            p_means,
            rows.into(),
            experts.into(),
            k.into(),
            alpha,
            Stream(stream),
        )
    })
}

/// One step of PyTorch's AdamW on `param` and its moments `m` and `v`. `step` counts from 1.
///
/// # Safety
/// All have n elements.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuda_adamw_step(
    param: *mut f32,
    grad: *const f32,
    m: *mut f32,
    v: *mut f32,
    lr: f32,
    beta1: f32,
    beta2: f32,
    eps: f32,
    weight_decay: f32,
    step: c_int,
    n: i64,
    stream: *mut c_void,
) -> i32 {
    // SAFETY: the caller's.
    answer(|| unsafe {
        ops::adamw_step(param, grad, m, v, lr, beta1, beta2, eps, weight_decay, step, n, Stream(stream))
    })
}

/// grad[i] = 0 for i < n.
///
/// # Safety
/// `grad` has n elements.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuda_zero_grad(grad: *mut f32, n: i64, stream: *mut c_void) -> i32 {
    // SAFETY: the caller's.
    answer(|| unsafe { ops::zero_grad(grad, n, Stream(stream)) })
}

/// total_norm[0] = sqrt(sum(grad^2)); if that is more than `clip`, grad is multiplied by clip / (total_norm +
/// 1e-6). `partial` (room for ceil(n / 256) partial sums) is not used and may be null: sums are double, in memory of
/// the library's own.
///
/// # Safety
/// `grad` has n elements, `total_norm` has 1.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuda_grad_clip(
    grad: *mut f32,
    partial: *mut f32,
    total_norm: *mut f32,
    clip: f32,
    n: i64,
    stream: *mut c_void,
) -> i32 {
    // SAFETY: the caller's.
    answer(|| unsafe { ops::grad_clip(grad, partial, total_norm, clip, n, Stream(stream)) })
}

/// grad_weight[idx[i]] += grad_out[i], rows of `dim`, for i < n_idx in order: the gradient of an embedding table.
/// How many rows the table has is not known here; cuda_scatter_add_rows checks it. On a device a negative index is
/// skipped, and many equal indices are added up in parts, always in the same order.
///
/// # Safety
/// `grad_out` has n_idx * dim elements, `idx` has n_idx, `grad_weight` has (largest index + 1) * dim.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuda_scatter_add(
    grad_out: *const f32,
    idx: *const i32,
    grad_weight: *mut f32,
    n_idx: c_int,
    dim: c_int,
    stream: *mut c_void,
) -> i32 {
    // SAFETY: the caller's.
    answer(|| unsafe {
        ops::scatter_add(grad_out, idx, grad_weight, n_idx.into(), dim.into(), Stream(stream))
    })
}

/// cuda_scatter_add with the number of rows of the table: an index outside 0..rows-1 is IH_INVALID_VALUE,
/// and on a device it is skipped.
///
/// # Safety
/// `grad_out` has n_idx * dim elements, `idx` has n_idx, `grad_weight` has rows * dim.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuda_scatter_add_rows(
    grad_out: *const f32,
    idx: *const i32,
    grad_weight: *mut f32,
    n_idx: c_int,
    dim: c_int,
    rows: c_int,
    stream: *mut c_void,
) -> i32 {
    // SAFETY: the caller's.
    answer(|| unsafe {
        ops::scatter_add_rows(
            grad_out,
            idx,
            grad_weight,
            n_idx.into(),
            dim.into(),
            rows.into(),
            Stream(stream),
        )
    })
}
