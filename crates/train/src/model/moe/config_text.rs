//! Sizes of a mixture of experts as text; the keys are those of the Python package.

use super::MoeConfig;
use crate::model::config_text::{Given, KIND, Pairs, given_twice, json_pairs, unknown_key};
use crate::{Error, Result};
use serde_json::Value;

/// Each field: its key, then the other spellings that are understood.
pub(in crate::model) const KEYS: [&[&str]; 14] = [
    &["hidden", "hidden_dim", "hidden_size", "n_embd", "width", "d_model", "C"],
    &["n_layer", "n_layers", "layers", "depth", "L"],
    &["n_head", "n_heads", "heads", "NH"],
    &["n_kv_head", "n_kv_heads", "kv_heads", "NKV"],
    &["head_dim", "HD"],
    &["n_experts", "experts", "E"],
    &["top_k", "top_k_experts", "K"],
    &["ffn", "ffn_dim", "intermediate_size", "F"],
    &["vocab_size", "vocabulary", "vocab", "V"],
    &["max_seq_len", "block_size", "n_positions", "n_ctx", "context", "maxT"],
    &["rope_base", "rope_theta"],
    &["rope_alpha"],
    &["rms_eps", "rms_norm_eps"],
    &["aux_alpha", "aux_loss_alpha"],
];
/// How many of the keys are sizes; the others are numbers.
const SIZES: usize = 10;

/// Collects key/value pairs, whatever they were written in.
#[derive(Default)]
struct Found {
    sizes: [Option<usize>; SIZES],
    numbers: [Option<f64>; KEYS.len() - SIZES],
}

impl Found {
    fn put(&mut self, key: &str, value: &Given) -> Result<()> {
        if key == KIND {
            return match value {
                Given::Text(kind) if kind == "moe" || kind == "llama" => Ok(()),
                other => Err(Error::config(format!("kind is {other}, expected moe or llama"))),
            };
        }
        let Some(at) = KEYS.iter().position(|names| names.contains(&key)) else {
            return Err(unknown_key(key, &KEYS));
        };
        let wrong = |what: &str| Error::config(format!("{key} is {value}, expected {what}"));
        let twice = if at < SIZES {
            self.sizes[at].replace(value.size().ok_or_else(|| wrong("a whole number"))?).is_some()
        } else {
            self.numbers[at - SIZES].replace(value.number().ok_or_else(|| wrong("a number"))?).is_some()
        };
        if twice { Err(given_twice(KEYS[at])) } else { Ok(()) }
    }

    /// Checks that all is there.
    fn finish(self) -> Result<MoeConfig> {
        let need = |at: usize| {
            self.sizes[at].ok_or_else(|| Error::config(format!("{} is missing", KEYS[at].join("|"))))
        };
        let [_, _, _, kv, head_dim, experts, k, _, vocab, context] = self.sizes;
        let [base, alpha, eps, aux] = self.numbers;
        let (hidden, n_head) = (need(0)?, need(2)?);
        let head_dim = match head_dim {
            Some(head_dim) => head_dim,
            None if n_head > 0 && hidden.is_multiple_of(n_head) => hidden / n_head,
            None => {
                return Err(Error::config(format!(
                    "n_head is {n_head}, expected a divisor of hidden, {hidden}, or a head_dim"
                )));
            }
        };
        let config = MoeConfig {
            hidden,
            n_layer: need(1)?,
            n_head,
            n_kv_head: kv.unwrap_or(1),
            head_dim,
            n_experts: experts.unwrap_or(0),
            top_k: k.unwrap_or(0),
            ffn: need(7)?,
            vocab_size: vocab.unwrap_or(32000),
            max_seq_len: context.unwrap_or(32768),
            rope_base: base.unwrap_or(10_000.0),
            rope_alpha: alpha.unwrap_or(1.0),
            rms_eps: eps.unwrap_or(1e-5),
            aux_alpha: aux.unwrap_or(0.01),
        };
        config.validate()?;
        Ok(config)
    }
}

impl MoeConfig {
    pub(in crate::model) fn from_pairs(pairs: &Pairs) -> Result<Self> {
        let mut found = Found::default();
        pairs.iter().try_for_each(|(key, value)| found.put(key, value))?;
        found.finish()
    }

    /// The sizes in a JSON object of another tool: what else it says is ignored.
    pub(in crate::model) fn from_foreign_json(text: &str) -> Result<Self> {
        let mut pairs = json_pairs(text)?;
        pairs.retain(|(key, _)| key == KIND || KEYS.iter().any(|names| names.contains(&key.as_str())));
        Self::from_pairs(&pairs)
    }

    /// As our own files carry them.
    pub fn to_json(&self) -> Value {
        serde_json::json!({
            "hidden": self.hidden,
            "n_layer": self.n_layer,
            "n_head": self.n_head,
            "n_kv_head": self.n_kv_head,
            "head_dim": self.head_dim,
            "n_experts": self.n_experts,
            "top_k": self.top_k,
            "ffn": self.ffn,
            "vocab_size": self.vocab_size,
            "max_seq_len": self.max_seq_len,
            "rope_base": self.rope_base,
            "rope_alpha": self.rope_alpha,
            "rms_eps": self.rms_eps,
            "aux_alpha": self.aux_alpha,
        })
    }
}
