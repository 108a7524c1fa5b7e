//! The error type of this crate.

/// A [`Result`](std::result::Result) with this crate's [`Error`].
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Errors of ops, programs and engines.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The slots of an op do not fit together.
    #[error("{op}: {what}")]
    Op {
        /// The op's name.
        op: &'static str,
        /// Which slot, what was found and what was expected.
        what: String,
    },
    /// A program or plan is inconsistent.
    #[error("program: {0}")]
    Program(String),
    /// An input value is out of range: a token beyond the vocabulary, a position beyond the context.
    #[error("{0}")]
    Input(String),
    /// The device does not exist on this machine, or its driver or a library is missing.
    #[error("{engine} engine: {what}")]
    NoDevice {
        /// The engine's name.
        engine: &'static str,
        /// What is missing and how to get it.
        what: String,
    },
    /// The engine does not support an element type, a size or an architecture.
    #[error("{engine} engine: {what}")]
    Unsupported {
        /// The engine's name.
        engine: &'static str,
        /// What is not supported and what to use instead.
        what: String,
    },
    /// The device has too little memory.
    #[error("{engine} engine: {what}")]
    OutOfMemory {
        /// The engine's name.
        engine: &'static str,
        /// How much was requested and what to make smaller.
        what: String,
    },
    /// Another process of the run is lost, or ended it.
    #[error("rank {rank} on {host}: {what}")]
    RankLost {
        /// The rank that is lost, or that ended the run.
        rank: usize,
        /// The host that the rank ran on.
        host: String,
        /// What happened to it, and what to do.
        what: String,
        /// The exit code of the run: [`RESUMABLE`](crate::ranks::RESUMABLE) where it was lost, its own where it gave up.
        code: u8,
    },
    /// The device failed while it was working and may not respond any more.
    #[error("{engine} engine: {what}")]
    DeviceLost {
        /// The engine's name.
        engine: &'static str,
        /// Which call failed and how.
        what: String,
    },
}

impl Error {
    /// Whether the device failed, as opposed to a request that was rejected.
    pub fn is_device_lost(&self) -> bool {
        matches!(self, Self::DeviceLost { .. })
    }
}
