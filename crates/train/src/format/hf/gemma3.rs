//! The `config.json` of Gemma 3's text models: two kinds of layers, of which one has a window, each with its own RoPE.

use std::path::Path;

use serde_json::{Map, Value, json};

use super::family::Family;
use super::{llama, window};
use crate::model::{ModelConfig, MoeConfig};
use crate::{Error, Result};

pub(super) struct Gemma3;

/// The key of a pattern: its value n says that every n-th layer has no window. Newer files have a word for each layer, which
/// decides.
const PATTERN: &str = "sliding_window_pattern";
/// The key under which newer versions of transformers keep the pattern, without reading it.
const KEPT_PATTERN: &str = "_sliding_window_pattern";
/// The pattern of a file without one.
const USUAL_PATTERN: usize = 6;
/// RoPE's base in layers with a window, and what scores are divided by the root of.
const LOCAL: &str = "rope_local_base_freq";
const SCALAR: &str = "query_pre_attn_scalar";
/// RoPE as newer and as older files have it.
const TABLE: &str = "rope_parameters";
const SCALING: &str = "rope_scaling";

impl Family for Gemma3 {
    type Config = MoeConfig;
    const MODEL_TYPE: &'static str = "gemma3_text";
    const ARCHITECTURE: &'static str = "Gemma3ForCausalLM";
    const KIND: &'static str = "gemma3_text";
    const WITHOUT: &'static [&'static str] = llama::DENSE;
    const RENAMED: &'static [(&'static str, &'static [&'static str])] =
        &[("rope_local", &[LOCAL]), ("query_scalar", &[SCALAR])];
    const READ: &'static [&'static str] = &[window::WINDOW, window::LAYERS, PATTERN, KEPT_PATTERN];

    fn of(config: &ModelConfig) -> Option<&MoeConfig> {
        llama::of_kind(config, Self::KIND)
    }

    fn settings() -> Vec<(&'static str, Vec<Value>)> {
        vec![
            ("hidden_activation", vec![json!("gelu_pytorch_tanh")]),
            ("attention_bias", vec![json!(false)]),
            ("attention_dropout", vec![json!(0.0), json!(0), Value::Null]),
            ("attn_logit_softcapping", vec![Value::Null]),
            ("final_logit_softcapping", vec![Value::Null]),
            ("use_bidirectional_attention", vec![json!(false), Value::Null]),
            ("pruned_heads", vec![json!({})]),
            ("quantization_config", vec![Value::Null]),
        ]
    }

    fn prepare(map: &mut Map<String, Value>, path: &Path) -> Result<()> {
        // absent is not null
        for (key, value) in [
            ("tie_word_embeddings", json!(true)),
            ("head_dim", json!(256)),
            (SCALAR, json!(256)),
            (window::WINDOW, json!(4096)),
        ] {
            map.entry(key).or_insert(value);
        }
        if let Some(scalar) = map.get(SCALAR).filter(|scalar| **scalar == json!(0)) {
            return Err(Error::field(path, SCALAR, scalar, "at least 1"));
        }
        let local = rope_of_layers(map, path)?;
        if let (Some(table), Some(own)) = (&local, map.get(LOCAL).filter(|own| !own.is_null()))
            && table.as_f64() != own.as_f64()
        {
            let expected = format!("{table}, as {TABLE}.{} says", window::SLIDING);
            return Err(Error::field(path, LOCAL, own, expected));
        }
        let absent = json!({
            "num_key_value_heads": 4,
            "vocab_size": 262_208,
            "max_position_embeddings": 131_072,
            "rope_theta": 1e6,
            LOCAL: 1e4,
            "rms_norm_eps": 1e-6,
        });
        llama::prepare(map, &absent, path)?;
        if let Some(local) = local {
            map.insert(LOCAL.into(), local);
        }
        Ok(())
    }

    fn finish(map: &Map<String, Value>, config: &mut MoeConfig, path: &Path) -> Result<()> {
        config.window = window::needed(map, path)?;
        config.window_every = every(map, config.n_layer, path)?;
        if config.query_scalar == config.head_dim {
            config.query_scalar = 0; // the same in our own words
        }
        Ok(())
    }

    fn template(config: &MoeConfig) -> Value {
        let own = json!({
            KEPT_PATTERN: config.window_every,
            "attention_bias": false,
            "attn_logit_softcapping": null,
            "final_logit_softcapping": null,
            "hidden_activation": "gelu_pytorch_tanh",
            "layer_types": window::words(config),
            "pad_token_id": null, // absent is 0, whose row of the token table learns nothing as an input
            SCALAR: config.query_scalar(),
            LOCAL: config.rope_local,
            "sliding_window": window::value(config),
            "use_bidirectional_attention": false,
        });
        let mut json = llama::template(config, own);
        if let Some(map) = json.as_object_mut() {
            map.shift_remove("hidden_act"); // another name here
            let full = map.remove(TABLE).unwrap_or_default();
            let sliding = json!({ "rope_type": "default", "rope_theta": config.rope_local });
            map.insert(TABLE.into(), json!({ window::FULL: full, window::SLIDING: sliding }));
        }
        json
    }
}

