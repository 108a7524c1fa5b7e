//! Files and folders that are there whole or not at all: written beside, fsynced, then renamed.

use std::ffi::OsString;
use std::fs::{self, File, OpenOptions};
use std::io::{BufWriter, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

use super::sink::Sink;
use crate::{Error, Result};

/// A file being written: to a temporary name in the same folder until [`AtomicFile::commit`]. Dropped before that, the
/// temporary is removed and what stood under the name is untouched. A device such as `/dev/stdout` is written to
/// directly.
pub struct AtomicFile {
    path: PathBuf,
    target: PathBuf,
    // closed before the temporary is removed
    out: BufWriter<File>,
    temporary: Option<Temporary>,
}

impl AtomicFile {
    /// Creates the temporary file.
    pub fn create(path: &Path) -> Result<Self> {
        // through a symbolic link the file it points to is replaced, not the link
        let target = fs::canonicalize(path).unwrap_or_else(|_| path.to_owned());
        let temporary = match fs::metadata(&target) {
            Ok(meta) if meta.is_dir() => return Err(Error::field(path, "path", "a folder", "a file")),
            Ok(meta) if !meta.is_file() => None,
            _ => Some(Temporary::new(&target, "tmp")?),
        };
        let file = match &temporary {
            Some(temporary) => OpenOptions::new().write(true).create_new(true).open(&temporary.path),
            None => OpenOptions::new().write(true).open(&target),
        };
        let file = file.map_err(|source| Error::io(path, "create", source))?;
        Ok(Self { path: path.to_owned(), target, out: BufWriter::new(file), temporary })
    }

    /// Where to write; errors name the file that was asked for.
    pub fn sink(&mut self) -> Sink<'_> {
        Sink::new(&mut self.out, &self.path)
    }

    /// Writes over the first bytes, once what follows is known.
    pub fn overwrite_start(&mut self, bytes: &[u8]) -> Result<()> {
        let written = self.out.seek(SeekFrom::Start(0)).and_then(|_| self.out.write_all(bytes));
        written.map_err(|source| Error::io(&self.path, "write", source))
    }

    /// Flushes, fsyncs and renames.
    pub fn commit(mut self) -> Result<()> {
        self.out.flush().map_err(|source| Error::io(&self.path, "write", source))?;
        if let Some(temporary) = self.temporary.take() {
            let synced = self.out.get_ref().sync_all();
            synced.map_err(|source| Error::io(&self.path, "write", source))?;
            let renamed = temporary.rename_to(&self.target);
            renamed.map_err(|source| Error::io(&self.path, "rename into place", source))?;
            sync_folder(parent(&self.target))?;
        }
        Ok(())
    }
}

