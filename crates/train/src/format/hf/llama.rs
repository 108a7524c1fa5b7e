//! The `config.json` of Llama, and what other families have in common with it.

use std::path::Path;

use serde_json::{Map, Value, json};

use super::family::Family;
use super::rope;
use crate::Result;
use crate::model::{ModelConfig, MoeConfig};

pub(super) struct Llama;

impl Family for Llama {
    type Config = MoeConfig;
    const MODEL_TYPE: &'static str = "llama";
    const ARCHITECTURE: &'static str = "LlamaForCausalLM";
    const KIND: &'static str = "llama";
    const WITHOUT: &'static [&'static str] = DENSE;

    fn of(config: &ModelConfig) -> Option<&MoeConfig> {
        of_kind(config, Self::KIND)
    }

    fn settings() -> Vec<(&'static str, Vec<Value>)> {
        settings(&[
            ("attention_bias", json!(false)),
            ("mlp_bias", json!(false)),
            ("pretraining_tp", json!(1)),
            ("rope_interleaved", json!(false)),
        ])
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

/// Fields of our configuration that files of models without experts do not have.
pub(super) const DENSE: &[&str] = &["n_experts", "top_k", "aux_alpha"];

/// The configuration, if it is of this kind.
pub(super) fn of_kind<'a>(config: &'a ModelConfig, kind: &str) -> Option<&'a MoeConfig> {
    match config {
        ModelConfig::Moe(config) if config.kind() == kind => Some(config),
        _ => None,
    }
}

/// The settings that Llama and its relatives share, and those of its `own`.
pub(super) fn settings(own: &[(&'static str, Value)]) -> Vec<(&'static str, Vec<Value>)> {
    let mut all = vec![
        ("hidden_act", vec![json!("silu")]),
        ("attention_dropout", vec![json!(0.0), json!(0), Value::Null]),
        ("partial_rotary_factor", vec![json!(1.0), json!(1), Value::Null]),
        ("pruned_heads", vec![json!({})]),
        ("quantization_config", vec![Value::Null]),
    ];
    all.extend(own.iter().map(|(key, value)| (*key, vec![value.clone()])));
    all
}

/// Keys for which transformers rejects null.
const NOT_NULL: [&str; 2] = ["vocab_size", "max_position_embeddings"];

/// Fills in the defaults of transformers for `absent` keys, and finds RoPE in any of the places a file can have it.
pub(super) fn prepare(map: &mut Map<String, Value>, absent: &Value, path: &Path) -> Result<()> {
    let is_null = |map: &Map<String, Value>, key: &str| map.get(key).is_none_or(Value::is_null);
    let given = map.clone();
    map.entry("tie_word_embeddings").or_insert(json!(false));
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
    rope::prepare(map, path)?;
    rope::check_agreement(&given, path)
}

fn copy(map: &mut Map<String, Value>, from: &str, to: &str) {
    if let Some(value) = map.get(from).cloned() {
        map.insert(to.into(), value);
    }
}

/// The file of Llama or a similar family, whose additional keys are `own`.
pub(super) fn template(config: &MoeConfig, own: Value) -> Value {
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
        "rope_theta": null,
        "rope_parameters": null,
        "tie_word_embeddings": null,
        "torch_dtype": null,
        "use_cache": true,
        "vocab_size": null,
    });
    if let (Some(json), Value::Object(own)) = (json.as_object_mut(), own) {
        rope::put(json, config);
        json.extend(own);
    }
    json
}
