//! What is written beside the shards: `manifest.json` when all is done, and until then a journal of how far it is.

use std::path::{Path, PathBuf};

use ironhorse_train::format::atomic::write_file;
use serde::{Deserialize, Serialize};
use serde_json::json;
use sha2::{Digest, Sha256};

use super::Settings;
use crate::read::{Input, Use};
use crate::tokenizer::Tokenizer;
use crate::{Error, Result};

/// The file that says what a folder of shards holds; it is written last.
pub const MANIFEST: &str = "manifest.json";
pub(super) const FORMAT: &str = "ironhorse-shards";
pub(super) const VERSION: u32 = 1;
/// The largest number that a journal may hold: sums with it do not overflow.
const MOST: u64 = 1 << 56;

/// Numbers of documents and of what was left out.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Counts {
    /// Documents for training.
    pub train_documents: u64,
    /// Documents for validation.
    pub val_documents: u64,
    /// Tokens for training, separators included.
    pub train_tokens: u64,
    /// Tokens for validation.
    pub val_tokens: u64,
    /// Bytes of all documents that were written.
    pub bytes: u64,
    /// Documents without anything but white space, left out.
    pub empty: u64,
    /// Lines that are invalid, left out.
    pub bad: u64,
    /// Files that are not text, left out.
    pub not_text: u64,
    /// Rows without text, left out.
    pub missing: u64,
    /// Documents whose bytes came before, left out.
    pub duplicates: u64,
    /// Sequences that are not UTF-8 and became U+FFFD.
    pub replaced: u64,
    /// Cuts of huge documents where ids may differ from those of the whole.
    pub forced_cuts: u64,
}

impl Counts {
    /// Adds what a unit says of itself.
    pub fn add(&mut self, other: &Self) {
        self.empty += other.empty;
        self.bad += other.bad;
        self.not_text += other.not_text;
        self.missing += other.missing;
        self.replaced += other.replaced;
        self.forced_cuts += other.forced_cuts;
    }
}

/// A shard.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ShardFacts {
    /// Its name in the folder.
    pub file: String,
    /// Its tokens.
    pub tokens: usize,
    /// Its bytes.
    pub bytes: u64,
    /// Their SHA-256.
    pub sha256: String,
}

/// An input.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct InputFacts {
    /// Its name as it was given.
    pub path: String,
    /// Its bytes.
    pub bytes: u64,
    /// Their SHA-256.
    pub sha256: String,
}

/// The tokenizer.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TokenizerFacts {
    /// Its name or path.
    pub name: String,
    /// SHA-256 of what it was read from.
    pub sha256: String,
    /// The number of its ids.
    pub vocab_size: usize,
    /// The token before every document.
    pub eot: u32,
}

/// Hashes of what decides about the bytes of the shards.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Identity {
    /// The hash of tokenizer and settings.
    pub settings: String,
    /// The hash of the names, sizes and times of the inputs.
    pub inputs: String,
}

impl Identity {
    pub(super) fn of(inputs: &[Input], tokenizer: &Tokenizer, eot: u32, settings: &Settings) -> Self {
        let read = &settings.read;
        // not skip_bad: a run that failed at a bad record goes on with it
        let what = json!([
            tokenizer.sha256(),
            eot,
            settings.name,
            settings.val,
            settings.shard_tokens,
            settings.dedup,
            read.field,
            read.delimiter,
            read.val_tail,
            read.unit_bytes,
            read.large_bytes,
        ]);
        let files: Vec<_> = inputs
            .iter()
            .map(|input| {
                json!([
                    input.path.to_string_lossy(),
                    input.bytes,
                    input.modified,
                    format!("{:?}", input.format)
                ])
            })
            .collect();
        let hash = |text: String| format!("{:x}", Sha256::digest(text));
        Self { settings: hash(what.to_string()), inputs: hash(json!(files).to_string()) }
    }

    pub(super) fn joined(&self) -> String {
        format!("{:x}", Sha256::digest(format!("{} {}", self.settings, self.inputs)))
    }

