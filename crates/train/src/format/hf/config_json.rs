//! `config.json`: the sizes, and the settings under which our arithmetic is theirs.

use std::path::Path;

use serde_json::{Map, Value, json};

use super::{TextTokens, moe_json};
use crate::format::Elem;
use crate::model::{Gpt2Config, ModelConfig};
use crate::{Error, Result};

/// The file's name in the folder.
pub const HF_CONFIG: &str = "config.json";

/// Reads the sizes, and refuses settings that would make the model compute something else than ours.
pub fn parse_config_json(bytes: &[u8], path: &Path) -> Result<ModelConfig> {
    let map: Map<String, Value> = serde_json::from_slice(without_bom(bytes))
        .map_err(|error| Error::field(path, "content", format!("not valid ({error})"), "a JSON object"))?;
    match map.get("model_type").and_then(Value::as_str) {
        Some("mixtral" | "llama") => moe_json::parse(&map, path).map(ModelConfig::Moe),
        // GPT-2's own size tells it as well
        None if !map.contains_key("model_type") && !map.contains_key("n_embd") => {
            Err(Error::field(path, "model_type", "missing", "\"gpt2\", \"mixtral\" or \"llama\""))
        }
        _ => parse_gpt2(&map, path).map(ModelConfig::Gpt2),
    }
}

/// Editors put a byte-order mark at the start of a file; JSON has none.
pub(super) fn without_bom(bytes: &[u8]) -> &[u8] {
    bytes.strip_prefix(b"\xef\xbb\xbf").unwrap_or(bytes)
}

/// A size that must be there.
pub(super) fn size(map: &Map<String, Value>, path: &Path, key: &str) -> Result<usize> {
    match map.get(key) {
        None => Err(Error::field(path, key, "missing", "a whole number")),
        Some(value) => value
            .as_u64()
            .and_then(|value| usize::try_from(value).ok())
            .ok_or_else(|| Error::field(path, key, value, "a whole number")),
    }
}

fn parse_gpt2(map: &Map<String, Value>, path: &Path) -> Result<Gpt2Config> {
    // where a key is absent, transformers takes the first value
    let settings: [(&str, &[Value]); 7] = [
        ("model_type", &[json!("gpt2"), json!("mixtral"), json!("llama")]),
        ("activation_function", &[json!("gelu_new"), json!("gelu_pytorch_tanh")]),
        ("layer_norm_epsilon", &[json!(1e-5)]),
        ("tie_word_embeddings", &[json!(true)]),
        ("scale_attn_weights", &[json!(true)]),
        ("scale_attn_by_inverse_layer_idx", &[json!(false)]),
        ("add_cross_attention", &[json!(false)]),
    ];
    check_settings(map, &settings, path)?;
    let size = |key: &str| size(map, path, key);
    let positions = if map.contains_key("n_positions") { "n_positions" } else { "n_ctx" };
    let config = Gpt2Config::new(
        size(positions)?,
        size("vocab_size")?,
        size("n_layer")?,
        size("n_head")?,
        size("n_embd")?,
    );
    if let Some(problem) = config.problem() {
        return Err(wrong_size(path, problem, &[("max_seq_len", positions)]));
    }
    let inner = map.get("n_inner").filter(|value| !value.is_null());
    if let Some(inner) = inner.filter(|inner| inner.as_u64() != Some(4 * config.n_embd as u64)) {
        return Err(Error::field(path, "n_inner", inner, format!("null or {}", 4 * config.n_embd)));
    }
    Ok(config)
}

/// A problem of a model's sizes in the file's words: `names` are ours and theirs.
pub(super) fn wrong_size(
    path: &Path,
    (field, found, expected): (&str, String, String),
    names: &[(&str, &str)],
) -> Error {
    let theirs =
        |word: &str| names.iter().find(|(ours, _)| *ours == word).map(|(_, theirs)| (*theirs).to_owned());
    // words end where no letter of a name follows
    let expected: String = expected
        .split_inclusive(|c: char| !(c.is_ascii_alphanumeric() || c == '_'))
        .map(|part| {
            let word = part.trim_end_matches(|c: char| !(c.is_ascii_alphanumeric() || c == '_'));
            theirs(word).map_or(part.to_owned(), |name| name + &part[word.len()..])
        })
        .collect();
    Error::field(path, theirs(field).unwrap_or(field.to_owned()), found, expected)
}

/// Refuses values that are not among those that we compute with.
pub(super) fn check_settings(
    map: &Map<String, Value>,
    settings: &[(&str, &[Value])],
    path: &Path,
) -> Result<()> {
    for &(key, allowed) in settings {
        if let Some(value) = map.get(key).filter(|value| !allowed.contains(value)) {
            let list: Vec<_> = allowed.iter().map(Value::to_string).collect();
            return Err(Error::field(path, key, value, list.join(" or ")));
        }
    }
    Ok(())
}

/// The `config.json` of a model with these sizes.
pub fn config_json(config: &ModelConfig, elem: Elem, tokens: &TextTokens) -> Value {
    let mut json = match config {
        ModelConfig::Gpt2(config) => gpt2_json(config, elem),
        ModelConfig::Moe(config) => moe_json::to_json(config, elem),
    };
    tokens.put(&mut json, config.vocab_size());
    json
}

/// What transformers calls the type.
pub(super) fn dtype_name(elem: Elem) -> &'static str {
    match elem {
        Elem::F32 => "float32",
        Elem::BF16 => "bfloat16",
        Elem::F16 => "float16",
    }
}

fn gpt2_json(config: &Gpt2Config, elem: Elem) -> Value {
    json!({
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "activation_function": "gelu_new",
        "attn_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "resid_pdrop": 0.0,
        "bos_token_id": null,
        "eos_token_id": null,
        "initializer_range": 0.02,
        "layer_norm_epsilon": 1e-5,
        "n_ctx": config.max_seq_len,
        "n_embd": config.n_embd,
        "n_head": config.n_head,
        "n_inner": null,
        "n_layer": config.n_layer,
        "n_positions": config.max_seq_len,
        "scale_attn_weights": true,
        "tie_word_embeddings": true,
        "torch_dtype": dtype_name(elem),
        "use_cache": true,
        "vocab_size": config.vocab_size,
    })
}
