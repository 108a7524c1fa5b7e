//! The `config.json` of Mixtral: that of Llama with experts.

use std::path::Path;

use serde_json::{Map, Value, json};

use super::family::Family;
use super::{llama, window};
use crate::model::{ModelConfig, MoeConfig};
use crate::{Error, Result};

pub(super) struct Mixtral;

impl Family for Mixtral {
    type Config = MoeConfig;
    const MODEL_TYPE: &'static str = "mixtral";
    const ARCHITECTURE: &'static str = "MixtralForCausalLM";
    const KIND: &'static str = "moe";
    const READ: &'static [&'static str] = &[window::WINDOW];

    fn of(config: &ModelConfig) -> Option<&MoeConfig> {
        llama::of_kind(config, Self::KIND)
    }

    fn settings() -> Vec<(&'static str, Vec<Value>)> {
        let mut settings = llama::settings(&[("attention_bias", json!(false)), ("mlp_bias", json!(false))]);
        settings.push(("router_jitter_noise", vec![json!(0.0), json!(0)]));
        settings
    }

    fn prepare(map: &mut Map<String, Value>, path: &Path) -> Result<()> {
        let absent = json!({
            "num_key_value_heads": 8,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "vocab_size": 32_000,
            "max_position_embeddings": 131_072,
            "rope_theta": 1e6,
            "rms_norm_eps": 1e-5,
            "router_aux_loss_coef": 0.001,
        });
        llama::prepare(map, &absent, path)?;
        match map.get("num_local_experts").filter(|experts| **experts == json!(0)) {
            Some(experts) => Err(Error::field(path, "num_local_experts", experts, "at least 1")),
            None => Ok(()),
        }
    }

    fn finish(map: &Map<String, Value>, config: &mut MoeConfig, path: &Path) -> Result<()> {
        window::of_all_layers(map, config, path)
    }

    fn template(config: &MoeConfig) -> Value {
        let own = json!({
            "num_local_experts": null,
            "num_experts_per_tok": null,
            "router_aux_loss_coef": null,
            "router_jitter_noise": 0.0,
            "output_router_logits": false,
            "sliding_window": window::value(config),
        });
        llama::template(config, own)
    }
}

#[cfg(test)]
mod tests {
    use super::super::{TextTokens, config_json, parse_config_json};
    use super::*;
    use crate::format::Elem;

    /// Reads the file of a mixture (or, without experts, of a Llama) with some keys changed or, with null, removed.
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
            assert_eq!(
                text,
                "c: model_type is missing, expected \"gpt2\", \"mixtral\", \"llama\", \"mistral\", \"qwen2\", \"qwen3\", \"qwen3_moe\" or \"gemma3_text\""
            );
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
        // of two tables one may have no base; places that disagree are refused
        let two =
            [("rope_parameters", json!({"rope_theta": 7.0})), ("rope_scaling", json!({"type": "default"}))];
        let with = |outside: Value| parsed(4, &[two.as_slice(), &[("rope_theta", outside)]].concat());
        assert_eq!(with(json!(7)).unwrap().rope_base, 7.0);
        let text = with(json!(5.0)).unwrap_err();
        assert!(
            text.starts_with("c: rope_parameters.rope_theta is 7.0, expected 5.0, as rope_theta says"),
            "{text}"
        );
        let one = [two[0].clone(), ("rope_theta", Value::Null)];
        assert_eq!(parsed(4, &one).unwrap().rope_base, 7.0);
        // transformers cannot build such a model either
        let text = parsed(4, &[("rope_parameters", json!({"rope_theta": null}))]).unwrap_err();
        assert_eq!(text, "c: rope_parameters.rope_theta is null, expected a number");
    }
}
