//! The metadata of an answer key.

use std::collections::BTreeMap;
use std::path::Path;

use serde::{Deserialize, Serialize};

use ironhorse_core::Optimizer;

use crate::error::one_of;
use crate::format::safetensors::Header;
use crate::model::{Lora, ModelConfig, Targets};
use crate::{Error, Result};
use ironhorse_core::DropRate;

/// The value of the metadata `format` that makes a safetensors file an answer key.
pub const FORMAT: &str = "ironhorse-answer-key";
/// The version that is read and written.
pub(super) const VERSION: &str = "1";

/// The optimizer whose steps a key records. Fields that other tools add are ignored.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct KeyOptimizer {
    /// "adamw" or "muon".
    pub name: String,
    /// The learning rate, the same in every step.
    pub lr: f64,
    /// Decay of the first moment.
    pub beta1: f64,
    /// Decay of the second moment.
    pub beta2: f64,
    /// Added to the root of the second moment.
    pub eps: f64,
    /// Weight decay.
    pub weight_decay: f64,
    /// The number of steps; 0 if the key records none.
    pub steps: usize,
    /// Which parameters decay: "matrices".
    #[serde(default = "matrices")]
    pub decay: String,
}

fn matrices() -> String {
    "matrices".into()
}

/// The metadata, parsed.
#[derive(Clone, Debug, PartialEq)]
pub struct KeyMeta {
    /// The model's sizes.
    pub config: ModelConfig,
    /// The precision PyTorch computed in: "f32", "bf16".
    pub dtype: String,
    /// The seed of weights, tokens and the masks of dropout.
    pub seed: Option<u64>,
    /// How often elements were dropped.
    pub dropout: DropRate,
    /// The activations in execution order.
    pub acts: Vec<String>,
    /// The optimizer behind `losses` and `after.*`.
    pub optimizer: Option<KeyOptimizer>,
    /// The adapters whose gradients it has, where the weights were frozen.
    pub lora: Option<Lora>,
    /// The β of the loss of pairs, where the loss is that; the key then has `pairs` and `reference`.
    pub preference: Option<f32>,
    /// CRC-32 of tensors' bytes.
    pub crc32: BTreeMap<String, u32>,
    /// PyTorch's own error against f64, per tensor of the optimizer's steps.
    pub torch_error: BTreeMap<String, f64>,
    /// PyTorch's own error in bf16, per tensor; empty if it was not measured.
    pub torch_error_bf16: BTreeMap<String, f64>,
}

impl KeyMeta {
    /// Checks and parses the metadata.
    pub(super) fn parse(header: &Header, path: &Path) -> Result<Self> {
        expect(header, path, "format", FORMAT)?;
        expect(header, path, "version", VERSION)?;
        let config = config(header, path)?;
        let seed = header.meta("seed").map(|text| {
            text.parse()
                .map_err(|_| Error::field(path, "metadata `seed`", format!("{text:?}"), "a whole number"))
        });
        let acts: Vec<String> = json(header, path, "acts")?.unwrap_or_default();
        let optimizer: Option<KeyOptimizer> = json(header, path, "optimizer")?;
        if let Some(optimizer) = &optimizer {
            check_optimizer(optimizer, path)?;
        }
        Ok(Self {
            config,
            dtype: need(header, path, "dtype")?.to_owned(),
            seed: seed.transpose()?,
            dropout: dropout(header, path)?,
            acts,
            optimizer,
            lora: lora(header, path)?,
            preference: preference(header, path)?,
            crc32: json(header, path, "crc32")?.unwrap_or_default(),
            torch_error: json(header, path, "torch_error")?.unwrap_or_default(),
            torch_error_bf16: json(header, path, "torch_error_bf16")?.unwrap_or_default(),
        })
    }
}

