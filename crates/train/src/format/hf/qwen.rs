//! The `config.json` of Qwen 2, Qwen 3 and Qwen 3 MoE: those of Llama with a window that most files do not use.

use std::path::Path;

use serde_json::{Map, Value, json};

use super::family::Family;
use super::{llama, window};
use crate::model::{ModelConfig, MoeConfig};
use crate::{Error, Result};

/// Keys of the window and of the layers that have it.
const WINDOW: &[&str] = &[window::USED, window::WINDOW, window::FROM, window::LAYERS];

pub(super) struct Qwen2;
pub(super) struct Qwen3;
pub(super) struct Qwen3Moe;

impl Family for Qwen2 {
    type Config = MoeConfig;
    const MODEL_TYPE: &'static str = "qwen2";
    const ARCHITECTURE: &'static str = "Qwen2ForCausalLM";
    const KIND: &'static str = "qwen2";
    const WITHOUT: &'static [&'static str] = llama::DENSE;
    const READ: &'static [&'static str] = WINDOW;

    fn of(config: &ModelConfig) -> Option<&MoeConfig> {
        llama::of_kind(config, Self::KIND)
    }

    fn settings() -> Vec<(&'static str, Vec<Value>)> {
        llama::settings(&[("use_mrope", json!(false))])
    }

    fn prepare(map: &mut Map<String, Value>, path: &Path) -> Result<()> {
        prepare(map, json!({ "num_key_value_heads": 32 }), path)
    }

    fn finish(map: &Map<String, Value>, config: &mut MoeConfig, path: &Path) -> Result<()> {
        window::of_last_layers(map, config, path)
    }

    fn template(config: &MoeConfig) -> Value {
        llama::template(config, windowed(config, json!({})))
    }
}

impl Family for Qwen3 {
    type Config = MoeConfig;
    const MODEL_TYPE: &'static str = "qwen3";
    const ARCHITECTURE: &'static str = "Qwen3ForCausalLM";
    const KIND: &'static str = "qwen3";
    const WITHOUT: &'static [&'static str] = llama::DENSE;
    const READ: &'static [&'static str] = WINDOW;

    fn of(config: &ModelConfig) -> Option<&MoeConfig> {
        llama::of_kind(config, Self::KIND)
    }

    fn settings() -> Vec<(&'static str, Vec<Value>)> {
        llama::settings(&[("attention_bias", json!(false))])
    }

    fn prepare(map: &mut Map<String, Value>, path: &Path) -> Result<()> {
        map.entry("head_dim").or_insert(json!(128)); // not hidden_size / num_attention_heads
        prepare(map, json!({ "num_key_value_heads": 32 }), path)
    }

    fn finish(map: &Map<String, Value>, config: &mut MoeConfig, path: &Path) -> Result<()> {
        window::of_last_layers(map, config, path)
    }

    fn template(config: &MoeConfig) -> Value {
        llama::template(config, windowed(config, json!({ "attention_bias": false })))
    }
}

impl Family for Qwen3Moe {
    type Config = MoeConfig;
    const MODEL_TYPE: &'static str = "qwen3_moe";
    const ARCHITECTURE: &'static str = "Qwen3MoeForCausalLM";
    const KIND: &'static str = "qwen3_moe";
    const RENAMED: &'static [(&'static str, &'static [&'static str])] =
        &[("n_experts", &["num_experts"]), ("ffn", &["moe_intermediate_size"])];
    // `intermediate_size` is the width of layers without experts, of which there are none
    const READ: &'static [&'static str] =
        &[window::USED, window::WINDOW, window::FROM, "num_local_experts", "intermediate_size"];

    fn of(config: &ModelConfig) -> Option<&MoeConfig> {
        llama::of_kind(config, Self::KIND)
    }

    fn settings() -> Vec<(&'static str, Vec<Value>)> {
        let mut settings = llama::settings(&[
            ("attention_bias", json!(false)),
            ("norm_topk_prob", json!(true)),
            ("decoder_sparse_step", json!(1)),
        ]);
        settings.push(("mlp_only_layers", vec![json!([]), Value::Null]));
        settings
    }

    fn prepare(map: &mut Map<String, Value>, path: &Path) -> Result<()> {
        if !map.contains_key("norm_topk_prob") {
            return Err(Error::field(path, "norm_topk_prob", "missing, which is false", "true"));
        }
        // transformers 5 writes the second name; both may be there
        if let Some(local) = map.get("num_local_experts").cloned() {
            let said = map.entry("num_experts").or_insert(local.clone());
            if *said != local {
                return Err(Error::field(
                    path,
                    "num_local_experts",
                    local,
                    format!("{said}, as num_experts says"),
                ));
            }
        }
        let absent = json!({
            "num_key_value_heads": 4,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 768,
            "router_aux_loss_coef": 0.001,
        });
        prepare(map, absent, path)?;
        match map.get("num_experts").filter(|experts| **experts == json!(0)) {
            Some(experts) => Err(Error::field(path, "num_experts", experts, "at least 1")),
            None => Ok(()),
        }
    }

    fn finish(map: &Map<String, Value>, config: &mut MoeConfig, path: &Path) -> Result<()> {
        window::of_all_layers(map, config, path)?;
        // older versions of transformers obey it here, newer ones do not
        match map.get(window::FROM).filter(|from| config.window > 0 && **from != json!(0)) {
            Some(from) => Err(Error::field(path, window::FROM, from, "0, or no window")),
            None => Ok(()),
        }
    }

    fn template(config: &MoeConfig) -> Value {
        let own = json!({
            "attention_bias": false,
            "decoder_sparse_step": 1,
            "intermediate_size": config.ffn,
            "mlp_only_layers": [],
            "moe_intermediate_size": null,
            "norm_topk_prob": true,
            "num_experts": null,
            "num_experts_per_tok": null,
            "output_router_logits": false,
            "router_aux_loss_coef": null,
        });
        llama::template(config, window::put(config, own))
    }
}

/// What Llama and Qwen do not have in common if it is absent.
fn prepare(map: &mut Map<String, Value>, own: Value, path: &Path) -> Result<()> {
    map.entry(window::USED).or_insert(json!(false));
    map.entry(window::WINDOW).or_insert(json!(4096)); // absent is not null
    let mut absent = json!({
        "vocab_size": 151_936,
        "max_position_embeddings": 32_768,
        "rope_theta": 1e4,
        "rms_norm_eps": 1e-6,
    });
    if let (Some(absent), Value::Object(own)) = (absent.as_object_mut(), own) {
        absent.extend(own);
    }
    llama::prepare(map, &absent, path)
}

/// The keys of Qwen 2 and Qwen 3, whose first layers may be without the window.
fn windowed(config: &MoeConfig, own: Value) -> Value {
    let mut own = window::put(config, own);
    if config.window > 0 {
        own[window::FROM] = json!(config.window_from);
    }
    own
}
