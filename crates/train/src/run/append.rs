//! A file that only grows, by whole records.

use crate::{Error, Result};
use std::fs::File;
use std::io::Write;
use std::path::{Path, PathBuf};

/// Appends records to a file. One that cannot be written is kept and written with the next one; the file never holds part
/// of a record for longer than a write takes.
#[derive(Debug)]
pub(super) struct Appender {
    path: PathBuf,
    file: File,
    /// Records that could not be written yet.
    unwritten: Vec<u8>,
    /// Bytes of whole records in the file.
    len: u64,
}

impl Appender {
    /// Continues a file, which must be there and end with a whole record.
    pub fn open(path: &Path) -> Result<Self> {
        let opened =
            File::options().append(true).open(path).and_then(|file| Ok((file.metadata()?.len(), file)));
        let (len, file) = opened.map_err(|e| Error::io(path, "open", e))?;
        Ok(Self { path: path.to_owned(), file, unwritten: Vec::new(), len })
    }

    /// Starts a new file; an existing one is emptied.
    pub fn create(path: &Path) -> Result<Self> {
        File::create(path).map_err(|e| Error::io(path, "create", e))?;
        Self::open(path)
    }

    /// Writes a record at once, so that whoever follows the file sees it now.
    pub fn write(&mut self, record: &[u8]) -> Result<()> {
        self.unwritten.extend_from_slice(record);
        self.flush()
    }

    /// Writes the records that could not be written before.
    pub fn flush(&mut self) -> Result<()> {
        if self.unwritten.is_empty() {
            return Ok(());
        }
        match self.file.write_all(&self.unwritten) {
            Ok(()) => {
                self.len += self.unwritten.len() as u64;
                self.unwritten.clear();
                Ok(())
            }
            Err(error) => {
                let _ = self.file.set_len(self.len); // what was written of a record
                Err(Error::io(&self.path, "write", error))
            }
        }
    }

    /// The file, for another thread to sync.
    pub fn handle(&self) -> Option<File> {
        self.file.try_clone().ok()
    }
}
