//! The sizes of a mixture of experts, or of the dense Llama shape that it is without experts, and its parameter table.

use crate::model::TensorSpec;
use crate::model::config::{MAX_LAYERS, MAX_PARAMS, VOCAB_MULTIPLE};
use crate::{Error, Result};

/// The sizes and constants of a mixture of experts.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct MoeConfig {
    /// Channels of the residual stream (C).
    pub hidden: usize,
    /// Transformer blocks (L).
    pub n_layer: usize,
    /// Heads of queries (NH).
    pub n_head: usize,
    /// Heads of keys and values (NKV), a divisor of NH.
    pub n_kv_head: usize,
    /// The width of a head (HD), even; NH·HD need not be C.
    pub head_dim: usize,
    /// Experts of a layer (E); 0 is the dense Llama shape.
    pub n_experts: usize,
    /// Experts of a token (K); 0 without experts.
    pub top_k: usize,
    /// The width inside an expert, or inside the MLP (F).
    pub ffn: usize,
    /// Tokens of the vocabulary (V).
    pub vocab_size: usize,
    /// The longest sequence (maxT).
    pub max_seq_len: usize,
    /// RoPE's base.
    pub rope_base: f64,
    /// Stretches RoPE's wavelengths for longer contexts (NTK-aware); 1 changes nothing.
    pub rope_alpha: f64,
    /// Added to the mean of the squares in every norm.
    pub rms_eps: f64,
    /// Weight of each layer's load-balancing loss.
    pub aux_alpha: f64,
}

/// Weights of more experts than this are a typing error; a table of them stays small.
const MAX_EXPERTS: usize = 4096;

impl MoeConfig {
    /// 6.9 billion parameters, 1.8 of them active.
    const LARGE: Self = Self {
        hidden: 768,
        n_layer: 30,
        n_head: 12,
        n_kv_head: 1,
        head_dim: 64,
        n_experts: 16,
        top_k: 4,
        ffn: 6144,
        vocab_size: 32000,
        max_seq_len: 32768,
        rope_base: 10_000.0,
        rope_alpha: 8.0,
        rms_eps: 1e-5,
        aux_alpha: 0.01,
    };

    /// Small enough for tests.
    const TINY: Self = Self {
        hidden: 64,
        n_layer: 2,
        n_head: 4,
        n_kv_head: 1,
        head_dim: 16,
        n_experts: 4,
        top_k: 2,
        ffn: 256,
        vocab_size: 1000,
        max_seq_len: 512,
        rope_alpha: 1.0,
        ..Self::LARGE
    };

