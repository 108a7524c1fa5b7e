//! Decoders of Llama's design, dense or a mixture of experts: Llama, Mistral, Mixtral, Qwen 2 and 3, Gemma 3. Their description; their
//! parameter table and the plan of their decoder are in `table`.

mod table;
mod words;

pub(super) use table::{EMBED, EXPERT_NAMES, HEAD};
use words::WindowLayers;
pub use words::{Family, RopeType};

use super::describe::{
    self, Described, Field, MAX_LAYERS, MAX_SIZE, above_0, at_least_0, check_params, described, factor,
    padded, size,
};
use crate::{Error, Result};
use ironhorse_core::op::RopeScaling;

described! {
    /// The sizes and constants of a decoder of Llama's design.
    #[derive(Clone, Copy, Debug, PartialEq)]
    MoeConfig {
        /// Channels of the residual stream (C).
        hidden: usize = None, ["hidden_dim", "hidden_size", "n_embd", "width", "d_model", "C"],
            hf ["hidden_size"], size(1, MAX_SIZE);
        /// Transformer blocks (L).
        n_layer: usize = None, ["n_layers", "layers", "depth", "L"], hf ["num_hidden_layers"], size(1, MAX_LAYERS);
        /// Query heads (NH).
        n_head: usize = None, ["n_heads", "heads", "NH"], hf ["num_attention_heads"], size(1, MAX_SIZE);
        /// Key and value heads (NKV), a divisor of NH.
        n_kv_head: usize = Some(1), ["n_kv_heads", "kv_heads", "NKV"], hf ["num_key_value_heads"], size(1, MAX_SIZE);
        /// The width of a head (HD), even. NH·HD need not be C; where it is not given, it is C / NH.
        head_dim: usize = Some(0), ["HD"], hf ["head_dim"], size(1, MAX_SIZE);
        /// Experts of a layer (E); 0 is the dense Llama.
        n_experts: usize = Some(0), ["experts", "E"], hf ["num_local_experts"], size(0, MAX_EXPERTS);
        /// Experts of a token (K); 0 without experts.
        top_k: usize = Some(0), ["top_k_experts", "K"], hf ["num_experts_per_tok"], size(0, usize::MAX);
        /// The width inside an expert, or inside the MLP (F).
        ffn: usize = None, ["ffn_dim", "intermediate_size", "F"], hf ["intermediate_size"], size(1, MAX_SIZE);
        /// Tokens of the vocabulary (V).
        vocab_size: usize = Some(32000), ["vocabulary", "vocab", "V"], hf ["vocab_size"], size(1, MAX_SIZE);
        /// The longest sequence (maxT).
        max_seq_len: usize = Some(32768), ["block_size", "n_positions", "n_ctx", "context", "maxT"],
            hf ["max_position_embeddings"], size(1, MAX_SIZE);
        /// RoPE's base.
        rope_base: f64 = Some(10_000.0), ["rope_theta"], hf ["rope_theta"], above_0;
        /// Stretches RoPE's wavelengths for longer contexts (NTK-aware); 1 changes nothing.
        rope_alpha: f64 = Some(1.0), [], hf [], above_0;
        /// Added to the mean of the squares in every norm.
        rms_eps: f64 = Some(1e-5), ["rms_norm_eps"], hf ["rms_norm_eps"], above_0;
        /// Weight of each layer's load-balancing loss.
        aux_alpha: f64 = Some(0.01), ["aux_loss_alpha"], hf ["router_aux_loss_coef"], at_least_0;
        /// The family, which decides about names, biases and norms.
        family: Family = Some(Family::Llama), [], hf [], |_| None;
        /// Whether the output head is the token table.
        tied: bool = Some(false), ["tie_word_embeddings"], hf ["tie_word_embeddings"], |_| None;
        /// How RoPE was changed for a longer context.
        rope_type: RopeType = Some(RopeType::Default), [], hf ["rope_parameters.rope_type"], |_| None;
        /// How much longer the context became; 1 without a change.
        rope_factor: f64 = Some(1.0), [], hf ["rope_parameters.factor"], above_0;
        /// Of `llama3`: pairs with fewer turns than this in the original context are slowed down by all of the factor.
        rope_low: f64 = Some(1.0), [], hf ["rope_parameters.low_freq_factor"], above_0;
        /// Of `llama3`: pairs with more turns than this keep their speed.
        rope_high: f64 = Some(4.0), [], hf ["rope_parameters.high_freq_factor"], above_0;
        /// Of `llama3`: the context before the change.
        rope_original: usize = Some(8192), [], hf ["rope_parameters.original_max_position_embeddings"], size(1, MAX_SIZE);
        /// How many keys a query reaches at most, its own included; 0 reaches all.
        window: usize = Some(0), ["sliding_window"], hf [], size(0, MAX_SIZE);
        /// The first layer with the window; those before it reach all keys.
        window_from: usize = Some(0), ["max_window_layers"], hf [], size(0, MAX_LAYERS);
        /// Of Gemma 3: n, where every n-th layer reaches all keys and the others have the window; 6 if it is not given. 0 in other families.
        window_every: usize = Some(0), ["sliding_window_pattern"], hf [], size(0, MAX_SIZE);
        /// Of Gemma 3: RoPE's base in layers with the window, where it is not changed for a longer context either.
        rope_local: f64 = Some(10_000.0), ["rope_local_base_freq"], hf [], above_0;
        /// Of Gemma 3: scores are divided by the root of this; 0 is the width of a head, as in other families.
        query_scalar: usize = Some(0), ["query_pre_attn_scalar"], hf [], size(0, MAX_SIZE);
    }
}

