//! The folder where compiled kernels and chosen algorithms are kept. Every file is written aside and renamed, so
//! a killed process leaves no half-written entry and no lock; an entry that does not read is made again.
//!
//! What is kept is code that is run. So the folder must be this user's alone, its files are opened without following links,
//! and each ends in a code made with the folder's own key: an entry that nobody with the key wrote is not loaded.
//!
//! ```text
//! files.rs  the folder and its files, which no other user can have made    mac.rs  the code at the end of an entry
//! entries.rs  which files are entries, and which are removed first
//! ```

mod entries;
mod files;
mod mac;

pub(crate) use entries::CHOICES;

use entries::{entries, evict, remove_leftovers};
use sha2::{Digest, Sha256};
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::SystemTime;

/// The variable that moves the folder.
pub const CACHE_VARIABLE: &str = "IRONHORSE_CACHE";
/// The variable that says how many bytes may be kept.
pub const LIMIT_VARIABLE: &str = "IRONHORSE_CACHE_LIMIT";

/// Entries by name. Without a folder nothing is kept, and everything works, slower to start.
#[derive(Clone, Debug)]
pub struct Cache(Option<Arc<Kept>>);

struct Kept {
    folder: PathBuf,
    key: [u8; mac::BYTES],
    /// Bytes of all entries together.
    limit: u64,
    /// Whether new entries can be written, as far as is known.
    writable: AtomicBool,
}

impl std::fmt::Debug for Kept {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Kept")
            .field("folder", &self.folder)
            .field("limit", &self.limit)
            .finish_non_exhaustive()
    }
}

impl Cache {
    /// Opens the cache in this folder, or the one of the environment, or the user's cache folder.
    pub fn open(folder: Option<&Path>) -> Self {
        let limit = std::env::var(LIMIT_VARIABLE).ok();
        Self::with_limit(folder, parse_limit(limit.as_deref()))
    }

    fn with_limit(folder: Option<&Path>, limit: u64) -> Self {
        let Some(folder) = folder.map(Path::to_owned).or_else(default_folder) else { return Self(None) };
        match files::make_folder(&folder).and_then(|()| key_of(&folder)) {
            Ok(key) => {
                remove_leftovers(&folder, SystemTime::now());
                let writable = AtomicBool::new(limit > 0 && can_write(&folder));
                Self(Some(Arc::new(Kept { folder, key, limit, writable })))
            }
            Err(error) => {
                warn_once(&folder, &error);
                Self(None)
            }
        }
    }

    /// The folder that keeps the entries.
    pub fn folder(&self) -> Option<&Path> {
        self.0.as_deref().map(|kept| kept.folder.as_path())
    }

    /// Whether what is written now will be there for a later run, as far as is known.
    pub fn keeps(&self) -> bool {
        self.0.as_ref().is_some_and(|kept| kept.writable.load(Ordering::Relaxed))
    }

    /// An entry, if it is there, whole, and written by someone with the key.
    pub fn read(&self, name: &str) -> Option<Vec<u8>> {
        let kept = self.0.as_ref()?;
        let (file, bytes) = match files::read(&kept.folder.join(name), u64::MAX, false) {
            Ok(read) => read,
            Err(error) if error.kind() == ErrorKind::NotFound => return None,
            Err(error) => {
                tracing::warn!("cache entry {name} is not used ({error}); making it again");
                return None;
            }
        };
        let body = bytes.split_last_chunk::<{ mac::BYTES }>();
        let body = body.filter(|(body, code)| mac::equal(&kept.code(name, body), *code));
        if body.is_none() {
            tracing::warn!("cache entry {name} is damaged or not from this cache; making it again");
        }
        let (body, _) = body?;
        let _ = file.set_modified(SystemTime::now()); // used just now: among the last to be evicted
        Some(body.to_vec())
    }

