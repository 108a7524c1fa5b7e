//! The parameter table, and the plan of the decoder.

use super::{Family, MoeConfig, WindowLayers};
use crate::model::TensorSpec;
use crate::model::blocks::{Heads, Setup};
use crate::model::decoder::{ExpertNames, MlpKind, Names, Plan, Rotation};
use ironhorse_core::op::RopeScaling;

impl MoeConfig {
    /// The parameter table in model order. Call `validate` first: invalid sizes can make a huge table.
    pub fn tensors(&self) -> Vec<TensorSpec> {
        self.groups().into_iter().flatten().collect()
    }

    /// The parameter table by groups: the tensors of a group lie in memory without gaps, so that ops see q, k and v as
    /// one (W,C), the experts' w1 and w3 as one (E,2F,C) and their w2 as one (E,C,F); gate, up and down in Qwen.
    fn groups(&self) -> Vec<Vec<TensorSpec>> {
        let (c, vocab) = (self.hidden, self.padded_vocab_size());
        let mut groups = vec![vec![TensorSpec::new(EMBED, [vocab, c])]];
        for layer in 0..self.n_layer {
            let name = |part: &str| format!("model.layers.{layer}.{part}");
            groups.push(vec![TensorSpec::new(name("input_layernorm.weight"), [c])]);
            groups.extend(self.attention_groups(&name));
            groups.push(vec![TensorSpec::new(name("post_attention_layernorm.weight"), [c])]);
            if self.family.has_post_norms() {
                groups.push(vec![TensorSpec::new(name("pre_feedforward_layernorm.weight"), [c])]);
            }
            groups.extend(self.mlp_groups(&name));
            if self.family.has_post_norms() {
                groups.push(vec![TensorSpec::new(name("post_feedforward_layernorm.weight"), [c])]);
            }
        }
        groups.push(vec![TensorSpec::new("model.norm.weight", [c])]);
        if !self.tied {
            groups.push(vec![TensorSpec::new(HEAD, [vocab, c])]);
        }
        groups
    }

    fn attention_groups(&self, name: &impl Fn(&str) -> String) -> Vec<Vec<TensorSpec>> {
        let (c, q, kv) = (self.hidden, self.n_head * self.head_dim, self.n_kv_head * self.head_dim);
        let parts = [("q_proj", q), ("k_proj", kv), ("v_proj", kv)];
        let called = |part: &str, what: &str| name(&format!("self_attn.{part}.{what}"));
        let weight =
            |(part, rows): (&str, usize)| TensorSpec::new(called(part, "weight"), [rows, c]).matrices(1);
        let mut groups = vec![parts.map(weight).into()];
        if self.family.has_qkv_bias() {
            groups.push(parts.map(|(part, rows)| TensorSpec::new(called(part, "bias"), [rows])).into());
        }
        groups.push(vec![TensorSpec::new(called("o_proj", "weight"), [c, q]).matrices(1)]);
        if self.family.has_qk_norm() {
            let norm = |part| vec![TensorSpec::new(called(part, "weight"), [self.head_dim])];
            groups.extend(["q_norm", "k_norm"].map(norm));
        }
        groups
    }

    fn mlp_groups(&self, name: &impl Fn(&str) -> String) -> Vec<Vec<TensorSpec>> {
        let (c, f) = (self.hidden, self.ffn);
        let matrix = |part: &str, dims| TensorSpec::new(name(&format!("{part}.weight")), dims).matrices(1);
        if self.n_experts == 0 {
            return vec![
                vec![matrix("mlp.gate_proj", [f, c]), matrix("mlp.up_proj", [f, c])],
                vec![matrix("mlp.down_proj", [c, f])],
            ];
        }
        let ExpertNames { router, experts, gate, up, down } = self.expert_names();
        let expert = |e: usize, part: &str, dims| matrix(&format!("{experts}.{e}.{part}"), dims);
        let both = |e| [gate, up].map(|part| expert(e, part, [f, c]));
        vec![
            // the router decides by its rows, one for each expert: AdamW updates it
            vec![matrix(router, [self.n_experts, c]).matrices(0)],
            (0..self.n_experts).flat_map(both).collect(),
            (0..self.n_experts).map(|e| expert(e, down, [c, f])).collect(),
        ]
    }

