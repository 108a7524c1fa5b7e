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
        /// The value in the file.
        found: String,
        /// What was expected.
        expected: String,
    },
    /// A size or argument has a value it must not have.
    #[error("{field} is {found}, expected {expected}")]
    Input {
        /// Its name: "n_layer", "batch", ...
        field: String,
        /// What was given.
        found: String,
        /// What was expected.
        expected: String,
    },
    /// A file or folder that the user named does not exist.
    #[error("{}: no such {kind}", path.display())]
    NotFound {
        /// Its name.
        path: PathBuf,
        /// "file or folder", or "folder".
        kind: &'static str,
    },
    /// An unknown name.
    #[error("unknown {what} `{name}`, expected {expected}")]
    Unknown {
        /// What kind of name: "model", "key", "tensor".
        what: &'static str,
        /// The name.
        name: String,
        /// Names that are known.
        expected: String,
    },
    /// A request that is understood but not supported.
    #[error("{0}")]
    Unsupported(String),
    /// A tokenizer failed; the text is its own.
    #[error("{0}")]
    Tokenizer(String),
    /// Any other of these errors, in a file.
    #[error("{}: {error}", path.display())]
    InFile {
        /// The file.
        path: PathBuf,
        /// What is wrong in it.
        error: Box<Error>,
    },
    /// A pattern of file names that no file matches.
    #[error("no file matches `{pattern}`, expected at least one")]
    NoMatch {
        /// The pattern.
        pattern: String,
    },
    /// The folder for a new run holds one that must not be replaced.
    #[error("{0}: holds a run already; resume it with --resume {0}, choose another --out, or add --overwrite", path.display())]
    RunExists {
        /// The folder.
        path: PathBuf,
    },
    /// The data are not those of the checkpoint that is resumed.
    #[error(
        "the checkpoint was written with other data files, sequence length, seed or order of the data; give the same to \
         resume, or start a new run from its weights with --init"
    )]
    OtherData,
    /// The loss or the gradients became NaN or infinite, and skipping steps did not help.
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
        /// Where the first NaN or infinity is, with its own separator; empty if it is not known.
        found: String,
    },
    /// The caller asked to stop before the work was done; nothing is wrong.
    #[error("stopped before it was finished")]
    Stopped,
    /// The program or engine refused.
    #[error(transparent)]
    Core(#[from] ironhorse_core::Error),
}

/// "a, b or c": what an error says was expected.
pub(crate) fn one_of<T: std::fmt::Display>(names: impl IntoIterator<Item = T>) -> String {
    let mut names: Vec<_> = names.into_iter().map(|name| name.to_string()).collect();
    match (names.pop(), names.is_empty()) {
        (Some(last), false) => format!("{} or {last}", names.join(", ")),
        (last, _) => last.unwrap_or_default(),
    }
}

impl Error {
    /// An I/O error with its path and what was being tried.
    pub fn io(path: &Path, action: &'static str, source: std::io::Error) -> Self {
        Self::Io { path: path.to_owned(), action, source }
    }

    /// A size or argument with a wrong value: what was found and what was expected.
    pub fn input(field: impl Into<String>, found: impl ToString, expected: impl ToString) -> Self {
        Self::Input {
            field: one_line(&field.into(), 300),
            found: one_line(&found.to_string(), 300),
            expected: one_line(&expected.to_string(), 1000),
        }
    }

    /// A name that is not known, and those that are.
    pub fn unknown(what: &'static str, name: &str, expected: impl ToString) -> Self {
        Self::Unknown { what, name: one_line(name, 300), expected: one_line(&expected.to_string(), 1000) }
    }

    /// The same error, about the content of a file.
    pub fn in_file(self, path: &Path) -> Self {
        match self {
            Self::Input { field, found, expected } => {
                Self::Field { path: path.to_owned(), field, found, expected }
            }
            other @ (Self::Unknown { .. } | Self::Unsupported(_)) => {
                Self::InFile { path: path.to_owned(), error: Box::new(other) }
            }
            other => other,
        }
    }

    /// The same error, about one line of a file.
    pub fn in_line(self, path: &Path, line: usize) -> Self {
        match self {
            Self::Input { field, found, expected } => {
                Self::Field { path: path.to_owned(), field: format!("line {line}: {field}"), found, expected }
            }
            other => other.in_file(path),
        }
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

/// Text from a file may hold anything: control characters are escaped and long text is cut.
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
