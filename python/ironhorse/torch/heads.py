"""Rotary embedding and attention. Tensors are (batch, heads, positions, head_dim).

Tensors that are stored as (batch, positions, heads, head_dim), what `linear(x).view(B, T, H, D).transpose(1, 2)` gives,
are used without a copy, and their results are stored the same way.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from ._library import (
    Op,
    Ops,
    acc,
    autocast_on,
    differentiable,
    fake,
    functorch_active,
    in_lower,
    instead,
    like,
    public,
    raw,
    stand_in,
)

__all__ = ["attention", "causal_attention", "rope", "rope_tables"]


def _layout(x: Tensor) -> Tensor:
    """A fake as large as x, with the strides of results of x: `layout` of crates/py/src/torch/heads.rs."""
    if x.dim() == 4 and x.stride(1) < x.stride(2):
        batch, heads, positions, dim = x.shape
        return x.new_empty((batch, positions, heads, dim)).transpose(1, 2)
    return like(x)


def rope_tables(
    seq: int,
    head_dim: int,
    base: float = 10000.0,
    alpha: float = 1.0,
    *,
    device: torch.device | str | None = None,
    dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor]:
    """cos and sin (seq, head_dim / 2) for `rope`: of p / (base alpha^(d / (d - 2)))^(2 i / d) at position p.

    d is head_dim. alpha is the NTK factor, 1 for none. The angles are computed in float64. float64 tensors need tables
    of float64.
    """
    if head_dim % 2 != 0:
        raise ValueError(f"rope_tables: `head_dim` is {head_dim}, expected an even number")
    if alpha != 1.0 and head_dim > 2:
        base = base * alpha ** (head_dim / (head_dim - 2))
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float64, device=device) / max(head_dim, 1)
    angles = torch.outer(torch.arange(seq, dtype=torch.float64, device=device), base**-exponents)
    return angles.cos().to(dtype), angles.sin().to(dtype)


def rope(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False, offset: int = 0) -> Tensor:
    """x (..., positions, head_dim) with pairs of elements rotated: position p by row offset + p of the tables.

    The pairs are i and i + head_dim / 2 (GPT-NeoX, Hugging Face); with `interleaved`, 2i and 2i + 1 (the paper, LLaMA).
    cos and sin are `rope_tables`: (at least offset + positions, head_dim / 2), float32 (float64 for float64). They get
    no gradient.
    """
    if stand_in("rope", x=x, cos=cos, sin=sin):
        return instead(rope, (x, cos, sin), x, cos, sin, interleaved=interleaved, offset=offset)
    if cos.requires_grad or sin.requires_grad:
        raise RuntimeError("rope: `cos` or `sin` requires grad, expected tables that do not")
    return _rope(x, cos, sin, offset, interleaved, False)


def _rope_back(ctx: Any, d_y: Tensor) -> tuple[Tensor]:
    """The gradient of a rotation is the rotation back."""
    offset, interleaved, back = ctx.numbers
    return (_rope_fwd(d_y, *ctx.saved_tensors, offset, interleaved, not back),)


def _rope_graph(ctx: Any, d_y: Tensor) -> tuple[Tensor]:
    offset, interleaved, back = ctx.numbers
    turn = _rope if functorch_active() else _rope_public
    return (turn(d_y, *ctx.saved_tensors, offset, interleaved, not back),)


fake("rope", lambda x, cos, sin, offset, interleaved, back: _layout(x))
_rope_public: Op = public("rope")
_rope_fwd: Op = raw("rope_fwd")
_rope = differentiable(
    "rope",
    3,
    save=lambda args, outputs: (args[1], args[2]),
    kernel=_rope_back,
    graph=_rope_graph,
)


def attention(q: Tensor, k: Tensor, v: Tensor, causal: bool = True, scale: float | None = None) -> Tensor:
    """softmax(q kᵀ · scale) v for q (batch, heads, positions, head_dim); scale is 1 / √head_dim unless given.

    Like torch.nn.functional.scaled_dot_product_attention(..., enable_gqa=True): k and v may have fewer heads, a divisor
    of q's. With `causal` the last query sees all keys, the one before all but the last, and so on; for as many keys as
    queries that is is_causal=True. A query that sees no key gets zeros. Under autocast in its lower precision.
    """
    if stand_in("attention", q=q, k=k, v=v):
        return instead(attention, (q, k, v), q, k, v, causal=causal, scale=scale)
    if scale is None:
        scale = 1.0 / math.sqrt(q.shape[-1]) if q.shape[-1] else 1.0
    if autocast_on(q):
        q, k, v = in_lower(q), in_lower(k), in_lower(v)
    return _attention(q, k, v, causal, scale)


def causal_attention(q: Tensor, k: Tensor, v: Tensor, scale: float | None = None) -> Tensor:
    """`attention` where queries see only what is not later."""
    return attention(q, k, v, True, scale)


def _attention_graph(ctx: Any, d_out: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v, *_ = ctx.saved_tensors
    causal, scale = ctx.numbers
    batch, heads, q_len, dim = q.shape
    kv_heads, kv_len = k.shape[1], k.shape[2]
    group = heads // kv_heads if kv_heads else 1
    # (batch, kv_heads, group, positions, head_dim), so that the heads of a group share their k and v.
    wide_q, wide_d = (t.to(acc(q)).reshape(batch, kv_heads, group, q_len, dim) for t in (q, d_out))
    wide_k, wide_v = (t.to(acc(q)).unsqueeze(2) for t in (k, v))
    scores = wide_q @ wide_k.transpose(-1, -2) * scale
    if causal:
        later = torch.ones(q_len, kv_len, dtype=torch.bool, device=q.device).triu(kv_len - q_len + 1)
        scores = scores.masked_fill(later, float("-inf"))
        # A query that sees no key: a row of zeros, without a gradient.
        blind = later.all(-1, keepdim=True)
        p = torch.softmax(scores.masked_fill(blind, 0.0), -1).masked_fill(later, 0.0)
    else:
        p = torch.softmax(scores, -1)
    d_p = wide_d @ wide_v.transpose(-1, -2)
    d_s = p * (d_p - (d_p * p).sum(-1, keepdim=True)) * scale
    d_q = (d_s @ wide_k).reshape(q.shape).to(q.dtype)
    d_k = (d_s.transpose(-1, -2) @ wide_q).sum(2).to(k.dtype)
    d_v = (p.transpose(-1, -2) @ wide_d).sum(2).to(v.dtype)
    return d_q, d_k, d_v


def _any_order() -> bool:
    """Whether the order of sums, and with it their last bits, may differ from call to call where that is faster."""
    return not torch.are_deterministic_algorithms_enabled()


def _fake_attention_bwd(d_out: Tensor, q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    return tuple(_layout(x) if need else x.new_empty(0) for x, need in zip((q, k, v), rest[-3:], strict=True))


fake("attention", lambda q, k, v, causal, scale: (_layout(q), q.new_empty(q.shape[:3], dtype=acc(q))))
fake("attention_bwd", _fake_attention_bwd)
fake("attention_any_order_bwd", _fake_attention_bwd)
_attention_bwd: Ops = raw("attention_bwd")
_attention_any_order_bwd: Ops = raw("attention_any_order_bwd")
_attention = differentiable(
    "attention",
    3,
    save=lambda args, outputs: (*args[:3], *outputs),
    kernel=lambda ctx, d_out: (_attention_any_order_bwd if _any_order() else _attention_bwd)(
        d_out, *ctx.saved_tensors, *ctx.numbers, *ctx.needs_input_grad[:3]
    ),
    graph=_attention_graph,
)