    /// Keeps an entry; whether that was possible. A folder that cannot be written costs time later, nothing else.
    pub fn write(&self, name: &str, body: &[u8]) -> bool {
        let Some(kept) = &self.0 else { return false };
        let mut bytes = body.to_vec();
        bytes.extend_from_slice(&kept.code(name, body));
        if bytes.len() as u64 > kept.limit {
            return false;
        }
        let written = aside(&kept.folder, &bytes).and_then(|aside| {
            let renamed = std::fs::rename(&aside, kept.folder.join(name));
            renamed.inspect_err(|_| drop(std::fs::remove_file(&aside)))
        });
        if let Err(error) = &written {
            warn_once(&kept.folder, error);
            kept.writable.store(false, Ordering::Relaxed);
            return false;
        }
        evict(&kept.folder, kept.limit, name);
        true
    }
}

impl Kept {
    fn code(&self, name: &str, body: &[u8]) -> [u8; mac::BYTES] {
        mac::code(&self.key, &[name.as_bytes(), body])
    }
}

/// The file that holds the key, which only its owner can read.
const KEY: &str = "key";
/// Bytes kept unless [`LIMIT_VARIABLE`] says otherwise.
const LIMIT: u64 = 1 << 30;

/// A full, read-only or refused folder fails for every entry: one line is enough.
fn warn_once(folder: &Path, error: &std::io::Error) {
    static WARNED: AtomicBool = AtomicBool::new(false);
    if !WARNED.swap(true, Ordering::Relaxed) {
        tracing::warn!("{}: compiled kernels cannot be kept there: {error}", folder.display());
    }
}

fn parse_limit(text: Option<&str>) -> u64 {
    let Some(text) = text.map(str::trim).filter(|text| !text.is_empty()) else { return LIMIT };
    text.parse().unwrap_or_else(|_| {
        tracing::warn!("{LIMIT_VARIABLE} is '{text}', expected a number of bytes; using {LIMIT}");
        LIMIT
    })
}

/// The folder's key. One that others could have read or that is not whole is replaced: it says nothing about entries.
fn key_of(folder: &Path) -> std::io::Result<[u8; mac::BYTES]> {
    let path = folder.join(KEY);
    let read = || {
        let (_, bytes) = files::read(&path, mac::BYTES as u64, true)?;
        <[u8; mac::BYTES]>::try_from(bytes).map_err(|_| std::io::Error::from(ErrorKind::InvalidData))
    };
    match read() {
        Ok(key) => return Ok(key),
        Err(error) if error.kind() == ErrorKind::NotFound => {}
        Err(_) => std::fs::remove_file(&path)?,
    }
    // No entry of an older key, or of a time without keys, can be read any more.
    entries(folder).for_each(|entry| drop(std::fs::remove_file(entry.path())));
    // Made aside and linked: whole from the start, and the first of several processes decides.
    let aside = aside(folder, &files::random::<{ mac::BYTES }>()?)?;
    let linked = std::fs::hard_link(&aside, &path);
    let made = match linked {
        Err(error) if error.kind() != ErrorKind::AlreadyExists => std::fs::rename(&aside, &path), // no links there
        _ => std::fs::remove_file(&aside),
    };
    made.and_then(|()| read())
}

/// A new file of a random name with these bytes.
fn aside(folder: &Path, bytes: &[u8]) -> std::io::Result<PathBuf> {
    let name = files::random::<16>()?.iter().map(|byte| format!("{byte:02x}")).collect::<String>();
    let path = folder.join(format!(".{name}.new"));
    match files::create(&path, bytes) {
        Ok(()) => Ok(path),
        Err(error) => {
            if error.kind() != ErrorKind::AlreadyExists {
                let _ = std::fs::remove_file(&path);
            }
            Err(error)
        }
    }
}

