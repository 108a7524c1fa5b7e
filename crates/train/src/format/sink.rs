//! Writing with errors that name the file.

use std::io::Write;
use std::path::{Path, PathBuf};

use super::elem::{self, Elem};
use super::source::CHUNK;
use crate::{Error, Result};

/// A writer that computes the checksum of what it writes.
pub struct Sink<'a> {
    out: &'a mut dyn Write,
    path: PathBuf,
    crc: crc32fast::Hasher,
    chunk: Vec<u8>,
}

impl<'a> Sink<'a> {
    /// Wraps a writer; `path` is used in messages only.
    pub fn new(out: &'a mut dyn Write, path: &Path) -> Self {
        Self { out, path: path.to_owned(), crc: crc32fast::Hasher::new(), chunk: Vec::new() }
    }

    /// The file's name.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The CRC-32 of all that was written so far.
    pub fn crc32(&self) -> u32 {
        self.crc.clone().finalize()
    }

    /// Writes bytes.
    pub fn put(&mut self, bytes: &[u8]) -> Result<()> {
        self.crc.update(bytes);
        self.out.write_all(bytes).map_err(|source| Error::io(&self.path, "write", source))
    }

    /// Writes numbers as `elem`.
    pub fn put_f32(&mut self, elem: Elem, values: &[f32]) -> Result<()> {
        let mut chunk = std::mem::take(&mut self.chunk);
        let mut result = Ok(());
        for part in values.chunks(CHUNK / elem.size()) {
            chunk.clear();
            elem::narrow(elem, part, &mut chunk);
            result = self.put(&chunk);
            if result.is_err() {
                break;
            }
        }
        self.chunk = chunk;
        result
    }

    /// Writes int32.
    pub fn put_i32(&mut self, values: &[i32]) -> Result<()> {
        for part in values.chunks(CHUNK / 4) {
            let bytes: Vec<u8> = part.iter().flat_map(|value| value.to_le_bytes()).collect();
            self.put(&bytes)?;
        }
        Ok(())
    }

    /// Flushes everything to the operating system.
    pub fn flush(&mut self) -> Result<()> {
        self.out.flush().map_err(|source| Error::io(&self.path, "write", source))
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    /// A disk that is full after some bytes.
    pub struct FullAfter(pub usize);

    impl Write for FullAfter {
        fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
            if self.0 == 0 {
                return Err(std::io::Error::from(std::io::ErrorKind::StorageFull));
            }
            let taken = bytes.len().min(self.0);
            self.0 -= taken;
            Ok(taken)
        }

        fn flush(&mut self) -> std::io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn a_full_disk_is_an_error_that_names_the_file() {
        let mut disk = FullAfter(100);
        let mut sink = Sink::new(&mut disk, Path::new("model.bin"));
        sink.put_f32(Elem::F32, &[0.0; 25]).unwrap();
        let text = sink.put_i32(&[1]).unwrap_err().to_string();
        assert!(text.starts_with("model.bin: cannot write: "), "{text}");
    }
}
