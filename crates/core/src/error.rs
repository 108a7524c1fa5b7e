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
    /// The engine cannot do this here: not supported, not enough memory, device lost.
    #[error("{engine} engine: {what}")]
    Engine {
        /// The engine's name.
        engine: &'static str,
        /// What it cannot do and what to do about it.
        what: String,
    },
}
