//! The 1024-byte header that all `.bin` files start with: 256 int32.

use std::io::{Read, Seek};

use super::{Sink, Source};
use crate::Result;
use crate::error::one_of;

/// The magic numbers, one per kind of file.
pub(super) mod magic {
    pub const MODEL: i32 = 20240326;
    pub const DEBUG_STATE: i32 = 20240327;
    pub const TOKENIZER: i32 = 20240328;
    pub const SHARD_U16: i32 = 20240520;
    pub const MULTIPLE_CHOICE: i32 = 20240522;
    pub const SHARD_U32: i32 = 20240801;
}

/// Bytes of the header.
pub(super) const HEADER_BYTES: u64 = 1024;

/// The header with all fields, including those without a name, so that a copy is byte-identical.
#[derive(Clone, PartialEq, Eq)]
pub struct BinHeader {
    words: [i32; 256],
}

impl std::fmt::Debug for BinHeader {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "BinHeader({:?}...)", &self.words[..8])
    }
}

impl BinHeader {
    /// A header that starts with `fields`; the others are 0.
    pub(super) fn new(fields: &[i32]) -> Self {
        let mut words = [0; 256];
        words.iter_mut().zip(fields).for_each(|(word, field)| *word = *field);
        Self { words }
    }

    /// Reads the header and checks its magic number; `kind` says what was expected.
    pub(super) fn read<R: Read + Seek>(source: &mut Source<R>, kind: &str, magics: &[i32]) -> Result<Self> {
        if source.len() < HEADER_BYTES {
            let expected = format!("at least {HEADER_BYTES} bytes, the header of a {kind}");
            return Err(source.field("file size", format!("{} bytes", source.len()), expected));
        }
        let mut words = [0; 256];
        source.read_i32(0, &mut words)?;
        if !magics.contains(&words[0]) {
            return Err(source.field("magic", words[0], format!("{} ({kind})", one_of(magics))));
        }
        Ok(Self { words })
    }

    /// Writes the 1024 bytes.
    pub(super) fn write(&self, sink: &mut Sink<'_>) -> Result<()> {
        sink.put_i32(&self.words)
    }

    /// One int32.
    pub(super) fn get(&self, index: usize) -> i32 {
        self.words[index]
    }

    /// The same header with other leading fields; fields without a name are kept.
    pub(super) fn with(&self, fields: &[i32]) -> Self {
        let mut words = self.words;
        words.iter_mut().zip(fields).for_each(|(word, field)| *word = *field);
        Self { words }
    }

    /// Checks the version field.
    pub(super) fn version<R: Read + Seek>(&self, source: &Source<R>, known: &[i32]) -> Result<i32> {
        if known.contains(&self.words[1]) {
            return Ok(self.words[1]);
        }
        Err(source.field("version", self.words[1], one_of(known)))
    }

    /// A field that must be at least 1.
    pub(super) fn positive<R: Read + Seek>(
        &self,
        source: &Source<R>,
        index: usize,
        name: &str,
    ) -> Result<usize> {
        match usize::try_from(self.words[index]) {
            Ok(value) if value > 0 => Ok(value),
            _ => Err(source.field(format!("{name} (header field {index})"), self.words[index], "at least 1")),
        }
    }
}
