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
    tokens: Vec<u32>,
}

impl MemoryTokens {
    /// A source of these tokens; the name is for error messages.
    pub fn new(name: impl Into<String>, tokens: Vec<u32>) -> Self {
        Self { name: name.into(), tokens }
    }

    /// A source for byte-level models: each byte is a token.
    pub fn from_bytes(name: impl Into<String>, bytes: &[u8]) -> Self {
        Self::new(name, bytes.iter().map(|&b| u32::from(b)).collect())
    }
}

impl Tokens for MemoryTokens {
    fn len(&self) -> u64 {
        self.tokens.len() as u64
    }

    fn read_at(&mut self, start: u64, out: &mut [u32]) -> Result<()> {
        let range = usize::try_from(start).ok().and_then(|s| self.tokens.get(s..s.checked_add(out.len())?));
        let (count, have) = (out.len(), self.tokens.len());
        let tokens = range.ok_or_else(|| {
            Error::field(
                self.name.as_ref(),
                "range asked for",
                format!("{count} tokens from {start}"),
                format!("to end by {have}"),
            )
        })?;
        out.copy_from_slice(tokens);
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
        let mut source = MemoryTokens::from_bytes("built-in", b"abc");
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