    /// An error if the folder holds something else.
    pub(super) fn check(&self, found: &Self, out: &Path, holds: &str) -> Result<()> {
        let other = if self.settings != found.settings {
            "other settings or another tokenizer"
        } else if self.inputs != found.inputs {
            "other inputs, or inputs that have changed since"
        } else {
            return Ok(());
        };
        Err(Error::input(
            out,
            format!("the folder {holds} of {other}; use another --out, or --overwrite to replace it"),
        ))
    }
}

/// What a folder of shards holds.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Manifest {
    /// `ironhorse-shards`.
    pub format: String,
    /// The version of the format: 1.
    pub version: u32,
    /// The tokenizer.
    pub tokenizer: TokenizerFacts,
    /// Shards for training.
    pub train: Vec<ShardFacts>,
    /// Shards for validation.
    pub val: Vec<ShardFacts>,
    /// Documents, tokens, and what was left out.
    pub counts: Counts,
    /// The inputs, in order.
    pub inputs: Vec<InputFacts>,
    /// Hashes of what decides about the bytes.
    pub identity: Identity,
}

impl Manifest {
    /// The manifest of a folder, if it has one.
    pub fn read(folder: &Path) -> Result<Option<Self>> {
        let path = folder.join(MANIFEST);
        read_file(&path)?.map(|bytes| Self::parse(&bytes, &path)).transpose()
    }

    /// Parses and checks the bytes of the file `path`.
    pub fn parse(bytes: &[u8], path: &Path) -> Result<Self> {
        let manifest: Self = parse_json(bytes, path)?;
        if (manifest.format.as_str(), manifest.version) != (FORMAT, VERSION) {
            let found = format!("{:?} of version {}", manifest.format, manifest.version);
            return Err(Error::input(path, format!("is {found}, expected {FORMAT:?} of version {VERSION}")));
        }
        for ShardFacts { file, .. } in manifest.train.iter().chain(&manifest.val) {
            if Path::new(file).file_name().and_then(|name| name.to_str()) != Some(file) {
                return Err(Error::input(
                    path,
                    format!("names the shard {file:?}, expected a file beside it"),
                ));
            }
        }
        Ok(manifest)
    }

    pub(super) fn write(&self, folder: &Path) -> Result<()> {
        write_json(&folder.join(MANIFEST), self)
    }
}

/// How far a preparation is.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Journal {
    pub(super) identity: Identity,
    /// Inputs that are done.
    pub(super) inputs: Vec<InputFacts>,
    /// Units of the next input that are done, and the checksum of their contents.
    pub(super) units: u64,
    pub(super) crc: u32,
    /// Bytes that were read of inputs that are done.
    pub(super) read: u64,
    pub(super) counts: Counts,
    pub(super) train: (Vec<ShardFacts>, usize),
    pub(super) val: (Vec<ShardFacts>, usize),
    /// What the document is for of which parts are still to come; `None` also for one that is left out.
    pub(super) current: Option<Use>,
    /// Hashes of documents in the file beside the journal.
    pub(super) hashes: u64,
}

/// The journal's name.
fn path(settings: &Settings) -> PathBuf {
    settings.out.join(format!(".{}.journal.json", settings.name))
}

/// The name of the file of the hashes of all documents, to find duplicates.
pub fn hashes_path(settings: &Settings) -> PathBuf {
    settings.out.join(format!(".{}.hashes", settings.name))
}

impl Journal {
    pub(super) fn read(settings: &Settings) -> Result<Option<Self>> {
        let path = path(settings);
        read_file(&path)?.map(|bytes| Self::parse(&bytes, &path)).transpose()
    }

