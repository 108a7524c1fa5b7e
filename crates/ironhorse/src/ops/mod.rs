//! One-call ops by address: what the C library and the Python module are made of.
//!
//! A function takes pointers to f32 arrays (row-major, contiguous), sizes, numbers and a [`Stream`], in the order of the C
//! functions of the same name (`silu` is `cuda_silu`). It checks all that can be checked, finds out where the memory is, and
//! computes there: for memory of the host on all cores, for memory of a CUDA device on that device.
//!
//! - On a device a call puts its work on the stream and returns; the stream has no meaning for memory of the host. All
//!   arrays of a call are in one place. What is in device memory cannot be looked at before the call: an index that is out
//!   of range, an error on the host, is skipped there or gives NaN, as the function's doc says, and reaches no other memory.
//! - Sizes are `i64`; negative, or so large that the bytes overflow, is [`Code::InvalidValue`].
//! - A null pointer is [`Code::InvalidValue`], unless its array has no elements. Arrays without elements are fine: nothing
//!   is done.
//! - An output may be the same array as an input where the function's doc says so; any other overlap with an output is
//!   [`Code::InvalidValue`].
//! - After an error no output was written.
//! - The bits of a result do not depend on the number of threads; calls may come from several threads at once.
//!
//! # Safety
//! Shared by all functions here: a pointer that is not null points to as many elements as the function's doc says, they
//! stay allocated during the call, and nobody else writes them, or reads what is written, meanwhile.
//!
//! # Errors
//! Shared by all functions here: [`OpError`] with the [`Code`] and a sentence that names the op, the argument, what it is
//! and what was expected.

mod attention;
mod check;
mod elementwise;
mod error;
mod loss;
mod matmul;
mod norm;
mod optimizer;
mod place;
mod rope;
mod sample;
mod softmax;

pub use crate::core::eager::{Pairs, uniform_of_seed};
pub use crate::cpu::flat::{set_threads, threads};
pub use crate::cuda::eager::Staging;
pub use attention::{attention, flash_attention};
pub use elementwise::{add, gelu, mul, scale, silu, swiglu};
pub use error::{Code, OpError, Result};
pub use loss::{aux_loss_forward, cross_entropy_backward, cross_entropy_forward};
pub use matmul::{Grouped, gemm, gemm_batched, gemm_grouped, gemm_transposed};
pub use norm::{layernorm, rmsnorm, rmsnorm_residual};
pub use optimizer::{adamw_step, grad_clip, scatter_add, scatter_add_rows, zero_grad};
pub use place::{Place, Stream, cuda_available, place_of};
pub use rope::{rope_forward, rope_forward_half, rope_freqs, rope_qk, rope_qk_half};
pub use sample::{argmax, sample, topk_sample, topp_sample};
pub use softmax::{softmax, softmax_topk};
