//! The bytes of a file, unpacked; what is read from the file itself is counted and hashed on the way.

use std::fs::File;
use std::io::{self, BufReader, Read};
use std::sync::{Arc, Mutex, MutexGuard};

use sha2::{Digest, Sha256};

use super::InputEnd;
use super::inputs::{Input, Packing};
use crate::{Error, Result};

#[derive(Default)]
struct Seen {
    bytes: u64,
    hash: Sha256,
}

/// A reader that hashes what passes.
struct Hashing<R> {
    inner: R,
    seen: Arc<Mutex<Seen>>,
}

impl<R: Read> Read for Hashing<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let count = self.inner.read(buffer)?;
        let mut seen = lock(&self.seen);
        seen.bytes += count as u64;
        seen.hash.update(&buffer[..count]);
        Ok(count)
    }
}

fn lock(seen: &Mutex<Seen>) -> MutexGuard<'_, Seen> {
    seen.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
}

/// An open input.
pub struct Raw {
    reader: Box<dyn Read + Send>,
    seen: Arc<Mutex<Seen>>,
    path: std::path::PathBuf,
}

const BUFFER: usize = 1 << 18;

impl Raw {
    /// Opens an input.
    pub fn open(input: &Input) -> Result<Self> {
        let failed = |source| Error::io(&input.path, "open", source);
        let inner: Box<dyn Read + Send> = match input.is_stdin() {
            true => Box::new(io::stdin()),
            false => Box::new(File::open(&input.path).map_err(failed)?),
        };
        Self::new(input, inner)
    }

    /// As [`Raw::open`], but reads the bytes of the file from `inner`.
    pub fn new(input: &Input, inner: Box<dyn Read + Send>) -> Result<Self> {
        let seen = Arc::new(Mutex::new(Seen::default()));
        let hashing = BufReader::with_capacity(BUFFER, Hashing { inner, seen: seen.clone() });
        let reader: Box<dyn Read + Send> = match input.packing {
            Packing::Plain => Box::new(hashing),
            Packing::Gzip => Box::new(flate2::bufread::MultiGzDecoder::new(hashing)),
            Packing::Zstd => {
                let decoder = zstd::stream::read::Decoder::with_buffer(hashing);
                Box::new(decoder.map_err(|source| Error::io(&input.path, "open", source))?)
            }
        };
        Ok(Self { reader, seen, path: input.path.clone() })
    }

    /// Appends up to `most` bytes; fewer only at the end of the input. Returns how many.
    pub fn fill(&mut self, most: usize, out: &mut Vec<u8>) -> Result<usize> {
        let mut limited = (&mut self.reader).take(most as u64);
        limited.read_to_end(out).map_err(|source| Error::io(&self.path, "read", source))
    }

    /// Bytes of the file that were read so far.
    pub fn position(&self) -> u64 {
        lock(&self.seen).bytes
    }

    /// Reads what is left, such as padding after compressed data, and tells about the whole file.
    pub fn finish(mut self) -> Result<InputEnd> {
        io::copy(&mut self.reader, &mut io::sink())
            .map_err(|source| Error::io(&self.path, "read", source))?;
        let seen = lock(&self.seen);
        Ok(InputEnd { bytes: seen.bytes, sha256: format!("{:x}", seen.hash.clone().finalize()) })
    }
}
