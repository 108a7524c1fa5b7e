//! Token shards `*_train.bin`, `*_val.bin`: a header and the tokens as uint16, or as uint32 for large vocabularies.

use std::fs::File;
use std::io::{Read, Seek};
use std::path::Path;

use super::atomic::AtomicFile;
use super::header::{BinHeader, HEADER_BYTES, magic};
use super::{Source, elem};
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
    /// Bytes per token.
    pub const fn size(self) -> usize {
        match self {
            Self::U16 => 2,
            Self::U32 => 4,
        }
    }

    /// The smaller variant that holds this vocabulary.
    pub fn for_vocab(vocab_size: usize) -> Self {
        if vocab_size <= 1 << 16 { Self::U16 } else { Self::U32 }
    }

    /// The header of a shard of so many tokens; `path` is for errors.
    pub fn header(self, path: &Path, tokens: usize) -> Result<Vec<u8>> {
        let Some(count) = i32::try_from(tokens).ok().filter(|&count| count > 0) else {
            return Err(Error::field(path, "number of tokens", tokens, "1 to 2147483647"));
        };
        let (magic, version) = self.magic_and_version();
        let mut header = Vec::new();
        BinHeader::new(&[magic, version, count]).write(&mut super::Sink::new(&mut header, path))?;
        Ok(header)
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
        let offset = HEADER_BYTES + start as u64 * size as u64;
        match self.kind {
            ShardKind::U16 => self.source.decode(offset, size, out, |chunk, out| {
                elem::decode(chunk, out, |word| u16::from_le_bytes(word).into());
            }),
            ShardKind::U32 => self.source.decode(offset, size, out, |chunk, out| {
                elem::decode(chunk, out, u32::from_le_bytes);
            }),
        }
    }
}

/// Rejects tokens outside the vocabulary; `name` is what an error calls the token at an index.
pub fn check_tokens<T: Copy + Into<i64>>(
    path: &Path,
    tokens: &[T],
    vocab_size: usize,
    name: impl Fn(usize) -> String,
) -> Result<()> {
    let is_outside = |&token: &T| !usize::try_from(token.into()).is_ok_and(|token| token < vocab_size);
    let Some(index) = tokens.iter().position(is_outside) else { return Ok(()) };
    let expected = format!("a token of the vocabulary, 0 to {}", vocab_size.saturating_sub(1));
    Err(Error::field(path, name(index), tokens[index].into(), expected))
}

/// What errors call the token at a position of a shard.
pub(crate) fn position_name(position: u64) -> String {
    format!("token at position {position}")
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
        check_tokens(&self.path, tokens, limit, |at| position_name((self.count + at) as u64))?;
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
        let header = self.kind.header(&self.path, self.count)?;
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
        let text =
            check_tokens(Path::new("s.bin"), &[1, 2, 50257_u32], 50257, |at| position_name(100 + at as u64));
        assert_eq!(
            text.unwrap_err().to_string(),
            "s.bin: token at position 102 is 50257, expected a token of the vocabulary, 0 to 50256"
        );
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
    }
}