    /// Parses the bytes of the file `path`, and refuses numbers that no preparation comes to: to go on from them would overflow.
    pub(super) fn parse(bytes: &[u8], path: &Path) -> Result<Self> {
        let journal: Self = parse_json(bytes, path)?;
        let counts = &journal.counts;
        let damaged = |what: String| Err(Error::input(path, format!("{what}; --overwrite starts over")));
        for (what, (shards, begun), counted) in [
            ("training", &journal.train, counts.train_tokens),
            ("validation", &journal.val, counts.val_tokens),
        ] {
            let sizes = shards.iter().map(|shard| shard.tokens as u64).chain([*begun as u64]);
            let sum = sizes.fold(0, u64::saturating_add);
            if sum != counted {
                return damaged(format!("counts {counted} tokens for {what}, but its shards have {sum}"));
            }
        }
        let Counts { train_documents, val_documents, train_tokens, val_tokens, bytes, .. } = *counts;
        let Counts { empty, bad, not_text, missing, duplicates, replaced, forced_cuts, .. } = *counts;
        let all =
            [train_documents, val_documents, train_tokens, val_tokens, bytes, empty, bad, not_text, missing]
                .into_iter()
                .chain([duplicates, replaced, forced_cuts, journal.units, journal.read, journal.hashes]);
        match all.max().filter(|&most| most > MOST) {
            Some(most) => damaged(format!("holds the number {most}, expected at most {MOST}")),
            None => Ok(journal),
        }
    }

    /// Refuses a journal of more inputs than there are.
    pub(super) fn check_inputs(&self, inputs: usize, out: &Path) -> Result<()> {
        if self.inputs.len() <= inputs {
            return Ok(());
        }
        let done = self.inputs.len();
        let problem =
            format!("its journal says that {done} of {inputs} inputs are done; --overwrite starts over");
        Err(Error::input(out, problem))
    }

    pub(super) fn write(&self, settings: &Settings) -> Result<()> {
        write_json(&path(settings), self)
    }

    pub(super) fn remove(settings: &Settings) {
        // what stays behind is hidden, and the manifest counts
        let _ = std::fs::remove_file(hashes_path(settings));
        let _ = std::fs::remove_file(path(settings));
    }
}

/// Removes what an earlier preparation has left in the folder: its shards, finished or not, manifest and journal.
pub fn remove_all(settings: &Settings) -> Result<()> {
    let out = &settings.out;
    let ours = |name: &str| {
        let name = name.strip_prefix('.').and_then(|name| name.strip_suffix(".partial")).unwrap_or(name);
        let number = name.strip_suffix(".bin").and_then(|name| name.rsplit_once('_'));
        number.is_some_and(|(stem, number)| {
            (stem == format!("{}_train", settings.name) || stem == format!("{}_val", settings.name))
                && number.len() == 6
                && number.bytes().all(|byte| byte.is_ascii_digit())
        })
    };
    let remove = |path: &Path| match std::fs::remove_file(path) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => Err(Error::io(path, "remove", error)),
        _ => Ok(()),
    };
    remove(&out.join(MANIFEST))?; // first: without it the folder is not taken for complete
    remove(&path(settings))?;
    remove(&hashes_path(settings))?;
    for entry in std::fs::read_dir(out).map_err(|source| Error::io(out, "list", source))? {
        let entry = entry.map_err(|source| Error::io(out, "list", source))?;
        if entry.file_name().to_str().is_some_and(ours) {
            remove(&entry.path())?;
        }
    }
    Ok(())
}

/// The bytes of a file, if it is there.
fn read_file(path: &Path) -> Result<Option<Vec<u8>>> {
    match std::fs::read(path) {
        Ok(bytes) => Ok(Some(bytes)),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(Error::io(path, "read", error)),
    }
}

fn parse_json<T: for<'de> Deserialize<'de>>(bytes: &[u8], path: &Path) -> Result<T> {
    serde_json::from_slice(bytes).map_err(|error| {
        Error::input(path, format!("is not what `prepare` writes ({error}); --overwrite replaces it"))
    })
}

fn write_json<T: Serialize>(path: &Path, value: &T) -> Result<()> {
    let text = serde_json::to_string_pretty(value).map_err(|error| Error::input(path, error))?;
    Ok(write_file(path, |sink| sink.put(format!("{text}\n").as_bytes()))?)
}
