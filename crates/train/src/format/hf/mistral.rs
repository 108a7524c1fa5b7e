//! The `config.json` of Mistral: that of Llama with a window.

use std::path::Path;

use serde_json::{Map, Value, json};

use super::family::Family;
use super::{llama, window};
use crate::Result;
use crate::model::{ModelConfig, MoeConfig};

pub(super) struct Mistral;

impl Family for Mistral {
    type Config = MoeConfig;
    const MODEL_TYPE: &'static str = "mistral";
    const ARCHITECTURE: &'static str = "MistralForCausalLM";
    const KIND: &'static str = "mistral";
    const WITHOUT: &'static [&'static str] = llama::DENSE;
    const READ: &'static [&'static str] = &[window::WINDOW];

    fn of(config: &ModelConfig) -> Option<&MoeConfig> {
        llama::of_kind(config, Self::KIND)
    }

    fn settings() -> Vec<(&'static str, Vec<Value>)> {
        llama::settings(&[])
    }

    fn prepare(map: &mut Map<String, Value>, path: &Path) -> Result<()> {
        map.entry(window::WINDOW).or_insert(json!(4096)); // absent is not null
        let absent = json!({
            "num_key_value_heads": 8,
            "vocab_size": 32_000,
            "max_position_embeddings": 131_072,
            "rope_theta": 1e4,
            "rms_norm_eps": 1e-6,
        });
        llama::prepare(map, &absent, path)
    }

    fn finish(map: &Map<String, Value>, config: &mut MoeConfig, path: &Path) -> Result<()> {
        window::of_all_layers(map, config, path)
    }

    fn template(config: &MoeConfig) -> Value {
        llama::template(config, json!({ "sliding_window": window::value(config) }))
    }
}
