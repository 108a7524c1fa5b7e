//! Why an eager op was not done.

/// What went wrong, as a number that C and Python see.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(i32)]
pub enum Code {
    /// Nothing went wrong.
    Success = 0,
    /// The device the memory is on cannot be used.
    NotAvailable = -1,
    /// An argument is invalid.
    InvalidValue = -2,
    /// The computation could not be started, or failed.
    LaunchFailed = -3,
    /// There is not enough memory.
    OutOfMemory = -4,
}

impl Code {
    /// What a failure of an engine is to C and Python.
    pub fn of(error: &crate::core::Error) -> Self {
        use crate::core::Error;
        match error {
            Error::NoDevice { .. } => Self::NotAvailable,
            Error::OutOfMemory { .. } => Self::OutOfMemory,
            Error::Input(_) => Self::InvalidValue,
            _ => Self::LaunchFailed,
        }
    }

    /// The number that C returns.
    pub fn as_i32(self) -> i32 {
        self as i32
    }
}

/// Why an op was not done.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OpError {
    /// The kind of error.
    pub code: Code,
    /// One sentence: the op, the argument, what was found, what was expected.
    pub text: String,
}

/// What every op returns.
pub type Result<T = ()> = std::result::Result<T, OpError>;

impl OpError {
    pub(crate) fn invalid(text: String) -> Self {
        Self { code: Code::InvalidValue, text }
    }
}

impl std::fmt::Display for OpError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.text)
    }
}

impl std::error::Error for OpError {}

impl From<crate::cpu::eager::Failed> for OpError {
    fn from(error: crate::cpu::eager::Failed) -> Self {
        use crate::cpu::eager::Failed;
        let code = match error {
            Failed::Panic(_) => Code::LaunchFailed,
            Failed::Unsupported(_) | Failed::Row { .. } => Code::InvalidValue,
        };
        Self { code, text: error.to_string() }
    }
}

impl From<crate::cuda::Error> for OpError {
    fn from(error: crate::cuda::Error) -> Self {
        let text = error.to_string();
        Self { code: Code::of(&error.into()), text }
    }
}
