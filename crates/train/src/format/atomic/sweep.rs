//! Removes the temporary files of writers that died.

use std::ffi::{OsStr, OsString};
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use super::{discard, fs};
use crate::host::os_string;
use crate::{Error, Result};

/// What [`sweep`] did.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Swept {
    /// The number of temporary files and folders that were removed.
    pub removed: usize,
    /// The folders that were put back because their writer died while replacing them.
    pub restored: Vec<PathBuf>,
}

/// A name that a writer of this module makes.
struct Leftover {
    path: PathBuf,
    /// The name of its target.
    target: OsString,
    /// Whether it is a complete old folder that was being replaced.
    old: bool,
    modified: SystemTime,
}

/// Removes the temporary files and folders that dead writers left in `folder`. If a writer died between the two renames
/// that replace a folder, the old folder gets its name back. A missing folder counts as empty.
///
/// The caller must hold a lock which guarantees that no writer is active in `folder`: its temporary files would be
/// removed.
pub fn sweep(folder: &Path) -> Result<Swept> {
    let mut leftovers = list(folder)?;
    // the latest first: of several old folders of one name, the latest is put back
    leftovers.sort_by_key(|leftover| std::cmp::Reverse(leftover.modified));
    let mut swept = Swept::default();
    for leftover in leftovers {
        let target = folder.join(&leftover.target);
        if leftover.old && !exists(&target)? {
            let renamed = fs::rename(&leftover.path, &target);
            renamed.map_err(|source| Error::io(&target, "put the old folder back", source))?;
            swept.restored.push(target);
            continue;
        }
        if leftover.old {
            discard(&target, &leftover.path);
        } else {
            fs::remove(&leftover.path).map_err(|source| Error::io(&leftover.path, "remove", source))?;
        }
        swept.removed += 1;
    }
    if !swept.restored.is_empty() {
        fs::sync_folder(folder).map_err(|source| Error::io(folder, "sync", source))?;
    }
    Ok(swept)
}

fn exists(path: &Path) -> Result<bool> {
    match std::fs::symlink_metadata(path) {
        Ok(_) => Ok(true),
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(false),
        Err(error) => Err(Error::io(path, "read", error)),
    }
}

fn list(folder: &Path) -> Result<Vec<Leftover>> {
    let cannot_read = |source| Error::io(folder, "read", source);
    let entries = match std::fs::read_dir(folder) {
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(Vec::new()),
        entries => entries.map_err(cannot_read)?,
    };
    let mut leftovers = Vec::new();
    for entry in entries {
        let entry = entry.map_err(cannot_read)?;
        let Some((target, old)) = parse(&entry.file_name()) else { continue };
        let modified = entry.metadata().and_then(|meta| meta.modified()).unwrap_or(SystemTime::UNIX_EPOCH);
        leftovers.push(Leftover { path: entry.path(), target, old, modified });
    }
    Ok(leftovers)
}

/// `.NAME.tmp-RANDOM` and `.NAME.old-RANDOM`, the random part 32 lower-case hexadecimal digits: NAME, and whether it
/// is an old folder.
fn parse(name: &OsStr) -> Option<(OsString, bool)> {
    let rest = name.as_encoded_bytes().strip_prefix(b".")?;
    let (rest, random) = rest.split_at_checked(rest.len().checked_sub(32)?)?;
    if !random.iter().all(|digit| matches!(digit, b'0'..=b'9' | b'a'..=b'f')) {
        return None;
    }
    let (target, old) = match (rest.strip_suffix(b".tmp-"), rest.strip_suffix(b".old-")) {
        (Some(target), _) => (target, false),
        (_, Some(target)) => (target, true),
        _ => return None,
    };
    if target.is_empty() { None } else { Some((os_string(target)?, old)) }
}
