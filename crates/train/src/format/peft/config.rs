//! `adapter_config.json`: every setting that changes what is computed is obeyed or refused by its name.

use super::BaseFacts;
use crate::model::{Lora, Target};
use crate::{Error, Result};
use serde_json::{Map, Value, json};
use std::path::Path;

/// What we need of the file.
pub(super) struct AdapterConfig {
    pub rank: usize,
    pub alpha: f64,
    /// The name or path of the base.
    pub base: String,
}

/// Settings that change nothing of what a loaded adapter computes, and those that are read below.
const FREE: [&str; 16] = [
    "auto_mapping",
    "base_model_name_or_path",
    "exclude_modules",
    "inference_mode",
    "layers_pattern",
    "lora_alpha",
    "lora_dropout",
    "megatron_core",
    "peft_version",
    "qalora_group_size",
    "r",
    "revision",
    "runtime_config",
    "target_modules",
    "task_type",
    "use_rslora",
];

/// Settings with the values that are supported besides null, false, and empty lists and objects.
const SUPPORTED: [(&str, &[&str]); 3] = [
    ("peft_type", &["LORA"]),
    ("bias", &["none"]),
    // others change the base when they start
    ("init_lora_weights", &["true", "gaussian", "orthogonal", "eva"]),
];

/// Whether a setting asks for nothing.
fn is_neutral(value: &Value) -> bool {
    match value {
        Value::Null | Value::Bool(false) => true,
        Value::Array(list) => list.is_empty(),
        Value::Object(map) => map.is_empty(),
        _ => false,
    }
}

impl AdapterConfig {
    pub fn read(path: &Path) -> Result<Self> {
        let bytes = std::fs::read(path).map_err(|source| Error::io(path, "read", source))?;
        let settings: Map<String, Value> = serde_json::from_slice(&bytes).map_err(|error| {
            Error::field(path, "content", format!("not valid ({error})"), "the JSON of an adapter of PEFT")
        })?;
        for (key, value) in settings.iter().filter(|(key, _)| !FREE.contains(&key.as_str())) {
            let allowed = SUPPORTED.iter().find(|(name, _)| name == key).map_or(&[][..], |(_, words)| words);
            let word = value.as_str().map_or_else(|| value.to_string(), str::to_owned);
            if !is_neutral(value) && !allowed.contains(&word.as_str()) {
                let expected = match allowed {
                    [] => "not set: it is not supported".to_owned(),
                    words => words.join(" or "),
                };
                return Err(Error::field(path, key, value, expected));
            }
        }
        let number = |key: &str| {
            let value = settings.get(key).unwrap_or(&Value::Null);
            value
                .as_f64()
                .filter(|number| *number > 0.0 && number.is_finite())
                .ok_or_else(|| Error::field(path, key, value, "a number above 0"))
        };
        let (rank, alpha) = (number("r")?, number("lora_alpha")?);
        if rank.fract() != 0.0 || rank > f64::from(u32::MAX) {
            return Err(Error::field(path, "r", rank, "a whole number"));
        }
        // rsLoRA divides alpha by the root of the rank
        let root = settings.get("use_rslora").and_then(Value::as_bool).unwrap_or(false);
        let alpha = if root { alpha * rank.sqrt() } else { alpha };
        let base =
            settings.get("base_model_name_or_path").and_then(Value::as_str).unwrap_or("an unnamed base");
        Ok(Self { rank: rank as usize, alpha, base: base.to_owned() })
    }
}

/// The file's text for these adapters.
pub(in crate::format) fn config_text(lora: &Lora, base: &BaseFacts) -> String {
    // PEFT declares alpha as a whole number
    let alpha = if lora.alpha.fract() == 0.0 { json!(lora.alpha as i64) } else { json!(lora.alpha) };
    let settings = json!({
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base.name,
        "r": lora.rank,
        "lora_alpha": alpha,
        "lora_dropout": 0.0,
        "target_modules": lora.targets.iter().map(Target::module).collect::<Vec<_>>(),
        "bias": "none",
        "fan_in_fan_out": false,
        "inference_mode": true,
        "init_lora_weights": true,
        "use_rslora": false,
        "use_dora": false,
        "modules_to_save": null,
        "layers_to_transform": null,
        "rank_pattern": {},
        "alpha_pattern": {},
        "revision": null,
    });
    format!("{settings:#}\n")
}
