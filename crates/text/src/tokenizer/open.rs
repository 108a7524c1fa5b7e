//! Opening a tokenizer by name, file or folder.

use std::collections::HashMap;
use std::path::Path;

use ironhorse_train::format::Source;
use ironhorse_train::format::hf::TextTokens;
use ironhorse_train::format::tokenizer::{TOKENIZER as BIN_NAME, Tokenizer as BinTokenizer, tokenizer_files};
use serde_json::Value;
use sha2::{Digest, Sha256};

use super::bpe::Bpe;
use super::foreign::Foreign;
use super::json::{self, AddedToken, Vocabulary};
use super::named::{self, NAMED};
use super::split::Pattern;
use super::{Begin, CONFIG_NAME, JSON_NAME, Kind, SpecialTokens, Tokenizer, ranks};
use crate::{Error, Result};

/// Tokens that stand between documents, in the order in which they are looked for.
const SEPARATORS: [&str; 6] =
    ["<|endoftext|>", "<|end_of_text|>", "<|end▁of▁sentence|>", "</s>", "<eos>", "[SEP]"];

/// The files of a folder that are a tokenizer, in the order in which they are looked for.
const IN_FOLDER: [&str; 4] = [JSON_NAME, "vocab.json", BIN_NAME, "tokenizer.model"];

fn sha256(parts: &[&[u8]]) -> String {
    let hash = parts.iter().fold(Sha256::new(), |hash, part| hash.chain_update(part));
    format!("{:x}", hash.finalize())
}

impl Tokenizer {
    /// The tokenizer of a name (`bytes`, `gpt2`, `r50k_base`, `p50k_base`, `cl100k_base`, `o200k_base`), a file
    /// (`tokenizer.json`, `vocab.json`, a rank file, llm.c's `tokenizer.bin`) or a folder with one of them.
    pub fn open(what: &str) -> Result<Self> {
        if what == "bytes" {
            return Ok(Self::bytes());
        }
        if let Some(named) = named::find(what) {
            let sha256 = sha256(&[named.name.as_bytes()]);
            return Ok(Self {
                name: named.name.to_owned(),
                kind: Kind::Bpe(Box::new(named.bpe()?)),
                eot: Some(named.eot),
                sha256,
                files: Vec::new(),
                model: TextTokens::Last,
                begin: Begin::Separator,
            });
        }
        let path = Path::new(what);
        if !path.exists() {
            let names: Vec<_> = NAMED.iter().map(|named| named.name).collect();
            let expected = format!("expected bytes, {}, a file or a folder", names.join(", "));
            return Err(Error::tokenizer(what, format!("is neither a known name nor a file, {expected}")));
        }
        Self::open_path(path)
    }

    /// Whether this is the name of a tokenizer that is part of the program.
    pub fn is_name(what: &str) -> bool {
        what == "bytes" || named::find(what).is_some()
    }

    /// 256 tokens, the bytes; token 0 is between documents.
    pub fn bytes() -> Self {
        let (kind, files) = (Kind::Bytes, Vec::new());
        Self {
            name: "bytes".into(),
            kind,
            eot: Some(0),
            sha256: sha256(&[b"bytes"]),
            files,
            model: TextTokens::Last,
            begin: Begin::Separator,
        }
    }

    /// For fuzz targets: byte-level BPE of a `tokenizer.json`.
    #[doc(hidden)]
    pub fn fuzz_json(bytes: &[u8]) -> Option<Bpe> {
        json::byte_level(bytes).ok()
    }

    /// For fuzz targets: the vocabulary of a rank file.
    #[doc(hidden)]
    pub fn fuzz_ranks(bytes: &[u8]) -> Option<Bpe> {
        ranks::read_tiktoken(bytes).ok().map(|(bpe, _)| bpe)
    }

    /// For fuzz targets: llm.c's `tokenizer.bin`.
    #[doc(hidden)]
    pub fn fuzz_bin(bytes: &[u8]) -> Option<Self> {
        let bin = BinTokenizer::read(&mut Source::memory(bytes.to_vec(), BIN_NAME)).ok()?;
        Some(Self::of_parsed_bin(Path::new(BIN_NAME), bin, String::new()))
    }

    /// For fuzz targets: `vocab.json`, `merges.txt` and `tokenizer_config.json`.
    #[doc(hidden)]
    pub fn fuzz_vocab([vocab, merges, config]: [&[u8]; 3]) -> Option<Bpe> {
        let config = serde_json::from_slice(config).ok();
        of_vocab(vocab, merges, config.as_ref()).ok()
    }

