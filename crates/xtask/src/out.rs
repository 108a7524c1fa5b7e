//! Standard output that does not panic when the reader goes away.

use std::fmt::Display;
use std::io::{self, Write};

/// Prints a line, at once: what the child processes write must come after it.
pub fn line(text: impl Display) {
    bytes(format!("{text}\n").as_bytes());
}

/// Prints bytes as they are, at once.
pub fn bytes(bytes: &[u8]) {
    let mut stdout = io::stdout().lock();
    // Nobody reads any more: the checks go on, and the exit code still tells.
    let _ = stdout.write_all(bytes).and_then(|()| stdout.flush());
}
