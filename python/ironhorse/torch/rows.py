"""Functions of the rows of the last dimension: the fused scale, bias and relu, and softmax."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ._library import (
    Op,
    Ops,
    autocast_on,
    column_sums,
    differentiable,
    fake,
    in_f32,
    instead,
    like,
    promoted,
    raw,
    stand_in,
    stands_in,
    wanted,
)

__all__ = ["fused_op_forward", "fused_scale_bias_relu", "softmax"]


def fused_scale_bias_relu(x: Tensor, bias: Tensor, scale: float = 1.0) -> Tensor:
    """relu(x · scale + bias), with one bias for each element of the last dimension.

    Like torch.relu(x * scale + bias) in one pass. Under autocast x and bias are taken in the wider type.
    """
    if stand_in("fused_scale_bias_relu", x=x, bias=bias) or stands_in(scale):
        return instead(fused_scale_bias_relu, (x, bias, scale), x, bias, scale=scale)
    if isinstance(scale, Tensor) and scale.requires_grad:
        raise RuntimeError(
            "fused_scale_bias_relu: `scale` is a number without a gradient; for a learned one use x * scale"
        )
    if x.dtype is not bias.dtype and autocast_on(x):
        x, bias = promoted(x, bias)
    return _fused(x, bias, scale)


fused_op_forward = fused_scale_bias_relu


def _fused_forward(x: Tensor, bias: Tensor, scale: float) -> tuple[Tensor, tuple[Tensor]]:
    if not x.is_cuda:
        y = _fused_fwd(x, bias, scale)
        return y, (y,)
    # One bit per element tells the backward what it needs of y; some shapes have no such bits.
    y, gate = _fused_gated(x, bias, scale)
    return y, (gate if gate.numel() else y,)


def _fused_graph(ctx: Any, d_y: Tensor) -> tuple[Tensor, Tensor]:
    (y,) = ctx.saved_tensors
    # NaN passes, as it does through torch.relu.
    passes = _opened(y, d_y) if y.dtype is torch.uint8 else ~(y.detach() <= 0)
    through = d_y * passes
    return through * ctx.numbers[0], column_sums(through)


def _opened(gate: Tensor, like_y: Tensor) -> Tensor:
    """The bits as booleans: element e is bit e % 8 of byte e // 8."""
    return (gate.unsqueeze(1) >> torch.arange(8, dtype=torch.uint8, device=gate.device) & 1).view(like_y.shape).bool()


def _fake_gated(x: Tensor, bias: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    bits = x.is_cuda and x.shape[-1] % 8 == 0
    return like(x), x.new_empty(x.numel() // 8 if bits else 0, dtype=torch.uint8)


def _fake_fused_bwd(d_y: Tensor, y: Tensor, scale: float, need_x: bool, need_bias: bool) -> tuple[Tensor, Tensor]:
    return wanted(need_x, d_y), d_y.new_empty(d_y.shape[-1] if need_bias else 0)


fake("fused_scale_bias_relu", lambda x, bias, scale: like(x))
fake("fused_scale_bias_relu_gated", _fake_gated)
fake("fused_scale_bias_relu_bwd", _fake_fused_bwd)
_fused_fwd: Op = raw("fused_scale_bias_relu_fwd")
_fused_gated: Ops = raw("fused_scale_bias_relu_gated")
_fused_bwd: Ops = raw("fused_scale_bias_relu_bwd")
_fused = differentiable(
    "fused_scale_bias_relu",
    2,
    save=lambda args, outputs: outputs,
    kernel=lambda ctx, d_y: _fused_bwd(d_y, *ctx.saved_tensors, *ctx.numbers, *ctx.needs_input_grad[:2]),
    graph=_fused_graph,
    forward=_fused_forward,
)


def softmax(x: Tensor, dim: int = -1) -> Tensor:
    """e^x over its sum along `dim`. Like torch.softmax; under autocast in float32."""
    if stand_in("softmax", x=x):
        return instead(softmax, (x,), x, dim=dim)
    if autocast_on(x):
        x = in_f32(x)
    if dim != -1 and dim != x.dim() - 1:
        return softmax(x.transpose(dim, -1)).transpose(dim, -1)
    if x.dim() == 0:
        return softmax(x.unsqueeze(0)).squeeze(0)
    return _softmax(x)


def _softmax_graph(ctx: Any, d_y: Tensor) -> tuple[Tensor]:
    (y,) = ctx.saved_tensors
    return (y * (d_y - (d_y * y).sum(-1, keepdim=True)),)


fake("softmax", lambda x: like(x))
fake("softmax_bwd", lambda d_y, y: like(y))
_softmax_bwd: Op = raw("softmax_bwd")
_softmax = differentiable(
    "softmax",
    1,
    save=lambda args, outputs: outputs,
    kernel=lambda ctx, d_y: (_softmax_bwd(d_y, *ctx.saved_tensors),),
    graph=_softmax_graph,
)
