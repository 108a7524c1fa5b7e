use super::*;
use crate::model::{ModelConfig, TensorSpec};

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
    let of = |family| MoeConfig { family, tied: true, n_head: 6, n_kv_head: 3, ..dense };
    let qwen3_moe = MoeConfig { family: Family::Qwen3, ..odd };
    let gemma3 = MoeConfig { window: 9, window_every: 2, ..of(Family::Gemma3) };
    for config in [LARGE, TINY, dense, odd, of(Family::Qwen2), of(Family::Qwen3), qwen3_moe, gemma3] {
        config.validate().unwrap();
        let table = config.tensors();
        let sum: usize = table.iter().map(|spec| spec.shape.numel()).sum();
        assert_eq!(
            (sum, table.len()),
            (config.num_params(), 3 - usize::from(config.tied) + config.n_layer * config.tensors_per_layer())
        );
        let own =
            3 * usize::from(config.family.has_qkv_bias()) + 2 * usize::from(config.family.has_qk_norm());
        let others = table.iter().filter(|spec| !spec.decay).count();
        assert_eq!(others, (config.norms() + own) * config.n_layer + 1, "only norms and biases do not decay");
        let unpadded: usize = table
            .iter()
            .map(|spec| ModelConfig::from(config).unpadded_shape(spec).iter().product::<usize>())
            .sum();
        assert_eq!(unpadded, config.total_params());
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
    assert_eq!(text(MoeConfig { n_experts: 0, ..TINY }), "top_k is 2, expected 0 in a model without experts");
    assert_eq!(text(MoeConfig { n_kv_head: 3, ..TINY }), "n_kv_head is 3, expected a divisor of n_head, 4");
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

#[test]
fn families_have_their_own_tensors() {
    let names = |family, n_experts| {
        let config = MoeConfig { family, n_layer: 1, n_experts, top_k: n_experts, tied: true, ..TINY };
        config.validate().unwrap();
        let table = config.tensors();
        let part = |spec: &TensorSpec| spec.name.trim_start_matches("model.layers.0.").to_owned();
        table.iter().map(part).filter(|name| !name.starts_with("model.")).collect::<Vec<_>>()
    };
    let attention =
        ["q_proj.weight", "k_proj.weight", "v_proj.weight"].map(|part| format!("self_attn.{part}"));
    let biases = ["q_proj.bias", "k_proj.bias", "v_proj.bias"].map(|part| format!("self_attn.{part}"));
    assert_eq!(names(Family::Qwen2, 0)[1..7], [attention.clone(), biases].concat());
    assert_eq!(names(Family::Mistral, 0), names(Family::Llama, 0));
    assert_eq!(
        names(Family::Qwen3, 2)[4..],
        [
            "self_attn.o_proj.weight",
            "self_attn.q_norm.weight",
            "self_attn.k_norm.weight",
            "post_attention_layernorm.weight",
            "mlp.gate.weight",
            "mlp.experts.0.gate_proj.weight",
            "mlp.experts.0.up_proj.weight",
            "mlp.experts.1.gate_proj.weight",
            "mlp.experts.1.up_proj.weight",
            "mlp.experts.0.down_proj.weight",
            "mlp.experts.1.down_proj.weight",
        ]
    );
}
