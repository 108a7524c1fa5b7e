//! Our checkpoints: a Hugging Face folder with the optimizer's state and the trainer's position beside it.
//!
//! `model.safetensors`, `config.json` · `state.safetensors` (m.NAME, v.NAME) · `tokenizer.bin` (optional) ·
//! `trainer.json`, written last, with the checksum of every other file.

use std::collections::BTreeMap;
use std::fs::File;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::hf::{self, HF_CONFIG, HF_WEIGHTS, HfFolder, HfOptions, TextTokens};
use super::safetensors::{Dtype, Header, SafeTensors, TensorInfo, Writer};
use super::stacked::{expect_numel, filled};
use super::tokenizer::{TOKENIZER, Tokenizer};
use super::{Elem, Source, atomic};
use crate::model::{ModelConfig, TensorSpec};
use crate::{Error, Result};

const STATE: &str = "state.safetensors";
const TRAINER: &str = "trainer.json";
const FILES: [&str; 5] = [HF_WEIGHTS, HF_CONFIG, STATE, TRAINER, TOKENIZER];
const FORMAT: &str = "ironhorse-checkpoint";

/// Where training stands. What data loader, random numbers and settings need to go on is theirs to define.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TrainerState {
    /// Steps done.
    pub step: u64,
    /// The position in the data.
    pub data: Value,
    /// The state of the random numbers.
    pub rng: Value,
    /// The settings of the run.
    pub settings: Value,
}

/// `trainer.json` as it is written.
#[derive(Serialize, Deserialize)]
struct TrainerFile {
    format: String,
    version: u32,
    step: u64,
    data: Value,
    rng: Value,
    settings: Value,
    config: Value,
    crc32: BTreeMap<String, u32>,
}

/// What `trainer.json` says.
#[derive(Clone, Debug, PartialEq)]
pub struct TrainerJson {
    /// Where training stands.
    pub state: TrainerState,
    /// The model's sizes.
    pub config: ModelConfig,
    /// CRC-32 of the other files.
    pub crc32: BTreeMap<String, u32>,
}

impl TrainerJson {
    /// Parses and checks the file's bytes.
    pub fn parse(bytes: &[u8], path: &Path) -> Result<Self> {
        let file: TrainerFile = serde_json::from_slice(bytes).map_err(|error| {
            Error::field(path, "content", format!("not valid ({error})"), "the JSON of a checkpoint")
        })?;
        if file.format != FORMAT {
            return Err(Error::field(path, "format", format!("{:?}", file.format), format!("{FORMAT:?}")));
        }
        if file.version != 1 {
            return Err(Error::field(path, "version", file.version, 1));
        }
        let config = ModelConfig::from_json(&file.config.to_string())
            .map_err(|error| Error::field(path, "config", format!("wrong ({error})"), "sizes of a model"))?;
        for name in [HF_WEIGHTS, HF_CONFIG, STATE] {
            if !file.crc32.contains_key(name) {
                return Err(Error::field(path, format!("crc32 of {name}"), "missing", "a number"));
            }
        }
        if let Some(name) = file.crc32.keys().find(|name| !FILES.contains(&name.as_str())) {
            return Err(Error::field(path, "crc32", format!("of {name:?}"), FILES.join(", ")));
        }
        let TrainerFile { step, data, rng, settings, crc32, .. } = file;
        Ok(Self { state: TrainerState { step, data, rng, settings }, config, crc32 })
    }

    fn to_text(&self) -> Result<String> {
        let file = TrainerFile {
            format: FORMAT.to_owned(),
            version: 1,
            step: self.state.step,
            data: self.state.data.clone(),
            rng: self.state.rng.clone(),
            settings: self.state.settings.clone(),
            config: self.config.to_json(),
            crc32: self.crc32.clone(),
        };
        let text = serde_json::to_string_pretty(&file);
        text.map_err(|error| Error::Config(format!("the trainer's state is not JSON: {error}")))
    }
}