/// More experts than this are a typing error; a parameter table of them stays small.
const MAX_EXPERTS: usize = 4096;

impl Described for MoeConfig {
    const KINDS: &'static [&'static str] =
        &["moe", "llama", "mistral", "qwen2", "qwen3", "qwen3_moe", "gemma3_text"];
    const FIELDS: &'static [Field<Self>] = Self::TABLE;
    const LATER: &'static [&'static str] = &[
        "family",
        "tied",
        "rope_type",
        "rope_factor",
        "rope_low",
        "rope_high",
        "rope_original",
        "window",
        "window_from",
        "window_every",
        "rope_local",
        "query_scalar",
    ];

    fn blank() -> Self {
        Self::BLANK
    }

    fn set_kind(&mut self, kind: &str) {
        self.family = Family::of_kind(kind);
    }

    fn complete(&mut self, given: impl Fn(&str) -> bool) -> Result<()> {
        if self.family == Family::Gemma3 {
            // as transformers takes them
            for (name, field, absent) in
                [("window", &mut self.window, 4096), ("window_every", &mut self.window_every, 6)]
            {
                if !given(name) {
                    *field = absent;
                }
            }
        }
        if given("head_dim") {
            return Ok(());
        }
        let Self { hidden, n_head, .. } = *self;
        if n_head == 0 || !hidden.is_multiple_of(n_head) {
            let expected = format!("a divisor of hidden, {hidden}, or a head_dim");
            return Err(Error::input("n_head", n_head, expected));
        }
        self.head_dim = hidden / n_head;
        Ok(())
    }

    fn check(&self) -> Result<()> {
        let Self { hidden, n_layer, n_head, n_kv_head, head_dim, n_experts, top_k, .. } = *self;
        match (n_experts, top_k) {
            (0, 0) => {}
            (0, k) => return Err(Error::input("top_k", k, "0 in a model without experts")),
            (e, k) if k == 0 || k > e => {
                return Err(Error::input("top_k", k, format!("from 1 to n_experts, {e}")));
            }
            _ => {}
        }
        if self.family.kind(n_experts > 0).is_none() {
            let expected = format!("0 in a model of the family {}", self.family);
            return Err(Error::input("n_experts", n_experts, expected));
        }
        self.check_rope()?;
        self.check_window()?;
        self.check_gemma3()?;
        if !n_head.is_multiple_of(n_kv_head) {
            return Err(Error::input("n_kv_head", n_kv_head, format!("a divisor of n_head, {n_head}")));
        }
        if !head_dim.is_multiple_of(2) {
            return Err(Error::input("head_dim", head_dim, "an even number: RoPE turns pairs"));
        }
        check_params(self.count_params(), [("n_layer", n_layer), ("hidden", hidden)])
    }
}

