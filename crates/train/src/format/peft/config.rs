//! `adapter_config.json`: every setting that changes what is computed is obeyed or refused by its name.

use super::BaseFacts;
use super::stacked::{Own, Stacked};
use crate::model::{Lora, TensorSpec};
use crate::{Error, Result};
use serde_json::{Map, Value, json};
use std::path::Path;

/// What we need of the file.
pub(super) struct AdapterConfig {
    pub own: Own,
    /// Parameters of experts that have adapters.
    pub stacked: Stacked,
    /// The name or path of the base.
    pub base: String,
}

/// The settings of one rank or alpha for some targets.
const PATTERNS: [&str; 2] = ["rank_pattern", "alpha_pattern"];

/// Settings that change nothing of what a loaded adapter computes, and those that are read below.
const FREE: [&str; 19] = [
    "alpha_pattern",
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
    "rank_pattern",
    "revision",
    "runtime_config",
    "target_modules",
    "target_parameters",
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

/// What a base is called that an adapter does not name.
pub(super) const UNNAMED: &str = "an unnamed base";

impl AdapterConfig {
    /// Reads the content of the file; errors name `path`.
    pub fn parse(bytes: &[u8], path: &Path) -> Result<Self> {
        let settings: Map<String, Value> = serde_json::from_slice(bytes).map_err(|error| {
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
        // rsLoRA divides alpha by the root of the rank
        let root = settings.get("use_rslora").and_then(Value::as_bool).unwrap_or(false);
        let own = |rank: f64, alpha: f64| -> Result<Own> {
            if rank.fract() != 0.0 || rank > f64::from(u32::MAX) {
                return Err(Error::field(path, "r", rank, "a whole number"));
            }
            let alpha = if root { alpha * rank.sqrt() } else { alpha };
            let factor = (alpha / rank) as f32;
            if !(factor.is_finite() && factor > 0.0) {
                let expected = "an alpha that divided by the rank is a number above 0 in f32";
                return Err(Error::field(path, "lora_alpha", alpha, expected));
            }
            Ok(Own { rank: rank as usize, alpha })
        };
        let number = |key: &str, value: Option<&Value>| {
            let value = value.unwrap_or(&Value::Null);
            let above_0 = value.as_f64().filter(|number| *number > 0.0 && number.is_finite());
            above_0.ok_or_else(|| Error::field(path, key, value, "a number above 0"))
        };
        let (rank, alpha) =
            (number("r", settings.get("r"))?, number("lora_alpha", settings.get("lora_alpha"))?);
        let targets = stacked_targets(&settings, path)?;
        let one = |which: usize| -> Result<Option<Own>> {
            if !targets[which] {
                return Ok(None);
            }
            let pattern = |key: &str, other: f64| match pattern(&settings, key, Stacked::NAMES[which]) {
                Some(value) => number(key, Some(value)),
                None => Ok(other),
            };
            own(pattern(PATTERNS[0], rank)?, pattern(PATTERNS[1], alpha)?).map(Some)
        };
        let base = settings.get("base_model_name_or_path").and_then(Value::as_str).unwrap_or(UNNAMED);
        let stacked = Stacked { gate_up: one(0)?, down: one(1)? };
        Ok(Self { own: own(rank, alpha)?, stacked, base: base.to_owned() })
    }
}

/// The value of a pattern for a parameter of experts, as PEFT writes it.
fn pattern<'a>(settings: &'a Map<String, Value>, key: &str, name: &str) -> Option<&'a Value> {
    settings
        .get(key)?
        .as_object()?
        .iter()
        .find(|(pattern, _)| parameter_of(pattern) == Some(name))
        .map(|(_, value)| value)
}

/// The parameter of experts that a pattern stands for in every layer: `gate_up_proj` of `.*\.gate_up_proj`.
fn parameter_of(pattern: &str) -> Option<&'static str> {
    let name = pattern.strip_prefix(".*\\.").unwrap_or(pattern);
    let name = name.strip_prefix("mlp.").unwrap_or(name);
    let name = name.strip_prefix("experts.").unwrap_or(name);
    Stacked::NAMES.into_iter().find(|known| *known == name)
}

/// Which parameters of experts have adapters; any other parameter, or a pattern for anything else, is refused.
fn stacked_targets(settings: &Map<String, Value>, path: &Path) -> Result<[bool; 2]> {
    let mut found = [false; 2];
    let none = Vec::new();
    let named = settings.get("target_parameters").and_then(Value::as_array).unwrap_or(&none);
    for target in named {
        let which = target.as_str().and_then(parameter_of);
        let at = which.and_then(|which| Stacked::NAMES.iter().position(|name| *name == which));
        let expected = "gate_up_proj and down_proj of experts; others are not supported";
        found[at.ok_or_else(|| Error::field(path, "target_parameters", target, expected))?] = true;
    }
    for key in PATTERNS {
        let patterns = settings.get(key).and_then(Value::as_object).into_iter().flatten();
        for (pattern, value) in patterns {
            let of =
                parameter_of(pattern).and_then(|which| Stacked::NAMES.iter().position(|name| *name == which));
            if !of.is_some_and(|of| found[of]) {
                let what = format!("{pattern:?}: {value}");
                return Err(Error::field(path, key, what, "gate_up_proj and down_proj of experts only"));
            }
        }
    }
    Ok(found)
}

/// The modules that have adapters, each once, by the names of their tensors: `q_proj` of `...self_attn.q_proj.lora_A.weight`.
fn modules(table: &[TensorSpec]) -> Vec<&str> {
    let mut modules = Vec::new();
    for spec in table {
        let module = spec.name.rsplit_once(".lora_").and_then(|(place, _)| place.rsplit('.').next());
        if let Some(module) = module.filter(|module| !modules.contains(module)) {
            modules.push(module);
        }
    }
    modules
}

/// The file's text for these adapters, whose parameter table is `table`.
pub(in crate::format) fn config_text(lora: &Lora, table: &[TensorSpec], base: &BaseFacts) -> String {
    // PEFT declares alpha as a whole number
    let alpha = if lora.alpha.fract() == 0.0 { json!(lora.alpha as i64) } else { json!(lora.alpha) };
    let settings = json!({
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base.name,
        "r": lora.rank,
        "lora_alpha": alpha,
        "lora_dropout": 0.0,
        "target_modules": modules(table),
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
