//! Atomic writes of files and folders: written under a temporary name in the same folder, fsynced, then renamed.

#[cfg(any(test, debug_assertions))]
#[doc(hidden)]
pub mod faults;
mod fs;
mod sweep;

use std::ffi::OsString;
use std::io::{self, BufWriter, ErrorKind, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

use self::fs::OutFile;
use super::sink::Sink;
use crate::{Error, Result};

pub use sweep::{Swept, sweep};

/// How many names are tried. A second is only needed if another process drew the same 128 random bits.
const ATTEMPTS: usize = 16;

/// A file being written under a temporary name in the same folder until [`AtomicFile::commit`]. If dropped before that,
/// the temporary file is removed and an old file is unchanged. A device such as `/dev/stdout` is written directly.
pub struct AtomicFile {
    path: PathBuf,
    target: PathBuf,
    // closed before the temporary file is removed
    out: BufWriter<OutFile>,
    temporary: Option<Temporary>,
}

impl AtomicFile {
    /// Creates the temporary file.
    pub fn create(path: &Path) -> Result<Self> {
        // a symbolic link is followed: its target is replaced, not the link
        let target = std::fs::canonicalize(path).unwrap_or_else(|_| path.to_owned());
        let (temporary, file) = match std::fs::metadata(&target) {
            Ok(meta) if meta.is_dir() => return Err(Error::field(path, "path", "a folder", "a file")),
            Ok(meta) if !meta.is_file() => {
                (None, OutFile::open(&target).map_err(|source| Error::io(path, "create", source))?)
            }
            _ => {
                let (temporary, file) = Temporary::create(&target, path, OutFile::create_new)?;
                (Some(temporary), file)
            }
        };
        Ok(Self { path: path.to_owned(), target, out: BufWriter::new(file), temporary })
    }

    /// Where to write; errors name the final file.
    pub fn sink(&mut self) -> Sink<'_> {
        Sink::new(&mut self.out, &self.path)
    }

    /// Overwrites the first bytes, once the rest is known.
    pub fn overwrite_start(&mut self, bytes: &[u8]) -> Result<()> {
        let written = self.out.seek(SeekFrom::Start(0)).and_then(|_| self.out.write_all(bytes));
        written.map_err(|source| Error::io(&self.path, "write", source))
    }

    /// Flushes, fsyncs and renames.
    pub fn commit(mut self) -> Result<()> {
        self.out.flush().map_err(|source| Error::io(&self.path, "write", source))?;
        if let Some(temporary) = self.temporary.take() {
            let synced = self.out.get_ref().sync();
            synced.map_err(|source| Error::io(&self.path, "write", source))?;
            let renamed = temporary.rename_to(&self.target);
            renamed.map_err(|source| Error::io(&self.path, "rename into place", source))?;
            sync_parent(&self.target)?;
        }
        Ok(())
    }
}

