//! One interface to read weights from every kind of file.

use std::ffi::OsStr;
use std::io::{Read, Seek};
use std::path::{Path, PathBuf};

use super::answer_key::AnswerKey;
use super::checkpoint::{Checkpoint, TrainerState, named_checkpoint};
use super::hf::{HfFolder, TextTokens};
use super::llmc_model::{ModelFile, check_finite, row_len};
use super::peft::{AdapterFolder, Merged};
use super::sniff::{Kind, sniff};
use super::tokenizer::{NamedFiles, tokenizer_files};
use crate::model::ModelConfig;
use crate::{Error, Result};

/// A source of the parameters of a model: a `.bin`, a Hugging Face folder, a run, a checkpoint or an answer key.
pub trait WeightSource: Send {
    /// The model's sizes.
    fn config(&self) -> ModelConfig;

    /// Fills `out` with a parameter by its name in the parameter table; padding rows of the vocabulary that are not in
    /// the file are 0. NaN and infinite weights are not rejected.
    fn read_unchecked(&mut self, name: &str, out: &mut [f32]) -> Result<()>;

    /// The file or folder.
    fn path(&self) -> &Path;

    /// The same; NaN and infinite weights are an error.
    fn read_tensor(&mut self, name: &str, out: &mut [f32]) -> Result<()> {
        self.read_unchecked(name, out)?;
        let spec = |name: &str| self.config().tensors().into_iter().find(|spec| spec.name == name);
        check_finite(self.path(), name, out, || spec(name).map_or(1, |spec| row_len(&spec)))
    }

    /// The tokens before and after a text, and what else a `config.json` says.
    fn text_tokens(&self) -> TextTokens {
        TextTokens::Last
    }

    /// The state of training, if this is a checkpoint.
    fn trainer(&self) -> Option<&TrainerState> {
        None
    }

    /// For weights with adapters in them: the base, and the weights that differ from it.
    fn adapted(&self) -> Option<AdaptedFrom> {
        None
    }

    /// The files of the tokenizer in the same folder and `generation_config.json`; empty without any.
    fn tokenizer_files(&self) -> Result<NamedFiles> {
        Ok(Vec::new())
    }
}

/// What weights with adapters in them are made of.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AdaptedFrom {
    /// The base.
    pub base: PathBuf,
    /// The weights that have adapters.
    pub names: Vec<String>,
}

/// Implements [`WeightSource`] by the methods of the same names that the readers have themselves.
macro_rules! weight_source {
    ($([$($generics:tt)*] $type:ty { $($more:tt)* })*) => {
        $(impl $($generics)* WeightSource for $type {
            fn config(&self) -> ModelConfig {
                <$type>::config(self).into()
            }

            fn read_unchecked(&mut self, name: &str, out: &mut [f32]) -> Result<()> {
                <$type>::read_tensor(self, name, out)
            }

            fn path(&self) -> &Path {
                <$type>::path(self)
            }

            $($more)*
        })*
    };
}

weight_source! {
    [<R: Read + Seek + Send>] ModelFile<R> {}
    [<R: Read + Seek + Send>] AnswerKey<R> {}
    [<R: Read + Seek + Send>] HfFolder<R> {
        fn text_tokens(&self) -> TextTokens {
            HfFolder::text_tokens(self).clone()
        }

        fn tokenizer_files(&self) -> Result<NamedFiles> {
            tokenizer_files(self.path())
        }
    }
    [] Checkpoint {
        fn text_tokens(&self) -> TextTokens {
            Checkpoint::text_tokens(self)
        }

        fn trainer(&self) -> Option<&TrainerState> {
            Some(Checkpoint::trainer(self))
        }

        fn tokenizer_files(&self) -> Result<NamedFiles> {
            Checkpoint::tokenizer_files(self)
        }
    }
}

/// Opens the weights in a file or folder of any kind, or in the best checkpoint of a run by `RUN/best`. NaN and infinite weights are an error when they are read.
pub fn open_weights(path: &Path) -> Result<Box<dyn WeightSource>> {
    let path = named_checkpoint(path)?;
    open_kind(&path, sniff(&path)?)
}

/// The same for a file whose kind is known.
fn open_kind(path: &Path, kind: Kind) -> Result<Box<dyn WeightSource>> {
    Ok(match kind {
        Kind::Model => Box::new(ModelFile::open(path)?),
        Kind::HfFolder => Box::new(HfFolder::open(path)?),
        Kind::HfFile => Box::new(HfFolder::open(path.parent().unwrap_or(Path::new(".")))?),
        Kind::Checkpoint => trained(Checkpoint::open_weights(path)?)?,
        Kind::Run => trained(Checkpoint::of_run(path)?)?,
        Kind::AnswerKey => Box::new(AnswerKey::open(path)?),
        other => {
            return Err(Error::field(
                path,
                "kind of file",
                other,
                "weights: a model .bin, a Hugging Face folder, a run, a checkpoint or an answer key",
            ));
        }
    })
}

/// The weights of a checkpoint; of one with adapters those of its base with the adapters in them.
fn trained(checkpoint: Checkpoint) -> Result<Box<dyn WeightSource>> {
    let Some(adapter) = checkpoint.adapter() else { return Ok(Box::new(checkpoint)) };
    let base = open_weights(&adapter.base).map_err(|error| base_missing(&checkpoint, error))?;
    let merged = Merged::new(base, AdapterFolder::open(checkpoint.path())?)?;
    Ok(Box::new(merged.with_trainer(checkpoint.trainer().clone())))
}

fn base_missing(checkpoint: &Checkpoint, error: Error) -> Error {
    Error::field(
        checkpoint.path(),
        "base of the adapters",
        format!("not readable ({error})"),
        "the model it was trained with",
    )
}

/// The value of `--model`: sizes to initialise at random, or weights.
pub enum ModelChoice {
    /// Sizes only: a name such as d12 or moe-tiny, `n_layer=...,...`, or a TOML file.
    Sizes(ModelConfig),
    /// A file or folder with weights.
    Weights(Box<dyn WeightSource>),
}

impl ModelChoice {
    /// Parses a name, sizes in one line, or a path.
    pub fn parse(text: &str) -> Result<Self> {
        Self::parse_os(text.as_ref())
    }

    /// The same for a command-line argument; the name of a file need not be UTF-8.
    pub fn parse_os(argument: &OsStr) -> Result<Self> {
        let (path, text) = (named_checkpoint(Path::new(argument))?, argument.to_string_lossy());
        let (path, text) = (path.as_ref(), text.as_ref());
        if !path.exists() {
            let like_a_path = text.contains(['/', '\\']) || path.extension().is_some();
            let named = ModelConfig::named(text).is_some(); // moe-6.9b ends like a file
            if like_a_path && !named && !text.contains('=') {
                return Err(Error::NotFound { path: path.to_owned(), kind: "file or folder" });
            }
            return ModelConfig::parse(text).map(Self::Sizes);
        }
        match sniff(path)? {
            Kind::Toml => ModelConfig::from_toml_file(path).map(Self::Sizes),
            kind => open_kind(path, kind).map(Self::Weights),
        }
    }

    /// The sizes, in either case.
    pub fn config(&self) -> ModelConfig {
        match self {
            Self::Sizes(config) => *config,
            Self::Weights(source) => source.config(),
        }
    }
}
