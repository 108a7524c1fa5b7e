//! The error type of this crate. Every variant prints as one line: what is wrong, where, what was expected, what to do.

use std::path::{Path, PathBuf};

/// Result with this crate's [`Error`].
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// What can go wrong with text, tokenizers and shards.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A file cannot be opened, read or written, or one of its fields is invalid.
    #[error(transparent)]
    Train(#[from] ironhorse_train::Error),
    /// One record of an input is invalid.
    #[error("{}: {unit} {number} {problem}; --skip-bad leaves such records out and counts them", path.display())]
    Record {
        /// The input.
        path: PathBuf,
        /// "line" or "row".
        unit: &'static str,
        /// Counted from 1.
        number: u64,
        /// What is wrong with it, as the end of a sentence: "is not JSON (...)".
        problem: String,
    },
    /// A whole input is invalid.
    #[error("{}: {problem}", path.display())]
    Input {
        /// The file.
        path: PathBuf,
        /// What is wrong and what to do.
        problem: String,
    },
    /// A tokenizer cannot be read or used.
    #[error("tokenizer {name}: {problem}")]
    Tokenizer {
        /// Its name or path.
        name: String,
        /// What is wrong and what to do.
        problem: String,
    },
    /// A line of chat data is invalid, or the template refuses it.
    #[error("{}: line {line} {problem}", path.display())]
    Sample {
        /// The file.
        path: PathBuf,
        /// Counted from 1.
        line: u64,
        /// What is wrong with it, as the end of a sentence.
        problem: String,
    },
    /// A chat template is invalid, or what it computes fails.
    #[error("{origin}: line {line}: {}{problem}", quoted(expression))]
    Template {
        /// The source of the template: a file, or a field in one.
        origin: String,
        /// The line of the template.
        line: usize,
        /// The expression; empty if it is not known.
        expression: String,
        /// What is wrong, or what the template itself says.
        problem: String,
    },
    /// A setting is invalid.
    #[error("{0}")]
    Setting(String),
    /// The caller asked to stop; what was done so far is kept.
    #[error("stopped before it was done; the same command goes on from there")]
    Stopped,
}

impl Error {
    /// A problem with an input.
    pub(crate) fn input(path: &Path, problem: impl ToString) -> Self {
        Self::Input { path: path.to_owned(), problem: one_line(&problem.to_string()) }
    }

    /// A problem with a tokenizer.
    pub(crate) fn tokenizer(name: impl ToString, problem: impl ToString) -> Self {
        Self::Tokenizer { name: name.to_string(), problem: one_line(&problem.to_string()) }
    }

    /// The error of training for callers that know only those.
    pub(crate) fn into_train(self) -> ironhorse_train::Error {
        match self {
            Self::Train(error) => error,
            other => ironhorse_train::Error::Tokenizer(other.to_string()),
        }
    }

    /// An error of the operating system.
    pub(crate) fn io(path: &Path, action: &'static str, source: std::io::Error) -> Self {
        ironhorse_train::Error::io(path, action, source).into()
    }
}

/// An expression before what is wrong with it.
fn quoted(expression: &str) -> String {
    if expression.is_empty() { String::new() } else { format!("`{expression}`: ") }
}

/// Text from files may hold anything: control characters are escaped and long text is cut.
pub(crate) fn one_line(text: &str) -> String {
    const MOST: usize = 600;
    let mut line = String::new();
    for c in text.chars() {
        if line.len() > MOST {
            return line + "...";
        }
        if c.is_control() { line.extend(c.escape_default()) } else { line.push(c) }
    }
    line
}
