//! Token shards `*_train.bin`, `*_val.bin`: a header and the tokens as uint16, or as uint32 for large vocabularies.

use std::fs::File;
use std::io::{Read, Seek};
use std::path::Path;

use super::Source;
use super::atomic::AtomicFile;
use super::header::{BinHeader, HEADER_BYTES, magic};
use crate::{Error, Result};

/// The two variants of a shard.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ShardKind {
    /// Two bytes per token: vocabularies of up to 65536.
    U16,
    /// Four bytes per token.
    U32,
}

impl ShardKind {
    /// The smaller variant that holds this vocabulary.
    pub fn for_vocab(vocab_size: usize) -> Self {
        if vocab_size <= 1 << 16 { Self::U16 } else { Self::U32 }
    }

    /// Bytes per token.
    pub const fn size(self) -> usize {
        match self {
            Self::U16 => 2,
            Self::U32 => 4,
        }
    }

    const fn magic_and_version(self) -> (i32, i32) {
        match self {
            Self::U16 => (magic::SHARD_U16, 1),
            Self::U32 => (magic::SHARD_U32, 7),
        }
    }
}

/// An open shard.
#[derive(Debug)]
pub struct ShardReader<R = File> {
    source: Source<R>,
    kind: ShardKind,
    count: usize,
}

impl ShardReader<File> {
    /// Opens a shard and checks its header and size.
    pub fn open(path: &Path) -> Result<Self> {
        Self::new(Source::open(path)?)
    }
}

impl<R: Read + Seek> ShardReader<R> {
    /// Checks the header and the size.
    pub fn new(mut source: Source<R>) -> Result<Self> {
        let header = BinHeader::read(&mut source, "token shard", &[magic::SHARD_U16, magic::SHARD_U32])?;
        let kind = if header.get(0) == magic::SHARD_U16 { ShardKind::U16 } else { ShardKind::U32 };
        header.version(&source, &[kind.magic_and_version().1])?;
        let count = header.positive(&source, 2, "number of tokens")?;
        source.expect_len(HEADER_BYTES + count as u64 * kind.size() as u64)?;
        Ok(Self { source, kind, count })
    }

    /// The number of tokens; never 0.
    pub fn num_tokens(&self) -> usize {
        self.count
    }

    /// Which variant this is.
    pub fn kind(&self) -> ShardKind {
        self.kind
    }

    /// The file's name.
    pub fn path(&self) -> &Path {
        self.source.path()
    }

    /// Fills `out` with the tokens from `start` on.
    pub fn read_at(&mut self, start: usize, out: &mut [u32]) -> Result<()> {
        if start.saturating_add(out.len()) > self.count {
            let asked = format!("asked for {} from {start} on", out.len());
            return Err(self.source.field("tokens", asked, format!("at most {} in all", self.count)));
        }
        let size = self.kind.size();
        let mut rest = &mut out[..];
        let bytes = rest.len() as u64 * size as u64;
        self.source.for_each_chunk(HEADER_BYTES + start as u64 * size as u64, bytes, |chunk| {
            let (now, later) = std::mem::take(&mut rest).split_at_mut(chunk.len() / size);
            match size {
                2 => now
                    .iter_mut()
                    .zip(chunk.as_chunks::<2>().0)
                    .for_each(|(o, w)| *o = u16::from_le_bytes(*w).into()),
                _ => now
                    .iter_mut()
                    .zip(chunk.as_chunks::<4>().0)
                    .for_each(|(o, w)| *o = u32::from_le_bytes(*w)),
            }
            rest = later;
            Ok(())
        })
    }
}

/// Rejects tokens outside the vocabulary; `first` is the position of `tokens[0]` in the file.
pub fn check_tokens(path: &Path, first: usize, tokens: &[u32], vocab_size: usize) -> Result<()> {
    match tokens.iter().position(|&token| token as usize >= vocab_size) {
        None => Ok(()),
        Some(index) => Err(Error::field(
            path,
            format!("token at position {}", first + index),
            tokens[index],
            format!("below the vocabulary size, {vocab_size}"),
        )),
    }
}

/// Writes a shard, atomically, as tokens come in.
pub struct ShardWriter {
    file: AtomicFile,
    path: std::path::PathBuf,
    kind: ShardKind,
    count: usize,
    bytes: Vec<u8>,
}

impl ShardWriter {
    /// Begins a shard; `path` is not created or replaced before [`ShardWriter::finish`].
    pub fn create(path: &Path, kind: ShardKind) -> Result<Self> {
        let mut file = AtomicFile::create(path)?;
        BinHeader::new(&[]).write(&mut file.sink())?;
        Ok(Self { file, path: path.to_owned(), kind, count: 0, bytes: Vec::new() })
    }

    /// Appends tokens.
    pub fn push(&mut self, tokens: &[u32]) -> Result<()> {
        let limit = if self.kind == ShardKind::U16 { 1 << 16 } else { 1 << 32 };
        check_tokens(&self.path, self.count, tokens, limit)?;
        let count = self.count.saturating_add(tokens.len());
        if i32::try_from(count).is_err() {
            return Err(Error::field(&self.path, "number of tokens", count, "at most 2147483647"));
        }
        self.bytes.clear();
        match self.kind {
            // the check above: every token fits
            ShardKind::U16 => {
                tokens.iter().for_each(|&token| self.bytes.extend((token as u16).to_le_bytes()))
            }
            ShardKind::U32 => tokens.iter().for_each(|&token| self.bytes.extend(token.to_le_bytes())),
        }
        self.file.sink().put(&self.bytes)?;
        self.count = count;
        Ok(())
    }

