"""The parameter table of a mixture of experts or a Llama: names of Hugging Face, shapes, order. Needs no torch."""

from __future__ import annotations

from math import prod

from .config_moe import MoEConfig


def param_shapes(config: MoEConfig) -> dict[str, tuple[int, ...]]:
    """Every parameter by name, in model order; linear weights are (out, in).

    Within a layer the experts' w1 and w3 alternate and all w2 follow, so that in memory they are one (E, 2F, C) and one
    (E, C, F).
    """
    C, V = config.hidden, config.vocab_size
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (V, C)}
    for layer in range(config.n_layer):
        shapes |= {f"model.layers.{layer}.{stem}": shape for stem, shape in layer_shapes(config).items()}
    return shapes | {"model.norm.weight": (C,), "lm_head.weight": (V, C)}


def layer_shapes(config: MoEConfig) -> dict[str, tuple[int, ...]]:
    """The parameters of one layer, without `model.layers.N.`."""
    C, F = config.hidden, config.ffn
    q, kv = config.n_head * config.head_dim, config.n_kv_head * config.head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "input_layernorm.weight": (C,),
        "self_attn.q_proj.weight": (q, C),
        "self_attn.k_proj.weight": (kv, C),
        "self_attn.v_proj.weight": (kv, C),
        "self_attn.o_proj.weight": (C, q),
        "post_attention_layernorm.weight": (C,),
    }
    if not config.n_experts:
        return shapes | {f"mlp.{name}_proj.weight": (F, C) for name in ("gate", "up")} | {
            "mlp.down_proj.weight": (C, F)
        }  # fmt: skip
    shapes["block_sparse_moe.gate.weight"] = (config.n_experts, C)
    experts = [f"block_sparse_moe.experts.{expert}" for expert in range(config.n_experts)]
    shapes |= {f"{expert}.{name}.weight": (F, C) for expert in experts for name in ("w1", "w3")}
    return shapes | {f"{expert}.w2.weight": (C, F) for expert in experts}


def decays(shape: tuple[int, ...]) -> bool:
    """Weight decay falls on matrices, the router's and the embeddings included, and not on the norms."""
    return len(shape) == 2


def total_params(config: MoEConfig) -> int:
    """All parameters."""
    return sum(prod(shape) for shape in param_shapes(config).values())


def active_params(config: MoEConfig) -> int:
    """Those that one token meets: all except the experts it is not sent to. Embedding and head count in full."""
    idle = config.n_experts - config.top_k
    return total_params(config) - config.n_layer * idle * 3 * config.ffn * config.hidden


def activation_names(config: MoEConfig) -> list[str]:
    """Every named activation, in execution order. `logits`, `loss` and `aux` follow and have their own names."""
    block = ("router_logits", "probs", "weights", "experts", "moe") if config.n_experts else ("mlp_act", "mlp")
    per_layer = (
        "input_layernorm",
        "qkv",
        "qkv_rope",
        "attn",
        "o_proj",
        "residual_1",
        "post_attention_layernorm",
        *block,
        "residual_2",
    )
    return ["embed", *(f"layers.{layer}.{name}" for layer in range(config.n_layer) for name in per_layer), "norm"]
