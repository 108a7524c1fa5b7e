"""Decoders of Llama's design as a plain nn.Module, written to be read: Llama, Mistral, Qwen 2 and 3, Gemma 3, and the
mixtures of experts Mixtral and Qwen 3 MoE.

    x = embed_tokens[tokens]
    for each layer:  x = x + o_proj(attention(rope(qkv(input_layernorm(x)))))
                     x = x + moe(post_attention_layernorm(x))
    logits = norm(x) @ lm_headᵀ
    moe(h) = Σ_j weights_j · w2_e(silu(w1_e h) · w3_e h)      e = experts_j, j = 0..K-1
    loss = mean cross-entropy + Σ_layers aux,  aux = alpha · E · Σ_e f_e · P_e

    | equation                                                     | code              |
    | rmsnorm: x · w / √(mean(x²) + eps)                           | RMSNorm           |
    | rope: pair (i, i + HD/2) turns by p · θ^(-2i/HD)             | rope_tables, turn |
    | the same for longer contexts: slower by the type of scaling  | scaled            |
    | each head of q and k by rmsnorm before rope, Qwen 3, Gemma 3 | SelfAttention     |
    | Gemma 3: x = √C · embed_tokens[tokens], rmsnorm by 1 + w     | Body, RMSNorm     |
    | Gemma 3: x + rmsnorm(o_proj(…)), x + rmsnorm(down_proj(…))   | Block             |
    | Gemma 3: gelu as the gate, q · √(HD / query_scalar)          | MLP, RMSNorm      |
    | Gemma 3: a window and a base of rope of its own in layers    | rope_tables       |
    | a window: position t sees the last `window` of 0..t          | window_attention  |
    | probs = softmax(gate h), in f32 at least                     | SparseMoE         |
    | experts = the K largest logits, of equal ones the lower      | choose            |
    | weights = probs of these, divided by their sum               | SparseMoE         |
    | f_e = share of tokens sent to e, P_e = mean of probs of e    | aux_loss          |

Shapes: B batch, T time, N = B·T tokens, C hidden, NH and NKV heads of width HD, E experts, K of them for a token, F
inner width, V vocabulary. Parameter names are Hugging Face's; linear weights are (out, in). In
bf16, norms, softmax, router and the sum over experts are f32 inside and rounded once. Every activation a check may want
to see is passed, by name and in execution order, to an optional recorder.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..config import NAMED, MoEConfig
from ..params import param_shapes
from .gpt2 import Attention, Record, causal_attention, fused_attention

__all__ = ["MoE", "MoEConfig", "NAMED", "aux_loss", "choose", "rope_tables", "turn"]


def wide(x: Tensor) -> Tensor:
    """bf16 as f32; f32 and f64 as they are."""
    return x.float() if x.dtype in (torch.bfloat16, torch.float16) else x


class RMSNorm(nn.Module):
    """(.., C) -> (.., C); the weight is `offset` + weight, and the result is multiplied by `scale`."""

    def __init__(self, size: int, eps: float, offset: float = 0.0, scale: float = 1.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((size,), 1.0 - offset))
        self.eps, self.offset, self.scale = eps, offset, scale

    def forward(self, x: Tensor) -> Tensor:
        values = wide(x)
        rstd = torch.rsqrt(values.pow(2).mean(dim=-1, keepdim=True) + self.eps)
        return (values * rstd * (self.offset + wide(self.weight)) * self.scale).to(x.dtype)


def norm(config: MoEConfig, size: int | None = None, scale: float = 1.0) -> RMSNorm:
    """The norm of this family, of the residual stream unless another size is given."""
    return RMSNorm(config.hidden if size is None else size, config.rms_eps, float(config.is_gemma3), scale)


def rope_tables(config: MoEConfig, T: int, like: Tensor, layer: int = 0) -> tuple[Tensor, Tensor]:
    """cos and sin (T, HD/2) of a layer, taken in f64 and rounded to f32 at most."""
    pairs = torch.arange(0, config.head_dim, 2, device=like.device, dtype=torch.float64)
    local = config.is_gemma3 and config.window_of(layer) is not None
    theta = config.rope_local if local else config.rope_theta
    speed = theta ** (-pairs / config.head_dim)
    speed = speed if local else scaled(config, speed)
    angles = torch.arange(T, device=like.device, dtype=torch.float64)[:, None] * speed
    dtype = wide(like.new_empty(0)).dtype
    return angles.cos().to(dtype), angles.sin().to(dtype)


def scaled(config: MoEConfig, speed: Tensor) -> Tensor:
    """The speeds of the pairs after scaling: all slower by a factor, or, as in Llama 3.1, those that turn less than
    `low` times in the original context; those that turn more than `high` times stay, and between it is a mixture."""
    if config.rope_type == "default":
        return speed
    slow = speed / config.rope_factor
    if config.rope_type == "linear":
        return slow
    turns = config.rope_original * speed / (2 * math.pi)
    kept = ((turns - config.rope_low) / (config.rope_high - config.rope_low)).clamp(0, 1)
    return kept * speed + (1 - kept) * slow


def turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x (B, heads, T, HD): the pair (i, i + HD/2) turned by its angle, as Hugging Face pairs them."""
    a, b = wide(x).chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).to(x.dtype)