    /// For fuzz targets: any `tokenizer.json`, also one that is not byte-level BPE.
    #[doc(hidden)]
    pub fn fuzz_any_json(bytes: &[u8]) -> Option<Self> {
        Self::of_json(Path::new(JSON_NAME), bytes.to_vec()).ok()
    }

    /// The tokenizer in a folder, if there is one.
    pub fn beside(folder: &Path) -> Result<Option<Self>> {
        let found = IN_FOLDER.iter().map(|name| folder.join(name)).find(|path| path.is_file());
        found.map(|path| Self::open_path(&path)).transpose()
    }

    /// The tokenizer in a file or folder.
    pub fn open_path(path: &Path) -> Result<Self> {
        if path.is_dir() {
            return Self::beside(path)?.ok_or_else(|| {
                let expected = IN_FOLDER.join(", ");
                Error::tokenizer(
                    path.display(),
                    format!("has no tokenizer, expected one of {expected} in it"),
                )
            });
        }
        let bytes = std::fs::read(path).map_err(|source| Error::io(path, "read", source))?;
        let name = path.file_name().and_then(|name| name.to_str()).unwrap_or("");
        let mut opened = match name {
            "vocab.json" => Self::of_vocab_json(path, bytes)?,
            _ if name.ends_with(".json") => Self::of_json(path, bytes)?,
            // by its first bytes, too: some have no such name
            _ if name.ends_with(".bin") || bytes.starts_with(&20_240_328_i32.to_le_bytes()) => {
                Self::of_bin(path, bytes)?
            }
            _ => {
                let (bpe, eot) =
                    ranks::read_tiktoken(&bytes).map_err(|problem| wrong(path, &problem, &bytes))?;
                Self::new(path, Kind::Bpe(Box::new(bpe)), Some(eot), sha256(&[&bytes]))
            }
        };
        opened.name = path.display().to_string();
        Ok(opened)
    }

    fn new(path: &Path, kind: Kind, eot: Option<u32>, sha256: String) -> Self {
        Self {
            name: path.display().to_string(),
            kind,
            eot,
            sha256,
            files: Vec::new(),
            model: TextTokens::Last,
            begin: Begin::Separator,
        }
    }

    fn of_json(path: &Path, bytes: Vec<u8>) -> Result<Self> {
        let kind = match json::byte_level(&bytes) {
            Ok(bpe) => Kind::Bpe(Box::new(bpe)),
            Err(_) => Kind::Foreign(Box::new(Foreign::read(&bytes, &path.display().to_string())?)),
        };
        let config = config_beside(path);
        let eot = separator(&kind, config.as_ref());
        let begin = path.parent().filter(|_| config.is_some()).map(SpecialTokens::read);
        let begin = begin.and_then(Result::ok).map_or(Begin::Separator, |special| {
            Begin::With(special.added_bos.and_then(|token| kind.id(&token)))
        });
        let mut opened = Self::new(path, kind, eot, sha256(&[&bytes]));
        opened.begin = begin;
        opened.files.push((JSON_NAME.to_owned(), bytes));
        opened.keep_beside(path)?;
        Ok(opened)
    }

    /// Keeps the other files of the tokenizer in this file's folder: its settings, its chat template.
    fn keep_beside(&mut self, path: &Path) -> Result<()> {
        let Some(folder) = path.parent() else { return Ok(()) };
        for (name, bytes) in tokenizer_files(folder)? {
            let is_tokenizer = IN_FOLDER.contains(&name.as_str()); // that is not the one which was opened
            if !is_tokenizer && self.files.iter().all(|(kept, _)| *kept != name) {
                self.files.push((name, bytes));
            }
        }
        Ok(())
    }

    fn of_vocab_json(path: &Path, bytes: Vec<u8>) -> Result<Self> {
        let merges_path = path.with_file_name("merges.txt");
        let merges = std::fs::read(&merges_path).map_err(|source| Error::io(&merges_path, "read", source))?;
        let config = config_beside(path);
        let kind = of_vocab(&bytes, &merges, config.as_ref())
            .map_err(|problem| Error::tokenizer(path.display(), problem))?;
        let kind = Kind::Bpe(Box::new(kind));
        let eot = separator(&kind, config.as_ref());
        let mut opened = Self::new(path, kind, eot, sha256(&[&bytes, &merges]));
        opened.files = vec![("vocab.json".to_owned(), bytes), ("merges.txt".to_owned(), merges)];
        opened.keep_beside(path)?;
        Ok(opened)
    }

