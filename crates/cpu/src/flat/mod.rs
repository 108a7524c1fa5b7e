//! One-call ops on plain f32 memory: no program, no engine, no pools. What `ironhorse::ops`, the C library and the Python
//! module run for memory of the host.
//!
//! Every op takes [`Span`]s: windows whose addresses, sizes and overlaps the caller has checked. Work that is large enough
//! to pay for it is cut into pieces for a process-wide team of threads; the pieces do not depend on the number of
//! threads, so neither do the bits.
//!
//! # Safety
//! Shared by all functions here: spans have the lengths the function's doc says; what is written shares no memory with
//! anything else the call uses, unless the doc says that two spans may be the same window; nobody else writes the
//! spans, or reads what is written, during the call.
//!
//! # Errors
//! Shared by all functions here: a task panicked, which is a bug in this crate.

mod argmax;
mod attention;
mod choose;
mod elementwise;
mod loss;
mod map;
mod matmul;
mod norm;
mod optimizer;
pub(crate) mod pool;
mod rope;
pub mod routing;
mod scatter;
mod softmax;
mod trig;

pub use crate::memory::Span;
pub use crate::team::TaskPanic;
pub use argmax::argmax;
pub use attention::{Attention, attention};
pub use choose::{Choice, Refused, choose};
pub use elementwise::{add, gelu, mul, scale, silu, swiglu};
pub use loss::{Router, aux_loss_forward, cross_entropy_backward, cross_entropy_forward};
pub use matmul::{Part, Product, gemm, gemm_batched, gemm_parts};
pub use norm::{layernorm, rmsnorm, rmsnorm_residual};
pub use optimizer::{AdamWStep, adamw_step, grad_clip, zero_grad};
pub use pool::{set_threads, threads};
pub use rope::{Pairs, Rope, rope_forward, rope_freqs};
pub use scatter::scatter_add;
pub use softmax::{softmax, softmax_topk};

/// What every op returns.
pub type Done = Result<(), TaskPanic>;
