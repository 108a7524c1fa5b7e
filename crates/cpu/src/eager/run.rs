//! What it means to run an eager op.

use crate::team::TaskPanic;
use std::fmt;

/// Why an op on host memory failed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Failed {
    /// A task panicked, which is a bug in this crate.
    Panic(TaskPanic),
    /// The op does not exist in this form on the host.
    Unsupported(&'static str),
    /// A row of the logits has no distribution to sample from.
    Row {
        /// The index of the row.
        row: usize,
        /// What is wrong with it.
        why: &'static str,
    },
}

impl From<TaskPanic> for Failed {
    fn from(panic: TaskPanic) -> Self {
        Self::Panic(panic)
    }
}

impl fmt::Display for Failed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Panic(panic) => panic.fmt(f),
            Self::Unsupported(what) => f.write_str(what),
            Self::Row { row, why } => write!(f, "row {row} of `logits`: {why}"),
        }
    }
}

impl std::error::Error for Failed {}

/// An eager op that runs on host memory.
pub trait Run {
    /// Runs the op on all cores where it is large enough to gain from them, and returns when it is done. The bits of the
    /// result do not depend on the number of threads.
    ///
    /// # Safety
    /// The arrays have the lengths and types the op documents, are aligned to their elements, and overlap only as it
    /// documents; no other thread writes them, or reads what is written, during the call.
    ///
    /// # Errors
    /// See [`Failed`].
    unsafe fn run(&self) -> Result<(), Failed>;
}