    fn of_bin(path: &Path, bytes: Vec<u8>) -> Result<Self> {
        let bin = BinTokenizer::open(path)?;
        let mut opened = Self::of_parsed_bin(path, bin, sha256(&[&bytes]));
        opened.files.push((BIN_NAME.to_owned(), bytes));
        opened.keep_beside(path)?;
        Ok(opened)
    }

    fn of_parsed_bin(path: &Path, bin: BinTokenizer, sha256: String) -> Self {
        let eot = Some(bin.eot);
        let kind = if bin == BinTokenizer::bytes() {
            Kind::Bytes
        } else {
            ranks::of_bin(&bin).map_or_else(|| Kind::Longest(bin), |bpe| Kind::Bpe(Box::new(bpe)))
        };
        Self::new(path, kind, eot, sha256)
    }
}

/// An error about a file that should have been a rank file; says so if it is a model of SentencePiece.
fn wrong(path: &Path, problem: &str, bytes: &[u8]) -> Error {
    let hint = match bytes.first() {
        _ if problem.starts_with("has ") => "", // it is a rank file
        Some(b'\n') => {
            "; this may be a SentencePiece model: use its tokenizer.json, which transformers writes"
        }
        _ => "; expected a tokenizer.json, vocab.json, rank file or tokenizer.bin",
    };
    Error::tokenizer(path.display(), format!("{problem}{hint}"))
}

/// The `tokenizer_config.json` beside a file.
fn config_beside(path: &Path) -> Option<Value> {
    serde_json::from_slice(&std::fs::read(path.with_file_name(CONFIG_NAME)).ok()?).ok()
}

/// The token between documents: a usual one, else `eos_token` of the configuration.
fn separator(kind: &Kind, config: Option<&Value>) -> Option<u32> {
    let eos = config.map(|config| &config["eos_token"]);
    let eos = eos.and_then(|eos| eos.as_str().or_else(|| eos["content"].as_str()));
    SEPARATORS.iter().copied().chain(eos).find_map(|token| kind.id(token))
}

/// `vocab.json` and `merges.txt`: GPT-2's, or Qwen's if `tokenizer_config.json` says so.
fn of_vocab(vocab: &[u8], merges: &[u8], config: Option<&Value>) -> Result<Bpe, String> {
    let vocab: HashMap<String, u32> = serde_json::from_slice(vocab)
        .map_err(|error| format!("is not an object of tokens and ids: {error}"))?;
    let merges = std::str::from_utf8(merges).map_err(|_| "merges.txt is not UTF-8".to_owned())?;
    let pairs: Result<Vec<_>, String> = merge_lines(merges)
        .map(|(number, line)| {
            line.split_once(' ').ok_or_else(|| format!("line {} of merges.txt is not two tokens", number + 1))
        })
        .collect();
    let (pattern, nfc) = pattern_of_class(config)?;
    let mut added = added_in(config);
    if added.is_empty() {
        let end = SEPARATORS[0];
        added.extend(vocab.get(end).map(|&id| AddedToken::marker(end, id)));
    }
    json::build(Vocabulary { vocab: &vocab, merges: &pairs?, whole: false, pattern, nfc, added: &added })
}

/// The merges of a `merges.txt` with the numbers of their lines, from 0.
pub(super) fn merge_lines(merges: &str) -> impl Iterator<Item = (usize, &str)> {
    let is_other = |number: usize, line: &str| line.is_empty() || number == 0 && line.starts_with("#version");
    merges.lines().enumerate().filter(move |(number, line)| !is_other(*number, line))
}

/// How the tokenizers of `vocab.json` split text, and whether they normalise it to NFC.
pub(super) fn pattern_of_class(config: Option<&Value>) -> Result<(Pattern, bool), String> {
    let class = config.and_then(|config| config["tokenizer_class"].as_str()).unwrap_or("GPT2Tokenizer");
    match class.trim_end_matches("Fast") {
        "GPT2Tokenizer" => Ok((Pattern::Gpt2, false)),
        "Qwen2Tokenizer" => Ok((Pattern::QWEN2, true)),
        other => Err(format!("is of a {other}; use its tokenizer.json, which transformers writes")),
    }
}

/// `added_tokens_decoder` of a `tokenizer_config.json`.
fn added_in(config: Option<&Value>) -> Vec<AddedToken> {
    let map = config.and_then(|config| config["added_tokens_decoder"].as_object());
    let tokens = map.into_iter().flatten().filter_map(|(id, token)| {
        let mut token: AddedToken = serde_json::from_value(token.clone()).ok()?;
        token.id = id.parse().ok()?;
        Some(token)
    });
    tokens.collect()
}
