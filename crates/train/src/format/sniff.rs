//! What kind of file this is, by its content rather than its name.

use std::fmt;
use std::path::Path;

use super::Source;
use super::answer_key;
use super::checkpoint::{has_checkpoints, is_run};
use super::gguf;
use super::header::magic;
use super::safetensors::SafeTensors;
use super::{hf, peft};
use crate::{Error, Result};

/// Kinds of files and folders.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Kind {
    /// A model `.bin`.
    Model,
    /// A debug state `.bin`.
    DebugState,
    /// A tokenizer `.bin`.
    Tokenizer,
    /// A token shard, either variant.
    Shard,
    /// A multiple-choice evaluation `.bin`.
    MultipleChoice,
    /// One of our answer keys.
    AnswerKey,
    /// A Hugging Face folder.
    HfFolder,
    /// The `model.safetensors` inside a Hugging Face folder, or one of several, or their index.
    HfFile,
    /// Any other safetensors file.
    SafeTensors,
    /// One of our checkpoint folders.
    Checkpoint,
    /// A folder of PEFT: an adapter without its base.
    Adapter,
    /// The folder of a run, with checkpoints in it.
    Run,
    /// Sizes in a TOML file.
    Toml,
    /// A GGUF file, which we write and do not read.
    Gguf,
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Model => "a model .bin",
            Self::DebugState => "a debug state",
            Self::Tokenizer => "a tokenizer",
            Self::Shard => "a token shard",
            Self::MultipleChoice => "a multiple-choice evaluation",
            Self::AnswerKey => "an answer key",
            Self::HfFolder => "a Hugging Face folder",
            Self::HfFile => "the weights of a Hugging Face folder",
            Self::SafeTensors => "a safetensors file without a config.json beside it",
            Self::Checkpoint => "a checkpoint",
            Self::Adapter => "an adapter without its base",
            Self::Run => "a run",
            Self::Toml => "a TOML file",
            Self::Gguf => "a GGUF file, which is written and not read",
        })
    }
}

/// Determines the kind from the first bytes of a file, or from the names in a folder. The rest is not checked.
pub fn sniff(path: &Path) -> Result<Kind> {
    let meta = std::fs::metadata(path).map_err(|source| Error::io(path, "open", source))?;
    if meta.is_dir() {
        return sniff_folder(path);
    }
    if path.extension().is_some_and(|extension| extension == "toml") {
        return Ok(Kind::Toml);
    }
    if path.file_name().is_some_and(|name| name == hf::HF_INDEX) {
        return Ok(Kind::HfFile);
    }
    let mut source = Source::open(path)?;
    if source.len() < 8 {
        return Err(unknown(path, format!("{} bytes long", source.len())));
    }
    let mut start = [0; 12];
    let known = usize::try_from(source.len()).map_or(start.len(), |len| len.min(start.len()));
    source.read_at(0, &mut start[..known])?;
    let first = i32::from_le_bytes([start[0], start[1], start[2], start[3]]);
    match first {
        magic::MODEL => Ok(Kind::Model),
        magic::DEBUG_STATE => Ok(Kind::DebugState),
        magic::TOKENIZER => Ok(Kind::Tokenizer),
        magic::SHARD_U16 | magic::SHARD_U32 => Ok(Kind::Shard),
        magic::MULTIPLE_CHOICE => Ok(Kind::MultipleChoice),
        _ if start.starts_with(&gguf::MAGIC) => Ok(Kind::Gguf),
        // a zip file, or a pickle of protocol 2
        _ if start.starts_with(b"PK\x03\x04") || start.starts_with(&[0x80, 2]) => {
            let expected = "model.safetensors and config.json in a folder; transformers writes them: \
                            AutoModelForCausalLM.from_pretrained(FOLDER).save_pretrained(NEW, safe_serialization=True)";
            Err(Error::field(path, "kind of file", "one of torch.save, which is not read", expected))
        }
        _ if start[8] == b'{' => sniff_safetensors(path, source),
        _ => Err(unknown(path, format!("not known (it starts with {first})"))),
    }
}

fn unknown(path: &Path, found: String) -> Error {
    let expected = "a .bin (model, debug state, tokenizer, shard), a safetensors file or a .toml";
    Error::field(path, "kind of file", found, expected)
}

fn sniff_safetensors(path: &Path, source: Source) -> Result<Kind> {
    let file = SafeTensors::new(source)?;
    if file.header().meta("format") == Some(answer_key::FORMAT) {
        return Ok(Kind::AnswerKey);
    }
    let named = path
        .file_name()
        .and_then(|name| name.to_str())
        .is_some_and(|name| name == hf::HF_WEIGHTS || hf::is_part_name(hf::MODEL, name));
    Ok(if named && path.with_file_name("config.json").exists() { Kind::HfFile } else { Kind::SafeTensors })
}

fn sniff_folder(path: &Path) -> Result<Kind> {
    if path.join("trainer.json").exists() {
        return Ok(Kind::Checkpoint);
    }
    if path.join("config.json").exists() {
        return Ok(Kind::HfFolder);
    }
    if path.join(peft::ADAPTER_CONFIG).exists() {
        return Ok(Kind::Adapter);
    }
    if is_run(path) || has_checkpoints(path) {
        return Ok(Kind::Run);
    }
    Err(Error::field(
        path,
        "folder",
        "without config.json",
        "a run, a checkpoint or a Hugging Face folder: config.json and model.safetensors, in one file or several",
    ))
}
