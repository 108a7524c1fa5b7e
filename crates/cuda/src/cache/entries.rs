//! The files of a cache folder by their names: which are entries, which are leftovers, and which are removed first.

use std::path::Path;
use std::time::{Duration, SystemTime};

/// Age from which on a file written aside is that of a process that was killed.
pub(super) const LEFTOVER: Duration = Duration::from_secs(3600);

/// Removes what killed processes had written aside.
pub(super) fn remove_leftovers(folder: &Path, now: SystemTime) {
    let Ok(all) = std::fs::read_dir(folder) else { return };
    for entry in all.flatten().filter(|entry| is_aside(&entry.file_name().to_string_lossy())) {
        let written = entry.metadata().and_then(|metadata| metadata.modified());
        let age = written.ok().and_then(|written| now.duration_since(written).ok());
        if age.is_some_and(|age| age > LEFTOVER) {
            let _ = std::fs::remove_file(entry.path());
        }
    }
}

/// Whether a file is named as `aside` names those it writes.
pub(super) fn is_aside(file: &str) -> bool {
    let name = file.strip_prefix('.').and_then(|rest| rest.strip_suffix(".new"));
    name.is_some_and(is_key)
}

/// Whether a file is named as entries are: what it is, the key of what decided it, an extension. Anything else in the
/// folder is not ours to remove.
pub(super) fn is_entry(file: &str) -> bool {
    let key = file.rsplit_once('.').and_then(|(stem, _)| stem.rsplit_once('-'));
    key.is_some_and(|(what, key)| !what.is_empty() && !what.starts_with('.') && is_key(key))
}

fn is_key(text: &str) -> bool {
    text.len() == 32 && text.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'))
}

pub(super) fn entries(folder: &Path) -> impl Iterator<Item = std::fs::DirEntry> {
    let all = std::fs::read_dir(folder).into_iter().flatten().flatten();
    all.filter(|entry| is_entry(&entry.file_name().to_string_lossy()))
}

/// Removes entries until all together have at most `limit` bytes: those used longest ago first, but chosen algorithms,
/// which are small and decide the bits of results, after all others; never `newest`.
pub(super) fn evict(folder: &Path, limit: u64, newest: &str) {
    let mut all = Vec::new();
    for entry in entries(folder) {
        let Ok(metadata) = entry.metadata() else { continue };
        let (name, used) = (entry.file_name().to_string_lossy().into_owned(), metadata.modified().ok());
        all.push((name.starts_with(CHOICES), used, name, metadata.len()));
    }
    let mut total: u64 = all.iter().map(|(.., bytes)| bytes).sum();
    all.sort();
    for (_, _, name, bytes) in all.into_iter().filter(|(_, _, name, _)| name != newest) {
        if total <= limit {
            return;
        }
        if std::fs::remove_file(folder.join(&name)).is_ok() {
            tracing::debug!("cache entry {name} evicted");
            total -= bytes;
        }
    }
}

/// What entries with chosen algorithms are called before the key.
pub(crate) const CHOICES: &str = "gemm-";
