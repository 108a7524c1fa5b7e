//! A model's sizes and constants as metadata.

use std::path::Path;

use ironhorse_core::op::Act;

use super::header::Value;
use crate::model::{Family, Gpt2Config, LAYERNORM_EPS, ModelConfig, MoeConfig, RopeType};
use crate::{Error, Result};

/// llama.cpp's name of the architecture, which is also the prefix of its keys.
pub fn architecture(config: &ModelConfig) -> &'static str {
    let ModelConfig::Moe(moe) = config else { return "gpt2" };
    match moe.family {
        Family::Llama | Family::Mistral => "llama",
        Family::Qwen2 => "qwen2",
        Family::Qwen3 if moe.n_experts > 0 => "qwen3moe",
        Family::Qwen3 => "qwen3",
        Family::Gemma3 => "gemma3", // refused by `check`
    }
}

/// Refuses a model that llama.cpp would compute differently.
pub fn check(config: &ModelConfig, path: &Path) -> Result<()> {
    match config {
        ModelConfig::Gpt2(gpt2) if gpt2.act != Act::Gelu => {
            Err(Error::field(path, "activation", gpt2.act, "gelu in a GGUF file of GPT-2"))
        }
        ModelConfig::Moe(moe) if moe.family == Family::Gemma3 => {
            let expected =
                "one that GGUF files are written of: gpt2, llama, mistral, moe, qwen2, qwen3 or qwen3_moe";
            Err(Error::field(path, "model of kind", moe.kind(), expected))
        }
        ModelConfig::Moe(moe) if moe.rope_type == RopeType::Llama3 && architecture(config) != "llama" => {
            let expected = format!("default or linear in a GGUF file of the family {}", moe.family);
            Err(Error::field(path, "rope_type", moe.rope_type, expected))
        }
        ModelConfig::Moe(moe) if moe.family == Family::Qwen2 && moe.n_head * moe.head_dim != moe.hidden => {
            let expected = format!("{} / {} in a GGUF file of the family qwen2", moe.hidden, moe.n_head);
            Err(Error::field(path, "head_dim", moe.head_dim, expected))
        }
        _ => Ok(()),
    }
}

/// The keys of the architecture.
pub fn keys(config: &ModelConfig) -> Vec<(String, Value)> {
    let found = match config {
        ModelConfig::Gpt2(gpt2) => of_gpt2(gpt2),
        ModelConfig::Moe(moe) => of_moe(moe),
    };
    let prefix = architecture(config);
    found.into_iter().map(|(key, value)| (format!("{prefix}.{key}"), value)).collect()
}

/// `validate` keeps every size below 2^31.
fn size(value: usize) -> Value {
    Value::U32(value as u32)
}

fn of_gpt2(config: &Gpt2Config) -> Vec<(&'static str, Value)> {
    vec![
        ("vocab_size", size(config.vocab_size)),
        ("context_length", size(config.max_seq_len)),
        ("embedding_length", size(config.n_embd)),
        ("block_count", size(config.n_layer)),
        ("feed_forward_length", size(4 * config.n_embd)),
        ("attention.head_count", size(config.n_head)),
        ("attention.head_count_kv", size(config.n_head)),
        ("attention.layer_norm_epsilon", Value::F32(LAYERNORM_EPS)),
    ]
}

fn of_moe(config: &MoeConfig) -> Vec<(&'static str, Value)> {
    let mut keys = vec![
        ("vocab_size", size(config.vocab_size)),
        ("context_length", size(context(config))),
        ("embedding_length", size(config.hidden)),
        ("block_count", size(config.n_layer)),
        ("feed_forward_length", size(config.ffn)),
        ("attention.head_count", size(config.n_head)),
        ("attention.head_count_kv", size(config.n_kv_head)),
        ("attention.key_length", size(config.head_dim)),
        ("attention.value_length", size(config.head_dim)),
        ("attention.layer_norm_rms_epsilon", Value::F32(config.rms_eps as f32)),
        ("rope.dimension_count", size(config.head_dim)),
        ("rope.freq_base", Value::F32(config.rope_theta() as f32)),
    ];
    if config.rope_type == RopeType::Linear {
        keys.push(("rope.scaling.type", "linear".into()));
        keys.push(("rope.scaling.factor", Value::F32(config.rope_factor as f32)));
    }
    if config.n_experts > 0 {
        keys.push(("expert_count", size(config.n_experts)));
        keys.push(("expert_used_count", size(config.top_k)));
        if config.family == Family::Qwen3 {
            keys.push(("expert_feed_forward_length", size(config.ffn)));
        }
    }
    keys
}

/// The longest sequence that llama.cpp computes as we do: it has no windows in these architectures, and a window over the whole
/// sequence masks nothing.
fn context(config: &MoeConfig) -> usize {
    if config.window == 0 { config.max_seq_len } else { config.window.min(config.max_seq_len) }
}

/// What a file says differently from the model, and why.
pub fn note(config: &ModelConfig) -> Option<String> {
    let ModelConfig::Moe(moe) = config else { return None };
    let (context, whole) = (context(moe), moe.max_seq_len);
    (context < whole).then(|| {
        format!("its context is {context} instead of {whole}, because llama.cpp does not have this model's sliding window")
    })
}

/// What RoPE's frequencies are divided by, pair by pair, where llama.cpp wants that as a tensor.
pub fn rope_factors(config: &ModelConfig) -> Option<Vec<f32>> {
    let ModelConfig::Moe(config) = config else { return None };
    if config.rope_type != RopeType::Llama3 {
        return None;
    }
    let (theta, dim, scaling) = (config.rope_theta(), config.head_dim as f64, config.rope_scaling());
    let factor = |pair: usize| {
        let frequency = theta.powf(-2.0 * pair as f64 / dim);
        (frequency / scaling.scaled(frequency)) as f32
    };
    Some((0..config.head_dim / 2).map(factor).collect())
}
