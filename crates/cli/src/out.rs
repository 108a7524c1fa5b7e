//! Standard output that does not panic when the reader goes away, and JSON files.

use anyhow::{Context, Result};
use ironhorse::train::format::atomic;
use serde::Serialize;
use std::fmt::Display;
use std::io::{self, Write};
use std::path::Path;

/// Prints a line.
pub fn line(text: impl Display) -> Result<()> {
    Ok(writeln!(io::stdout().lock(), "{text}")?)
}

/// Prints without a line end, at once.
pub fn piece(text: &[u8]) -> Result<()> {
    let mut stdout = io::stdout().lock();
    stdout.write_all(text)?;
    Ok(stdout.flush()?)
}

/// Whether the error is only that nobody reads the output any more (`ironhorse ... | head`).
pub fn is_closed_pipe(error: &anyhow::Error) -> bool {
    error.downcast_ref::<io::Error>().is_some_and(|error| error.kind() == io::ErrorKind::BrokenPipe)
}

/// Writes a value as JSON, if a file was asked for.
pub fn json(path: Option<&Path>, value: &impl Serialize) -> Result<()> {
    let Some(path) = path else { return Ok(()) };
    let mut text = serde_json::to_string_pretty(value).context("the figures are not JSON")?;
    text.push('\n');
    Ok(atomic::write_file(path, |sink| sink.put(text.as_bytes()))?)
}