fn can_write(folder: &Path) -> bool {
    aside(folder, b"").and_then(std::fs::remove_file).inspect_err(|error| warn_once(folder, error)).is_ok()
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
    use super::entries::LEFTOVER;
    use super::*;

    fn names(folder: &Path) -> Vec<String> {
        let all = std::fs::read_dir(folder).unwrap().flatten();
        let mut names: Vec<_> = all.map(|entry| entry.file_name().to_string_lossy().into_owned()).collect();
        names.sort();
        names
    }

    #[test]
    fn entries_come_back_and_damaged_ones_do_not() {
        let folder = tempfile::tempdir().unwrap();
        let cache = Cache::open(Some(folder.path()));
        assert!(cache.keeps());
        assert_eq!(cache.read("a"), None);
        assert!(cache.write("a", b"body"));
        assert_eq!(cache.read("a").as_deref(), Some(&b"body"[..]));
        let path = folder.path().join("a");
        for damaged in [&b""[..], b"short", &std::fs::read(&path).unwrap()[1..]] {
            std::fs::write(&path, damaged).unwrap();
            assert_eq!(cache.read("a"), None);
        }
        cache.write("a", b"again");
        assert_eq!(cache.read("a").as_deref(), Some(&b"again"[..]));
        assert_eq!(names(folder.path()), ["a", KEY], "nothing is left aside");
    }

    #[test]
    fn an_entry_of_another_key_or_name_is_not_loaded() {
        let [ours, theirs] = [(); 2].map(|()| tempfile::tempdir().unwrap());
        let cache = Cache::open(Some(ours.path()));
        Cache::open(Some(theirs.path())).write("a", b"body");
        std::fs::copy(theirs.path().join("a"), ours.path().join("a")).unwrap();
        assert_eq!(cache.read("a"), None, "made with another key");
        let mut plain = b"body".to_vec();
        plain.extend_from_slice(&Sha256::digest(b"body"));
        std::fs::write(ours.path().join("a"), plain).unwrap();
        assert_eq!(cache.read("a"), None, "a checksum without a key");
        cache.write("a", b"body");
        std::fs::rename(ours.path().join("a"), ours.path().join("b")).unwrap();
        assert_eq!(cache.read("b"), None, "made for another name");
    }

    #[test]
    fn the_key_is_made_once_and_again_where_it_is_not_whole() {
        let folder = tempfile::tempdir().unwrap();
        let name = format!("gelu-{}.cubin", key(&["x"]));
        let foreign = folder.path().join("thesis.tex");
        std::fs::write(&foreign, b"x").unwrap();
        std::fs::write(folder.path().join(&name), b"of a time without keys").unwrap();
        let keys: Vec<_> = std::thread::scope(|scope| {
            let open = || Cache::open(Some(folder.path())).0.unwrap().key;
            let threads: Vec<_> = (0..4).map(|_| scope.spawn(open)).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        });
        assert!(keys.iter().all(|key| *key == keys[0]), "the first of several decides");
        assert_eq!(names(folder.path()), [KEY, "thesis.tex"], "only entries that cannot be read are removed");
        Cache::open(Some(folder.path())).write(&name, b"body");
        assert!(Cache::open(Some(folder.path())).read(&name).is_some());
        std::fs::write(folder.path().join(KEY), b"short").unwrap();
        let cache = Cache::open(Some(folder.path()));
        assert_ne!(cache.0.as_ref().unwrap().key, keys[0]);
        assert_eq!(cache.read(&name), None);
        assert!(foreign.exists());
    }

    #[cfg(unix)]
    #[test]
    fn a_key_that_others_can_read_is_replaced_and_an_open_folder_refused() {
        use std::os::unix::fs::PermissionsExt;
        let folder = tempfile::tempdir().unwrap();
        let chmod = |path: &Path, mode| {
            std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode)).unwrap();
        };
        let old = Cache::open(Some(folder.path())).0.unwrap().key;
        chmod(&folder.path().join(KEY), 0o644);
        assert_ne!(Cache::open(Some(folder.path())).0.unwrap().key, old);
        chmod(folder.path(), 0o777);
        let cache = Cache::open(Some(folder.path()));
        assert!(cache.folder().is_none() && !cache.keeps() && !cache.write("a", b"body"));
    }

    #[cfg(unix)]
    #[test]
    fn an_entry_that_is_a_link_is_not_followed() {
        let (folder, other) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let cache = Cache::open(Some(folder.path()));
        cache.write("a", b"body");
        let elsewhere = other.path().join("a");
        std::fs::rename(folder.path().join("a"), &elsewhere).unwrap();
        std::os::unix::fs::symlink(&elsewhere, folder.path().join("a")).unwrap();
        assert_eq!(cache.read("a"), None);
        assert!(cache.write("a", b"new"), "the link is replaced");
        assert_eq!(cache.read("a").as_deref(), Some(&b"new"[..]));
        assert!(std::fs::read(&elsewhere).unwrap().starts_with(b"body"), "what it led to stays");
    }

    #[test]
    fn those_used_longest_ago_are_evicted_and_algorithms_last() {
        let folder = tempfile::tempdir().unwrap();
        let cache = Cache::with_limit(Some(folder.path()), 1000);
        let name = |what: &str| format!("{what}-{}.x", key(&[what]));
        let aged = |what: &str, seconds: u64| {
            let file = std::fs::File::options().write(true).open(folder.path().join(name(what))).unwrap();
            file.set_modified(SystemTime::now() - std::time::Duration::from_secs(seconds)).unwrap();
        };
        std::fs::write(folder.path().join("thesis.tex"), [0; 5000]).unwrap();
        for (what, age) in [("gemm", 900), ("one", 400), ("two", 300), ("three", 200)] {
            assert!(cache.write(&name(what), &[1; 200]));
            aged(what, age);
        }
        assert!(cache.read(&name("one")).is_some(), "used just now");
        assert!(cache.write(&name("four"), &[2; 200]));
        let there = |what: &str| folder.path().join(name(what)).exists();
        assert!(there("gemm") && there("one") && !there("two") && there("three") && there("four"));
        assert!(!cache.write(&name("huge"), &[0; 1000]), "larger than everything together may be");
        assert!(cache.write(&name("large"), &[0; 900]));
        assert!(!there("gemm") && !there("one") && there("large"));
        assert!(folder.path().join("thesis.tex").exists());
    }

    #[test]
    fn limits_are_bytes() {
        assert_eq!(parse_limit(None), LIMIT);
        assert_eq!(parse_limit(Some(" ")), LIMIT);
        assert_eq!(parse_limit(Some("4096")), 4096);
        assert_eq!(parse_limit(Some("4 GiB")), LIMIT);
        let folder = tempfile::tempdir().unwrap();
        assert!(!Cache::with_limit(Some(folder.path()), 0).keeps());
    }

    #[test]
    fn only_old_files_of_killed_processes_are_removed() {
        let folder = tempfile::tempdir().unwrap();
        Cache::open(Some(folder.path()));
        let aside = folder.path().join(format!(".{}.new", key(&["x"])));
        for path in [&aside, &folder.path().join("gelu-0.cubin"), &folder.path().join(".keep.me.too")] {
            std::fs::write(path, b"x").unwrap();
        }
        Cache::open(Some(folder.path()));
        assert!(aside.exists(), "it may still be written");
        remove_leftovers(folder.path(), SystemTime::now() + 2 * LEFTOVER);
        assert!(!aside.exists());
        assert_eq!(names(folder.path()).len(), 3);
    }

    #[test]
    fn a_folder_that_cannot_be_made_keeps_nothing() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let cache = Cache::open(Some(&file.path().join("below")));
        assert_eq!(cache.folder(), None);
        assert!(!cache.write("a", b"body"));
        assert_eq!(cache.read("a"), None);
    }

    #[test]
    fn keys_depend_on_every_part() {
        assert_eq!(key(&["a", "bc"]).len(), 32);
        assert_ne!(key(&["a", "bc"]), key(&["ab", "c"]));
    }
}