    pub(in crate::model) fn expert_names(&self) -> ExpertNames {
        match self.family {
            Family::Qwen3 => QWEN_EXPERTS,
            _ => MIXTRAL_EXPERTS,
        }
    }

    fn rotation(&self) -> Rotation {
        let (base, alpha) = (self.rope_base as f32, self.rope_alpha as f32);
        Rotation { base, alpha, scaling: self.rope_scaling() }
    }

    /// The rotation in layers with a window, where it is another.
    fn windowed_rotation(&self) -> Option<Rotation> {
        let local = Rotation { base: self.rope_local as f32, alpha: 1.0, scaling: RopeScaling::None };
        (self.family.windows(false) == WindowLayers::Pattern).then_some(local)
    }

    /// What queries are multiplied by, because attention divides scores by √HD.
    fn query_scale(&self) -> f32 {
        (self.head_dim as f64 / self.query_scalar() as f64).sqrt() as f32
    }

    pub(in crate::model) fn plan(&self) -> Plan {
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
            adapters: None,
        };
        let aux_alpha = self.aux_alpha as f32;
        Plan {
            setup,
            lora: None,
            names: Names {
                head: if self.tied { EMBED } else { HEAD },
                experts: self.expert_names(),
                ..if self.family.has_post_norms() { POST_NORM_NAMES } else { NAMES }
            },
            heads: Heads { query: self.n_head, kv: self.n_kv_head, dim: self.head_dim },
            rope: Some(self.rotation()),
            windowed_rope: self.windowed_rotation(),
            qk_norm: self.family.has_qk_norm().then(|| self.query_scale()),
            windows: self.windows(),
            norm_eps: self.rms_eps as f32,
            gain: self.family.gain(),
            embed_factor: if self.family.scales_embedding() { (self.hidden as f64).sqrt() } else { 1.0 },
            vocab: [self.vocab_size, self.padded_vocab_size()],
            ffn: self.ffn,
            mlp: match self.n_experts {
                0 => MlpKind::Swiglu(self.family.gate()),
                count => MlpKind::Experts { count, top_k: self.top_k, aux_alpha },
            },
        }
    }
}

/// The token table and the head: V rows in files, Vp in memory.
pub(in crate::model) const EMBED: &str = "model.embed_tokens.weight";
pub(in crate::model) const HEAD: &str = "lm_head.weight";

const NAMES: Names = Names {
    layers: ["model.layers", "layers"],
    embed: EMBED,
    positions: None,
    norm_1: "input_layernorm",
    qkv: ["self_attn.q_proj", "qkv"],
    attn: "attn",
    proj: ["self_attn.o_proj", "o_proj"],
    post_attn: None,
    norm_2: "post_attention_layernorm",
    post_mlp: None,
    last_norm: ["model.norm", "norm"],
    head: HEAD,
    experts: MIXTRAL_EXPERTS,
    io: &["loss", "cross_entropy", "y", "losses"],
};

/// What families call their experts.
pub(in crate::model) const EXPERT_NAMES: [ExpertNames; 2] = [MIXTRAL_EXPERTS, QWEN_EXPERTS];

/// The names of a family whose layers also normalise what they add to the residual stream.
const POST_NORM_NAMES: Names = Names {
    post_attn: Some("post_attention_layernorm"),
    norm_2: "pre_feedforward_layernorm",
    post_mlp: Some("post_feedforward_layernorm"),
    ..NAMES
};

const MIXTRAL_EXPERTS: ExpertNames = ExpertNames {
    router: "block_sparse_moe.gate",
    experts: "block_sparse_moe.experts",
    gate: "w1",
    up: "w3",
    down: "w2",
};

const QWEN_EXPERTS: ExpertNames = ExpertNames {
    router: "mlp.gate",
    experts: "mlp.experts",
    gate: "gate_proj",
    up: "up_proj",
    down: "down_proj",
};
