//! A mixture of experts, which without experts is a dense Llama: its description, its parameter table and the plan of its
//! decoder.

use super::TensorSpec;
use super::blocks::{Heads, Setup};
use super::decoder::{MlpKind, Names, Plan};
use super::describe::{
    self, Described, Field, MAX_LAYERS, MAX_SIZE, above_0, at_least_0, check_params, described, factor,
    padded, size,
};
use crate::{Error, Result};

described! {
    /// The sizes and constants of a mixture of experts.
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
    }
}

/// More experts than this are a typing error; a parameter table of them stays small.
const MAX_EXPERTS: usize = 4096;

impl Described for MoeConfig {
    const KINDS: &'static [&'static str] = &["moe", "llama"];
    const FIELDS: &'static [Field<Self>] = Self::TABLE;

    fn blank() -> Self {
        Self::BLANK
    }

    fn complete(&mut self, given: impl Fn(&str) -> bool) -> Result<()> {
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

    fn count_params(&self) -> u128 {
        let [c, f, hd, experts] = [self.hidden, self.ffn, self.head_dim, self.n_experts].map(factor);
        let attention = 2 * (factor(self.n_head) + factor(self.n_kv_head)) * hd * c;
        let mlps = experts.max(1) * 3 * f * c + experts * c;
        let tables = 2 * factor(self.padded_vocab_size()) * c;
        factor(self.n_layer) * (attention + mlps + 2 * c) + tables + c
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
        self.num_params().saturating_sub(2 * (self.padded_vocab_size() - self.vocab_size) * self.hidden)
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

    /// The parameter table in model order. Call `validate` first: invalid sizes can make a huge table.
    pub fn tensors(&self) -> Vec<TensorSpec> {
        self.groups().into_iter().flatten().collect()
    }

    /// The parameter table by groups: the tensors of a group lie in memory without gaps, so that ops see q, k and v as
    /// one (W,C), the experts' w1 and w3 as one (E,2F,C) and their w2 as one (E,C,F).
    fn groups(&self) -> Vec<Vec<TensorSpec>> {
        let (c, f, vocab) = (self.hidden, self.ffn, self.padded_vocab_size());
        let (q, kv) = (self.n_head * self.head_dim, self.n_kv_head * self.head_dim);
        let mut groups = vec![vec![TensorSpec::new(EMBED, [vocab, c])]];
        for layer in 0..self.n_layer {
            let name = |part: &str| format!("model.layers.{layer}.{part}.weight");
            let matrix = |part: &str, dims: [usize; 2]| TensorSpec::new(name(part), dims).matrices(1);
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
            // the router decides by its rows, one for each expert: AdamW updates it
            groups.push(vec![matrix("block_sparse_moe.gate", [self.n_experts, c]).matrices(0)]);
            let both = |e| ["w1", "w3"].map(|part| expert(e, part, [f, c]));
            groups.push((0..self.n_experts).flat_map(both).collect());
            groups.push((0..self.n_experts).map(|e| expert(e, "w2", [c, f])).collect());
        }
        groups.push(vec![TensorSpec::new("model.norm.weight", [c])]);
        groups.push(vec![TensorSpec::new(HEAD, [vocab, c])]);
        groups
    }

    pub(super) fn plan(&self) -> Plan {
        let (layers, rows) = (self.n_layer as f64 + 1.0, self.top_k.max(1) as f64);
        let width = self.hidden + self.qkv_width() + self.ffn * self.top_k.max(1) + self.n_experts;
        let setup = Setup {
            groups: self.groups(),
            layers: self.n_layer,
            width: self.hidden,
            context: self.max_seq_len,
            floats: 64.0 * (width as f64 + rows * self.hidden as f64 + 1.0) * layers
                + 4.0 * self.padded_vocab_size() as f64,
            flops: 16.0 * self.num_params() as f64,
            attention_flops: 32.0 * self.qkv_width() as f64 * layers,
            routes: rows,
        };
        let aux_alpha = self.aux_alpha as f32;
        Plan {
            setup,
            names: &NAMES,
            heads: Heads { query: self.n_head, kv: self.n_kv_head, dim: self.head_dim },
            rope: Some([self.rope_base as f32, self.rope_alpha as f32]),
            norm_eps: self.rms_eps as f32,
            vocab: [self.vocab_size, self.padded_vocab_size()],
            ffn: self.ffn,
            mlp: match self.n_experts {
                0 => MlpKind::Swiglu,
                count => MlpKind::Experts { count, top_k: self.top_k, aux_alpha },
            },
        }
    }
}

/// The token table and the head: V rows in files, Vp in memory.
pub(super) const EMBED: &str = "model.embed_tokens.weight";
pub(super) const HEAD: &str = "lm_head.weight";

const NAMES: Names = Names {
    layers: ["model.layers", "layers"],
    embed: EMBED,
    positions: None,
    norm_1: "input_layernorm",
    qkv: ["self_attn.q_proj", "qkv"],
    attn: "attn",
    proj: ["self_attn.o_proj", "o_proj"],
    norm_2: "post_attention_layernorm",
    last_norm: ["model.norm", "norm"],
    head: HEAD,
    io: &["loss", "cross_entropy", "y", "losses"],
};

#[cfg(test)]
mod tests {
    use super::*;

    const TINY: MoeConfig = MoeConfig {
        hidden: 64,
        n_layer: 2,
        n_head: 4,
        head_dim: 16,
        n_experts: 4,
        top_k: 2,
        ffn: 256,
        vocab_size: 1000,
        max_seq_len: 512,
        ..MoeConfig::BLANK
    };
    const LARGE: MoeConfig = MoeConfig {
        hidden: 768,
        n_layer: 30,
        n_head: 12,
        head_dim: 64,
        n_experts: 16,
        top_k: 4,
        ffn: 6144,
        rope_alpha: 8.0,
        ..MoeConfig::BLANK
    };

    #[test]
    fn the_table_adds_up() {
        let dense = MoeConfig { n_experts: 0, top_k: 0, ..TINY };
        let odd = MoeConfig { n_head: 6, n_kv_head: 3, hidden: 40, n_experts: 3, top_k: 1, ..TINY };
        for config in [LARGE, TINY, dense, odd] {
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
        assert_eq!(LARGE.total_params(), 6_882_678_528);
        assert_eq!(LARGE.active_params(), 1_786_599_168);
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
