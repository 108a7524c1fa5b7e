//! Training data: the built-in stories, token sources, and the loader that makes batches from them.

mod batches;
pub mod corpus;
mod files;
mod grammar;
pub mod loader;
mod pack;
pub mod packed;
mod permute;
mod plots;
mod sample;
mod shard_pool;
mod shift;
pub mod survey;
mod world;

use std::ffi::OsStr;

use crate::{Error, Result};

pub use batches::Batches;
pub use files::expand_globs;
pub use loader::{Loader, LoaderConfig, LoaderState};
pub use packed::{BatchTokens, PackStats, PackedLoader};
pub use sample::Sample;
pub use shard_pool::OPEN_SHARDS;
pub use shift::shift;
pub use survey::{SourceFacts, survey};

/// A sequence of tokens with random access: a shard file, or memory.
pub trait Tokens: Send {
    /// The number of tokens.
    fn len(&self) -> u64;

    /// Fills `out` with the tokens from position `start` on.
    fn read_at(&mut self, start: u64, out: &mut [u32]) -> Result<()>;

    /// The name of this source in error messages: the path of a file.
    fn name(&self) -> String;

    /// True when there are no tokens.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// Tokens held in memory.
#[derive(Clone, Debug)]
pub struct MemoryTokens {
    name: String,
    tokens: Held,
}

#[derive(Clone, Debug)]
enum Held {
    Tokens(Vec<u32>),
    /// Each byte is a token.
    Bytes(Vec<u8>),
}

impl MemoryTokens {
    /// A source of these tokens; the name is for error messages.
    pub fn new(name: impl Into<String>, tokens: Vec<u32>) -> Self {
        Self { name: name.into(), tokens: Held::Tokens(tokens) }
    }

    /// A source for byte-level models: each byte is a token.
    pub fn from_bytes(name: impl Into<String>, bytes: Vec<u8>) -> Self {
        Self { name: name.into(), tokens: Held::Bytes(bytes) }
    }
}

impl Tokens for MemoryTokens {
    fn len(&self) -> u64 {
        match &self.tokens {
            Held::Tokens(tokens) => tokens.len() as u64,
            Held::Bytes(bytes) => bytes.len() as u64,
        }
    }

    fn read_at(&mut self, start: u64, out: &mut [u32]) -> Result<()> {
        let (count, have) = (out.len(), self.len());
        let end = start.checked_add(count as u64).filter(|&end| end <= have);
        let end = end.ok_or_else(|| {
            Error::field(
                self.name.as_ref(),
                "range asked for",
                format!("{count} tokens from {start}"),
                format!("to end by {have}"),
            )
        })?;
        let range = start as usize..end as usize; // inside what is in memory
        match &self.tokens {
            Held::Tokens(tokens) => out.copy_from_slice(&tokens[range]),
            Held::Bytes(bytes) => {
                out.iter_mut().zip(&bytes[range]).for_each(|(out, &byte)| *out = byte.into())
            }
        }
        Ok(())
    }

    fn name(&self) -> String {
        self.name.clone()
    }
}

/// Opens every shard that the patterns match. At most [`OPEN_SHARDS`] of them are open at a time.
pub fn open_shards<P: AsRef<OsStr>>(patterns: &[P]) -> Result<Vec<Box<dyn Tokens>>> {
    shard_pool::open(&expand_globs(patterns)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_reads_inside_its_bounds_only() {
        let mut source = MemoryTokens::from_bytes("built-in", b"abc".to_vec());
        let mut out = [0; 2];
        source.read_at(1, &mut out).unwrap();
        assert_eq!((out, source.len(), source.is_empty()), ([98, 99], 3, false));
        for start in [2, 3, u64::MAX] {
            let text = source.read_at(start, &mut out).unwrap_err().to_string();
            assert!(text.starts_with("built-in: range asked for is 2 tokens from"), "{text}");
        }
        source.read_at(3, &mut []).unwrap();
    }
}
