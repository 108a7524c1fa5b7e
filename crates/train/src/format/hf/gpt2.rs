//! The `config.json` of GPT-2.

use std::path::Path;

use serde_json::{Map, Value, json};

use super::config_json::Family;
use crate::model::{Gpt2Config, ModelConfig};
use crate::{Error, Result};

pub(super) struct Gpt2;

impl Family for Gpt2 {
    type Config = Gpt2Config;
    const MODEL_TYPE: &'static str = "gpt2";
    const ARCHITECTURE: &'static str = "GPT2LMHeadModel";

    fn of(config: &ModelConfig) -> Option<&Gpt2Config> {
        match config {
            ModelConfig::Gpt2(config) => Some(config),
            ModelConfig::Moe(_) => None,
        }
    }

    fn settings() -> Vec<(&'static str, Vec<Value>)> {
        vec![
            ("activation_function", vec![json!("gelu_new"), json!("gelu_pytorch_tanh")]),
            ("layer_norm_epsilon", vec![json!(1e-5)]),
            ("tie_word_embeddings", vec![json!(true)]),
            ("scale_attn_weights", vec![json!(true)]),
            ("scale_attn_by_inverse_layer_idx", vec![json!(false)]),
            ("add_cross_attention", vec![json!(false)]),
        ]
    }

    fn check(map: &Map<String, Value>, config: &Gpt2Config, path: &Path) -> Result<()> {
        let expected = 4 * config.n_embd;
        match map.get("n_inner").filter(|inner| !inner.is_null() && **inner != json!(expected)) {
            Some(inner) => Err(Error::field(path, "n_inner", inner, format!("null or {expected}"))),
            None => Ok(()),
        }
    }

    fn template(_config: &Gpt2Config) -> Value {
        json!({
            "architectures": null,
            "model_type": null,
            "activation_function": "gelu_new",
            "attn_pdrop": 0.0,
            "embd_pdrop": 0.0,
            "resid_pdrop": 0.0,
            "bos_token_id": null,
            "eos_token_id": null,
            "initializer_range": 0.02,
            "layer_norm_epsilon": 1e-5,
            "n_ctx": null,
            "n_embd": null,
            "n_head": null,
            "n_inner": null,
            "n_layer": null,
            "n_positions": null,
            "scale_attn_weights": true,
            "tie_word_embeddings": true,
            "torch_dtype": null,
            "use_cache": true,
            "vocab_size": null,
        })
    }
}