def window_attention(q: Tensor, k: Tensor, v: Tensor, window: int) -> Tensor:
    """softmax(mask(q kᵀ / sqrt(HD))) v, each (B, NH, T, HD), f32 at least inside; t sees the last `window` of 0..t."""
    T, HD = q.shape[-2:]
    scores = (wide(q) @ wide(k).transpose(-2, -1)) / math.sqrt(HD)  # (B, NH, T, T)
    seen = torch.ones(T, T, dtype=torch.bool, device=q.device).tril().triu(1 - window)
    return (scores.masked_fill(~seen, -math.inf).softmax(dim=-1) @ wide(v)).to(q.dtype)


class SelfAttention(nn.Module):
    """(B, T, C) -> (B, T, C), causal; query head h reads the head h / (NH/NKV) of keys and values."""

    def __init__(self, config: MoEConfig, attention: Attention, layer: int = 0) -> None:
        super().__init__()
        self.window = config.window_of(layer)
        self.heads, self.kv_heads, self.head_dim = config.n_head, config.n_kv_head, config.head_dim
        self.attention = attention
        C, q, kv = config.hidden, config.n_head * config.head_dim, config.n_kv_head * config.head_dim
        self.q_proj = nn.Linear(C, q, bias=config.has_qkv_bias)
        self.k_proj = nn.Linear(C, kv, bias=config.has_qkv_bias)
        self.v_proj = nn.Linear(C, kv, bias=config.has_qkv_bias)
        self.o_proj = nn.Linear(q, C, bias=False)
        self.q_norm = norm(config, config.head_dim, config.query_scale) if config.has_qk_norm else None
        self.k_norm = norm(config, config.head_dim) if config.has_qk_norm else None

    def _split(self, qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(B, T, W) packed to q (B, NH, T, HD), k and v (B, NKV, T, HD)."""
        parts = qkv.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
        q, k, v = parts.split((self.heads, self.kv_heads, self.kv_heads), dim=1)
        return q, k, v

    def _joined(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """The inverse of `_split`."""
        return torch.cat((q, k, v), dim=1).transpose(1, 2).flatten(2)

    def forward(self, x: Tensor, tables: tuple[Tensor, Tensor], name: str, record: Record) -> Tensor:
        qkv = torch.cat((self.q_proj(x), self.k_proj(x), self.v_proj(x)), dim=-1)  # (B, T, (NH + 2·NKV)·HD)
        record(f"{name}.qkv", qkv)
        q, k, v = self._split(qkv)
        if self.q_norm is not None and self.k_norm is not None:
            normed = self._joined(self.q_norm(q), self.k_norm(k), v)
            record(f"{name}.qk_norm", normed)
            q, k, v = self._split(normed)
        turned = self._joined(turn(q, *tables), turn(k, *tables), v)
        record(f"{name}.qkv_rope", turned)
        q, k, v = self._split(turned)
        k, v = (part.repeat_interleave(self.heads // self.kv_heads, dim=1) for part in (k, v))
        heads = self.attention(q, k, v) if self.window is None else window_attention(q, k, v, self.window)
        mixed = heads.transpose(1, 2).flatten(2)  # (B, T, NH·HD)
        record(f"{name}.attn", mixed)
        out = self.o_proj(mixed)
        record(f"{name}.o_proj", out)
        return out


class MLP(nn.Module):
    """SwiGLU, in Gemma 3 GeGLU: (.., C) -> (.., F) -> (.., C)."""

    def __init__(self, config: MoEConfig) -> None:
        super().__init__()
        self.glu = geglu if config.is_gemma3 else swiglu
        self.gate_proj = nn.Linear(config.hidden, config.ffn, bias=False)
        self.up_proj = nn.Linear(config.hidden, config.ffn, bias=False)
        self.down_proj = nn.Linear(config.ffn, config.hidden, bias=False)

    def forward(self, x: Tensor, name: str, record: Record) -> Tensor:
        active = self.glu(self.gate_proj(x), self.up_proj(x))
        record(f"{name}.mlp_act", active)
        out = self.down_proj(active)
        record(f"{name}.mlp", out)
        return out


class Expert(nn.Module):
    """The same under Mixtral's or Qwen's names: (rows, C) -> (rows, C). Without rows gradients are 0, not absent."""

    def __init__(self, config: MoEConfig) -> None:
        super().__init__()
        self.names = ("gate_proj", "up_proj", "down_proj") if config.family == "qwen3" else ("w1", "w3", "w2")
        widths = (config.hidden, config.ffn), (config.hidden, config.ffn), (config.ffn, config.hidden)
        for name, (wide_in, wide_out) in zip(self.names, widths, strict=True):
            self.add_module(name, nn.Linear(wide_in, wide_out, bias=False))

    def forward(self, x: Tensor) -> Tensor:
        gate, up, down = (getattr(self, name) for name in self.names)
        out: Tensor = down(swiglu(gate(x), up(x)))
        return out


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) · up."""
    return (F.silu(wide(gate)) * wide(up)).to(gate.dtype)


def geglu(gate: Tensor, up: Tensor) -> Tensor:
    """gelu(gate) · up, GELU in its tanh form."""
    return (F.gelu(wide(gate), approximate="tanh") * wide(up)).to(gate.dtype)


def choose(logits: Tensor, top_k: int) -> Tensor:
    """(N, E) -> (N, K): the largest, descending; of equal ones the lower number first. torch.topk promises no order."""
    return logits.argsort(dim=-1, descending=True, stable=True)[:, :top_k]


def aux_loss(probs: Tensor, experts: Tensor, alpha: float) -> Tensor:
    """alpha · E · Σ_e f_e · P_e, a scalar; even routing gives alpha · K. The choice f has no gradient, P has."""
    E = probs.shape[-1]
    share = F.one_hot(experts.long(), E).sum(dim=1).to(probs.dtype).mean(dim=0)  # (E,), sums to K
    return alpha * E * (share * probs.mean(dim=0)).sum()


class SparseMoE(nn.Module):
    """Router, experts and the weighted sum: (B, T, C) -> (B, T, C), and the layer's auxiliary loss."""

    def __init__(self, config: MoEConfig) -> None:
        super().__init__()
        self.top_k, self.alpha = config.top_k, config.aux_alpha
        self.gate = nn.Linear(config.hidden, config.n_experts, bias=False)
        self.experts = nn.ModuleList(Expert(config) for _ in range(config.n_experts))
        self.fixed: Tensor | None = None  # (N, K), a choice to keep, for finite differences

    def forward(self, x: Tensor, name: str, record: Record) -> tuple[Tensor, Tensor]:
        tokens = x.flatten(0, -2)  # (N, C)
        logits = self.gate(tokens)
        record(f"{name}.router_logits", logits)
        probs = wide(logits).softmax(dim=-1)
        record(f"{name}.probs", probs)
        experts = choose(logits.detach(), self.top_k) if self.fixed is None else self.fixed
        chosen = probs.gather(1, experts)
        weights = chosen / chosen.sum(dim=-1, keepdim=True)
        record(f"{name}.weights", weights)
        record(f"{name}.experts", experts.int())
        out = self.combine(self.apply_experts(tokens, experts), weights).view_as(x)
        record(f"{name}.moe", out)
        return out, aux_loss(probs, experts, self.alpha)

    def apply_experts(self, tokens: Tensor, experts: Tensor) -> Tensor:
        """(N, C), (N, K) -> (N, K, C): what each chosen expert makes of the token. No token is dropped."""
        order = experts.flatten().argsort(stable=True)  # routes n·K + j, those of expert 0 first
        counts = experts.flatten().bincount(minlength=len(self.experts)).tolist()
        groups = tokens[order // self.top_k].split(counts)
        rows = torch.cat([expert(group) for expert, group in zip(self.experts, groups, strict=True)])
        return rows[order.argsort()].unflatten(0, experts.shape)  # back to the order of routes

    @staticmethod
    def combine(rows: Tensor, weights: Tensor) -> Tensor:
        """Σ_j weights_j · rows_j, added in the order of j."""
        out = weights[:, :1] * wide(rows[:, 0])
        for j in range(1, weights.shape[1]):
            out = out + weights[:, j : j + 1] * wide(rows[:, j])
        return out.to(rows.dtype)


class Block(nn.Module):
    """One layer: attention, then experts or an MLP, each behind a norm and added to the residual stream; in Gemma 3
    there is another norm before it is added."""

    def __init__(self, config: MoEConfig, attention: Attention, layer: int = 0) -> None:
        super().__init__()
        self.input_layernorm = norm(config)
        self.self_attn = SelfAttention(config, attention, layer)
        self.post_attention_layernorm = norm(config)
        self.post_norms = config.is_gemma3
        if self.post_norms:
            self.pre_feedforward_layernorm, self.post_feedforward_layernorm = norm(config), norm(config)
        self.sparse = "mlp" if config.family == "qwen3" else "block_sparse_moe"  # what the experts are called
        if config.n_experts:
            self.add_module(self.sparse, SparseMoE(config))
        else:
            self.mlp = MLP(config)

    def forward(
        self, x: Tensor, tables: tuple[Tensor, Tensor], name: str, record: Record
    ) -> tuple[Tensor, Tensor | None]:
        def normalised(part: str, value: Tensor) -> Tensor:
            normed: Tensor = getattr(self, part)(value)
            record(f"{name}.{part}", normed)
            return normed

        out = self.self_attn(normalised("input_layernorm", x), tables, name, record)
        x = x + (normalised("post_attention_layernorm", out) if self.post_norms else out)
        record(f"{name}.residual_1", x)
        normed = normalised("pre_feedforward_layernorm" if self.post_norms else "post_attention_layernorm", x)
        experts = getattr(self, self.sparse, None)
        if isinstance(experts, SparseMoE):
            out, aux = experts(normed, name, record)
        else:
            out, aux = self.mlp(normed, name, record), None
        x = x + (normalised("post_feedforward_layernorm", out) if self.post_norms else out)
        record(f"{name}.residual_2", x)
        return x, aux


class Body(nn.Module):
    """What Hugging Face calls `model`: all but the head."""

    def __init__(self, config: MoEConfig, attention: Attention) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden)
        self.layers = nn.ModuleList(Block(config, attention, layer) for layer in range(config.n_layer))
        self.norm = norm(config)

    def forward(self, tokens: Tensor, record: Record) -> tuple[Tensor, list[Tensor]]:
        x = self.embed_tokens(tokens)
        if self.config.is_gemma3:
            x = x * torch.tensor(math.sqrt(self.config.hidden), dtype=x.dtype, device=x.device)
        record("embed", x)
        losses = []
        for layer, block in enumerate(self.layers):
            tables = rope_tables(self.config, tokens.shape[1], x, layer)
            x, aux = block(x, tables, f"layers.{layer}", record)
            losses += [] if aux is None else [aux]
        x = self.norm(x)
        record("norm", x)
        return x, losses


class MoE(nn.Module):
    """tokens (B, T) -> logits (B, T, V). Weights are torch's own until `init_moe.init_weights` or a load fills them.

    `attention` takes and returns (B, NH, T, HD), keys and values repeated for their groups.
    """

    def __init__(self, config: MoEConfig, attention: Attention = causal_attention) -> None:
        super().__init__()
        self.config = config.validate()
        self.model = Body(config, attention)
        self.lm_head = None if config.tied else nn.Linear(config.hidden, config.vocab_size, bias=False)

    def _head(self, x: Tensor) -> Tensor:
        return F.linear(x, self.model.embed_tokens.weight) if self.lm_head is None else self.lm_head(x)

    def forward(self, tokens: Tensor, record: Record | None = None) -> Tensor:
        return self._head(self.model(tokens, record or _discard)[0])

    def loss(self, tokens: Tensor, targets: Tensor, record: Record | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """(logits (B, T, V), mean cross-entropy over the B·T targets plus all of aux, aux (L,), or (0,) if dense)."""
        x, losses = self.model(tokens, record or _discard)
        logits = self._head(x)
        loss = F.cross_entropy(wide(logits).flatten(0, 1), targets.flatten())
        aux = torch.stack(losses) if losses else loss.new_zeros(0)
        return logits, loss + aux.sum(), aux

    loss_f32 = loss  # cross-entropy is never narrower than f32 here

    def bf16_copy(self) -> MoE:
        """The same model in bf16, with attention that is f32 inside; the textbook's rounds every score to bf16."""
        low = copy.deepcopy(self).to(torch.bfloat16)
        for block in low.model.layers:
            block.self_attn.attention = fused_attention
        return low

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """In the order of the parameter table, which is not that of the modules: all w2 come after all w1 and w3."""
        found = dict(super().named_parameters("", recurse, remove_duplicate))
        for name in param_shapes(self.config):
            if name in found:
                yield (f"{prefix}.{name}" if prefix else name), found[name]


def _discard(name: str, value: Tensor) -> None:
    """A recorder that records nothing."""