impl MoeConfig {
    /// Refuses sizes that no model can have. Everything below relies on it: after it no product overflows.
    pub fn validate(&self) -> Result<()> {
        describe::validate(self)
    }

    fn check_rope(&self) -> Result<()> {
        let plain = self.rope_type == RopeType::Default;
        if plain && self.rope_factor != 1.0 {
            return Err(Error::input(
                "rope_factor",
                self.rope_factor,
                "1, or a rope_type of linear or llama3",
            ));
        }
        if self.rope_low >= self.rope_high {
            let expected = format!("below rope_high, {}", self.rope_high);
            return Err(Error::input("rope_low", self.rope_low, expected));
        }
        Ok(())
    }

    fn check_window(&self) -> Result<()> {
        let Self { window, window_from, window_every, n_layer, .. } = *self;
        let layers = self.family.windows(self.n_experts > 0);
        let none = || format!("0 in a model of kind {}", self.kind());
        let some = || format!("at least 1 in a model of kind {}", self.kind());
        match (layers == WindowLayers::Pattern, window_every) {
            (true, _) if window == 0 => return Err(Error::input("window", window, some())),
            (true, 0) => return Err(Error::input("window_every", window_every, some())),
            (false, 1..) => return Err(Error::input("window_every", window_every, none())),
            _ => {}
        }
        match (window, window_from) {
            (0, 0) => Ok(()),
            (0, from) => Err(Error::input("window_from", from, "0 without a window")),
            (_, _) if layers == WindowLayers::None => Err(Error::input("window", window, none())),
            (_, 0) => Ok(()),
            (_, from) if layers != WindowLayers::Last => Err(Error::input("window_from", from, none())),
            (_, from) if from >= n_layer => {
                Err(Error::input("window_from", from, format!("below n_layer, {n_layer}")))
            }
            _ => Ok(()),
        }
    }

    /// Refuses what only Gemma 3 has in models of other families.
    fn check_gemma3(&self) -> Result<()> {
        if self.family == Family::Gemma3 {
            return Ok(());
        }
        let own =
            |found: String, expected: &str| (found, format!("{expected} in a model of kind {}", self.kind()));
        let (local, scalar) = (self.rope_local, self.query_scalar);
        if local != Self::BLANK.rope_local {
            let (found, expected) = own(local.to_string(), "10000");
            return Err(Error::input("rope_local", found, expected));
        }
        if scalar != 0 {
            let (found, expected) = own(scalar.to_string(), "0");
            return Err(Error::input("query_scalar", found, expected));
        }
        Ok(())
    }

    fn count_params(&self) -> u128 {
        let [c, f, hd, experts] = [self.hidden, self.ffn, self.head_dim, self.n_experts].map(factor);
        let mut attention = 2 * (factor(self.n_head) + factor(self.n_kv_head)) * hd * c;
        if self.family.has_qkv_bias() {
            attention += (factor(self.n_head) + 2 * factor(self.n_kv_head)) * hd;
        }
        if self.family.has_qk_norm() {
            attention += 2 * hd;
        }
        let mlps = experts.max(1) * 3 * f * c + experts * c;
        let tables = self.vocab_tables() as u128 * factor(self.padded_vocab_size()) * c;
        factor(self.n_layer) * (attention + mlps + factor(self.norms()) * c) + tables + c
    }

    /// Norms of a layer, apart from those of heads.
    fn norms(&self) -> usize {
        if self.family.has_post_norms() { 4 } else { 2 }
    }

    /// The token table and, unless it is the same, the head.
    fn vocab_tables(&self) -> usize {
        if self.tied { 1 } else { 2 }
    }

    /// Rows of the token table and of the head in memory (Vp): V rounded up, the rows beyond V are zero.
    pub fn padded_vocab_size(&self) -> usize {
        padded(self.vocab_size)
    }

    /// Parameters in memory, the padding of the vocabulary included. 0 for sizes that `validate` refuses as too large
    /// to count.
    pub fn num_params(&self) -> usize {
        usize::try_from(self.count_params()).unwrap_or(0)
    }

