//! The `config.json` of Llama, and what other families have in common with it.

use std::path::Path;

use serde_json::{Map, Value, json};

use super::family::Family;
use crate::model::{ModelConfig, MoeConfig};
use crate::{Error, Result};

pub(super) struct Llama;

impl Family for Llama {
    type Config = MoeConfig;
    const MODEL_TYPE: &'static str = "llama";
    const ARCHITECTURE: &'static str = "LlamaForCausalLM";
    const WITHOUT: &'static [&'static str] = &["n_experts", "top_k", "aux_alpha"];

    fn of(config: &ModelConfig) -> Option<&MoeConfig> {
        match config {
            ModelConfig::Moe(config) if config.n_experts == 0 => Some(config),
            _ => None,
        }
    }

    fn settings() -> Vec<(&'static str, Vec<Value>)> {
        settings()
    }

    fn prepare(map: &mut Map<String, Value>, path: &Path) -> Result<()> {
        let absent = json!({
            "vocab_size": 32_000,
            "max_position_embeddings": 2048,
            "rope_theta": 1e4,
            "rms_norm_eps": 1e-6,
        });
        prepare(map, &absent, path)
    }

    fn template(config: &MoeConfig) -> Value {
        template(config, json!({ "attention_bias": false, "mlp_bias": false }))
    }
}

/// The settings that Llama and its relatives share.
pub(super) fn settings() -> Vec<(&'static str, Vec<Value>)> {
    vec![
        ("hidden_act", vec![json!("silu")]),
        ("tie_word_embeddings", vec![json!(false)]),
        ("attention_bias", vec![json!(false)]),
        ("mlp_bias", vec![json!(false)]),
        ("router_jitter_noise", vec![json!(0.0), json!(0)]),
        ("quantization_config", vec![Value::Null]),
    ]
}

/// Keys for which transformers rejects null.
const NOT_NULL: [&str; 2] = ["vocab_size", "max_position_embeddings"];

/// Fills in the defaults of transformers for `absent` keys, and finds the base of RoPE in any of the places a file can
/// have it.
pub(super) fn prepare(map: &mut Map<String, Value>, absent: &Value, path: &Path) -> Result<()> {
    let is_null = |map: &Map<String, Value>, key: &str| map.get(key).is_none_or(Value::is_null);
    // null, which is not the same as absent, means one for each query head
    if map.get("num_key_value_heads").is_some_and(Value::is_null) {
        map.shift_remove("num_key_value_heads");
        copy(map, "num_attention_heads", "num_key_value_heads");
    }
    for (key, value) in absent.as_object().into_iter().flatten() {
        if !map.contains_key(key) || (is_null(map, key) && !NOT_NULL.contains(&key.as_str())) {
            map.insert(key.clone(), value.clone());
        }
    }
    if is_null(map, "num_key_value_heads") {
        copy(map, "num_attention_heads", "num_key_value_heads");
    }
    if is_null(map, "head_dim")
        && let [Some(hidden), Some(heads)] =
            ["hidden_size", "num_attention_heads"].map(|key| map.get(key).and_then(Value::as_u64))
    {
        map.insert("head_dim".into(), hidden.checked_div(heads).unwrap_or(0).into());
    }
    // if a file has both tables, transformers uses the second
    let theta = rope_theta(map, path, "rope_scaling")?.or(rope_theta(map, path, "rope_parameters")?);
    if let Some(theta) = theta.flatten() {
        map.insert("rope_theta".into(), theta.into());
    }
    Ok(())
}

fn copy(map: &mut Map<String, Value>, from: &str, to: &str) {
    if let Some(value) = map.get(from).cloned() {
        map.insert(to.into(), value);
    }
}

/// The base inside `rope_parameters`, where transformers writes it since its version 5, or `rope_scaling`, its name
/// before. `None` without such a table, `Some(None)` if it has no base. Other kinds of RoPE have other angles and are
/// errors.
fn rope_theta(map: &Map<String, Value>, path: &Path, key: &str) -> Result<Option<Option<f64>>> {
    let wrong = |value: &Value| {
        let expected = "null or {\"rope_type\": \"default\", \"rope_theta\": ...}";
        Error::field(path, key, value, expected)
    };
    let Some(value) = map.get(key).filter(|value| !value.is_null()) else { return Ok(None) };
    let rope = value.as_object().ok_or_else(|| wrong(value))?;
    for (name, set) in rope {
        let known = match name.as_str() {
            "rope_type" | "type" => set == "default",
            "rope_theta" => set.is_number(),
            "partial_rotary_factor" => set.is_null() || set.as_f64() == Some(1.0),
            _ => false,
        };
        if !known {
            return Err(wrong(value));
        }
    }
    Ok(Some(rope.get("rope_theta").and_then(Value::as_f64)))
}

/// The file of Llama or a similar family, whose additional keys are `own`. The NTK-aware alpha is included in the base.
pub(super) fn template(config: &MoeConfig, own: Value) -> Value {
    let theta = config.rope_theta();
    let mut json = json!({
        "architectures": null,
        "model_type": null,
        "attention_dropout": 0.0,
        "bos_token_id": null,
        "eos_token_id": null,
        "head_dim": null,
        "hidden_act": "silu",
        "hidden_size": null,
        "initializer_range": 0.02,
        "intermediate_size": null,
        "max_position_embeddings": null,
        "num_attention_heads": null,
        "num_hidden_layers": null,
        "num_key_value_heads": null,
        "rms_norm_eps": null,
        // where versions before 5 look
        "rope_theta": theta,
        "rope_parameters": { "rope_theta": theta, "rope_type": "default" },
        "tie_word_embeddings": false,
        "torch_dtype": null,
        "use_cache": true,
        "vocab_size": null,
    });
    if let (Some(json), Value::Object(own)) = (json.as_object_mut(), own) {
        json.extend(own);
    }
    json
}