/// Leaves the RoPE of layers without a window where other families have theirs, and gives the base of the others if the
/// file has it in its table: only this may be said of them.
fn rope_of_layers(map: &mut Map<String, Value>, path: &Path) -> Result<Option<Value>> {
    let object = |key: String, value: Value| match value {
        Value::Null => Ok(Map::new()),
        Value::Object(table) => Ok(table),
        other => Err(Error::field(path, key, other, "null or an object")),
    };
    let mut table = object(TABLE.into(), map.shift_remove(TABLE).unwrap_or_default())?;
    let mut part = |kind: &str| {
        let value = table.shift_remove(kind).unwrap_or_default();
        object(format!("{TABLE}.{kind}"), value)
    };
    let (mut full, sliding) = (part(window::FULL)?, part(window::SLIDING)?);
    if let Some((key, value)) = table.iter().next() {
        let expected = format!("only {:?} and {:?} in it", window::FULL, window::SLIDING);
        return Err(Error::field(path, format!("{TABLE}.{key}"), value, expected));
    }
    let scaling = object(SCALING.into(), map.shift_remove(SCALING).unwrap_or_default())?;
    if let Some(kind) = scaling.get("type").filter(|_| !scaling.contains_key("rope_type")) {
        // obeyed by some versions of transformers, and not by others
        return Err(Error::field(path, format!("{SCALING}.type"), kind, "the same as \"rope_type\""));
    }
    full.extend(scaling);
    map.insert(TABLE.into(), full.into());
    for (key, value) in &sliding {
        let expected = match key.as_str() {
            "rope_type" => (value != "default").then_some("\"default\""),
            "rope_theta" => (!value.is_number()).then_some("a number"),
            _ => Some("no such field in layers with a window"),
        };
        if let Some(expected) = expected {
            return Err(Error::field(path, format!("{TABLE}.{}.{key}", window::SLIDING), value, expected));
        }
    }
    Ok(sliding.get("rope_theta").cloned())
}

/// The pattern of the layers that have no window.
fn every(map: &Map<String, Value>, count: usize, path: &Path) -> Result<usize> {
    let pattern = |key: &str| match map.get(key).filter(|pattern| !pattern.is_null()) {
        None => Ok(None),
        Some(pattern) => match window::number(pattern).filter(|&every| every > 0) {
            None => Err(Error::field(path, key, pattern, "a whole number of at least 1")),
            every => Ok(every),
        },
    };
    let (said, kept) = (pattern(PATTERN)?, pattern(KEPT_PATTERN)?);
    let Some(layers) = map.get(window::LAYERS).filter(|layers| !layers.is_null()) else {
        return Ok(said.unwrap_or(USUAL_PATTERN));
    };
    let words = layers.as_array().map_or(&[][..], Vec::as_slice);
    let first = words.iter().position(|word| word == window::FULL).unwrap_or(count);
    let word = |layer: usize, every: usize| {
        if (layer + 1).is_multiple_of(every) { window::FULL } else { window::SLIDING }
    };
    let fits = |every: &usize| (0..count).all(|layer| words[layer] == word(layer, *every));
    let known = [said, kept, Some(USUAL_PATTERN), Some(first + 1)].into_iter().flatten();
    known.filter(|_| words.len() == count).find(fits).ok_or_else(|| {
        let expected = format!(
            "{:?} for each of {count} layers, with {:?} instead in every n-th layer, for one n",
            window::SLIDING,
            window::FULL
        );
        Error::field(path, window::LAYERS, layers, expected)
    })
}