/// Which of a parameter's tensors is asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Part {
    /// The parameter itself, in the master precision.
    Weight,
    /// AdamW's first moment.
    M,
    /// AdamW's second moment.
    V,
}

impl Part {
    fn name(self, spec: &TensorSpec) -> String {
        match self {
            Self::Weight => spec.name.clone(),
            Self::M => format!("m.{}", spec.name),
            Self::V => format!("v.{}", spec.name),
        }
    }
}

/// What goes into a checkpoint besides the tensors.
#[derive(Clone, Copy, Debug)]
pub struct CheckpointParts<'a> {
    /// The model's sizes.
    pub config: &'a ModelConfig,
    /// How the weights are stored: F32 to resume exactly. The moments are always F32.
    pub elem: Elem,
    /// Where training stands.
    pub trainer: &'a TrainerState,
    /// The tokenizer, for `generate`.
    pub tokenizer: Option<&'a Tokenizer>,
}

/// Writes a checkpoint atomically, replacing an earlier one of the name. `fill` is called once per part of each parameter
/// with a zeroed buffer of its shape in the parameter table.
pub fn write_checkpoint(
    folder: &Path,
    parts: &CheckpointParts<'_>,
    mut fill: impl FnMut(Part, &TensorSpec, &mut [f32]) -> Result<()>,
) -> Result<()> {
    parts.config.validate()?;
    atomic::write_folder(
        folder,
        |name| FILES.contains(&name),
        |folder| {
            let mut crc32 = BTreeMap::new();
            let tokens = parts.tokenizer.map_or(TextTokens::Last, |it| TextTokens::Eot(it.eot));
            let options = HfOptions { tokens, ..HfOptions::new(parts.elem) };
            crc32.insert(HF_CONFIG.to_owned(), hf::write_config_json(folder, parts.config, &options)?);
            let weights = |spec: &TensorSpec, out: &mut [f32]| fill(Part::Weight, spec, out);
            crc32.insert(HF_WEIGHTS.to_owned(), hf::write_weights(folder, parts.config, &options, weights)?);
            crc32.insert(STATE.to_owned(), write_state(folder, parts.config, &mut fill)?);
            if let Some(tokenizer) = parts.tokenizer {
                let written = atomic::write_file(&folder.join(TOKENIZER), |sink| {
                    tokenizer.write_to(sink)?;
                    Ok(sink.crc32())
                });
                crc32.insert(TOKENIZER.to_owned(), written?);
            }
            let json = TrainerJson { state: parts.trainer.clone(), config: *parts.config, crc32 };
            let text = json.to_text()?;
            atomic::write_file(&folder.join(TRAINER), |sink| sink.put(text.as_bytes()))
        },
    )
}

fn write_state(
    folder: &Path,
    config: &ModelConfig,
    fill: &mut impl FnMut(Part, &TensorSpec, &mut [f32]) -> Result<()>,
) -> Result<u32> {
    let table = config.tensors();
    let list: Vec<(Part, &TensorSpec)> =
        [Part::M, Part::V].into_iter().flat_map(|part| table.iter().map(move |spec| (part, spec))).collect();
    let infos =
        list.iter().map(|(part, spec)| TensorInfo::new(part.name(spec), Dtype::F32, spec.shape.dims()));
    let header = Header::build(&[], &infos.collect::<Vec<_>>())?;
    atomic::write_file(&folder.join(STATE), |sink| {
        let mut writer = Writer::new(sink, header)?;
        let mut values = Vec::new();
        for (part, spec) in list {
            filled(spec, &mut values, |spec, out| fill(part, spec, out))?;
            writer.put_f32(&part.name(spec), &values)?;
        }
        writer.finish()?;
        Ok(sink.crc32())
    })
}

