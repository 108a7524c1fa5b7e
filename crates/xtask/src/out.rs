//! Standard output that does not panic when the reader closes the pipe.

use std::fmt::Display;
use std::io::{self, Write};

/// Prints a line and flushes, so that the output of child processes comes after it.
pub fn line(text: impl Display) {
    bytes(format!("{text}\n").as_bytes());
}

/// Prints bytes unchanged and flushes.
pub fn bytes(bytes: &[u8]) {
    let mut stdout = io::stdout().lock();
    // If the reader is gone the checks continue, and the exit code still reports the result.
    let _ = stdout.write_all(bytes).and_then(|()| stdout.flush());
}
