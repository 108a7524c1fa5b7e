"""Norms of rows of the last dimension."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, is_grad_enabled
from torch.compiler import is_compiling

from ._library import (
    Op,
    Ops,
    acc,
    autocast_on,
    column_sums,
    fake,
    forward_mode,
    functorch_active,
    gradient,
    in_f32,
    instead,
    like,
    only,
    public,
    raw,
    stand_in,
    wanted,
)

__all__ = ["layernorm", "rmsnorm"]

_rmsnorm: Ops = public("rmsnorm")
_rmsnorm_fwd: Ops = raw("rmsnorm_fwd")
_rmsnorm_bwd: Ops = raw("rmsnorm_bwd")
_layernorm: Ops = public("layernorm")
_layernorm_fwd: Ops = raw("layernorm_fwd")
_layernorm_bwd: Ops = raw("layernorm_bwd")


def _statistic(x: Tensor) -> Tensor:
    return x.new_empty(x.shape[:-1], dtype=acc(x))


def rmsnorm(x: Tensor, weight: Tensor | None = None, eps: float = 1e-6) -> Tensor:
    """x / √(mean(x²) + eps) · weight along the last dimension.

    Like torch.nn.functional.rms_norm over one dimension; under autocast in float32.
    """
    if stand_in(x, weight):
        return instead(rmsnorm, (x, weight), x, weight, eps=eps)
    if weight is None:
        weight = x.new_ones(x.shape[-1:])
    if autocast_on(x):
        x, weight = in_f32(x), in_f32(weight)
    if is_compiling():
        return _rmsnorm(x, weight, eps)[0]
    if (x.requires_grad or weight.requires_grad) and is_grad_enabled() or forward_mode():
        return _rmsnorm_func(x, weight, eps)[0] if functorch_active() else _rmsnorm_grad(x, weight, eps)
    return _rmsnorm_fwd(x, weight, eps)[0]


class _Rmsnorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        y, rstd = _rmsnorm_fwd(x, weight, eps)
        ctx.save_for_backward(x, weight, rstd)
        ctx.eps = eps
        return y

    @staticmethod
    def backward(ctx: Any, d_y: Tensor, d_rstd: Tensor | None = None) -> Any:
        x, weight, rstd = ctx.saved_tensors
        need_x, need_weight, _ = ctx.needs_input_grad
        if d_y is None:
            return None, None, None
        if is_grad_enabled():
            d_x, d_weight = _rmsnorm_gradient(d_y, x, weight, ctx.eps)
        else:
            d_x, d_weight = _rmsnorm_bwd(d_y, x, weight, rstd, need_x, need_weight)
        return only(need_x, d_x), only(need_weight, d_weight), None


def _rmsnorm_gradient(d_y: Tensor, x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    d_y, wide, w = (t.to(acc(x)) for t in (d_y, x, weight))
    rstd = torch.rsqrt((wide * wide).mean(-1, keepdim=True) + eps)
    normed, g = wide * rstd, d_y * w
    d_x = rstd * (g - normed * (g * normed).mean(-1, keepdim=True))
    return d_x.to(x.dtype), column_sums(d_y * normed).to(weight.dtype)


def _save_rmsnorm(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x, weight, ctx.eps = inputs
    ctx.save_for_backward(x, weight, output[1])
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)


def _fake_rmsnorm_bwd(
    d_y: Tensor, x: Tensor, weight: Tensor, rstd: Tensor, need_x: bool, need_weight: bool
) -> tuple[Tensor, Tensor]:
    return wanted(need_x, x), wanted(need_weight, weight)


fake("rmsnorm", lambda x, weight, eps: (like(x), _statistic(x)))
fake("rmsnorm_bwd", _fake_rmsnorm_bwd)
_rmsnorm_grad: Op = _Rmsnorm.apply
_rmsnorm_func: Ops = gradient("rmsnorm", _save_rmsnorm, _Rmsnorm.backward)


def layernorm(x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5) -> Tensor:
    """(x - mean) / √(variance + eps) · weight + bias along the last dimension.

    Like torch.nn.functional.layer_norm over one dimension; under autocast in float32.
    """
    if stand_in(x, weight, bias):
        return instead(layernorm, (x, weight, bias), x, weight, bias, eps=eps)
    if weight is None:
        weight = x.new_ones(x.shape[-1:])
    if bias is None:
        bias = torch.zeros_like(weight)
    if autocast_on(x):
        x, weight, bias = in_f32(x), in_f32(weight), in_f32(bias)
    if is_compiling():
        return _layernorm(x, weight, bias, eps)[0]
    if (x.requires_grad or weight.requires_grad or bias.requires_grad) and is_grad_enabled() or forward_mode():
        if functorch_active():
            return _layernorm_func(x, weight, bias, eps)[0]
        return _layernorm_grad(x, weight, bias, eps)
    return _layernorm_fwd(x, weight, bias, eps)[0]


class _Layernorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
        y, mean, rstd = _layernorm_fwd(x, weight, bias, eps)
        ctx.save_for_backward(x, weight, mean, rstd)
        ctx.eps = eps
        return y

    @staticmethod
    def backward(ctx: Any, d_y: Tensor, d_mean: Tensor | None = None, d_rstd: Tensor | None = None) -> Any:
        x, weight, mean, rstd = ctx.saved_tensors
        need_x, need_weight, need_bias, _ = ctx.needs_input_grad
        if d_y is None:
            return None, None, None, None
        if is_grad_enabled():
            d_x, d_weight, d_bias = _layernorm_gradient(d_y, x, weight, ctx.eps)
        else:
            d_x, d_weight, d_bias = _layernorm_bwd(d_y, x, weight, mean, rstd, need_x, need_weight, need_bias)
        return only(need_x, d_x), only(need_weight, d_weight), only(need_bias, d_bias), None


def _layernorm_gradient(d_y: Tensor, x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    d_y, wide, w = (t.to(acc(x)) for t in (d_y, x, weight))
    centred = wide - wide.mean(-1, keepdim=True)
    rstd = torch.rsqrt((centred * centred).mean(-1, keepdim=True) + eps)
    normed, g = centred * rstd, d_y * w
    d_x = rstd * (g - g.mean(-1, keepdim=True) - normed * (g * normed).mean(-1, keepdim=True))
    return d_x.to(x.dtype), column_sums(d_y * normed).to(weight.dtype), column_sums(d_y).to(weight.dtype)


def _save_layernorm(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    x, weight, _, ctx.eps = inputs
    ctx.save_for_backward(x, weight, output[1], output[2])
    ctx.mark_non_differentiable(output[1], output[2])
    ctx.set_materialize_grads(False)


def _fake_layernorm_bwd(
    d_y: Tensor,
    x: Tensor,
    weight: Tensor,
    mean: Tensor,
    rstd: Tensor,
    need_x: bool,
    need_weight: bool,
    need_bias: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    return wanted(need_x, x), wanted(need_weight, weight), wanted(need_bias, weight)


fake("layernorm", lambda x, weight, bias, eps: (like(x), _statistic(x), _statistic(x)))
fake("layernorm_bwd", _fake_layernorm_bwd)
_layernorm_grad: Op = _Layernorm.apply
_layernorm_func: Ops = gradient("layernorm", _save_layernorm, _Layernorm.backward)
