//! Every operation with which the writers of this module change the disk. Tests and debug builds can make each of them
//! fail: see [`super::faults`].

use std::fs::{self, File, OpenOptions};
use std::io::{self, ErrorKind, Seek, SeekFrom, Write};
use std::path::Path;

#[cfg(any(test, debug_assertions))]
use super::faults;

/// Counts an operation, and fails if a test asked for that.
fn operation() -> io::Result<()> {
    #[cfg(any(test, debug_assertions))]
    faults::operation()?;
    Ok(())
}

/// A file open for writing.
#[derive(Debug)]
pub(super) struct OutFile(File);

impl OutFile {
    /// Creates a file; an error if the name exists.
    pub(super) fn create_new(path: &Path) -> io::Result<Self> {
        operation()?;
        OpenOptions::new().write(true).create_new(true).open(path).map(Self)
    }

    /// Opens an existing file, such as a device.
    pub(super) fn open(path: &Path) -> io::Result<Self> {
        operation()?;
        OpenOptions::new().write(true).open(path).map(Self)
    }

    /// Makes room for so many bytes; those beyond the end are 0.
    pub(super) fn set_len(&self, bytes: u64) -> io::Result<()> {
        operation()?;
        self.0.set_len(bytes)
    }

    /// Waits until the contents are on the disk.
    pub(super) fn sync(&self) -> io::Result<()> {
        operation()?;
        self.0.sync_all()
    }
}

impl Write for OutFile {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        #[cfg(any(test, debug_assertions))]
        if let Some(short) = faults::write(bytes.len())? {
            let written = self.0.write(&bytes[..short.bytes])?;
            short.finish();
            return Ok(written);
        }
        self.0.write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.0.flush()
    }
}

impl Seek for OutFile {
    fn seek(&mut self, to: SeekFrom) -> io::Result<u64> {
        self.0.seek(to)
    }
}

/// Creates a folder; an error if the name exists.
pub(super) fn create_dir(path: &Path) -> io::Result<()> {
    operation()?;
    fs::create_dir(path)
}

/// Renames, replacing a file of the new name.
pub(super) fn rename(from: &Path, to: &Path) -> io::Result<()> {
    operation()?;
    fs::rename(from, to)
}

/// Waits until an existing file, or the names in a folder, are on the disk.
pub(super) fn sync(path: &Path) -> io::Result<()> {
    if path.is_dir() {
        return sync_folder(path);
    }
    operation()?;
    File::open(path)?.sync_all()
}

/// Makes renames in this folder survive a power failure. Some network and FUSE file systems do not support that and
/// return EINVAL or ENOSYS, which is ignored; everything else is an error. Only Unix can open a folder.
pub(super) fn sync_folder(folder: &Path) -> io::Result<()> {
    if cfg!(not(unix)) {
        return Ok(());
    }
    let synced = operation().and_then(|()| File::open(folder)?.sync_all());
    match synced {
        Err(error) if matches!(error.kind(), ErrorKind::InvalidInput | ErrorKind::Unsupported) => Ok(()),
        other => other,
    }
}

/// Removes a file, or a folder with its contents.
pub(super) fn remove(path: &Path) -> io::Result<()> {
    operation()?;
    if fs::symlink_metadata(path)?.is_dir() { fs::remove_dir_all(path) } else { fs::remove_file(path) }
}
