//! The `config.json` of Mixtral and, without experts, of Llama.

use std::path::Path;

use serde_json::{Map, Value, json};

use super::config_json::{check_settings, dtype_name, size, wrong_size};
use crate::format::Elem;
use crate::model::MoeConfig;
use crate::{Error, Result};

/// Our names of sizes, and the file's.
const NAMES: [(&str, &str); 11] = [
    ("hidden", "hidden_size"),
    ("n_layer", "num_hidden_layers"),
    ("n_head", "num_attention_heads"),
    ("n_kv_head", "num_key_value_heads"),
    ("n_experts", "num_local_experts"),
    ("top_k", "num_experts_per_tok"),
    ("ffn", "intermediate_size"),
    ("max_seq_len", "max_position_embeddings"),
    ("rope_base", "rope_theta"),
    ("rms_eps", "rms_norm_eps"),
    ("aux_alpha", "router_aux_loss_coef"),
];

/// Reads the sizes, and refuses settings that would make the model compute something else than ours. `rope_theta` becomes
/// the base, with alpha 1: the same angles.
pub(super) fn parse(map: &Map<String, Value>, path: &Path) -> Result<MoeConfig> {
    let settings: [(&str, &[Value]); 6] = [
        ("hidden_act", &[json!("silu")]),
        ("tie_word_embeddings", &[json!(false)]),
        ("attention_bias", &[json!(false)]),
        ("mlp_bias", &[json!(false)]),
        ("router_jitter_noise", &[json!(0.0), json!(0)]),
        ("quantization_config", &[Value::Null]),
    ];
    check_settings(map, &settings, path)?;
    let mixtral = map.get("model_type").and_then(Value::as_str) == Some("mixtral");
    let given = |key: &str| map.get(key).is_some_and(|value| !value.is_null());
    let size = |key: &str| size(map, path, key);
    let size_or = |key: &str, or: usize| if given(key) { size(key) } else { Ok(or) };
    let number_or = |key: &str, or: f64| match map.get(key).filter(|value| !value.is_null()) {
        None => Ok(or),
        Some(value) => value.as_f64().ok_or_else(|| Error::field(path, key, value, "a number")),
    };
    let (hidden, n_head) = (size("hidden_size")?, size("num_attention_heads")?);
    let config = MoeConfig {
        hidden,
        n_layer: size("num_hidden_layers")?,
        n_head,
        // where a key is absent, what transformers takes; null means as many as heads
        n_kv_head: match map.get("num_key_value_heads") {
            None if mixtral => 8,
            None | Some(Value::Null) => n_head,
            Some(_) => size("num_key_value_heads")?,
        },
        head_dim: size_or("head_dim", hidden.checked_div(n_head).unwrap_or(0))?,
        n_experts: if mixtral { size_or("num_local_experts", 8)? } else { 0 },
        top_k: if mixtral { size_or("num_experts_per_tok", 2)? } else { 0 },
        ffn: size("intermediate_size")?,
        vocab_size: if map.contains_key("vocab_size") { size("vocab_size")? } else { 32_000 },
        max_seq_len: match map.contains_key("max_position_embeddings") {
            true => size("max_position_embeddings")?,
            false if mixtral => 131_072,
            false => 2048,
        },
        // of two tables the second is meant, as there
        rope_base: match rope_theta(map, path, "rope_scaling")?
            .or(rope_theta(map, path, "rope_parameters")?)
            .flatten()
        {
            Some(theta) => theta,
            None => number_or("rope_theta", if mixtral { 1e6 } else { 1e4 })?,
        },
        rope_alpha: 1.0,
        rms_eps: number_or("rms_norm_eps", if mixtral { 1e-5 } else { 1e-6 })?,
        aux_alpha: if mixtral { number_or("router_aux_loss_coef", 0.001)? } else { 0.01 },
    };
    // a window that reaches over the whole context is none
    let window = size_or("sliding_window", usize::MAX)?;
    if mixtral && config.n_experts == 0 {
        return Err(Error::field(path, "num_local_experts", 0, "at least 1"));
    }
    match config.problem() {
        Some(problem) => Err(wrong_size(path, problem, &NAMES)),
        None if mixtral && window < config.max_seq_len => {
            let expected = format!("null or at least max_position_embeddings, {}", config.max_seq_len);
            Err(Error::field(path, "sliding_window", window, expected))
        }
        None => Ok(config),
    }
}

/// The base inside `rope_parameters`, where transformers writes it since its version 5, or `rope_scaling`, its name
/// before. None without such a table, Some(None) if it says no base. Every other kind of RoPE turns by other angles.
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