    /// The named sizes.
    pub const NAMED: [(&'static str, Self); 2] = [("moe-6.9b", Self::LARGE), ("moe-tiny", Self::TINY)];

    /// One of the named sizes.
    pub fn named(name: &str) -> Option<Self> {
        Self::NAMED.iter().find(|size| size.0 == name).map(|size| size.1)
    }

    /// Refuses sizes that no model can have. Everything below relies on it: after it no product overflows.
    pub fn validate(&self) -> Result<()> {
        match self.problem() {
            None => Ok(()),
            Some((field, found, expected)) => {
                Err(Error::config(format!("{field} is {found}, expected {expected}")))
            }
        }
    }

    /// What is wrong, as (field, found, expected), for readers that name their file as well.
    pub(crate) fn problem(&self) -> Option<(&'static str, String, String)> {
        self.size_problem().or_else(|| self.number_problem()).or_else(|| match self.checked_params() {
            Some(count) if count <= MAX_PARAMS => None,
            count => Some((
                "number of parameters",
                count.map_or("more than 2^64".into(), |count| count.to_string()),
                format!("at most 2^40 (n_layer {}, hidden {})", self.n_layer, self.hidden),
            )),
        })
    }

    fn size_problem(&self) -> Option<(&'static str, String, String)> {
        let wrong =
            |field: &'static str, found: usize, expected: String| Some((field, found.to_string(), expected));
        let sizes = [
            ("hidden", self.hidden),
            ("n_layer", self.n_layer),
            ("n_head", self.n_head),
            ("n_kv_head", self.n_kv_head),
            ("head_dim", self.head_dim),
            ("ffn", self.ffn),
            ("vocab_size", self.vocab_size),
            ("max_seq_len", self.max_seq_len),
        ];
        if let Some((name, _)) = sizes.into_iter().find(|size| size.1 == 0) {
            return wrong(name, 0, "at least 1".into());
        }
        // with 32 bits each, no product of two of them overflows
        if let Some((name, size)) = sizes.into_iter().find(|size| size.1 > i32::MAX as usize - VOCAB_MULTIPLE)
        {
            return wrong(name, size, format!("at most {}", i32::MAX as usize - VOCAB_MULTIPLE));
        }
        if self.n_layer > MAX_LAYERS {
            return wrong("n_layer", self.n_layer, format!("at most {MAX_LAYERS}"));
        }
        if self.n_experts > MAX_EXPERTS {
            return wrong("n_experts", self.n_experts, format!("at most {MAX_EXPERTS}"));
        }
        match (self.n_experts, self.top_k) {
            (0, 0) => {}
            (0, k) => return wrong("top_k", k, "0 in a model without experts".into()),
            (e, k) if k == 0 || k > e => return wrong("top_k", k, format!("from 1 to n_experts, {e}")),
            _ => {}
        }
        if !self.n_head.is_multiple_of(self.n_kv_head) {
            return wrong("n_kv_head", self.n_kv_head, format!("a divisor of n_head, {}", self.n_head));
        }
        if !self.head_dim.is_multiple_of(2) {
            return wrong("head_dim", self.head_dim, "an even number: RoPE turns pairs".into());
        }
        None
    }

    fn number_problem(&self) -> Option<(&'static str, String, String)> {
        let positive =
            [("rope_base", self.rope_base), ("rope_alpha", self.rope_alpha), ("rms_eps", self.rms_eps)];
        // the ops take f32
        let wrong = positive.iter().find(|(_, value)| !((*value as f32).is_finite() && *value as f32 > 0.0));
        if let Some((name, value)) = wrong {
            return Some((name, value.to_string(), "a number above 0".into()));
        }
        if !((self.aux_alpha as f32).is_finite() && self.aux_alpha >= 0.0) {
            return Some(("aux_alpha", self.aux_alpha.to_string(), "a number of at least 0".into()));
        }
        None
    }

    fn checked_params(&self) -> Option<u64> {
        let [c, f, hd] = [self.hidden, self.ffn, self.head_dim].map(|size| size as u64);
        let q = (self.n_head as u64).checked_mul(hd)?;
        let kv = (self.n_kv_head as u64).checked_mul(hd)?;
        let attention = q.checked_add(kv)?.checked_mul(2)?.checked_mul(c)?;
        let mlps = (self.n_experts.max(1) as u64).checked_mul(3)?.checked_mul(f)?.checked_mul(c)?;
        let gate = (self.n_experts as u64).checked_mul(c)?;
        let block = attention.checked_add(mlps)?.checked_add(gate)?.checked_add(c.checked_mul(2)?)?;
        let tables = (self.padded_vocab_size() as u64).checked_mul(2)?.checked_mul(c)?;
        block.checked_mul(self.n_layer as u64)?.checked_add(tables)?.checked_add(c)
    }

    /// Rows of the token table and of the head in memory (Vp): V rounded up, the rows beyond V are zero.
    pub fn padded_vocab_size(&self) -> usize {
        self.vocab_size.checked_next_multiple_of(VOCAB_MULTIPLE).unwrap_or(self.vocab_size)
    }

    /// Parameters in memory, the padding of the vocabulary included. 0 for sizes that `validate` refuses as too large
    /// to count.
    pub fn num_params(&self) -> usize {
        self.checked_params().and_then(|count| usize::try_from(count).ok()).unwrap_or(0)
    }

    /// All parameters, without padding.
    pub fn total_params(&self) -> usize {
        self.num_params().saturating_sub(2 * (self.padded_vocab_size() - self.vocab_size) * self.hidden)
    }

    /// Those that one token meets: all except the experts it is not sent to. Embedding and head count in full.
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

    /// Whether both have the same parameters and compute the same from them.
    pub fn computes_as(&self, other: &Self) -> bool {
        let same = Self { rope_base: 1.0, rope_alpha: 1.0, aux_alpha: 0.0, ..*self }
            == Self { rope_base: 1.0, rope_alpha: 1.0, aux_alpha: 0.0, ..*other };
        let (theta, theirs) = (self.rope_theta(), other.rope_theta());
        same && (theta - theirs).abs() <= 1e-9 * theta.abs()
    }

    /// `moe`, or `llama` without experts.
    pub fn kind(&self) -> &'static str {
        if self.n_experts == 0 { "llama" } else { "moe" }
    }

    /// How many tensors a layer has.
    pub fn tensors_per_layer(&self) -> usize {
        6 + if self.n_experts == 0 { 3 } else { 1 + 3 * self.n_experts }
    }

    /// The parameter table in model order. Call `validate` first: the table of absurd sizes is absurd.
    pub fn tensors(&self) -> Vec<TensorSpec> {
        self.groups().into_iter().flatten().collect()
    }

    /// The parameter table by groups: the tensors of a group lie in memory without gaps, so that ops see q, k and v as
    /// one (W,C), the experts' w1 and w3 as one (E,2F,C) and their w2 as one (E,C,F).
    pub(super) fn groups(&self) -> Vec<Vec<TensorSpec>> {
        let (c, f, vocab) = (self.hidden, self.ffn, self.padded_vocab_size());
        let (q, kv) = (self.n_head * self.head_dim, self.n_kv_head * self.head_dim);
        let mut groups = vec![vec![TensorSpec::new(EMBED, [vocab, c])]];
        for layer in 0..self.n_layer {
            let name = |part: &str| format!("model.layers.{layer}.{part}.weight");
            let matrix = |part: &str, dims: [usize; 2]| TensorSpec::new(name(part), dims);
            groups.push(vec![TensorSpec::new(name("input_layernorm"), [c])]);
            groups.push(vec![
                matrix("self_attn.q_proj", [q, c]),
                matrix("self_attn.k_proj", [kv, c]),
                matrix("self_attn.v_proj", [kv, c]),
            ]);
            groups.push(vec![matrix("self_attn.o_proj", [c, q])]);
            groups.push(vec![TensorSpec::new(name("post_attention_layernorm"), [c])]);
            if self.n_experts == 0 {
                groups.push(vec![matrix("mlp.gate_proj", [f, c]), matrix("mlp.up_proj", [f, c])]);
                groups.push(vec![matrix("mlp.down_proj", [c, f])]);
                continue;
            }
            let expert =
                |e: usize, part: &str, dims| matrix(&format!("block_sparse_moe.experts.{e}.{part}"), dims);
            groups.push(vec![matrix("block_sparse_moe.gate", [self.n_experts, c])]);
            let both = |e| ["w1", "w3"].map(|part| expert(e, part, [f, c]));
            groups.push((0..self.n_experts).flat_map(both).collect());
            groups.push((0..self.n_experts).map(|e| expert(e, "w2", [c, f])).collect());
        }
        groups.push(vec![TensorSpec::new("model.norm.weight", [c])]);
        groups.push(vec![TensorSpec::new(HEAD, [vocab, c])]);
        groups
    }
}

/// The token table and the head: V rows in files, Vp in memory.
pub(crate) const EMBED: &str = "model.embed_tokens.weight";
pub(crate) const HEAD: &str = "lm_head.weight";

#[cfg(test)]
mod tests {
    use super::*;

