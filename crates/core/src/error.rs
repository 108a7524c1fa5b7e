//! The error type of this crate.

/// Result with this crate's [`Error`].
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// What an op, a program, a plan or an engine can refuse.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// An op was given slots that do not fit together.
    #[error("{op}: {what}")]
    Op {
        /// The op's name.
        op: &'static str,
        /// Which slot, what it is, what was expected.
        what: String,
    },
    /// A program or plan is inconsistent.
    #[error("program: {0}")]
    Program(String),
    /// An input value is out of range: a token beyond the vocabulary, a position beyond the context.
    #[error("{0}")]
    Input(String),
    /// There is no such device on this machine, or its driver or a library is missing.
    #[error("{engine} engine: {what}")]
    NoDevice {
        /// The engine's name.
        engine: &'static str,
        /// What is missing and how to get it.
        what: String,
    },
    /// The engine cannot do this: an element type, a size, an architecture.
    #[error("{engine} engine: {what}")]
    Unsupported {
        /// The engine's name.
        engine: &'static str,
        /// What it cannot do and what to use instead.
        what: String,
    },
    /// The device has too little memory.
    #[error("{engine} engine: {what}")]
    OutOfMemory {
        /// The engine's name.
        engine: &'static str,
        /// How much was asked for and what to make smaller.
        what: String,
    },
    /// The device failed in the middle of its work and may not answer any more.
    #[error("{engine} engine: {what}")]
    DeviceLost {
        /// The engine's name.
        engine: &'static str,
        /// Which call failed and how.
        what: String,
    },
}

impl Error {
    /// Whether the device failed, as opposed to a request that was refused.
    pub fn is_device_lost(&self) -> bool {
        matches!(self, Self::DeviceLost { .. })
    }
}
