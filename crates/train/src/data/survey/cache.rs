//! The results of earlier surveys in a JSON file. Nothing here is an error: without a cache, files are read again.

use std::collections::BTreeMap;
use std::fs::Metadata;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use super::SourceFacts;
use crate::format::atomic;

/// The version, which changes with the meaning of the file's fields.
const VERSION: u32 = 1;

/// The properties by which an unchanged file is recognised.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Stamp {
    bytes: u64,
    /// Time of the last change, in nanoseconds since 1970.
    modified_ns: i64,
    /// The inode; 0 on systems without.
    inode: u64,
}

impl Stamp {
    #[cfg(unix)]
    pub(super) fn of(meta: &Metadata) -> Self {
        use std::os::unix::fs::MetadataExt;
        let modified_ns = meta.mtime().saturating_mul(1_000_000_000).saturating_add(meta.mtime_nsec());
        Self { bytes: meta.len(), modified_ns, inode: meta.ino() }
    }

    #[cfg(not(unix))]
    pub(super) fn of(meta: &Metadata) -> Self {
        let since = meta.modified().ok().and_then(|at| at.duration_since(std::time::UNIX_EPOCH).ok());
        let modified_ns = since.and_then(|since| i64::try_from(since.as_nanos()).ok()).unwrap_or(0);
        Self { bytes: meta.len(), modified_ns, inode: 0 }
    }
}

/// One file.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Entry {
    stamp: Stamp,
    tokens: u64,
    max_token: u32,
    sha256: String,
}

/// The JSON file.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Contents {
    version: u32,
    /// The files by absolute path; those whose path is not UTF-8 are not cached.
    files: BTreeMap<String, Entry>,
}

/// The cache in memory.
pub(super) struct Cache {
    path: Option<PathBuf>,
    files: BTreeMap<String, Entry>,
    changed: bool,
}

impl Cache {
    /// Reads the file; empty if it is missing, damaged or of another version.
    pub(super) fn read(path: Option<&Path>) -> Self {
        let contents = path
            .and_then(|path| std::fs::read(path).ok())
            .and_then(|text| serde_json::from_slice::<Contents>(&text).ok())
            .filter(|contents| contents.version == VERSION);
        let files = contents.map(|contents| contents.files).unwrap_or_default();
        Self { path: path.map(Path::to_owned), files, changed: false }
    }

    /// The result for a file with these properties, if known.
    pub(super) fn get(&self, path: &Path, stamp: Stamp) -> Option<SourceFacts> {
        let entry = self.files.get(path.to_str()?).filter(|entry| entry.stamp == stamp)?;
        let hex = |digit: u8| matches!(digit, b'0'..=b'9' | b'a'..=b'f');
        if entry.sha256.len() != 64 || !entry.sha256.bytes().all(hex) {
            return None;
        }
        Some(SourceFacts {
            path: path.to_owned(),
            tokens: entry.tokens,
            bytes: stamp.bytes,
            max_token: entry.max_token,
            sha256: entry.sha256.clone(),
        })
    }

    /// Adds the result for a file.
    pub(super) fn put(&mut self, facts: &SourceFacts, stamp: Stamp) {
        let (Some(path), SourceFacts { tokens, max_token, sha256, .. }) =
            (facts.path.to_str(), facts.clone())
        else {
            return;
        };
        self.files.insert(path.to_owned(), Entry { stamp, tokens, max_token, sha256 });
        self.changed = true;
    }

    /// Writes the file, if there are new results and a path.
    pub(super) fn write(self) {
        let Some(path) = self.path.filter(|_| self.changed) else { return };
        if let Ok(text) = serde_json::to_vec_pretty(&Contents { version: VERSION, files: self.files }) {
            // not an error: without the cache the next start only takes longer
            let _ = atomic::write_file(&path, |sink| sink.put(&text));
        }
    }
}