    const TINY: MoeConfig = MoeConfig::TINY;

    #[test]
    fn the_table_adds_up() {
        let dense = MoeConfig { n_experts: 0, top_k: 0, ..TINY };
        let odd = MoeConfig { n_head: 6, n_kv_head: 3, hidden: 40, n_experts: 3, top_k: 1, ..TINY };
        for config in [MoeConfig::LARGE, TINY, dense, odd] {
            config.validate().unwrap();
            let table = config.tensors();
            let sum: usize = table.iter().map(|spec| spec.shape.numel()).sum();
            assert_eq!(
                (sum, table.len()),
                (config.num_params(), 3 + config.n_layer * config.tensors_per_layer())
            );
            let norms = table.iter().filter(|spec| !spec.decay).count();
            assert_eq!(norms, 2 * config.n_layer + 1, "only norms do not decay");
        }
        assert_eq!(MoeConfig::LARGE.total_params(), 6_882_678_528);
        assert_eq!(MoeConfig::LARGE.active_params(), 1_786_599_168);
        assert_eq!(TINY.num_params() - TINY.total_params(), 2 * 24 * 64);
        assert_eq!(dense.active_params(), dense.total_params());
    }

    #[test]
    fn tensors_have_the_names_and_the_order_of_hugging_face() {
        let config = MoeConfig { n_layer: 1, n_experts: 2, top_k: 1, ..TINY };
        let table = config.tensors();
        let names: Vec<&str> = table
            .iter()
            .map(|spec| spec.name.trim_start_matches("model.layers.0.").trim_end_matches(".weight"))
            .collect();
        assert_eq!(
            names,
            [
                "model.embed_tokens",
                "input_layernorm",
                "self_attn.q_proj",
                "self_attn.k_proj",
                "self_attn.v_proj",
                "self_attn.o_proj",
                "post_attention_layernorm",
                "block_sparse_moe.gate",
                "block_sparse_moe.experts.0.w1",
                "block_sparse_moe.experts.0.w3",
                "block_sparse_moe.experts.1.w1",
                "block_sparse_moe.experts.1.w3",
                "block_sparse_moe.experts.0.w2",
                "block_sparse_moe.experts.1.w2",
                "model.norm",
                "lm_head",
            ]
        );
    }

