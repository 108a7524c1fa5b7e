//! The folder where compiled kernels and chosen algorithms are kept. Every file is written aside and renamed, so
//! a killed process leaves no half-written entry and no lock; an entry that does not read is made again.

use sha2::{Digest, Sha256};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, SystemTime};

/// The variable that moves the folder.
pub const CACHE_VARIABLE: &str = "IRONHORSE_CACHE";

/// Entries by name. Without a folder nothing is kept, and everything works, slower to start.
#[derive(Clone, Debug)]
pub struct Cache {
    folder: Option<PathBuf>,
}

impl Cache {
    /// In this folder, or the one of the environment, or the user's cache folder.
    pub fn open(folder: Option<&Path>) -> Self {
        let folder = folder.map(Path::to_owned).or_else(default_folder);
        let folder = folder.filter(|folder| match std::fs::create_dir_all(folder) {
            Ok(()) => true,
            Err(error) => {
                warn_once(folder, &error);
                false
            }
        });
        if let Some(folder) = &folder {
            remove_leftovers(folder, SystemTime::now());
        }
        Self { folder }
    }

    /// Where entries are kept.
    pub fn folder(&self) -> Option<&Path> {
        self.folder.as_deref()
    }

    /// An entry, if it is there and whole.
    pub fn read(&self, name: &str) -> Option<Vec<u8>> {
        let bytes = std::fs::read(self.folder.as_ref()?.join(name)).ok()?;
        let (body, digest) = bytes.split_at_checked(bytes.len().checked_sub(DIGEST)?)?;
        if Sha256::digest(body).as_slice() == digest {
            return Some(body.to_vec());
        }
        tracing::warn!("cache entry {name} is damaged; making it again");
        None
    }

    /// Keeps an entry. A folder that cannot be written costs time later, nothing else.
    pub fn write(&self, name: &str, body: &[u8]) {
        let Some(folder) = &self.folder else { return };
        let aside = folder.join(format!(".{name}.{}.{:x}", std::process::id(), unique()));
        let mut bytes = body.to_vec();
        bytes.extend_from_slice(&Sha256::digest(body));
        let written = std::fs::write(&aside, bytes).and_then(|()| std::fs::rename(&aside, folder.join(name)));
        if let Err(error) = written {
            let _ = std::fs::remove_file(&aside);
            warn_once(folder, &error);
        }
    }
}

const DIGEST: usize = 32;
/// Age from which on a file written aside is that of a process that was killed.
const LEFTOVER: Duration = Duration::from_secs(3600);

/// A full or read-only folder fails for every entry: one line is enough.
fn warn_once(folder: &Path, error: &std::io::Error) {
    static WARNED: AtomicBool = AtomicBool::new(false);
    if !WARNED.swap(true, Ordering::Relaxed) {
        tracing::warn!("{}: compiled kernels cannot be kept there: {error}", folder.display());
    }
}

/// Removes what killed processes had written aside.
fn remove_leftovers(folder: &Path, now: SystemTime) {
    let Ok(entries) = std::fs::read_dir(folder) else { return };
    for entry in entries.flatten().filter(|entry| is_aside(&entry.file_name().to_string_lossy())) {
        let written = entry.metadata().and_then(|metadata| metadata.modified());
        let age = written.ok().and_then(|written| now.duration_since(written).ok());
        if age.is_some_and(|age| age > LEFTOVER) {
            let _ = std::fs::remove_file(entry.path());
        }
    }
}

/// Whether a file is named as [`Cache::write`] names those it writes aside: `.name.process.number`.
fn is_aside(file: &str) -> bool {
    let mut parts = file.rsplitn(3, '.');
    let number = parts.next().is_some_and(|part| u64::from_str_radix(part, 16).is_ok());
    let process = parts.next().is_some_and(|part| part.parse::<u32>().is_ok());
    number && process && parts.next().is_some_and(|name| name.len() > 1 && name.starts_with('.'))
}

fn unique() -> u64 {
    static NEXT: AtomicU64 = AtomicU64::new(0);
    NEXT.fetch_add(1, Ordering::Relaxed)
}

fn default_folder() -> Option<PathBuf> {
    let set = |name: &str| std::env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    set(CACHE_VARIABLE)
        .or_else(|| set("XDG_CACHE_HOME").map(|cache| cache.join("ironhorse")))
        .or_else(|| set("HOME").map(|home| home.join(".cache").join("ironhorse")))
        .or_else(|| set("LOCALAPPDATA").map(|local| local.join("ironhorse")))
}

/// A name for everything that decides an entry's contents.
pub(crate) fn key(parts: &[&str]) -> String {
    let mut hash = Sha256::new();
    for part in parts {
        hash.update((part.len() as u64).to_le_bytes());
        hash.update(part.as_bytes());
    }
    hash.finalize().iter().take(16).map(|byte| format!("{byte:02x}")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn entries_come_back_and_damaged_ones_do_not() {
        let folder = tempfile::tempdir().unwrap();
        let cache = Cache::open(Some(folder.path()));
        assert_eq!(cache.read("a"), None);
        cache.write("a", b"body");
        assert_eq!(cache.read("a").as_deref(), Some(&b"body"[..]));
        let path = folder.path().join("a");
        for damaged in [&b""[..], b"short", &std::fs::read(&path).unwrap()[1..]] {
            std::fs::write(&path, damaged).unwrap();
            assert_eq!(cache.read("a"), None);
        }
        cache.write("a", b"again");
        assert_eq!(cache.read("a").as_deref(), Some(&b"again"[..]));
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 1, "nothing is left aside");
    }

    #[test]
    fn only_old_files_of_killed_processes_are_removed() {
        let folder = tempfile::tempdir().unwrap();
        let aside = folder.path().join(".gelu-0.cubin.4711.a");
        for path in [&aside, &folder.path().join("gelu-0.cubin"), &folder.path().join(".keep.me.too")] {
            std::fs::write(path, b"x").unwrap();
        }
        Cache::open(Some(folder.path()));
        assert!(aside.exists(), "it may still be written");
        remove_leftovers(folder.path(), SystemTime::now() + 2 * LEFTOVER);
        assert!(!aside.exists());
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 2);
    }

    #[test]
    fn a_folder_that_cannot_be_made_keeps_nothing() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let cache = Cache::open(Some(&file.path().join("below")));
        assert_eq!(cache.folder(), None);
        cache.write("a", b"body");
        assert_eq!(cache.read("a"), None);
    }

    #[test]
    fn keys_depend_on_every_part() {
        assert_eq!(key(&["a", "bc"]).len(), 32);
        assert_ne!(key(&["a", "bc"]), key(&["ab", "c"]));
    }
}
