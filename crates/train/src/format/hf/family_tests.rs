//! What each family reads from a `config.json`, refuses by name, and writes again.

use std::path::Path;

use serde_json::{Value, json};

use super::{TextTokens, config_json, parse_config_json};
use crate::format::Elem;
use crate::model::{Family, ModelConfig, MoeConfig, RopeType};

fn parse(json: &Value) -> std::result::Result<MoeConfig, String> {
    match parse_config_json(json.to_string().as_bytes(), Path::new("c")) {
        Ok(ModelConfig::Moe(config)) => Ok(config),
        Ok(other) => panic!("{other:?}"),
        Err(error) => Err(error.to_string()),
    }
}

/// A file with some keys changed.
fn with(json: &Value, changes: Value) -> Value {
    let mut json = json.clone();
    json.as_object_mut().unwrap().extend(changes.as_object().unwrap().clone());
    json
}

/// Files as the makers of these models publish them, with small sizes.
fn published() -> [(&'static str, Value); 6] {
    let sizes = json!({
        "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 6, "num_key_value_heads": 2,
        "intermediate_size": 20, "vocab_size": 99, "max_position_embeddings": 64, "rms_norm_eps": 1e-6,
        "hidden_act": "silu", "attention_dropout": 0.0, "initializer_range": 0.02, "torch_dtype": "bfloat16",
        "transformers_version": "4.51.0", "use_cache": true, "bos_token_id": 1, "eos_token_id": [2, 3],
    });
    let window = json!({ "use_sliding_window": false, "sliding_window": 32, "max_window_layers": 1 });
    let llama3 = json!({
        "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8, "rope_type": "llama3",
    });
    [
        ("llama", json!({
            "rope_theta": 500000.0, "rope_scaling": llama3, "tie_word_embeddings": true, "head_dim": 8,
            "attention_bias": false, "mlp_bias": false, "pretraining_tp": 1,
        })),
        ("mistral", json!({ "rope_theta": 1e4, "sliding_window": null, "tie_word_embeddings": false })),
        ("qwen2", with(&window, json!({ "rope_theta": 1e6, "tie_word_embeddings": true }))),
        ("qwen3", with(&window, json!({
            "rope_theta": 1e6, "rope_scaling": null, "head_dim": 10, "attention_bias": false,
        }))),
        ("qwen3_moe", with(&window, json!({
            "rope_theta": 1e6, "head_dim": 8, "attention_bias": false, "num_experts": 5, "num_experts_per_tok": 2,
            "moe_intermediate_size": 14, "norm_topk_prob": true, "decoder_sparse_step": 1, "mlp_only_layers": [],
            "router_aux_loss_coef": 0.01, "output_router_logits": false,
        }))),
        ("gemma3_text", json!({
            "hidden_activation": "gelu_pytorch_tanh", "rope_theta": 1e6, "rope_local_base_freq": 1e4, "rope_scaling": null,
            "head_dim": 8, "query_pre_attn_scalar": 8, "sliding_window": 16, "sliding_window_pattern": 6,
            "attention_bias": false, "attn_logit_softcapping": null, "final_logit_softcapping": null,
            "cache_implementation": "hybrid", "pad_token_id": 0,
        })),
    ]
    .map(|(kind, own)| {
        let mut json = with(&with(&sizes, own), json!({ "model_type": kind }));
        if kind == "gemma3_text" {
            json.as_object_mut().unwrap().remove("hidden_act"); // another name there
        }
        (kind, json)
    })
}

#[test]
fn published_files_are_understood_and_written_again() {
    for (kind, json) in published() {
        let config = parse(&json).unwrap();
        assert_eq!(config.kind(), kind);
        let text = json.to_string();
        let again = config_json(&config.into(), Elem::F32, &TextTokens::parse(text.as_bytes()));
        assert_eq!(parse(&again).unwrap(), config, "{again}");
        assert_eq!(again["torch_dtype"], "float32");
        // every field is there with its value; those of RoPE may be in another place
        for (key, value) in json.as_object().unwrap() {
            if !key.starts_with("rope_") && key != "torch_dtype" {
                assert_eq!(again[key], *value, "{kind}: {key}");
            }
        }
    }
    let [llama, mistral, qwen2, qwen3, moe, gemma3] = published().map(|(_, json)| parse(&json).unwrap());
    assert_eq!((llama.tied, llama.rope_type, llama.rope_factor), (true, RopeType::Llama3, 32.0));
    assert_eq!((llama.rope_original, llama.rope_base, llama.head_dim), (8, 5e5, 8));
    assert_eq!((mistral.family, mistral.tied, mistral.head_dim), (Family::Mistral, false, 4));
    assert_eq!((qwen2.family, qwen2.tied, qwen2.rope_base), (Family::Qwen2, true, 1e6));
    assert_eq!((qwen3.head_dim, qwen3.n_kv_head), (10, 2));
    assert_eq!((moe.n_experts, moe.top_k, moe.ffn, moe.aux_alpha), (5, 2, 14, 0.01));
    assert_eq!((gemma3.window, gemma3.window_every, gemma3.query_scalar), (16, 6, 0));
    assert_eq!((gemma3.rope_base, gemma3.rope_local, gemma3.tied), (1e6, 1e4, true));
}

/// Versions of transformers look in different places first: a file whose places disagree means a different model to each.
#[test]
fn rope_is_said_once_or_twice_the_same() {
    let [(_, old), ..] = published();
    let scaling = old["rope_scaling"].clone();
    let both = |table: Value| parse(&with(&old, json!({ "rope_parameters": table })));
    assert_eq!(both(with(&scaling, json!({ "rope_theta": 500_000 }))).unwrap(), parse(&old).unwrap());
    let error = both(with(&scaling, json!({ "rope_theta": 1e4 }))).unwrap_err();
    assert!(
        error.starts_with("c: rope_parameters.rope_theta is 10000.0, expected 500000.0, as rope_theta says"),
        "{error}"
    );
    let error = both(with(&scaling, json!({ "factor": 7 }))).unwrap_err();
    assert!(
        error.starts_with("c: rope_parameters.factor is 7, expected 32.0, as rope_scaling.factor"),
        "{error}"
    );
    let twice = old.to_string().replacen("\"rope_theta\"", "\"rope_theta\": 1, \"rope_theta\"", 1);
    let error = parse_config_json(twice.as_bytes(), Path::new("c")).unwrap_err().to_string();
    assert!(error.contains("the key `rope_theta` twice in one object"), "{error}");
}

#[test]
fn both_ways_to_write_rope_are_one() {
    let [(_, old), ..] = published();
    let mut new = old.clone();
    let map = new.as_object_mut().unwrap();
    let (scaling, theta) = (map.remove("rope_scaling").unwrap(), map.remove("rope_theta").unwrap());
    map.insert("rope_parameters".into(), with(&scaling, json!({ "rope_theta": theta })));
    assert_eq!(parse(&new).unwrap(), parse(&old).unwrap());
    let linear = parse(&with(&old, json!({ "rope_scaling": { "type": "linear", "factor": 4 } }))).unwrap();
    assert_eq!((linear.rope_type, linear.rope_factor), (RopeType::Linear, 4.0));
    let written = config_json(&linear.into(), Elem::F32, &TextTokens::Last);
    assert_eq!(written["rope_parameters"], json!({"rope_type": "linear", "factor": 4.0, "rope_theta": 5e5}));
    assert_eq!((&written["rope_scaling"]["factor"], &written["rope_theta"]), (&json!(4.0), &json!(5e5)));
    for (changes, says) in [
        (json!({ "factor": 0 }), "factor is 0, expected a number above 0"),
        (
            json!({ "low_freq_factor": 9 }),
            "low_freq_factor is 9, expected below rope_parameters.high_freq_factor, 4",
        ),
        (
            json!({ "original_max_position_embeddings": 1.5 }),
            "original_max_position_embeddings is 1.5, expected a whole number",
        ),
    ] {
        let text = parse(&with(&old, json!({ "rope_scaling": with(&scaling, changes) }))).unwrap_err();
        assert_eq!(text, format!("c: rope_parameters.{says}"));
    }
}

#[test]
fn no_field_is_ignored() {
    for (kind, json) in published() {
        for (key, value, says) in [
            ("logit_scale", json!(2.0), format!("2.0, expected no such field in a {kind}; remove it if")),
            ("attention_dropout", json!(0.1), "0.1, expected 0.0, 0 or null".into()),
            ("hidden_act", json!("gelu"), "\"gelu\", expected ".into()),
            ("partial_rotary_factor", json!(0.5), "0.5, expected ".into()),
        ] {
            let text = parse(&with(&json, json!({ key: value }))).unwrap_err();
            assert!(text.starts_with(&format!("c: {key} is {says}")), "{text}");
            assert_eq!(text.lines().count(), 1);
        }
    }
    let refusal = |kind: &str, changes: Value| {
        let (_, json) = published().into_iter().find(|(known, _)| *known == kind).unwrap();
        parse(&with(&json, changes)).unwrap_err()
    };
    assert_eq!(
        refusal("llama", json!({ "attention_bias": true })),
        "c: attention_bias is true, expected false"
    );
    assert_eq!(refusal("llama", json!({ "mlp_bias": true })), "c: mlp_bias is true, expected false");
    for kind in ["qwen3", "qwen3_moe"] {
        assert_eq!(
            refusal(kind, json!({ "attention_bias": true })),
            "c: attention_bias is true, expected false"
        );
    }
    assert_eq!(
        refusal("qwen3_moe", json!({ "norm_topk_prob": false })),
        "c: norm_topk_prob is false, expected true"
    );
    assert_eq!(
        refusal("qwen3_moe", json!({ "decoder_sparse_step": 2 })),
        "c: decoder_sparse_step is 2, expected 1"
    );
    assert_eq!(
        refusal("qwen3_moe", json!({ "mlp_only_layers": [1] })),
        "c: mlp_only_layers is [1], expected [] or null"
    );
    assert_eq!(
        refusal("qwen3_moe", json!({ "num_local_experts": 4 })),
        "c: num_local_experts is 4, expected 5, as num_experts says"
    );
    assert_eq!(
        refusal("qwen3_moe", json!({ "num_experts_per_tok": 9 })),
        "c: num_experts_per_tok is 9, expected from 1 to num_experts, 5"
    );
}

#[test]
fn what_gemma3_says_is_obeyed_or_refused() {
    let (_, json) = published().into_iter().last().unwrap();
    for (changes, says) in [
        (
            json!({ "hidden_activation": "gelu" }),
            "hidden_activation is \"gelu\", expected \"gelu_pytorch_tanh\"",
        ),
        (json!({ "attention_bias": true }), "attention_bias is true, expected false"),
        (json!({ "attn_logit_softcapping": 50.0 }), "attn_logit_softcapping is 50.0, expected null"),
        (json!({ "final_logit_softcapping": 30.0 }), "final_logit_softcapping is 30.0, expected null"),
        (
            json!({ "use_bidirectional_attention": true }),
            "use_bidirectional_attention is true, expected false or null",
        ),
        (json!({ "query_pre_attn_scalar": 0 }), "query_pre_attn_scalar is 0, expected at least 1"),
        (json!({ "query_pre_attn_scalar": 8.5 }), "query_pre_attn_scalar is 8.5, expected a whole number"),
        (json!({ "sliding_window": null }), "sliding_window is null, expected from 1 to"),
        (
            json!({ "sliding_window_pattern": 0 }),
            "sliding_window_pattern is 0, expected a whole number of at least 1",
        ),
        (
            json!({ "layer_types": ["full_attention"] }),
            "layer_types is [\"full_attention\"], expected \"sliding_attention\" for each of 2",
        ),
        (
            json!({ "layer_types": ["full_attention", "sliding_attention"] }),
            "layer_types is [\"full_attention\",\"sliding_attention\"], expected",
        ),
        (
            json!({ "rope_scaling": { "rope_type": "yarn" } }),
            "rope_parameters.rope_type is \"yarn\", expected",
        ),
        (
            json!({ "rope_scaling": { "type": "linear", "factor": 8.0 } }),
            "rope_scaling.type is \"linear\", expected",
        ),
        (
            json!({ "rope_parameters": { "rope_type": "linear" } }),
            "rope_parameters.rope_type is \"linear\", expected only \"full_attention\" and",
        ),
        (
            json!({ "rope_parameters": { "sliding_attention": { "rope_type": "linear", "factor": 2.0 } } }),
            "rope_parameters.sliding_attention.rope_type is \"linear\", expected \"default\"",
        ),
    ] {
        let text = parse(&with(&json, changes)).unwrap_err();
        assert!(text.starts_with(&format!("c: {says}")), "{text}");
    }
    let (full, sliding) = ("full_attention", "sliding_attention");
    for (changes, windows, every) in [
        (json!({}), [Some(16); 2], 6),
        (json!({ "sliding_window_pattern": 1 }), [None; 2], 1),
        (json!({ "sliding_window_pattern": 2 }), [Some(16), None], 2),
        (json!({ "layer_types": [sliding, full] }), [Some(16), None], 2),
        (json!({ "layer_types": [full, full] }), [None; 2], 1),
        (json!({ "layer_types": [sliding, sliding], "_sliding_window_pattern": 9 }), [Some(16); 2], 6),
    ] {
        let config = parse(&with(&json, changes)).unwrap();
        assert_eq!((config.windows(), config.window_every), (windows.to_vec(), every));
        let again = parse(&config_json(&config.into(), Elem::F32, &TextTokens::Last)).unwrap();
        assert_eq!(again, config);
    }
}

/// Both ways to write RoPE of two kinds of layers.
#[test]
fn the_ropes_of_gemma3_are_those_of_its_layers() {
    let (_, old) = published().into_iter().last().unwrap();
    let scaling = json!({ "rope_type": "linear", "factor": 8.0 });
    let mut new = old.clone();
    for key in ["rope_theta", "rope_local_base_freq", "rope_scaling"] {
        new.as_object_mut().unwrap().remove(key);
    }
    let tables = json!({
        "full_attention": with(&scaling, json!({ "rope_theta": 5e5 })),
        "sliding_attention": { "rope_type": "default", "rope_theta": 300.0 },
    });
    let old =
        with(&old, json!({ "rope_theta": 5e5, "rope_local_base_freq": 300.0, "rope_scaling": scaling }));
    let config = parse(&old).unwrap();
    assert_eq!(parse(&with(&new, json!({ "rope_parameters": tables }))).unwrap(), config);
    assert_eq!((config.rope_type, config.rope_factor), (RopeType::Linear, 8.0));
    assert_eq!((config.rope_base, config.rope_local), (5e5, 300.0));
    let written = config_json(&config.into(), Elem::F32, &TextTokens::Last);
    assert_eq!(written["rope_parameters"], tables);
    assert_eq!(parse(&written).unwrap(), config);
    let plain = parse(&new).unwrap();
    assert_eq!((plain.rope_base, plain.rope_local), (1e6, 1e4), "what transformers takes");
}

#[test]
fn what_a_file_does_not_say_is_what_transformers_takes() {
    let without = |kind: &str, keys: &[&str]| {
        let (_, mut json) = published().into_iter().find(|(known, _)| *known == kind).unwrap();
        keys.iter().for_each(|key| drop(json.as_object_mut().unwrap().remove(*key)));
        parse(&json)
    };
    assert_eq!(without("qwen3", &["head_dim"]).unwrap().head_dim, 128);
    assert_eq!(without("qwen3_moe", &["head_dim"]).unwrap().head_dim, 4);
    assert_eq!(without("qwen2", &["vocab_size", "max_position_embeddings"]).unwrap().max_seq_len, 32_768);
    assert!(!without("llama", &["tie_word_embeddings"]).unwrap().tied);
    // Mistral's window is 4096 unless the file says null, and here the context is shorter
    let null = without("mistral", &[]).unwrap();
    let absent = without("mistral", &["sliding_window"]).unwrap();
    assert_eq!((null.window, absent.window), (0, 4096));
    assert!(absent.computes_as(&null));
    assert_eq!(without("qwen2", &["use_sliding_window"]).unwrap().window, 0);
    let plain = without("qwen3_moe", &["norm_topk_prob"]).unwrap_err();
    assert_eq!(plain, "c: norm_topk_prob is missing, which is false, expected true");
}

/// A window is obeyed in the layers that have it, refused where we do not know which, and written again.
#[test]
fn windows_are_those_of_transformers() {
    let file = |kind: &str, changes: Value| {
        let (_, json) = published().into_iter().find(|(known, _)| *known == kind).unwrap();
        with(&json, changes)
    };
    let (full, sliding) = ("full_attention", "sliding_attention");
    let used = |more: Value| with(&json!({ "use_sliding_window": true }), more);
    for (kind, changes, windows) in [
        ("mistral", json!({ "sliding_window": 16 }), [Some(16); 2]),
        ("qwen2", used(json!({})), [None, Some(32)]),
        ("qwen2", used(json!({ "sliding_window": null })), [None; 2]),
        ("qwen3", used(json!({ "max_window_layers": 0 })), [Some(32); 2]),
        ("qwen3", used(json!({ "max_window_layers": 2 })), [None; 2]),
        ("qwen3", used(json!({ "layer_types": [sliding, sliding] })), [Some(32); 2]),
        ("qwen3", used(json!({ "layer_types": [full, sliding] })), [None, Some(32)]),
        ("qwen3", used(json!({ "layer_types": [full, full], "max_window_layers": 0 })), [None; 2]),
        ("qwen3_moe", used(json!({ "max_window_layers": 0 })), [Some(32); 2]),
    ] {
        let json = file(kind, changes);
        let config = parse(&json).unwrap();
        let found = if config.window == 0 { vec![None; 2] } else { config.windows() };
        assert_eq!(found, windows, "{json}");
        for tokens in [TextTokens::Last, TextTokens::parse(json.to_string().as_bytes())] {
            let again = config_json(&config.into(), Elem::F32, &tokens);
            assert_eq!(parse(&again).unwrap(), config, "{again}");
        }
    }
    let mut default = file("qwen2", used(json!({})));
    default.as_object_mut().unwrap().remove("max_window_layers");
    assert_eq!(parse(&default).unwrap().window, 0, "layers from number 28 on have it, and here are two");
    for (kind, changes, says) in [
        ("mistral", json!({ "sliding_window": 0 }), "sliding_window is 0, expected null or from 1 to"),
        ("mistral", json!({ "sliding_window": -1 }), "sliding_window is -1, expected null or from 1 to"),
        ("mistral", json!({ "sliding_window": 1.5 }), "sliding_window is 1.5, expected null or from 1 to"),
        ("qwen2", json!({ "use_sliding_window": 1 }), "use_sliding_window is 1, expected true or false"),
        (
            "qwen2",
            used(json!({ "max_window_layers": "x" })),
            "max_window_layers is \"x\", expected a whole number",
        ),
        (
            "qwen3",
            used(json!({ "layer_types": [sliding, full] })),
            "layer_types is [\"sliding_attention\",\"full_attention\"], expected \"full_attention\" for each of \
             2 layers, or \"sliding_attention\" from one of them on",
        ),
        (
            "qwen3",
            json!({ "layer_types": [full, sliding] }),
            "layer_types is [\"full_attention\",\"sliding_attention\"], expected \"full_attention\" for each of 2 layers",
        ),
        ("qwen3_moe", used(json!({})), "max_window_layers is 1, expected 0, or no window"),
        ("llama", json!({ "sliding_window": 8 }), "sliding_window is 8, expected no such field in a llama"),
    ] {
        let text = parse(&file(kind, changes)).unwrap_err();
        assert!(text.starts_with(&format!("c: {says}")), "{text}");
    }
}
