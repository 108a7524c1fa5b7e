//! Eager ops: one call on the caller's device memory and stream, without program, pools or engine. What `ironhorse::ops`,
//! the C library and the PyTorch ops run on a GPU. The ops are the structs of [`ironhorse_core::eager`]; each implements
//! [`Launch`] in the file of its family.
//!
//! A call only puts work on the stream: it never waits, and may be captured into a CUDA graph. Memory for the duration of a
//! call comes from the caller's [`Memory`]. Calls may come from several threads at once.

mod at;
mod attention;
mod attention_cudnn;
mod cublas;
mod elementwise;
mod gemm;
mod launch;
mod layout;
mod loss;
mod memory;
mod norm;
mod norm_bwd;
mod optimizer;
mod rope;
mod router;
mod rows;
mod sampling;
mod scale_bias_relu;
mod scatter;
mod softmax;
mod staging;

pub use crate::device::{Stream, device_of};
pub use at::{OnStream, available};
pub use launch::Launch;
pub use memory::{Memory, StreamMemory};
pub use scale_bias_relu::gate_bytes;
pub use staging::Staging;

use crate::kernels::{Spec, specs_of};

/// Every specialisation that eager ops ask for.
pub(crate) fn specs() -> Vec<Spec> {
    specs_of!(
        attention elementwise gemm loss norm norm_bwd optimizer rope router sampling scale_bias_relu scatter softmax
    )
}
