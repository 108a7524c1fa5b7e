"""GPT-2 as a plain nn.Module, written to be read.

    x = wte[tokens] + wpe[positions]
    for each layer:  x = x + c_proj(attention(c_attn(ln_1(x))))
                     x = x + c_proj(act(c_fc(ln_2(x))))
    logits = ln_f(x) @ wteᵀ

With `GPT2.dropout` set, the embedding, the attention's probabilities and what is added to x are multiplied with the
masks of `reference.dropout`.

Shapes: B batch, T time, C width, NH heads, HD = C/NH, V vocabulary. Parameter names are Hugging Face's without
the `transformer.` prefix; linear weights are (out, in). Every activation a check may want to see is passed, by
name and in execution order, to an optional recorder.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..config import NAMED, GPT2Config
from . import dropout as places
from .activations import ACTIVATIONS
from .dropout import Dropout

__all__ = ["GPT2", "GPT2Config", "NAMED", "causal_attention", "fused_attention"]

Record = Callable[[str, Tensor], None]
Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


def causal_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """softmax(mask(q kᵀ / sqrt(HD))) v, each (B, NH, T, HD); position t sees positions 0..t."""
    T, HD = q.shape[-2:]
    scores = (q @ k.transpose(-2, -1)) / math.sqrt(HD)  # (B, NH, T, T)
    future = torch.ones(T, T, dtype=torch.bool, device=q.device).triu(1)
    return scores.masked_fill(future, -math.inf).softmax(dim=-1) @ v


def dropped_attention(q: Tensor, k: Tensor, v: Tensor, dropout: Dropout, layer: int) -> Tensor:
    """`causal_attention` with dropout of the probabilities, which are computed in f32 at least."""
    T, HD = q.shape[-2:]
    wide = torch.promote_types(q.dtype, torch.float32)
    scores = (q.to(wide) @ k.to(wide).transpose(-2, -1)) / math.sqrt(HD)  # (B, NH, T, T)
    future = torch.ones(T, T, dtype=torch.bool, device=q.device).triu(1)
    probs = scores.masked_fill(future, -math.inf).softmax(dim=-1)
    return dropout.drop(places.probabilities(layer), probs).to(q.dtype) @ v


def fused_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The same by torch's own attention, which keeps no (T, T) buffer."""
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


class CausalSelfAttention(nn.Module):
    """(B, T, C) -> (B, T, C)."""

    def __init__(self, config: GPT2Config, attention: Attention) -> None:
        super().__init__()
        self.n_head = config.n_head
        self.attention = attention
        self.c_attn = nn.Linear(config.n_embd, 3 * config.n_embd)
        self.c_proj = nn.Linear(config.n_embd, config.n_embd)

    def forward(self, x: Tensor, name: str, record: Record, drop: tuple[Dropout, int] | None = None) -> Tensor:
        B, T, C = x.shape
        qkv = self.c_attn(x)  # (B, T, 3C): all of q, then k, then v
        record(f"{name}.c_attn", qkv)
        q, k, v = (part.view(B, T, self.n_head, -1).transpose(1, 2) for part in qkv.split(C, dim=-1))
        heads = self.attention(q, k, v) if drop is None else dropped_attention(q, k, v, *drop)
        mixed = heads.transpose(1, 2).reshape(B, T, C)
        record(f"{name}.sdpa", mixed)
        out = self.c_proj(mixed)
        record(f"{name}.c_proj", out)
        return out if drop is None else _drop(out, drop[0], places.after_attention(drop[1]), f"{name}.dropout", record)


class MLP(nn.Module):
    """(B, T, C) -> (B, T, 4C) -> (B, T, C)."""

    def __init__(self, config: GPT2Config) -> None:
        super().__init__()
        self.act = config.act
        self.c_fc = nn.Linear(config.n_embd, 4 * config.n_embd)
        self.c_proj = nn.Linear(4 * config.n_embd, config.n_embd)

    def forward(self, x: Tensor, name: str, record: Record, drop: tuple[Dropout, int] | None = None) -> Tensor:
        hidden = self.c_fc(x)
        record(f"{name}.c_fc", hidden)
        active = ACTIVATIONS[self.act].value(hidden)
        record(f"{name}.{self.act}", active)
        out = self.c_proj(active)
        record(f"{name}.c_proj", out)
        return out if drop is None else _drop(out, drop[0], places.after_mlp(drop[1]), f"{name}.dropout", record)


