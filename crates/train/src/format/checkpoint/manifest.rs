//! `trainer.json`: the state of training, and the sizes and checksums of the other files.

use std::collections::BTreeMap;
use std::path::Path;

use ironhorse_core::{DType, Optimizer, Precision};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::super::hf::{HF_CONFIG, HF_INDEX, HF_WEIGHTS};
use super::super::peft::{ADAPTER_CONFIG, ADAPTER_MODEL};
use super::adapter::{AdapterJson, CheckpointAdapter};
use super::is_ours;
use crate::error::one_of;
use crate::model::{Adapted, ModelConfig};
use crate::{Error, Result};

const FORMAT: &str = "ironhorse-checkpoint";
/// The current version. Version 1 had only f32 weights and moments and could not be resumed; its weights can still be
/// read.
const VERSION: u32 = 2;

/// The lowest validation loss of a run so far.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Best {
    /// Steps done when it was measured.
    pub step: u64,
    /// The loss.
    pub val_loss: f32,
}

/// The state of training. The data loader, the random numbers and the settings define the contents of their fields.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct TrainerState {
    /// Steps done.
    pub step: u64,
    /// The position in the data.
    pub data: Value,
    /// The state of the random numbers.
    pub rng: Value,
    /// The lowest validation loss so far.
    #[serde(default)]
    pub best: Option<Best>,
    /// The validation loss after this very step, where it was measured.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub validated: Option<Best>,
    /// Consecutive steps, up to this one, whose loss or gradient norm was non-finite.
    #[serde(default)]
    pub bad_in_a_row: u32,
    /// The step at which too many of them made the run go back to a checkpoint, if that was recent.
    #[serde(default)]
    pub rolled_back_from: Option<u64>,
    /// The bits of the largest elements of earlier steps, where tensors in 8 bits are scaled by them
    /// ([`Session::scales`](crate::session::Session::scales)).
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub scale_bits: Vec<u32>,
    /// The settings of the run.
    pub settings: Value,
}

impl TrainerState {
    /// What [`scale_bits`](Self::scale_bits) are the bits of.
    pub fn scales(&self) -> Vec<f32> {
        self.scale_bits.iter().map(|&bits| f32::from_bits(bits)).collect()
    }
}

/// The element types of a run, by name.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct PrecisionNames {
    weights: String,
    grads: String,
    master: String,
    moments: String,
    /// Not in files from before there was a choice, and not with AdamW, so that those are the same.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    optimizer: Option<String>,
}

/// The file as it is written.
#[derive(Serialize, Deserialize)]
struct TrainerFile {
    format: String,
    version: u32,
    #[serde(flatten)]
    state: TrainerState,
    config: Value,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    precision: Option<PrecisionNames>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    adapter: Option<AdapterJson>,
    #[serde(default)]
    bytes: BTreeMap<String, u64>,
    crc32: BTreeMap<String, u32>,
}

