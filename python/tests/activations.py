"""The names that the reference models give to their activations."""

from __future__ import annotations

from ironhorse.config import GPT2Config, ModelConfig

GPT2_LAYER = (
    "ln_1", "attn.c_attn", "attn.sdpa", "attn.c_proj", "residual_1", "ln_2", "mlp.c_fc", "mlp.gelu", "mlp.c_proj",
    "residual_2",
)  # fmt: skip
ATTENTION = ("input_layernorm", "qkv", "qkv_rope", "attn", "o_proj", "residual_1", "post_attention_layernorm")
GEMMA3 = ("post_attention_layernorm", "residual_1", "pre_feedforward_layernorm")  # in the place of its last two


def activation_names(config: ModelConfig) -> list[str]:
    """Every named activation, in execution order. `logits`, `loss` and `aux` follow and have their own names."""
    if isinstance(config, GPT2Config):
        return ["embed", *(f"h.{layer}.{name}" for layer in range(config.n_layer) for name in GPT2_LAYER), "ln_f"]
    block = ("router_logits", "probs", "weights", "experts", "moe") if config.n_experts else ("mlp_act", "mlp")
    norms = ("qk_norm",) if config.has_qk_norm else ()
    after = (*GEMMA3, *block, "post_feedforward_layernorm") if config.is_gemma3 else (*ATTENTION[5:], *block)
    per_layer = (*ATTENTION[:2], *norms, *ATTENTION[2:5], *after, "residual_2")
    return ["embed", *(f"layers.{layer}.{name}" for layer in range(config.n_layer) for name in per_layer), "norm"]