    #[test]
    fn senseless_sizes_are_refused() {
        let text = |config: MoeConfig| config.validate().unwrap_err().to_string();
        assert_eq!(text(MoeConfig { top_k: 5, ..TINY }), "top_k is 5, expected from 1 to n_experts, 4");
        assert_eq!(text(MoeConfig { top_k: 0, ..TINY }), "top_k is 0, expected from 1 to n_experts, 4");
        assert_eq!(
            text(MoeConfig { n_experts: 0, ..TINY }),
            "top_k is 2, expected 0 in a model without experts"
        );
        assert_eq!(
            text(MoeConfig { n_kv_head: 3, ..TINY }),
            "n_kv_head is 3, expected a divisor of n_head, 4"
        );
        assert!(text(MoeConfig { head_dim: 15, ..TINY }).contains("even number"));
        assert_eq!(text(MoeConfig { ffn: 0, ..TINY }), "ffn is 0, expected at least 1");
        assert!(text(MoeConfig { ffn: usize::MAX, ..TINY }).starts_with("ffn is 18446744073709551615"));
        let wide = MoeConfig { ffn: 1 << 30, hidden: 1 << 30, ..TINY };
        assert!(text(wide).contains("number of parameters"));
        assert!(text(MoeConfig { n_layer: 5000, ..TINY }).contains("at most 1024"));
        for rope_base in [0.0, -1.0, f64::NAN, f64::INFINITY, 1e300] {
            assert!(text(MoeConfig { rope_base, ..TINY }).contains("expected a number above 0"));
        }
        assert!(text(MoeConfig { aux_alpha: -0.1, ..TINY }).contains("at least 0"));
        MoeConfig { aux_alpha: 0.0, ..TINY }.validate().unwrap();
    }
}
