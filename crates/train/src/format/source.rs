//! Reading at offsets from a file, or from bytes in memory in tests, with errors that name the file.

use std::fs::File;
use std::io::{Cursor, Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};

use super::elem::{self, Elem};
use crate::{Error, Result};

/// Bytes converted at a time: small enough for the cache, large enough to make calls rare. A multiple of every element
/// size.
pub(super) const CHUNK: usize = 64 * 1024;

/// A source of known length that is read at offsets. Nothing is read beyond the length, and no buffer is larger than
/// what the caller requested.
#[derive(Debug)]
pub struct Source<R = File> {
    inner: R,
    path: PathBuf,
    len: u64,
    chunk: Vec<u8>,
}

impl Source<File> {
    /// Opens a file.
    pub fn open(path: &Path) -> Result<Self> {
        let file = File::open(path).map_err(|source| Error::io(path, "open", source))?;
        let meta = file.metadata().map_err(|source| Error::io(path, "read", source))?;
        if meta.is_dir() {
            return Err(Error::field(path, "path", "a folder", "a file"));
        }
        Self::new(file, path)
    }
}

impl Source<Cursor<Vec<u8>>> {
    /// Bytes in memory under a name for the messages.
    pub fn memory(bytes: Vec<u8>, name: &str) -> Self {
        let len = bytes.len() as u64;
        Self { inner: Cursor::new(bytes), path: PathBuf::from(name), len, chunk: Vec::new() }
    }
}

impl<R: Read + Seek> Source<R> {
    /// Wraps any seekable reader; `path` is used in messages only.
    pub fn new(mut inner: R, path: &Path) -> Result<Self> {
        let len = inner.seek(SeekFrom::End(0)).map_err(|source| Error::io(path, "read", source))?;
        Ok(Self { inner, path: path.to_owned(), len, chunk: Vec::new() })
    }

    /// The file's name.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The file's size in bytes.
    pub fn len(&self) -> u64 {
        self.len
    }

    /// Whether the file is empty.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// An error about one field of this file.
    pub fn field(&self, field: impl Into<String>, found: impl ToString, expected: impl ToString) -> Error {
        Error::field(&self.path, field, found, expected)
    }

    /// Checks the size, which every format knows from its header.
    pub fn expect_len(&self, expected: u64) -> Result<()> {
        if self.len == expected {
            return Ok(());
        }
        Err(self.field("file size", format!("{} bytes", self.len), format!("{expected} bytes")))
    }

    fn seek(&mut self, offset: u64) -> Result<()> {
        let moved = self.inner.seek(SeekFrom::Start(offset));
        moved.map(drop).map_err(|source| Error::io(&self.path, "seek", source))
    }

    fn fill(&mut self, out: &mut [u8]) -> Result<()> {
        self.inner.read_exact(out).map_err(|source| Error::io(&self.path, "read", source))
    }

    /// Fills `out` with the bytes from `offset` on.
    pub fn read_at(&mut self, offset: u64, out: &mut [u8]) -> Result<()> {
        let end = offset.checked_add(out.len() as u64);
        if end.is_none_or(|end| end > self.len) {
            let needed = end.map_or("more than 2^64 bytes".into(), |end| format!("at least {end} bytes"));
            return Err(self.field("file size", format!("{} bytes", self.len), needed));
        }
        self.seek(offset)?;
        self.fill(out)
    }

    /// Calls `each` with the bytes `offset .. offset + len`, some at a time.
    pub fn for_each_chunk(
        &mut self,
        offset: u64,
        len: u64,
        mut each: impl FnMut(&[u8]) -> Result<()>,
    ) -> Result<()> {
        if offset.checked_add(len).is_none_or(|end| end > self.len) {
            let expected = format!("at least {} bytes", offset.saturating_add(len));
            return Err(self.field("file size", format!("{} bytes", self.len), expected));
        }
        self.seek(offset)?;
        let mut chunk = std::mem::take(&mut self.chunk);
        chunk.resize(CHUNK.min(usize::try_from(len).unwrap_or(CHUNK)), 0);
        let mut left = len;
        let mut result = Ok(());
        while left > 0 && result.is_ok() {
            let size = CHUNK.min(usize::try_from(left).unwrap_or(CHUNK));
            result = self.fill(&mut chunk[..size]).and_then(|()| each(&chunk[..size]));
            left -= size as u64;
        }
        self.chunk = chunk;
        result
    }

    /// Fills `out` with numbers of `size` bytes from `offset` on; `convert` decodes some of them at a time.
    pub(super) fn decode<T>(
        &mut self,
        offset: u64,
        size: usize,
        out: &mut [T],
        mut convert: impl FnMut(&[u8], &mut [T]),
    ) -> Result<()> {
        let mut rest = &mut out[..];
        let bytes = rest.len() as u64 * size as u64;
        self.for_each_chunk(offset, bytes, |chunk| {
            let (now, later) = std::mem::take(&mut rest).split_at_mut(chunk.len() / size);
            convert(chunk, now);
            rest = later;
            Ok(())
        })
    }

    /// Fills `out` with numbers from `offset` on, widened to f32.
    pub fn read_f32(&mut self, offset: u64, elem: Elem, out: &mut [f32]) -> Result<()> {
        self.decode(offset, elem.size(), out, |chunk, out| elem::widen(elem, chunk, out))
    }

    /// Fills `out` with int32 from `offset` on.
    pub fn read_i32(&mut self, offset: u64, out: &mut [i32]) -> Result<()> {
        self.decode(offset, 4, out, |chunk, out| elem::decode(chunk, out, i32::from_le_bytes))
    }

    /// The CRC-32 of the bytes `offset .. offset + len`.
    pub fn crc32(&mut self, offset: u64, len: u64) -> Result<u32> {
        let mut crc = crc32fast::Hasher::new();
        self.for_each_chunk(offset, len, |chunk| {
            crc.update(chunk);
            Ok(())
        })?;
        Ok(crc.finalize())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_cross_chunks_and_stop_at_the_end() {
        let count = CHUNK / 4 * 2 + 3;
        let bytes: Vec<u8> = (0..count as i32).flat_map(i32::to_le_bytes).collect();
        let mut source = Source::memory(bytes, "numbers");
        let mut out = vec![0; count - 1];
        source.read_i32(4, &mut out).unwrap();
        assert!(out.iter().enumerate().all(|(i, &value)| value == i as i32 + 1));
        let text = source.read_i32(8, &mut out).unwrap_err().to_string();
        assert_eq!(
            text,
            format!("numbers: file size is {} bytes, expected at least {} bytes", count * 4, count * 4 + 4)
        );
        assert!(source.read_at(u64::MAX, &mut [0; 2]).is_err());
        assert!(source.for_each_chunk(u64::MAX, 2, |_| Ok(())).is_err());
    }

    #[test]
    fn missing_files_and_folders_are_named() {
        let folder = tempfile::tempdir().unwrap();
        let text = Source::open(folder.path()).unwrap_err().to_string();
        assert!(text.ends_with("path is a folder, expected a file"), "{text}");
        let text = Source::open(&folder.path().join("gone.bin")).unwrap_err().to_string();
        assert!(text.contains("gone.bin: cannot open:"), "{text}");
    }
}