/// The sizes of a model of a known kind.
fn config(header: &Header, path: &Path) -> Result<ModelConfig> {
    let (found, kinds) = (header.meta("model"), ModelConfig::kinds());
    let Some(&kind) = kinds.iter().find(|kind| found == Some(**kind)) else {
        let found = found.map_or("missing".into(), |found| format!("{found:?}"));
        return Err(Error::field(
            path,
            "metadata `model`",
            found,
            one_of(kinds.iter().map(|kind| format!("{kind:?}"))),
        ));
    };
    let model = match kind {
        "gpt2" => "a GPT-2".to_owned(),
        "moe" => "a mixture of experts".to_owned(),
        "llama" => "a Llama".to_owned(),
        kind => format!("a model of kind {kind}"),
    };
    let wrong = |found: String| Error::field(path, "metadata `config`", found, format!("sizes of {model}"));
    let text = need(header, path, "config")?;
    let config =
        ModelConfig::from_foreign_json(kind, text).map_err(|error| wrong(format!("wrong ({error})")))?;
    if config.kind() == kind { Ok(config) } else { Err(wrong(format!("that of a {}", config.kind()))) }
}

/// The rate of dropout; 0 where the key does not say.
fn dropout(header: &Header, path: &Path) -> Result<DropRate> {
    let Some(text) = header.meta("dropout") else { return Ok(DropRate::default()) };
    let rate = text.parse().ok().and_then(DropRate::new);
    rate.ok_or_else(|| {
        Error::field(path, "metadata `dropout`", format!("{text:?}"), "a number of at least 0 and below 1")
    })
}

/// The adapters: `{"r": 4, "alpha": 8, "targets": "q,v"}`.
fn lora(header: &Header, path: &Path) -> Result<Option<Lora>> {
    #[derive(Deserialize)]
    struct Adapters {
        r: usize,
        alpha: f64,
        targets: String,
    }
    let Some(Adapters { r, alpha, targets }) = json(header, path, "lora")? else { return Ok(None) };
    let targets = Targets::parse(&targets).map_err(|error| error.in_file(path))?;
    Ok(Some(Lora { rank: r, alpha, targets }))
}

/// The loss of pairs: `{"beta": 0.1}`.
fn preference(header: &Header, path: &Path) -> Result<Option<f32>> {
    #[derive(Deserialize)]
    struct Dpo {
        beta: f64,
    }
    let Some(Dpo { beta }) = json(header, path, "dpo")? else { return Ok(None) };
    if beta > 0.0 && beta <= f64::from(f32::MAX) {
        return Ok(Some(beta as f32));
    }
    Err(Error::field(path, "metadata `dpo`", format!("a beta of {beta}"), "a number above 0"))
}

fn need<'a>(header: &'a Header, path: &Path, key: &str) -> Result<&'a str> {
    let found = header.meta(key);
    found.ok_or_else(|| Error::field(path, format!("metadata `{key}`"), "missing", "in an answer key"))
}

fn expect(header: &Header, path: &Path, key: &str, value: &str) -> Result<()> {
    match header.meta(key) {
        Some(found) if found == value => Ok(()),
        found => {
            let found = found.map_or("missing".into(), |found| format!("{found:?}"));
            Err(Error::field(path, format!("metadata `{key}`"), found, format!("{value:?}")))
        }
    }
}

fn json<'a, T: Deserialize<'a>>(header: &'a Header, path: &Path, key: &str) -> Result<Option<T>> {
    let parsed = header.meta(key).map(serde_json::from_str).transpose();
    parsed.map_err(|error| {
        Error::field(
            path,
            format!("metadata `{key}`"),
            format!("not valid ({error})"),
            "JSON of an answer key",
        )
    })
}

fn check_optimizer(optimizer: &KeyOptimizer, path: &Path) -> Result<()> {
    let wrong = |key: &str, found: String, expected: &str| {
        Err(Error::field(path, format!("optimizer `{key}`"), found, expected))
    };
    if Optimizer::named(&optimizer.name).is_none() {
        return wrong("name", format!("{:?}", optimizer.name), "\"adamw\" or \"muon\"");
    }
    if optimizer.decay != "matrices" {
        return wrong("decay", format!("{:?}", optimizer.decay), "\"matrices\"");
    }
    Ok(())
}
