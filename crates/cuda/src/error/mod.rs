//! The error type of this crate.

mod kind;

pub use kind::ErrorKind;

use std::path::PathBuf;

/// Result with this crate's [`Error`].
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// What can go wrong between us and the GPU.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A library is not on this machine.
    #[error("{library} was not found; looked for {names} in {looked}; {install}")]
    LibraryMissing {
        /// The library's name in messages.
        library: &'static str,
        /// The file names tried.
        names: String,
        /// The folders that were searched.
        looked: String,
        /// What to do.
        install: String,
    },
    /// A library lacks a function we call.
    #[error("{library} at {} has no `{symbol}`: it is too old; {install}", path.display())]
    SymbolMissing {
        /// The library's name in messages.
        library: &'static str,
        /// The file.
        path: PathBuf,
        /// The function.
        symbol: &'static str,
        /// What to do.
        install: String,
    },
    /// There is no usable GPU.
    #[error("{0}")]
    NoDevice(String),
    /// A driver call failed.
    #[error("{call} failed: {name} ({text})")]
    Driver {
        /// The call.
        call: &'static str,
        /// The code's name.
        name: String,
        /// What the driver says about it.
        text: String,
    },
    /// A library call failed.
    #[error("{library}: {call} failed with status {status}{detail}")]
    Library {
        /// The library.
        library: &'static str,
        /// The call.
        call: &'static str,
        /// Its status.
        status: i64,
        /// What else is known, with its own separator.
        detail: String,
    },
    /// A kernel did not compile.
    #[error("{file} does not compile for {arch}:\n{log}")]
    Compile {
        /// The source file.
        file: String,
        /// The target.
        arch: String,
        /// The compiler's words.
        log: String,
    },
    /// The device has too little memory.
    #[error("{0}")]
    OutOfMemory(String),
    /// This engine cannot do what the program asks.
    #[error("{0}")]
    Unsupported(String),
    /// An input value is out of range.
    #[error("{0}")]
    Input(String),
    /// An error of the core: a slot outside its pool, an op that does not fit.
    #[error(transparent)]
    Core(#[from] ironhorse_core::Error),
}

impl From<Error> for ironhorse_core::Error {
    fn from(error: Error) -> Self {
        let (engine, what, kind) = ("cuda", error.to_string(), error.kind());
        match (error, kind) {
            (Error::Core(error), _) => error,
            (_, ErrorKind::NotFound) => Self::NoDevice { engine, what },
            (_, ErrorKind::OutOfMemory) => Self::OutOfMemory { engine, what },
            (_, ErrorKind::DeviceLost) => Self::DeviceLost { engine, what },
            (_, ErrorKind::Unsupported) => Self::Unsupported { engine, what },
            (_, ErrorKind::BadInput) => Self::Input(what),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ironhorse_core::Error as Core;

    #[test]
    fn codes_of_the_driver_become_what_a_caller_can_act_on() {
        let driver =
            |name: &str| Core::from(Error::Driver { call: "cuX", name: name.into(), text: "text".into() });
        assert!(matches!(driver("CUDA_ERROR_OUT_OF_MEMORY"), Core::OutOfMemory { .. }));
        assert!(matches!(driver("CUDA_ERROR_INVALID_DEVICE"), Core::NoDevice { .. }));
        let lost = driver("CUDA_ERROR_ILLEGAL_ADDRESS");
        assert!(lost.is_device_lost());
        assert_eq!(lost.to_string(), "cuda engine: cuX failed: CUDA_ERROR_ILLEGAL_ADDRESS (text)");
        let library = |library, status| {
            Core::from(Error::Library { library, call: "call", status, detail: String::new() })
        };
        assert!(matches!(library("cuBLASLt", 3), Core::OutOfMemory { .. }));
        assert!(library("cuDNN", 3).is_device_lost());
    }
}
