//! The error type of this crate. Every variant prints as one line: what is wrong, where, and what was expected.

use std::path::{Path, PathBuf};

/// Result with this crate's [`Error`].
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// What can go wrong in models, files, data and training.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The operating system refused: missing file, no permission, disk full.
    #[error("{}: cannot {action}: {source}", path.display())]
    Io {
        /// The file or folder.
        path: PathBuf,
        /// What was tried: "open", "read", "write", ...
        action: &'static str,
        /// What the system said.
        source: std::io::Error,
    },
    /// One field of a file has a value it must not have.
    #[error("{}: {field} is {found}, expected {expected}", path.display())]
    Field {
        /// The file.
        path: PathBuf,
        /// The field: "magic", "version", "n_layer", "file size", ...
        field: String,
        /// What stands in the file.
        found: String,
        /// What would have been right.
        expected: String,
    },
    /// A setting given by the user makes no sense.
    #[error("{0}")]
    Config(String),
    /// Training ran away.
    #[error(
        "training diverged at step {step}: loss {loss}, gradient norm {norm}{found}; lower --lr, raise --warmup, or set --grad-clip"
    )]
    Diverged {
        /// The step, from 0.
        step: u64,
        /// Its loss.
        loss: f32,
        /// Its gradient norm.
        norm: f32,
        /// Where the first number is that is not finite, with its own separator; empty if it is not known.
        found: String,
    },
    /// The program or engine refused.
    #[error(transparent)]
    Core(#[from] ironhorse_core::Error),
}

impl Error {
    /// An I/O error with its path and what was being tried.
    pub fn io(path: &Path, action: &'static str, source: std::io::Error) -> Self {
        Self::Io { path: path.to_owned(), action, source }
    }

    /// A setting that makes no sense; the text may hold what the user typed.
    pub fn config(text: impl AsRef<str>) -> Self {
        Self::Config(one_line(text.as_ref(), 1000))
    }

    /// A wrong field in a file: what was found and what was expected.
    pub fn field(
        path: &Path,
        field: impl Into<String>,
        found: impl ToString,
        expected: impl ToString,
    ) -> Self {
        Self::Field {
            path: path.to_owned(),
            field: one_line(&field.into(), 300),
            found: one_line(&found.to_string(), 300),
            expected: one_line(&expected.to_string(), 300),
        }
    }
}

/// Text from a file may hold anything: control characters are escaped and what is long is cut.
fn one_line(text: &str, most: usize) -> String {
    let mut line = String::new();
    for c in text.chars() {
        if line.len() > most {
            line.push_str("...");
            break;
        }
        if c.is_control() { line.extend(c.escape_default()) } else { line.push(c) }
    }
    line
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_message_is_one_short_line() {
        let error = Error::field(Path::new("a.bin"), "name", "x\ny".repeat(1000), 3);
        let text = error.to_string();
        assert!(text.starts_with(r"a.bin: name is x\nyx\ny") && text.ends_with("..., expected 3"), "{text}");
        assert!(text.len() < 400 && text.lines().count() == 1);
    }
}
