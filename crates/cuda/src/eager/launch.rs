//! The trait of every eager op.

use super::OnStream;
use crate::Result;

/// An eager op that runs on a GPU: a struct of [`ironhorse_core::eager`].
pub trait Launch {
    /// Puts the op on the stream of `at` and returns without waiting for it.
    ///
    /// # Safety
    /// The arrays are memory of the device of `at`, have the lengths and types the op documents, overlap only as it
    /// documents, and stay valid until the stream has done the op.
    ///
    /// # Errors
    /// A size the kernels cannot handle, not enough memory, or a launch that failed.
    unsafe fn launch(&self, at: &OnStream<'_>) -> Result<()>;
}