class Block(nn.Module):
    """One layer: attention, then the MLP, each behind a layernorm and added to the residual stream."""

    def __init__(self, config: GPT2Config, attention: Attention) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(config.n_embd, eps=1e-5)
        self.attn = CausalSelfAttention(config, attention)
        self.ln_2 = nn.LayerNorm(config.n_embd, eps=1e-5)
        self.mlp = MLP(config)

    def forward(self, x: Tensor, name: str, record: Record, drop: tuple[Dropout, int] | None = None) -> Tensor:
        normed = self.ln_1(x)
        record(f"{name}.ln_1", normed)
        x = x + self.attn(normed, f"{name}.attn", record, drop)
        record(f"{name}.residual_1", x)
        normed = self.ln_2(x)
        record(f"{name}.ln_2", normed)
        x = x + self.mlp(normed, f"{name}.mlp", record, drop)
        record(f"{name}.residual_2", x)
        return x


class GPT2(nn.Module):
    """tokens (B, T) -> logits (B, T, V). Weights are torch's own until `init.init_weights` or a load fills them.

    `attention` takes and returns (B, NH, T, HD); the default spells the equation out, a benchmark passes
    torch's fused one. With `dropout`, every call of `loss` or `loss_f32` is the next step of training.
    """

    dropout: Dropout | None = None

    def __init__(self, config: GPT2Config, attention: Attention = causal_attention) -> None:
        super().__init__()
        self.config = config.validate()
        self.wte = nn.Embedding(config.vocab_size, config.n_embd)
        self.wpe = nn.Embedding(config.max_seq_len, config.n_embd)
        self.h = nn.ModuleList(Block(config, attention) for _ in range(config.n_layer))
        self.ln_f = nn.LayerNorm(config.n_embd, eps=1e-5)

    def forward(self, tokens: Tensor, record: Record | None = None) -> Tensor:
        record = record or _discard
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.wte(tokens) + self.wpe(positions)
        record("embed", x)
        dropout = self.dropout
        if dropout is not None:
            x = _drop(x, dropout, places.EMBEDDING, "embed_dropout", record)
        for layer, block in enumerate(self.h):
            x = block(x, f"h.{layer}", record, None if dropout is None else (dropout, layer))
        x = self.ln_f(x)
        record("ln_f", x)
        return F.linear(x, self.wte.weight)  # the head is wte itself (tied)

    def loss(self, tokens: Tensor, targets: Tensor, record: Record | None = None) -> tuple[Tensor, Tensor]:
        """(logits (B, T, V), mean cross-entropy over the B*T targets)."""
        self._next_step()
        logits = self(tokens, record)
        return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten())

    def loss_f32(self, tokens: Tensor, targets: Tensor, record: Record | None = None) -> tuple[Tensor, Tensor]:
        """The same with cross-entropy in f32, whatever the logits are."""
        self._next_step()
        logits = self(tokens, record)
        return logits, F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())

    def _next_step(self) -> None:
        if self.dropout is not None:
            self.dropout.step += 1

    def bf16_copy(self) -> GPT2:
        """The same model in bf16, with attention that is f32 inside; the textbook's rounds every score to bf16."""
        low = copy.deepcopy(self).to(torch.bfloat16)
        for block in low.h:
            block.attn.attention = fused_attention
        return low


def _drop(x: Tensor, dropout: Dropout, site: int, name: str, record: Record) -> Tensor:
    x = dropout.drop(site, x)
    record(name, x)
    return x


def _discard(name: str, value: Tensor) -> None:
    """A recorder that records nothing."""