/// Writes a file through `body`, atomically, and gives what `body` gave.
pub fn write_file<T>(path: &Path, body: impl FnOnce(&mut Sink<'_>) -> Result<T>) -> Result<T> {
    let mut file = AtomicFile::create(path)?;
    let value = body(&mut file.sink())?;
    file.commit()?;
    Ok(value)
}

/// Writes a folder through `body`, which is given the temporary folder to fill (its files are fsynced here). What
/// stood under `path` is replaced, but only if it holds nothing except files whose names are `owned`.
///
/// Replacing a folder takes two renames: if the machine dies between them, the old one is found beside under
/// `.NAME.old-*`.
pub fn write_folder<T>(
    path: &Path,
    owned: impl Fn(&str) -> bool,
    body: impl FnOnce(&Path) -> Result<T>,
) -> Result<T> {
    let target = fs::canonicalize(path).unwrap_or_else(|_| path.to_owned());
    let exists = check_replaceable(&target, path, owned)?;
    let temporary = Temporary::new(&target, "tmp")?;
    fs::create_dir(&temporary.path).map_err(|source| Error::io(path, "create", source))?;
    let value = body(&temporary.path).map_err(|error| rename_in_error(error, &temporary.path, path))?;
    let synced = fs::read_dir(&temporary.path)
        .and_then(|mut entries| entries.try_for_each(|entry| File::open(entry?.path())?.sync_all()));
    synced.map_err(|source| Error::io(path, "write", source))?;
    sync_folder(&temporary.path)?;
    if exists {
        let old = Temporary::new(&target, "old")?;
        fs::rename(&target, &old.path).map_err(|source| Error::io(path, "replace", source))?;
        if let Err(source) = fs::rename(&temporary.path, &target) {
            // put the old one back; if that fails too, keep it beside rather than let it be removed
            let _ = fs::rename(&old.path, &target);
            old.keep();
            return Err(Error::io(path, "rename into place", source));
        }
        temporary.keep();
    } else {
        temporary.rename_to(&target).map_err(|source| Error::io(path, "rename into place", source))?;
    }
    sync_folder(parent(&target))?;
    Ok(value)
}

/// Whether there is a folder to replace; an error if it holds files that are not ours to delete.
fn check_replaceable(target: &Path, path: &Path, owned: impl Fn(&str) -> bool) -> Result<bool> {
    let meta = match fs::symlink_metadata(target) {
        Ok(meta) => meta,
        Err(_) => return Ok(false),
    };
    if !meta.is_dir() {
        return Err(Error::field(path, "path", "a file", "a folder or nothing"));
    }
    for entry in fs::read_dir(target).map_err(|source| Error::io(path, "read", source))? {
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

/// Messages name the folder that was asked for, not the temporary one.
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

/// A name beside `target`; what stands under it is removed on drop unless it was renamed or kept.
struct Temporary {
    path: PathBuf,
    keep: bool,
}

impl Temporary {
    fn new(target: &Path, tag: &str) -> Result<Self> {
        static COUNT: AtomicU64 = AtomicU64::new(0);
        let Some(name) = target.file_name() else {
            return Err(Error::field(target, "path", "without a name", "a file or folder name"));
        };
        let mut hidden = OsString::from(".");
        hidden.push(name);
        hidden.push(format!(".{tag}-{}-{}", std::process::id(), COUNT.fetch_add(1, Ordering::Relaxed)));
        Ok(Self { path: parent(target).join(hidden), keep: false })
    }

    fn keep(mut self) {
        self.keep = true;
    }

    fn rename_to(self, target: &Path) -> std::io::Result<()> {
        fs::rename(&self.path, target)?;
        self.keep();
        Ok(())
    }
}

impl Drop for Temporary {
    fn drop(&mut self) {
        if !self.keep {
            // nothing can be done about an error here, and the name says what it is
            let _ =
                if self.path.is_dir() { fs::remove_dir_all(&self.path) } else { fs::remove_file(&self.path) };
        }
    }
}

fn parent(path: &Path) -> &Path {
    match path.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent,
        _ => Path::new("."),
    }
}

/// Makes a rename survive a power cut. Only Unix can open a folder.
fn sync_folder(folder: &Path) -> Result<()> {
    if cfg!(unix) {
        let synced = File::open(folder).and_then(|folder| folder.sync_all());
        synced.map_err(|source| Error::io(folder, "sync", source))?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(folder: &Path) -> Vec<String> {
        let entries = fs::read_dir(folder).unwrap();
        let mut names: Vec<_> = entries.map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
        names.sort();
        names
    }

    #[test]
    fn a_failed_write_leaves_the_old_file() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a.bin");
        write_file(&path, |sink| sink.put(b"old")).unwrap();
        let failed: Result<()> = write_file(&path, |sink| {
            sink.put(b"half of the new")?;
            Err(Error::Config("no more".into()))
        });
        assert!(failed.is_err());
        assert_eq!(fs::read(&path).unwrap(), b"old");
        assert_eq!(names(folder.path()), ["a.bin"]);
        write_file(&path, |sink| sink.put(b"new")).unwrap();
        assert_eq!(fs::read(&path).unwrap(), b"new");
        assert_eq!(names(folder.path()), ["a.bin"]);
    }

    #[test]
    fn impossible_targets_are_named() {
        let folder = tempfile::tempdir().unwrap();
        let text = write_file(folder.path(), |_| Ok(())).unwrap_err().to_string();
        assert!(text.ends_with("path is a folder, expected a file"), "{text}");
        let text = write_file(&folder.path().join("no/such/a.bin"), |_| Ok(())).unwrap_err().to_string();
        assert!(text.contains("no/such/a.bin: cannot create:"), "{text}");
        assert!(write_file(Path::new("/"), |_| Ok(())).is_err());
        assert!(write_file(Path::new(""), |_| Ok(())).is_err());
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn a_full_device_is_named() {
        let path = Path::new("/dev/full");
        if path.exists() {
            let text = write_file(path, |sink| sink.put(b"text")).unwrap_err().to_string();
            assert!(text.starts_with("/dev/full: cannot write: "), "{text}");
            assert!(path.exists());
        }
    }

    #[cfg(unix)]
    #[test]
    fn a_link_stays_a_link() {
        let folder = tempfile::tempdir().unwrap();
        let (file, link) = (folder.path().join("file"), folder.path().join("link"));
        fs::write(&file, "old").unwrap();
        std::os::unix::fs::symlink(&file, &link).unwrap();
        write_file(&link, |sink| sink.put(b"new")).unwrap();
        assert!(fs::symlink_metadata(&link).unwrap().is_symlink());
        assert_eq!(fs::read(&file).unwrap(), b"new");
    }

    #[test]
    fn a_folder_is_replaced_whole_or_not_at_all() {
        let top = tempfile::tempdir().unwrap();
        let path = top.path().join("step");
        let fill = |text: &'static str| {
            move |folder: &Path| write_file(&folder.join("a"), |s| s.put(text.as_bytes()))
        };
        write_folder(&path, |name| name == "a", fill("one")).unwrap();
        write_folder(&path, |name| name == "a", fill("two")).unwrap();
        assert_eq!(fs::read(path.join("a")).unwrap(), b"two");
        let failed: Result<()> = write_folder(
            &path,
            |name| name == "a",
            |folder| {
                write_file(&folder.join("a"), |s| s.put(b"three"))?;
                Err(Error::field(&folder.join("a"), "field", 1, 2))
            },
        );
        assert_eq!(
            failed.unwrap_err().to_string(),
            format!("{}: field is 1, expected 2", path.join("a").display())
        );
        assert_eq!(fs::read(path.join("a")).unwrap(), b"two");
        assert_eq!(names(top.path()), ["step"]);
    }

    #[test]
    fn a_folder_with_other_files_is_not_replaced() {
        let top = tempfile::tempdir().unwrap();
        fs::write(top.path().join("thesis.tex"), "precious").unwrap();
        let text = write_folder(top.path(), |name| name == "a", |_| Ok(())).unwrap_err().to_string();
        assert!(text.contains("thesis.tex"), "{text}");
        assert_eq!(names(top.path()), ["thesis.tex"]);
    }
}
