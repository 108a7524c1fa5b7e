//! Documents to token shards.
//!
//! ```text
//! mod.rs       settings; a preparation from start to end      pipeline.rs  one reader, many encoders, one writer in order
//! encode.rs    a unit to tokens, on any thread                state.rs     what is decided in order: duplicates, shards
//! shards.rs    shard files that can be gone on with           journal.rs   how far it is; manifest.json
//! ```
//!
//! The bytes of the shards depend on the inputs, the tokenizer and the settings only: not on the number of threads, and
//! not on whether the work was interrupted.

mod encode;
mod journal;
mod pipeline;
mod shards;
mod state;

pub use journal::{Counts, InputFacts, MANIFEST, Manifest, ShardFacts, TokenizerFacts};

use std::fs::{File, TryLockError};
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::time::Duration;

use self::journal::{Identity, Journal};
use self::pipeline::Job;
use self::state::State;
use crate::read::{Input, ReadSettings};
use crate::tokenizer::Tokenizer;
use crate::{Error, Result};

/// How often a process looks whether another one has ended its preparation.
const WAIT: Duration = Duration::from_millis(100);

/// What to prepare and how.
#[derive(Clone, Debug)]
pub struct Settings {
    /// The folder of the shards.
    pub out: PathBuf,
    /// Shards are `NAME_train_000000.bin` and `NAME_val_000000.bin`.
    pub name: String,
    /// The part of the documents, chosen by their hashes, that is for validation.
    pub val: f64,
    /// Tokens of a shard.
    pub shard_tokens: usize,
    /// Leave out documents whose bytes came before.
    pub dedup: bool,
    /// Threads that encode; 0 means one for each core.
    pub threads: usize,
    /// How inputs are read.
    pub read: ReadSettings,
    /// Replace what the folder holds of an earlier preparation.
    pub overwrite: bool,
    /// Wait while another process prepares data in the folder; otherwise that is an error.
    pub wait: bool,
}

impl Settings {
    /// The usual settings: shards of 100 million tokens, half a percent for validation.
    pub fn new(out: &Path, name: &str) -> Self {
        Self {
            out: out.to_owned(),
            name: name.to_owned(),
            val: 0.005,
            shard_tokens: 100_000_000,
            dedup: false,
            threads: 0,
            read: ReadSettings::default(),
            overwrite: false,
            wait: false,
        }
    }

    fn check(&self) -> Result<()> {
        let wrong = |flag: &str, found: &dyn std::fmt::Display, expected: &str| {
            Err(Error::Setting(format!("{flag} is {found}, expected {expected}")))
        };
        if !(0.0..1.0).contains(&self.val) {
            return wrong("--val", &self.val, "at least 0 and less than 1");
        }
        if let Some(tail) = self.read.val_tail.filter(|tail| !(*tail > 0.0 && *tail < 1.0)) {
            return wrong("--val-tail", &tail, "more than 0 and less than 1");
        }
        if self.shard_tokens == 0 || i32::try_from(self.shard_tokens).is_err() {
            return wrong("--shard-tokens", &self.shard_tokens, "1 to 2147483647");
        }
        if self.name.is_empty() || self.name.contains(['/', '\\']) || self.name.starts_with('.') {
            return wrong("--name", &self.name, "the start of a file name");
        }
        if self.read.delimiter.as_deref() == Some("") {
            return wrong("--delimiter", &"empty", "at least one character");
        }
        Ok(())
    }
}

/// How far it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Progress {
    /// Bytes of the input files that were read.
    pub read: u64,
    /// Bytes of all input files; 0 if that is not known.
    pub total: u64,
    /// Tokens that were written.
    pub tokens: u64,
    /// Documents that were written.
    pub documents: u64,
}

/// What a preparation made.
#[derive(Debug)]
pub struct Prepared {
    /// What the folder holds.
    pub manifest: Manifest,
    /// Whether the folder held all of it already.
    pub unchanged: bool,
    /// Whether it went on from where an earlier run had stopped.
    pub resumed: bool,
}

