//! Direct ops: one call on the caller's device memory and stream, without program, pools or engine. What `ironhorse::ops`, the C
//! library and the PyTorch ops run for memory of a GPU. The ops are those of the table in [`ironhorse_core::direct`].
//!
//! A call only puts work on the stream: it never waits, and may be captured into a CUDA graph. Memory for the time of a call
//! comes from the caller's [`Memory`]. Calls may come from several threads at once.
//!
//! # Safety
//! Shared by all functions here: arrays are memory of the device of `at`, as large as the op's doc says, valid until the
//! stream has passed the call; outputs share no memory with anything else the call uses, unless the doc says so.

mod elementwise;
mod gpu;
mod memory;

pub use elementwise::{binary, unary};
pub use gpu::{At, Gpu, available, device_of};
pub use memory::{Memory, StreamMemory};

use crate::kernels::Spec;

/// Every specialisation direct ops ask for.
pub(crate) fn specs() -> Vec<Spec> {
    [elementwise::specs()].concat()
}
