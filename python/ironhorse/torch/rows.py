"""Over rows of the last dimension: the fused scale, bias and relu, and softmax."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, is_grad_enabled
from torch.compiler import is_compiling

from ._library import (
    Op,
    Ops,
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
    promoted,
    public,
    raw,
    stand_in,
    stands_in,
    wanted,
)

__all__ = ["fused_op_forward", "fused_scale_bias_relu", "softmax"]

_fused: Op = public("fused_scale_bias_relu")
_fused_fwd: Op = raw("fused_scale_bias_relu_fwd")
_fused_gated: Ops = raw("fused_scale_bias_relu_gated")
_fused_bwd: Ops = raw("fused_scale_bias_relu_bwd")
_softmax: Op = public("softmax")
_softmax_fwd: Op = raw("softmax_fwd")
_softmax_bwd: Op = raw("softmax_bwd")


def fused_scale_bias_relu(x: Tensor, bias: Tensor, scale: float = 1.0) -> Tensor:
    """relu(x · scale + bias), with one bias for each element of the last dimension.

    Like torch.relu(x * scale + bias) in one pass. Under autocast x and bias are taken in the wider type.
    """
    if stand_in(x, bias, scale):
        return instead(fused_scale_bias_relu, (x, bias, scale), x, bias, scale=scale)
    if isinstance(scale, Tensor) and scale.requires_grad:
        raise RuntimeError(
            "fused_scale_bias_relu: `scale` is a number without a gradient; for a learned one use x * scale"
        )
    if x.dtype is not bias.dtype and autocast_on(x):
        x, bias = promoted(x, bias)
    if is_compiling():
        return _fused(x, bias, scale)
    if (x.requires_grad or bias.requires_grad) and is_grad_enabled() or forward_mode():
        return _fused_func(x, bias, scale) if functorch_active() else _fused_grad(x, bias, scale)
    return _fused_fwd(x, bias, scale)


fused_op_forward = fused_scale_bias_relu


class _Fused(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor, scale: float) -> Tensor:
        if x.is_cuda:
            # One bit an element tells the backward what it needs of y; some shapes have none.
            y, gate = _fused_gated(x, bias, scale)
            ctx.save_for_backward(gate if gate.numel() else y)
        else:
            y = _fused_fwd(x, bias, scale)
            ctx.save_for_backward(y)
        ctx.scale = scale
        return y

    @staticmethod
    def backward(ctx: Any, d_y: Tensor) -> Any:
        (y,) = ctx.saved_tensors
        need_x, need_bias, _ = ctx.needs_input_grad
        if is_grad_enabled():
            # NaN passes, as it does through torch.relu.
            passes = _opened(y, d_y) if y.dtype is torch.uint8 else ~(y.detach() <= 0)
            through = d_y * passes
            d_bias = column_sums(through) if need_bias else None
            return through * ctx.scale if need_x else None, d_bias, None
        d_x, d_bias = _fused_bwd(d_y, y, ctx.scale, need_x, need_bias)
        return only(need_x, d_x), only(need_bias, d_bias), None


def _opened(gate: Tensor, like_y: Tensor) -> Tensor:
    """The bits as booleans: element e is bit e % 8 of byte e // 8."""
    return (gate.unsqueeze(1) >> torch.arange(8, dtype=torch.uint8, device=gate.device) & 1).view(like_y.shape).bool()


def _save_fused(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(output)
    ctx.scale = inputs[2]


def _fake_gated(x: Tensor, bias: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    bits = x.is_cuda and x.shape[-1] % 8 == 0
    return like(x), x.new_empty(x.numel() // 8 if bits else 0, dtype=torch.uint8)


def _fake_fused_bwd(d_y: Tensor, y: Tensor, scale: float, need_x: bool, need_bias: bool) -> tuple[Tensor, Tensor]:
    return wanted(need_x, d_y), d_y.new_empty(d_y.shape[-1] if need_bias else 0)


fake("fused_scale_bias_relu", lambda x, bias, scale: like(x))
fake("fused_scale_bias_relu_gated", _fake_gated)
fake("fused_scale_bias_relu_bwd", _fake_fused_bwd)
_fused_grad: Op = _Fused.apply
_fused_func: Op = gradient("fused_scale_bias_relu", _save_fused, _Fused.backward)


def softmax(x: Tensor, dim: int = -1) -> Tensor:
    """e^x over its sum along `dim`. Like torch.softmax; under autocast in float32."""
    if stands_in(x):
        return instead(softmax, (x,), x, dim=dim)
    if autocast_on(x):
        x = in_f32(x)
    if dim != -1 and dim != x.dim() - 1:
        return softmax(x.transpose(dim, -1)).transpose(dim, -1)
    if x.dim() == 0:
        return softmax(x.unsqueeze(0)).squeeze(0)
    if is_compiling():
        return _softmax(x)
    if x.requires_grad and is_grad_enabled() or forward_mode():
        return _softmax_func(x) if functorch_active() else _softmax_grad(x)
    return _softmax_fwd(x)


class _Softmax(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        y = _softmax_fwd(x)
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx: Any, d_y: Tensor) -> Any:
        (y,) = ctx.saved_tensors
        if is_grad_enabled():
            return y * (d_y - (d_y * y).sum(-1, keepdim=True))
        return _softmax_bwd(d_y, y)


def _save_output(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(output)


fake("softmax", lambda x: like(x))
fake("softmax_bwd", lambda d_y, y: like(y))
_softmax_grad: Op = _Softmax.apply
_softmax_func: Op = gradient("softmax", _save_output, _Softmax.backward)