/// Prepares shards. `watch` is called now and then and may stop it, which is [`Error::Stopped`]: then, and after any
/// other error, the same call goes on where it was.
pub fn prepare(
    inputs: &[Input],
    tokenizer: &Tokenizer,
    settings: &Settings,
    watch: &mut dyn FnMut(&Progress) -> ControlFlow<()>,
) -> Result<Prepared> {
    settings.check()?;
    let Some(eot) = tokenizer.eot() else {
        let problem = "has no end-of-text token to put between documents; --separator names one";
        return Err(Error::tokenizer(tokenizer.name(), problem));
    };
    let out = &settings.out;
    std::fs::create_dir_all(out).map_err(|source| Error::io(out, "create", source))?;
    let identity = Identity::of(inputs, tokenizer, eot, settings);
    // The manifest is written last, in one piece: who finds it needs no lock, and keeps nobody out who looks at the same time.
    if let Some(prepared) = done_before(&identity, settings)? {
        return Ok(prepared);
    }
    let lock = Lock::take(settings, watch)?;
    if settings.overwrite {
        journal::remove_all(settings)?;
    } else if let Some(prepared) = done_before(&identity, settings)? {
        return Ok(prepared); // by the process that held the lock
    }
    let journal = Journal::read(settings)?;
    if let Some(journal) = &journal {
        identity.check(&journal.identity, out, "holds an unfinished preparation")?;
        journal.check_inputs(inputs.len(), out)?;
    }
    let resumed = journal.is_some();
    let mut state = State::new(settings, tokenizer, identity, journal)?;
    pipeline::run(Job { inputs, tokenizer, settings }, &mut state, watch)?;
    let manifest = state.finish(inputs, tokenizer, eot, settings)?;
    drop(lock);
    Ok(Prepared { manifest, unchanged: false, resumed })
}

/// What the folder holds of the same preparation, if that is complete and to be kept.
fn done_before(identity: &Identity, settings: &Settings) -> Result<Option<Prepared>> {
    let out = &settings.out;
    let Some(manifest) = (!settings.overwrite).then(|| Manifest::read(out)).transpose()?.flatten() else {
        return Ok(None);
    };
    identity.check(&manifest.identity, out, "holds shards")?;
    Ok(Some(Prepared { manifest, unchanged: true, resumed: false }))
}

/// A hash of all that decides about the shards, in hexadecimal: inputs, tokenizer, settings but for the folder.
pub fn identity(inputs: &[Input], tokenizer: &Tokenizer, settings: &Settings) -> String {
    Identity::of(inputs, tokenizer, tokenizer.eot().unwrap_or(0), settings).joined()
}

/// Keeps a second preparation out of the folder. The empty file stays: if it were removed, a process that had opened it before
/// could lock it while a third one locks a new file.
struct Lock(#[allow(dead_code, reason = "the lock is held while the file is open")] File);

impl Lock {
    fn take(settings: &Settings, watch: &mut dyn FnMut(&Progress) -> ControlFlow<()>) -> Result<Self> {
        let out = &settings.out;
        let path = out.join(".prepare.lock");
        let file = File::create(&path).map_err(|source| Error::io(&path, "create", source))?;
        loop {
            match file.try_lock() {
                Ok(()) => return Ok(Self(file)),
                Err(TryLockError::WouldBlock) if settings.wait => {
                    if watch(&Progress { read: 0, total: 0, tokens: 0, documents: 0 }).is_break() {
                        return Err(Error::Stopped);
                    }
                    std::thread::sleep(WAIT);
                }
                Err(TryLockError::WouldBlock) => {
                    return Err(Error::input(
                        out,
                        "another process prepares data in this folder; wait for it, or use another --out",
                    ));
                }
                // a file system without locks
                Err(TryLockError::Error(_)) => return Ok(Self(file)),
            }
        }
    }
}

#[cfg(test)]
mod tests;
