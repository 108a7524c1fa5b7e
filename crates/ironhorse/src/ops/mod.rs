//! Eager ops by address: what the C library and the Python module are made of.
//!
//! A function takes pointers to f32 arrays (row-major, contiguous), sizes, numbers and a [`Stream`], in the order of the C
//! function of the same name (`silu` is `cuda_silu`). It checks all that can be checked, finds out where the memory is, and
//! computes there: host memory on all cores, memory of a CUDA device on that device.
//!
//! Every op is one entry of the table in `entries.rs`; [`table`] has it as data, from which the C header, the numpy functions
//! and their documentation are made.
//!
//! - On a device a call puts its work on the stream and returns; the stream is ignored for host memory. All arrays of a
//!   call are in one place. Device memory cannot be read before the call: an index that is out of range, an error on the
//!   host, is skipped there or gives NaN, as the function's doc says, and reaches no other memory.
//! - Sizes are `i64`; negative, or so large that the bytes overflow, is [`Code::InvalidValue`].
//! - A null pointer is [`Code::InvalidValue`], unless its array has no elements. Arrays without elements are fine: nothing
//!   is done.
//! - An output may be the same array as an input where the table says so; any other overlap with an output is
//!   [`Code::InvalidValue`].
//! - After an error no output was written.
//! - The bits of a result do not depend on the number of threads; calls may come from several threads at once.
//!
//! # Safety
//! Shared by all functions here: a pointer that is not null points to as many elements as the table says, they
//! stay allocated during the call, and no other thread writes them, or reads what is written, meanwhile.
//!
//! # Errors
//! Shared by all functions here: [`OpError`] with the [`Code`] and a sentence that names the op, the argument, what it is
//! and what was expected.

#[macro_use]
mod define;

mod arg;
mod check;
pub mod layers;
mod place;
pub mod sets;
pub mod spec;
pub mod text;
mod value;
#[macro_use]
mod entries;

pub use crate::core::eager::{Pairs, uniform_of_seed};
pub use crate::cpu::eager::{set_threads, threads};
pub use crate::cuda::eager::Staging;
pub use crate::error::{Code, OpError, Result};
pub use place::{Place, Stream, cuda_available, place_of};

use spec::Value;

for_each_op!(define);