pub(super) fn to_json(config: &MoeConfig, elem: Elem) -> Value {
    let mixtral = config.n_experts > 0;
    let theta = config.rope_theta();
    let mut json = json!({
        "architectures": [if mixtral { "MixtralForCausalLM" } else { "LlamaForCausalLM" }],
        "model_type": if mixtral { "mixtral" } else { "llama" },
        "attention_dropout": 0.0,
        "bos_token_id": null,
        "eos_token_id": null,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "hidden_size": config.hidden,
        "initializer_range": 0.02,
        "intermediate_size": config.ffn,
        "max_position_embeddings": config.max_seq_len,
        "num_attention_heads": config.n_head,
        "num_hidden_layers": config.n_layer,
        "num_key_value_heads": config.n_kv_head,
        "rms_norm_eps": config.rms_eps,
        // the first is where versions before 5 look
        "rope_theta": theta,
        "rope_parameters": { "rope_theta": theta, "rope_type": "default" },
        "tie_word_embeddings": false,
        "torch_dtype": dtype_name(elem),
        "use_cache": true,
        "vocab_size": config.vocab_size,
    });
    let own = if mixtral {
        json!({
            "num_local_experts": config.n_experts,
            "num_experts_per_tok": config.top_k,
            "router_aux_loss_coef": config.aux_alpha,
            "router_jitter_noise": 0.0,
            "output_router_logits": false,
            "sliding_window": null,
        })
    } else {
        json!({ "attention_bias": false, "mlp_bias": false })
    };
    if let (Some(json), Some(own)) = (json.as_object_mut(), own.as_object()) {
        json.extend(own.clone());
    }
    json
}

#[cfg(test)]
mod tests {
    use super::super::{TextTokens, config_json, parse_config_json};
    use super::*;
    use crate::model::ModelConfig;

    /// What is made of the file of a mixture or, without experts, of a Llama, with some keys changed or, by null, taken out.
    fn parsed(experts: usize, changes: &[(&str, Value)]) -> std::result::Result<MoeConfig, String> {
        let sizes = "kind=llama,hidden=6,layers=2,heads=4,kv_heads=2,head_dim=8,ffn=5,vocab=9,context=7";
        let mixture = sizes.replace("kind=llama", &format!("kind=moe,experts={experts},top_k=1"));
        let config = ModelConfig::parse(if experts > 0 { &mixture } else { sizes }).unwrap();
        let mut json = config_json(&config, Elem::F32, &TextTokens::Last);
        for (key, value) in changes {
            match value {
                Value::Null => drop(json.as_object_mut().unwrap().remove(*key)),
                value => json[key] = value.clone(),
            }
        }
        match parse_config_json(json.to_string().as_bytes(), Path::new("c")) {
            Ok(ModelConfig::Moe(config)) => Ok(config),
            Ok(other) => panic!("{other:?}"),
            Err(error) => Err(error.to_string()),
        }
    }

    #[test]
    fn problems_are_told_in_the_words_of_the_file() {
        for (key, value, says) in [
            ("num_experts_per_tok", json!(9), "9, expected from 1 to num_local_experts, 4"),
            ("num_local_experts", json!(0), "0, expected at least 1"),
            ("num_key_value_heads", json!(3), "3, expected a divisor of num_attention_heads, 4"),
            ("hidden_size", json!(0), "0, expected at least 1"),
            ("num_hidden_layers", json!(0), "0, expected at least 1"),
            ("intermediate_size", json!(0), "0, expected at least 1"),
            ("max_position_embeddings", json!(0), "0, expected at least 1"),
            ("rms_norm_eps", json!(0), "0, expected a number above 0"),
            ("router_aux_loss_coef", json!(-1), "-1, expected a number of at least 0"),
        ] {
            assert_eq!(parsed(4, &[(key, value)]).unwrap_err(), format!("c: {key} is {says}"));
        }
        let rope = [("rope_parameters", Value::Null), ("rope_theta", json!(0))];
        assert_eq!(parsed(4, &rope).unwrap_err(), "c: rope_theta is 0, expected a number above 0");
        let large = [("hidden_size", json!(1 << 30)), ("intermediate_size", json!(1 << 30))];
        let text = parsed(4, &large).unwrap_err();
        assert!(text.ends_with("(num_hidden_layers 2, hidden_size 1073741824)"), "{text}");
        for experts in [0, 4] {
            let text = parsed(experts, &[("model_type", Value::Null)]).unwrap_err();
            assert_eq!(text, "c: model_type is missing, expected \"gpt2\", \"mixtral\" or \"llama\"");
        }
    }

    #[test]
    fn what_a_file_does_not_say_is_what_transformers_takes() {
        for (experts, context) in [(0, 2048), (4, 131_072)] {
            let config =
                parsed(experts, &["max_position_embeddings", "vocab_size"].map(|key| (key, Value::Null)));
            let config = config.unwrap();
            assert_eq!((config.max_seq_len, config.vocab_size), (context, 32_000));
        }
        // of two tables the second is meant, even if it leaves the base to what is said outside
        let two =
            [("rope_parameters", json!({"rope_theta": 7.0})), ("rope_scaling", json!({"type": "default"}))];
        let outside = ("rope_theta", json!(5.0));
        assert_eq!(parsed(4, &[two.as_slice(), &[outside]].concat()).unwrap().rope_base, 5.0);
        assert_eq!(parsed(4, &two[..1]).unwrap().rope_base, 7.0);
        // transformers cannot build such a model either
        let text = parsed(4, &[("rope_parameters", json!({"rope_theta": null}))]).unwrap_err();
        assert!(text.starts_with("c: rope_parameters is {\"rope_theta\":null}, expected"), "{text}");
    }
}
