//! Runs an eager op where its memory is, on the host or on a GPU. The ops, their arrays and what they compute are the structs
//! of [`crate::core::eager`].
//!
//! Nothing is checked here: this is for callers who know types, sizes and places. [`crate::ops`] is for the others.

pub use crate::cuda::eager::gate_bytes;
use crate::error::{OpError, Result};
use crate::{cpu, cuda};

/// The device that a call computes on.
pub enum At<'a> {
    /// The cores of this machine compute before the call returns.
    Host,
    /// A stream of a GPU computes after the call has returned.
    Device(cuda::eager::OnStream<'a>),
}

/// An eager op: a struct of [`crate::core::eager`] that both engines can run.
pub trait Op: cpu::eager::Run + cuda::eager::Launch {}

impl<T: cpu::eager::Run + cuda::eager::Launch> Op for T {}

/// Runs an op where its memory is: on the host before this returns, on a GPU after it.
///
/// # Safety
/// The arrays are memory of the place `at` names, of the sizes and types that the op documents; outputs overlap nothing else
/// of the call, unless the op says so; on a GPU, memory stays valid until the stream has passed the call.
///
/// # Errors
/// The work could not be started, or failed.
pub unsafe fn run(at: &At<'_>, op: &impl Op) -> Result {
    match at {
        // SAFETY: guaranteed by the caller.
        At::Host => Ok(unsafe { op.run() }?),
        // SAFETY: guaranteed by the caller.
        At::Device(at) => Ok(unsafe { op.launch(at) }?),
    }
}

/// A place, and the name of the op that runs there, with which its errors begin.
pub(crate) struct Runner<'a> {
    pub op: &'static str,
    pub at: &'a At<'a>,
}

impl Runner<'_> {
    /// # Safety
    /// See [`run`].
    pub unsafe fn run(&self, op: &impl Op) -> Result {
        // SAFETY: guaranteed by the caller.
        unsafe { run(self.at, op) }.map_err(|error| match error.text.starts_with(self.op) {
            true => error,
            false => OpError { text: format!("{}: {}", self.op, error.text), ..error },
        })
    }
}
