"""Norms of rows of the last dimension."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ._library import (
    Ops,
    acc,
    autocast_on,
    column_sums,
    differentiable,
    fake,
    in_f32,
    instead,
    like,
    raw,
    stand_in,
    wanted,
)

__all__ = ["layernorm", "rmsnorm"]


def _statistic(x: Tensor) -> Tensor:
    return x.new_empty(x.shape[:-1], dtype=acc(x))


def rmsnorm(x: Tensor, weight: Tensor | None = None, eps: float = 1e-6) -> Tensor:
    """x / √(mean(x²) + eps) · weight along the last dimension.

    Like torch.nn.functional.rms_norm over one dimension; under autocast in float32.
    """
    if stand_in("rmsnorm", x=x, weight=x if weight is None else weight):
        return instead(rmsnorm, (x, weight), x, weight, eps=eps)
    if weight is None:
        weight = x.new_ones(x.shape[-1:])
    if autocast_on(x):
        x, weight = in_f32(x), in_f32(weight)
    return _rmsnorm(x, weight, eps)


def _rmsnorm_graph(ctx: Any, d_y: Tensor) -> tuple[Tensor, Tensor]:
    x, weight, _ = ctx.saved_tensors
    (eps,) = ctx.numbers
    d_y, wide, w = (t.to(acc(x)) for t in (d_y, x, weight))
    rstd = torch.rsqrt((wide * wide).mean(-1, keepdim=True) + eps)
    normed, g = wide * rstd, d_y * w
    d_x = rstd * (g - normed * (g * normed).mean(-1, keepdim=True))
    return d_x.to(x.dtype), column_sums(d_y * normed).to(weight.dtype)


fake("rmsnorm", lambda x, weight, eps: (like(x), _statistic(x)))
fake(
    "rmsnorm_bwd",
    lambda d_y, x, weight, rstd, need_x, need_weight: (wanted(need_x, x), wanted(need_weight, weight)),
)
_rmsnorm_bwd: Ops = raw("rmsnorm_bwd")
_rmsnorm = differentiable(
    "rmsnorm",
    2,
    save=lambda args, outputs: (args[0], args[1], outputs[1]),
    kernel=lambda ctx, d_y: _rmsnorm_bwd(d_y, *ctx.saved_tensors, *ctx.needs_input_grad[:2]),
    graph=_rmsnorm_graph,
)


def layernorm(x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5) -> Tensor:
    """(x - mean) / √(variance + eps) · weight + bias along the last dimension.

    Like torch.nn.functional.layer_norm over one dimension; under autocast in float32.
    """
    if stand_in("layernorm", x=x, weight=x if weight is None else weight, bias=x if bias is None else bias):
        return instead(layernorm, (x, weight, bias), x, weight, bias, eps=eps)
    if weight is None:
        weight = x.new_ones(x.shape[-1:])
    if bias is None:
        bias = torch.zeros_like(weight)
    if autocast_on(x):
        x, weight, bias = in_f32(x), in_f32(weight), in_f32(bias)
    return _layernorm(x, weight, bias, eps)


def _layernorm_graph(ctx: Any, d_y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    x, weight, *_ = ctx.saved_tensors
    (eps,) = ctx.numbers
    d_y, wide, w = (t.to(acc(x)) for t in (d_y, x, weight))
    centred = wide - wide.mean(-1, keepdim=True)
    rstd = torch.rsqrt((centred * centred).mean(-1, keepdim=True) + eps)
    normed, g = centred * rstd, d_y * w
    d_x = rstd * (g - g.mean(-1, keepdim=True) - normed * (g * normed).mean(-1, keepdim=True))
    return d_x.to(x.dtype), column_sums(d_y * normed).to(weight.dtype), column_sums(d_y).to(weight.dtype)


def _fake_layernorm_bwd(d_y: Tensor, x: Tensor, weight: Tensor, mean: Tensor, rstd: Tensor, *need: bool) -> Any:
    return wanted(need[0], x), wanted(need[1], weight), wanted(need[2], weight)


fake("layernorm", lambda x, weight, bias, eps: (like(x), _statistic(x), _statistic(x)))
fake("layernorm_bwd", _fake_layernorm_bwd)
_layernorm_bwd: Ops = raw("layernorm_bwd")
_layernorm = differentiable(
    "layernorm",
    3,
    save=lambda args, outputs: (args[0], args[1], outputs[1], outputs[2]),
    kernel=lambda ctx, d_y: _layernorm_bwd(d_y, *ctx.saved_tensors, *ctx.needs_input_grad[:3]),
    graph=_layernorm_graph,
)