/// Writes a file atomically through `body`, and returns the result of `body`.
pub fn write_file<T>(path: &Path, body: impl FnOnce(&mut Sink<'_>) -> Result<T>) -> Result<T> {
    let mut file = AtomicFile::create(path)?;
    let value = body(&mut file.sink())?;
    file.commit()?;
    Ok(value)
}

/// Writes these bytes as a file, atomically, and returns their CRC-32.
pub fn write_bytes(path: &Path, bytes: &[u8]) -> Result<u32> {
    write_file(path, |sink| {
        sink.put(bytes)?;
        Ok(sink.crc32())
    })
}

/// Writes a folder atomically through `body`, which fills the temporary folder (its files are fsynced here). An old
/// folder at `path` is replaced only if it contains no files except those whose names are `owned`.
///
/// Replacing a folder needs two renames: if the machine fails between them, the old folder is still there under the
/// name `.NAME.old-*`, and [`sweep()`] puts it back.
pub fn write_folder<T>(
    path: &Path,
    owned: impl Fn(&str) -> bool,
    body: impl FnOnce(&Path) -> Result<T>,
) -> Result<T> {
    let folder = NewFolder::create(path, owned)?;
    let value = body(folder.at()).map_err(|error| rename_in_error(error, folder.at(), path))?;
    folder.commit().map(|()| value)
}

/// A folder being filled under a temporary name beside its place, by this process or with others, until [`NewFolder::commit`]. If
/// dropped before that, it is removed and an old folder is unchanged.
pub struct NewFolder {
    path: PathBuf,
    target: PathBuf,
    exists: bool,
    temporary: Temporary,
}

impl NewFolder {
    /// Creates the temporary folder. An old folder at `path` is replaced only if it contains no files except those whose names are
    /// `owned`.
    pub fn create(path: &Path, owned: impl Fn(&str) -> bool) -> Result<Self> {
        let target = std::fs::canonicalize(path).unwrap_or_else(|_| path.to_owned());
        let exists = check_replaceable(&target, path, owned)?;
        let (temporary, ()) = Temporary::create(&target, path, fs::create_dir)?;
        Ok(Self { path: path.to_owned(), target, exists, temporary })
    }

    /// The temporary folder that it is until it is complete.
    pub fn at(&self) -> &Path {
        &self.temporary.path
    }

    /// Fsyncs its files and renames it.
    pub fn commit(self) -> Result<()> {
        let Self { path, target, exists, temporary } = self;
        let synced = std::fs::read_dir(&temporary.path)
            .and_then(|mut entries| entries.try_for_each(|entry| fs::sync(&entry?.path())))
            .and_then(|()| fs::sync_folder(&temporary.path));
        synced.map_err(|source| Error::io(&path, "write", source))?;
        let into_place = |source| Error::io(&path, "rename into place", source);
        if !exists {
            temporary.rename_to(&target).map_err(into_place)?;
            return sync_parent(&target);
        }
        let old = hidden(&target, "old")?;
        fs::rename(&target, &old).map_err(|source| Error::io(&path, "replace", source))?;
        if let Err(source) = temporary.rename_to(&target) {
            // put the old one back; if that fails too, it keeps its other name, where `sweep` finds it
            let _ = fs::rename(&old, &target);
            return Err(into_place(source));
        }
        // the old one is removed only after the new one is durable
        let synced = sync_parent(&target);
        discard(&target, &old);
        synced
    }
}

/// A file of a [`NewFolder`] that several processes write, each other bytes of it.
pub struct Placed {
    path: PathBuf,
    out: OutFile,
}

impl Placed {
    /// Creates the file with these first bytes, and room for `bytes` in all.
    pub fn create(path: &Path, start: &[u8], bytes: u64) -> Result<()> {
        let made = OutFile::create_new(path).and_then(|mut out| {
            out.write_all(start)?;
            out.set_len(bytes)?;
            out.sync()
        });
        made.map_err(|source| Error::io(path, "create", source))
    }

    /// Opens the file, which must be there.
    pub fn open(path: &Path) -> Result<Self> {
        let out = OutFile::open(path).map_err(|source| Error::io(path, "open", source))?;
        Ok(Self { path: path.to_owned(), out })
    }

    /// Writes bytes to their place.
    pub fn put(&mut self, at: u64, bytes: &[u8]) -> Result<()> {
        let written = self.out.seek(SeekFrom::Start(at)).and_then(|_| self.out.write_all(bytes));
        written.map_err(|source| Error::io(&self.path, "write", source))
    }

    /// Waits until everything is on the disk.
    pub fn finish(self) -> Result<()> {
        self.out.sync().map_err(|source| Error::io(&self.path, "write", source))
    }
}

/// Removes a folder. If the process dies on the way, the folder is complete under its name, or hidden where [`sweep()`]
/// finds it; it is never incomplete under its name.
pub fn remove_folder(path: &Path) -> Result<()> {
    let aside = hidden(path, "tmp")?;
    fs::rename(path, &aside).map_err(|source| Error::io(path, "remove", source))?;
    drop(Temporary { path: aside, keep: false });
    Ok(())
}

/// Removes an old folder. It is renamed first, because [`sweep()`] may put a folder `.NAME.old-*` back, which therefore
/// must always be complete. After an error a name remains that [`sweep()`] removes.
fn discard(target: &Path, old: &Path) {
    let Ok(path) = hidden(target, "tmp") else { return };
    if fs::rename(old, &path).is_ok() {
        drop(Temporary { path, keep: false });
    }
}

/// Whether there is a folder to replace; an error if it contains files that must not be deleted.
fn check_replaceable(target: &Path, path: &Path, owned: impl Fn(&str) -> bool) -> Result<bool> {
    let meta = match std::fs::symlink_metadata(target) {
        Ok(meta) => meta,
        Err(_) => return Ok(false),
    };
    if !meta.is_dir() {
        return Err(Error::field(path, "path", "a file", "a folder or nothing"));
    }
    for entry in std::fs::read_dir(target).map_err(|source| Error::io(path, "read", source))? {
        let name = entry.map_err(|source| Error::io(path, "read", source))?.file_name();
        if !name.to_str().is_some_and(&owned) {
            return Err(Error::field(
                path,
                "folder",
                format!("not replaced because it holds {}", name.display()),
                "an empty or new folder, or an earlier one of the same kind",
            ));
        }
    }
    Ok(true)
}

/// Makes error messages name the final folder instead of the temporary one.
fn rename_in_error(error: Error, from: &Path, to: &Path) -> Error {
    let rename = |path: PathBuf| path.strip_prefix(from).map_or(path.clone(), |rest| to.join(rest));
    match error {
        Error::Io { path, action, source } => Error::Io { path: rename(path), action, source },
        Error::Field { path, field, found, expected } => {
            Error::Field { path: rename(path), field, found, expected }
        }
        other => other,
    }
}

/// A temporary file or folder next to its target; removed on drop unless it was renamed.
struct Temporary {
    path: PathBuf,
    keep: bool,
}

impl Temporary {
    /// Creates one under a new name through `create`, which must fail if the name exists. Errors name `path`.
    fn create<T>(target: &Path, path: &Path, create: impl Fn(&Path) -> io::Result<T>) -> Result<(Self, T)> {
        Self::create_under(|| hidden(target, "tmp"), path, create)
    }

    /// The same with the names that `name` gives, one after the other.
    fn create_under<T>(
        mut name: impl FnMut() -> Result<PathBuf>,
        path: &Path,
        create: impl Fn(&Path) -> io::Result<T>,
    ) -> Result<(Self, T)> {
        let mut attempts = 0;
        loop {
            let at = name()?;
            attempts += 1;
            match create(&at) {
                // only now this process owns the name and may remove it
                Ok(created) => return Ok((Self { path: at, keep: false }, created)),
                Err(error) if error.kind() == ErrorKind::AlreadyExists && attempts < ATTEMPTS => {}
                Err(error) => return Err(Error::io(path, "create", error)),
            }
        }
    }

    fn rename_to(mut self, target: &Path) -> io::Result<()> {
        fs::rename(&self.path, target)?;
        self.keep = true;
        Ok(())
    }
}

impl Drop for Temporary {
    fn drop(&mut self) {
        if !self.keep {
            // nothing can be done about an error here, and `sweep` knows the name
            let _ = fs::remove(&self.path);
        }
    }
}

/// A unique name in the folder of `target`: `.NAME.TAG-` and 128 random bits. Process ids are not unique: two
/// containers that share a folder may both be process 1.
fn hidden(target: &Path, tag: &str) -> Result<PathBuf> {
    let Some(name) = target.file_name() else {
        return Err(Error::field(target, "path", "without a name", "a file or folder name"));
    };
    let mut random = [0; 16];
    getrandom::fill(&mut random).map_err(|error| Error::io(target, "draw a temporary name", error.into()))?;
    let mut hidden = OsString::from(".");
    hidden.push(name);
    hidden.push(format!(".{tag}-{:032x}", u128::from_le_bytes(random)));
    Ok(parent(target).join(hidden))
}

fn parent(path: &Path) -> &Path {
    match path.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent,
        _ => Path::new("."),
    }
}

/// Makes a rename to `target` survive a power failure.
fn sync_parent(target: &Path) -> Result<()> {
    let folder = parent(target);
    fs::sync_folder(folder).map_err(|source| Error::io(folder, "sync", source))
}

#[cfg(test)]
mod fault_tests;
#[cfg(test)]
mod tests;
