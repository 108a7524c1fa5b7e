//! Direct ops: one call on the caller's device memory and stream, without program, pools or engine. What `ironhorse::ops`, the C
//! library and the PyTorch ops run for memory of a GPU. The ops are those of the table in [`ironhorse_core::eager`].
//!
//! A call only puts work on the stream: it never waits, and may be captured into a CUDA graph. Memory for the time of a call
//! comes from the caller's [`Memory`]. Calls may come from several threads at once.
//!
//! # Safety
//! Shared by all functions here: arrays are memory of the device of `at`, as large as the op's doc says, valid until the
//! stream has passed the call; outputs share no memory with anything else the call uses, unless the doc says so.

mod attention;
mod choose;
mod cublas;
mod elementwise;
mod gemm;
mod gpu;
mod launch;
mod layout;
mod loss;
mod memory;
mod norm;
mod norm_bwd;
mod optimizer;
mod rope;
mod route;
mod rows;
mod scale_bias_relu;
mod scatter;
mod softmax;
mod staging;

pub use attention::{attention, attention_bwd};
pub use choose::{Choice, argmax, choose};
pub use elementwise::{binary, swiglu_bwd, unary, unary_bwd};
pub use gemm::{Gemm, gemm};
pub use gpu::{At, Gpu, available, device_of};
pub use launch::Launch;
pub use loss::{
    cross_entropy, cross_entropy_bwd, cross_entropy_log_probs, cross_entropy_log_probs_bwd,
    cross_entropy_mean,
};
pub use memory::{Memory, StreamMemory};
pub use norm::{layernorm, rmsnorm, rmsnorm_residual};
pub use norm_bwd::{layernorm_bwd, rmsnorm_bwd};
pub use optimizer::{AdamWStep, adamw_step, grad_clip};
pub use rope::{rope, rope_angles, rope_freqs};
pub use route::{Router, aux_loss, softmax_topk};
pub use scale_bias_relu::{gate_bytes, scale_bias_relu, scale_bias_relu_bwd};
pub use scatter::scatter_add;
pub use softmax::{softmax, softmax_bwd};
pub use staging::Staging;

use crate::kernels::Spec;

/// Every specialisation direct ops ask for.
pub(crate) fn specs() -> Vec<Spec> {
    [
        attention::specs(),
        choose::specs(),
        elementwise::specs(),
        gemm::specs(),
        loss::specs(),
        norm::specs(),
        norm_bwd::specs(),
        optimizer::specs(),
        rope::specs(),
        route::specs(),
        scale_bias_relu::specs(),
        scatter::specs(),
        softmax::specs(),
    ]
    .concat()
}
