//! The error type of this crate. Every variant prints as one line: what is wrong, where, and what to do.

use std::path::{Path, PathBuf};

/// Result with this crate's [`Error`].
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Why a name did not become files.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The operating system refused.
    #[error(transparent)]
    Train(#[from] ironhorse_train::Error),
    /// The disk is full.
    #[error("{}: the disk is full{more}; make room, or move the cache ({variable}); the same command goes on from there", path.display())]
    Full {
        /// The file that was being written.
        path: PathBuf,
        /// What is known of the sizes.
        more: String,
        /// The variable that moves the cache.
        variable: &'static str,
    },
    /// What was given is not a name.
    #[error("`{name}` {problem}")]
    Name {
        /// What was given.
        name: String,
        /// What is wrong with it.
        problem: String,
    },
    /// The hub wants to know who asks, or that somebody agreed to a licence.
    #[error(
        "{what}: the hub refuses access ({status}{said}); set HF_TOKEN to a token of your account, and agree to the licence, if there is one, at {page}"
    )]
    Refused {
        /// The repository and file.
        what: String,
        /// 401 or 403.
        status: u16,
        /// What the hub said, with its own separator.
        said: String,
        /// The repository's page.
        page: String,
    },
    /// The hub has no such repository, revision or file.
    #[error("{what}: {problem} ({address})")]
    NotFound {
        /// The repository and file.
        what: String,
        /// What is not there, and what else it can be.
        problem: String,
        /// The address that was asked for.
        address: String,
    },
    /// The server did not give what it should, however often it was asked.
    #[error("{what}: {problem} ({address})")]
    Server {
        /// The file or the repository.
        what: String,
        /// What happened.
        problem: String,
        /// What was asked for.
        address: String,
    },
    /// There is no network, or it may not be used.
    #[error("{what} is not in the cache, and {reason}; {advice}")]
    Missing {
        /// The name.
        what: String,
        /// Why it cannot be downloaded.
        reason: String,
        /// Which file to put where.
        advice: String,
    },
    /// The content is not what it should be.
    #[error(transparent)]
    Content(#[from] Box<WrongContent>),
    /// The caller asked to stop.
    #[error("stopped before it was done; the same command goes on from there")]
    Stopped,
}

/// A file whose content is not what it should be.
#[derive(Debug, thiserror::Error)]
#[error("{what}: {field} is {found}, expected {expected}; nothing of it was kept, try again ({address})")]
pub struct WrongContent {
    /// The file.
    pub what: String,
    /// "size", "SHA-256", ...
    pub field: &'static str,
    /// What it is.
    pub found: String,
    /// What it should be.
    pub expected: String,
    /// The address that the file came from.
    pub address: String,
}

impl Error {
    /// An error of the operating system; a full disk is one of its own.
    pub(crate) fn io(path: &Path, action: &'static str, source: std::io::Error) -> Self {
        use std::io::ErrorKind;
        match source.kind() {
            ErrorKind::StorageFull | ErrorKind::QuotaExceeded => Self::Full {
                path: path.to_owned(),
                more: String::new(),
                variable: "HF_HOME or IRONHORSE_CACHE",
            },
            _ => ironhorse_train::Error::io(path, action, source).into(),
        }
    }
}

/// What a server says may hold anything: control characters are escaped and long text is cut.
pub(crate) fn one_line(text: &str) -> String {
    const MOST: usize = 200;
    let mut line = String::new();
    for c in text.chars() {
        if line.len() > MOST {
            return line + "...";
        }
        if c.is_control() { line.extend(c.escape_default()) } else { line.push(c) }
    }
    line
}