/// An open checkpoint, whose files have the checksums they were written with.
#[derive(Debug)]
pub struct Checkpoint {
    folder: PathBuf,
    trainer: TrainerJson,
    weights: HfFolder<File>,
    /// Only where it was asked for.
    state: Option<SafeTensors<File>>,
    tokenizer: Option<Tokenizer>,
}

impl Checkpoint {
    /// Opens a folder; reads every file once to compare its checksum.
    pub fn open(folder: &Path) -> Result<Self> {
        let mut checkpoint = Self::open_but(folder, None)?;
        checkpoint.state = Some(SafeTensors::open(&folder.join(STATE))?);
        Ok(checkpoint)
    }

    /// Opens a folder for its weights: the optimizer's state, twice their size, is neither read nor needed.
    pub fn open_weights(folder: &Path) -> Result<Self> {
        Self::open_but(folder, Some(STATE))
    }

    /// Checks every file but one. There is no state yet.
    fn open_but(folder: &Path, unread: Option<&str>) -> Result<Self> {
        let path = folder.join(TRAINER);
        let json = std::fs::read(&path).map_err(|source| Error::io(&path, "read", source))?;
        let trainer = TrainerJson::parse(&json, &path)?;
        for (name, &want) in trainer.crc32.iter().filter(|(name, _)| Some(name.as_str()) != unread) {
            let path = folder.join(name);
            let found = crc32_of(&path)?;
            if found != want {
                return Err(Error::field(&path, "crc32", found, format!("{want}, as trainer.json says")));
            }
        }
        let mut weights = HfFolder::open(folder)?;
        if !weights.config().computes_as(&trainer.config) {
            let expected = format!("that of config.json, {}", weights.config().to_json());
            return Err(Error::field(&path, "config", trainer.config.to_json(), expected));
        }
        weights.set_config(trainer.config);
        let tokenizer =
            trainer.crc32.contains_key(TOKENIZER).then(|| Tokenizer::open(&folder.join(TOKENIZER)));
        let tokenizer = tokenizer.transpose()?;
        Ok(Self { folder: folder.to_owned(), trainer, weights, state: None, tokenizer })
    }

    /// The model's sizes.
    pub fn config(&self) -> &ModelConfig {
        &self.trainer.config
    }

    /// Where training stood.
    pub fn trainer(&self) -> &TrainerState {
        &self.trainer.state
    }

    /// The tokenizer, if there is one.
    pub fn tokenizer(&self) -> Option<&Tokenizer> {
        self.tokenizer.as_ref()
    }

    /// The tokens before and after a text: the tokenizer's, or what `config.json` says.
    pub fn text_tokens(&self) -> TextTokens {
        match &self.tokenizer {
            Some(tokenizer) => TextTokens::Eot(tokenizer.eot),
            None => self.weights.text_tokens().clone(),
        }
    }

    /// The folder.
    pub fn path(&self) -> &Path {
        &self.folder
    }

    /// Reads one parameter by its name in the parameter table.
    pub fn read_tensor(&mut self, name: &str, out: &mut [f32]) -> Result<()> {
        self.weights.read_tensor(name, out)
    }

    /// Reads one part of a parameter.
    pub fn read_part(&mut self, part: Part, spec: &TensorSpec, out: &mut [f32]) -> Result<()> {
        if part == Part::Weight {
            return self.read_tensor(&spec.name, out);
        }
        expect_numel(&spec.name, out.len(), spec.shape.numel())?;
        let Some(state) = &mut self.state else {
            return Err(Error::Config(format!("{}: was opened for its weights only", self.folder.display())));
        };
        state.read_f32(&part.name(spec), out)
    }
}

fn crc32_of(path: &Path) -> Result<u32> {
    let mut source = Source::open(path)?;
    let mut crc = crc32fast::Hasher::new();
    let len = source.len();
    source.for_each_chunk(0, len, |chunk| {
        crc.update(chunk);
        Ok(())
    })?;
    Ok(crc.finalize())
}

#[cfg(test)]
mod tests;