    /// Writes the header and renames the file into place. Returns the number of tokens.
    pub fn finish(mut self) -> Result<usize> {
        if self.count == 0 {
            return Err(Error::field(&self.path, "number of tokens", 0, "at least 1"));
        }
        let (magic, version) = self.kind.magic_and_version();
        let mut header = Vec::new();
        // push() keeps the count within i32
        BinHeader::new(&[magic, version, self.count as i32])
            .write(&mut super::Sink::new(&mut header, &self.path))?;
        self.file.overwrite_start(&header)?;
        self.file.commit()?;
        Ok(self.count)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bytes(fields: [i32; 3], body: &[u8]) -> Vec<u8> {
        let mut bytes: Vec<u8> = fields.iter().flat_map(|f| f.to_le_bytes()).collect();
        bytes.resize(1024, 0);
        bytes.extend_from_slice(body);
        bytes
    }

    fn refusal(bytes: Vec<u8>) -> String {
        ShardReader::new(Source::memory(bytes, "s.bin")).unwrap_err().to_string()
    }

    #[test]
    fn both_kinds_round_trip() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("s.bin");
        let narrow = bytes([20240520, 1, 3], &[1, 0, 0xff, 0xff, 0, 2]);
        let wide = bytes([20240801, 7, 2], &[1, 0, 1, 0, 0xff, 0xff, 0xff, 0xff]);
        for (want, kind, tokens) in
            [(narrow, ShardKind::U16, vec![1, 65535, 512]), (wide, ShardKind::U32, vec![65537, u32::MAX])]
        {
            let mut writer = ShardWriter::create(&path, kind).unwrap();
            tokens.iter().for_each(|&token| writer.push(&[token]).unwrap());
            writer.finish().unwrap();
            assert!(std::fs::read(&path).unwrap() == want);
            let mut shard = ShardReader::open(&path).unwrap();
            assert_eq!((shard.kind(), shard.num_tokens()), (kind, tokens.len()));
            let mut all = vec![0; tokens.len()];
            shard.read_at(0, &mut all).unwrap();
            assert_eq!(all, tokens);
            shard.read_at(1, &mut all[..1]).unwrap();
            assert_eq!(all[0], tokens[1]);
            assert!(shard.read_at(1, &mut all).is_err());
            assert!(shard.read_at(usize::MAX, &mut all).is_err());
        }
    }

    #[test]
    fn a_long_read_crosses_chunks() {
        let body: Vec<u8> = (0..100_000u32).flat_map(|n| (n as u16).to_le_bytes()).collect();
        let mut shard = ShardReader::new(Source::memory(bytes([20240520, 1, 100_000], &body), "s")).unwrap();
        let mut out = vec![0; 99_000];
        shard.read_at(999, &mut out).unwrap();
        assert!(out.iter().enumerate().all(|(i, &token)| token == (i as u32 + 999) % 65536));
    }

    #[test]
    fn broken_shards_are_named() {
        assert_eq!(
            refusal(bytes([1, 1, 1], &[0, 0])),
            "s.bin: magic is 1, expected 20240520 or 20240801 (token shard)"
        );
        assert_eq!(refusal(bytes([20240520, 7, 1], &[0, 0])), "s.bin: version is 7, expected 1");
        assert_eq!(refusal(bytes([20240801, 1, 1], &[0; 4])), "s.bin: version is 1, expected 7");
        assert_eq!(
            refusal(bytes([20240520, 1, 0], &[])),
            "s.bin: number of tokens (header field 2) is 0, expected at least 1"
        );
        assert_eq!(
            refusal(bytes([20240520, 1, 2], &[0; 3])),
            "s.bin: file size is 1027 bytes, expected 1028 bytes"
        );
        assert!(refusal(bytes([20240520, 1, i32::MAX], &[])).contains("expected 4294968318 bytes"));
        assert!(refusal(bytes([20240520, 1, i32::MIN], &[])).contains("is -2147483648"));
        assert!(refusal(vec![]).contains("file size is 0 bytes"));
        let text = check_tokens(Path::new("s.bin"), 100, &[1, 2, 50257], 50257).unwrap_err().to_string();
        assert_eq!(text, "s.bin: token at position 102 is 50257, expected below the vocabulary size, 50257");
    }

    #[test]
    fn the_writer_refuses_what_does_not_fit() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("s.bin");
        let mut writer = ShardWriter::create(&path, ShardKind::U16).unwrap();
        writer.push(&[1]).unwrap();
        let text = writer.push(&[2, 65536]).unwrap_err().to_string();
        assert!(text.contains("token at position 2 is 65536"), "{text}");
        drop(writer);
        assert!(ShardWriter::create(&path, ShardKind::U16).unwrap().finish().is_err());
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0);
        assert_eq!(ShardKind::for_vocab(65536), ShardKind::U16);
        assert_eq!(ShardKind::for_vocab(65537), ShardKind::U32);
    }
}