    /// All parameters, without padding.
    pub fn total_params(&self) -> usize {
        let padding = self.padded_vocab_size() - self.vocab_size;
        self.num_params().saturating_sub(self.vocab_tables() * padding * self.hidden)
    }

    /// Those that one token uses: all except the experts it is not sent to. Embedding and head count in full.
    pub fn active_params(&self) -> usize {
        let idle = self.n_experts.saturating_sub(self.top_k);
        self.total_params().saturating_sub(self.n_layer * idle * 3 * self.ffn * self.hidden)
    }

    /// The width of a row of q, k and v (W).
    pub fn qkv_width(&self) -> usize {
        (self.n_head + 2 * self.n_kv_head) * self.head_dim
    }

    /// What the wavelengths follow: base · alpha^(HD/(HD-2)).
    pub fn rope_theta(&self) -> f64 {
        if self.head_dim == 2 {
            return self.rope_base; // its only pair turns by one radian a position, whatever the base
        }
        let hd = self.head_dim as f64;
        self.rope_base * self.rope_alpha.powf(hd / (hd - 2.0))
    }

    /// How the speeds of RoPE were changed.
    pub fn rope_scaling(&self) -> RopeScaling {
        match self.rope_type {
            RopeType::Default => RopeScaling::None,
            RopeType::Linear => RopeScaling::Linear { factor: self.rope_factor },
            RopeType::Llama3 => RopeScaling::Llama3 {
                factor: self.rope_factor,
                low: self.rope_low,
                high: self.rope_high,
                original: self.rope_original as u32, // `check` keeps it below 2^31
            },
        }
    }

    /// How many keys a query reaches at most, layer by layer; empty where every layer reaches all.
    pub(crate) fn windows(&self) -> Vec<Option<usize>> {
        let layers = if self.window == 0 { 0 } else { self.n_layer };
        (0..layers).map(|layer| self.is_windowed(layer).then_some(self.window)).collect()
    }

    /// Whether a layer has the window, if there is one.
    pub(crate) fn is_windowed(&self, layer: usize) -> bool {
        let reaches_all = self.window_every > 0 && (layer + 1).is_multiple_of(self.window_every);
        layer >= self.window_from && !reaches_all
    }

    /// What scores are divided by the root of.
    pub(crate) fn query_scalar(&self) -> usize {
        if self.query_scalar == 0 { self.head_dim } else { self.query_scalar }
    }

    /// Whether both have the same parameters and compute the same from them.
    pub fn computes_as(&self, other: &Self) -> bool {
        let plain = |config: &Self| {
            // a window over the whole context masks nothing, and one that no layer has is of no account
            let Self { max_seq_len, n_layer, window_every, .. } = *config;
            let masks = config.window < max_seq_len && window_every != 1;
            let [window, window_from] =
                [config.window, config.window_from].map(|value| if masks { value } else { 0 });
            Self {
                rope_base: 1.0,
                rope_alpha: 1.0,
                aux_alpha: 0.0,
                window,
                window_from,
                window_every: window_every.min(n_layer + 1),
                rope_local: if window_every == 1 { 1.0 } else { config.rope_local },
                query_scalar: config.query_scalar(),
                ..*config
            }
        };
        let same = plain(self) == plain(other);
        let (theta, theirs) = (self.rope_theta(), other.rope_theta());
        same && (theta - theirs).abs() <= 1e-9 * theta.abs()
    }

    /// `moe`, `llama`, `mistral`, `qwen2`, `qwen3`, `qwen3_moe` or `gemma3_text`.
    pub fn kind(&self) -> &'static str {
        self.family.kind(self.n_experts > 0).unwrap_or(self.family.name())
    }

    /// How many tensors a layer has.
    pub fn tensors_per_layer(&self) -> usize {
        let own = 3 * usize::from(self.family.has_qkv_bias()) + 2 * usize::from(self.family.has_qk_norm());
        4 + self.norms() + own + if self.n_experts == 0 { 3 } else { 1 + 3 * self.n_experts }
    }
}

#[cfg(test)]
mod tests;
