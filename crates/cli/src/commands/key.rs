//! The secret that clients of a server must send.

use anyhow::{Context, Result, bail};
use std::path::Path;

/// The secret of a flag, or the first line of the file of another; `flag` is what an error calls the first.
pub fn key(given: Option<&str>, file: Option<&Path>, flag: &str) -> Result<Option<String>> {
    let key = match file {
        Some(file) => {
            let text = std::fs::read_to_string(file)
                .with_context(|| format!("{}: cannot read {flag}-file", file.display()))?;
            Some(text.lines().next().unwrap_or_default().trim().to_owned())
        }
        None => given.map(str::to_owned),
    };
    if key.as_ref().is_some_and(String::is_empty) {
        bail!("{flag} is empty; give a value or leave the flag out");
    }
    Ok(key)
}