/// The contents of `trainer.json`.
#[derive(Clone, Debug, PartialEq)]
pub struct TrainerJson {
    /// The state of training.
    pub state: TrainerState,
    /// The model's sizes.
    pub config: ModelConfig,
    /// The element types of the run; `None` in files of version 1.
    pub precision: Option<Precision>,
    /// The adapters that the run trains, if it does not train the model itself.
    pub adapter: Option<CheckpointAdapter>,
    /// Sizes of the other files; empty in files of version 1.
    pub bytes: BTreeMap<String, u64>,
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
        if !(1..=VERSION).contains(&file.version) {
            return Err(Error::field(path, "version", file.version, format!("1 to {VERSION}")));
        }
        let config = ModelConfig::from_json(&file.config.to_string())
            .map_err(|error| Error::field(path, "config", format!("wrong ({error})"), "sizes of a model"))?;
        let has = |name: &str| file.crc32.contains_key(name);
        let model = [(HF_CONFIG, has(HF_CONFIG)), (HF_WEIGHTS, has(HF_WEIGHTS) || has(HF_INDEX))];
        let peft = [ADAPTER_CONFIG, ADAPTER_MODEL].map(|name| (name, has(name)));
        for (name, there) in if file.adapter.is_some() { peft } else { model } {
            if !there {
                return Err(Error::field(path, format!("crc32 of {name}"), "missing", "a number"));
            }
        }
        if let Some(name) = file.crc32.keys().chain(file.bytes.keys()).find(|name| !is_ours(name)) {
            let expected = "files of a checkpoint, such as model.safetensors";
            return Err(Error::field(path, "crc32", format!("of {name:?}"), expected));
        }
        if file.version > 1
            && let Some(name) = file.crc32.keys().find(|name| !file.bytes.contains_key(name.as_str()))
        {
            return Err(Error::field(path, format!("bytes of {name}"), "missing", "a number"));
        }
        let precision = match &file.precision {
            Some(names) => Some(precision_of(names, path)?),
            None if file.version == 1 => None,
            None => return Err(Error::field(path, "precision", "missing", "the run's element types")),
        };
        let TrainerFile { state, bytes, crc32, adapter, .. } = file;
        let adapter = adapter.map(|adapter| adapter.parse(path)).transpose()?;
        if let Some(adapter) = &adapter {
            adapter.lora.check(&config).map_err(|error| error.in_file(path))?;
        }
        Ok(Self { state, config, precision, adapter, bytes, crc32 })
    }

    /// The model, and its adapters if it has any.
    pub fn model(&self) -> Adapted {
        Adapted { config: self.config, lora: self.adapter.as_ref().map(|adapter| adapter.lora) }
    }

    /// The file's text. The same state gives the same bytes.
    pub(super) fn to_text(&self) -> serde_json::Result<String> {
        let file = TrainerFile {
            format: FORMAT.to_owned(),
            version: VERSION,
            state: self.state.clone(),
            config: self.config.to_json(),
            precision: self.precision.map(|precision| PrecisionNames {
                weights: precision.weights.name().to_owned(),
                grads: precision.grads.name().to_owned(),
                master: precision.master.name().to_owned(),
                moments: precision.moments.name().to_owned(),
                optimizer: (precision.optimizer != Optimizer::AdamW)
                    .then(|| precision.optimizer.name().to_owned()),
            }),
            adapter: self.adapter.as_ref().map(AdapterJson::new),
            bytes: self.bytes.clone(),
            crc32: self.crc32.clone(),
        };
        serde_json::to_string_pretty(&file)
    }
}

fn optimizer_of(name: Option<&str>, path: &Path) -> Result<Optimizer> {
    let Some(name) = name else { return Ok(Optimizer::AdamW) };
    Optimizer::named(name).ok_or_else(|| {
        let expected = one_of(Optimizer::ALL.map(Optimizer::name));
        Error::field(path, "precision.optimizer", format!("{name:?}"), expected)
    })
}

fn precision_of(names: &PrecisionNames, path: &Path) -> Result<Precision> {
    let dtype = |field: &str, name: &str, allowed: &[DType]| {
        allowed.iter().copied().find(|dtype| dtype.name() == name).ok_or_else(|| {
            let expected = one_of(allowed.iter().map(|dtype| dtype.name()));
            Error::field(path, format!("precision.{field}"), format!("{name:?}"), expected)
        })
    };
    let floats = [DType::F32, DType::BF16];
    Ok(Precision {
        weights: dtype("weights", &names.weights, &floats)?,
        grads: dtype("grads", &names.grads, &floats)?,
        master: dtype("master", &names.master, &[DType::F32, DType::I16])?,
        moments: dtype("moments", &names.moments, &floats)?,
        optimizer: optimizer_of(names.optimizer.as_deref(), path)?,
        fp8: None, // a choice of the products, not of what is kept
    })
}
