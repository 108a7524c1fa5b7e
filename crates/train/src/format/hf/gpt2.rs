//! The `config.json` of GPT-2.

use std::path::Path;

use ironhorse_core::op::Act;
use serde_json::{Map, Value, json};

use super::family::Family;
use crate::error::one_of;
use crate::model::{Gpt2Config, ModelConfig};
use crate::{Error, Result};

/// The key of the activation.
const ACTIVATION: &str = "activation_function";

pub(super) struct Gpt2;

impl Family for Gpt2 {
    type Config = Gpt2Config;
    const MODEL_TYPE: &'static str = "gpt2";
    const ARCHITECTURE: &'static str = "GPT2LMHeadModel";
    const KIND: &'static str = "gpt2";
    const READ: &'static [&'static str] = &["n_inner"];

    fn of(config: &ModelConfig) -> Option<&Gpt2Config> {
        match config {
            ModelConfig::Gpt2(config) => Some(config),
            ModelConfig::Moe(_) => None,
        }
    }

    fn settings() -> Vec<(&'static str, Vec<Value>)> {
        vec![
            ("layer_norm_epsilon", vec![json!(1e-5)]),
            ("tie_word_embeddings", vec![json!(true)]),
            ("scale_attn_weights", vec![json!(true)]),
            ("scale_attn_by_inverse_layer_idx", vec![json!(false)]),
            ("add_cross_attention", vec![json!(false)]),
            ("reorder_and_upcast_attn", vec![json!(false)]),
            ("pruned_heads", vec![json!({})]),
            ("quantization_config", vec![Value::Null]),
        ]
    }

    fn prepare(map: &mut Map<String, Value>, path: &Path) -> Result<()> {
        // What we call gelu is its tanh form, which transformers calls gelu_new; its gelu is the exact one.
        let theirs = |act: &Act| if *act == Act::Gelu { "gelu_new" } else { act.name() };
        let found = map.entry(ACTIVATION).or_insert(json!("gelu_new"));
        if *found == "gelu_pytorch_tanh" {
            *found = json!("gelu_new");
        }
        let Some(act) = Act::ALL.iter().find(|act| *found == theirs(act)) else {
            let known = Act::ALL.iter().map(theirs).chain(["gelu_pytorch_tanh"]);
            return Err(Error::field(path, ACTIVATION, found, one_of(known.map(|name| format!("{name:?}")))));
        };
        *found = json!(act.name());
        Ok(())
    }

    fn finish(map: &Map<String, Value>, config: &mut Gpt2Config, path: &Path) -> Result<()> {
        let expected = 4 * config.n_embd;
        match map.get("n_inner").filter(|inner| !inner.is_null() && **inner != json!(expected)) {
            Some(inner) => Err(Error::field(path, "n_inner", inner, format!("null or {expected}"))),
            None => Ok(()),
        }
    }

    fn template(config: &Gpt2Config) -> Value {
        json!({
            "architectures": null,
            "model_type": null,
            ACTIVATION: if config.act == Act::Gelu { "gelu_new" } else { config.act.name() },
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
