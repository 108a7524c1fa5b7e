"""Element by element."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, is_grad_enabled
from torch.compiler import is_compiling

from ._library import (
    Op,
    Ops,
    autocast_on,
    fake,
    forward_mode,
    functorch_active,
    gradient,
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

__all__ = ["gelu", "silu", "square", "square_forward", "swiglu"]

_square: Op = public("square")
_square_fwd: Op = raw("square_fwd")
_square_bwd: Op = raw("square_bwd")
_silu: Op = public("silu")
_silu_fwd: Op = raw("silu_fwd")
_silu_bwd: Op = raw("silu_bwd")
_gelu: Op = public("gelu")
_gelu_fwd: Op = raw("gelu_fwd")
_gelu_bwd: Op = raw("gelu_bwd")
_swiglu: Op = public("swiglu")
_swiglu_fwd: Op = raw("swiglu_fwd")
_swiglu_bwd: Ops = raw("swiglu_bwd")

# In each backward: where a graph is wanted (create_graph=True) the gradient is written in torch's own ops, so that it
# can be differentiated again; else it is one kernel.


def square(x: Tensor) -> Tensor:
    """x². Like torch.square."""
    if stands_in(x):
        return instead(square, (x,), x)
    if is_compiling():
        return _square(x)
    if x.requires_grad and is_grad_enabled() or forward_mode():
        return _square_func(x) if functorch_active() else _square_grad(x)
    return _square_fwd(x)


square_forward = square


class _Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return _square_fwd(x)

    @staticmethod
    def backward(ctx: Any, d_y: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        return 2 * x * d_y if is_grad_enabled() else _square_bwd(d_y, x)


def _save_x(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.save_for_backward(inputs[0])


fake("square", lambda x: like(x))
fake("square_bwd", lambda d_y, x: like(x))
_square_grad: Op = _Square.apply
_square_func: Op = gradient("square", _save_x, _Square.backward)


def silu(x: Tensor) -> Tensor:
    """x / (1 + e^-x). Like torch.nn.functional.silu."""
    if stands_in(x):
        return instead(silu, (x,), x)
    if is_compiling():
        return _silu(x)
    if x.requires_grad and is_grad_enabled() or forward_mode():
        return _silu_func(x) if functorch_active() else _silu_grad(x)
    return _silu_fwd(x)


def _silu_slope(x: Tensor) -> Tensor:
    s = torch.sigmoid(x)
    return s * (1 + x * (1 - s))


class _Silu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return _silu_fwd(x)

    @staticmethod
    def backward(ctx: Any, d_y: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        return d_y * _silu_slope(x) if is_grad_enabled() else _silu_bwd(d_y, x)


fake("silu", lambda x: like(x))
fake("silu_bwd", lambda d_y, x: like(x))
_silu_grad: Op = _Silu.apply
_silu_func: Op = gradient("silu", _save_x, _Silu.backward)


def gelu(x: Tensor, approximate: str = "none") -> Tensor:
    """x Φ(x), or its tanh form with approximate="tanh". Like torch.nn.functional.gelu."""
    if approximate != "none" and approximate != "tanh":
        raise ValueError(f"gelu: `approximate` is {approximate!r}, expected 'none' or 'tanh'")
    if stands_in(x):
        return instead(gelu, (x,), x, approximate=approximate)
    tanh = approximate == "tanh"
    if is_compiling():
        return _gelu(x, tanh)
    if x.requires_grad and is_grad_enabled() or forward_mode():
        return _gelu_func(x, tanh) if functorch_active() else _gelu_grad(x, tanh)
    return _gelu_fwd(x, tanh)


def _gelu_slope(x: Tensor, tanh: bool) -> Tensor:
    if not tanh:
        return 0.5 * (1 + torch.erf(x * math.sqrt(0.5))) + x * torch.exp(-0.5 * x * x) / math.sqrt(2 * math.pi)
    a = math.sqrt(2 / math.pi)
    t = torch.tanh(a * (x + 0.044715 * x * x * x))
    return 0.5 * (1 + t) + 0.5 * x * (1 - t * t) * a * (1 + 3 * 0.044715 * x * x)


class _Gelu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, tanh: bool) -> Tensor:
        ctx.save_for_backward(x)
        ctx.tanh = tanh
        return _gelu_fwd(x, tanh)

    @staticmethod
    def backward(ctx: Any, d_y: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        d_x = d_y * _gelu_slope(x, ctx.tanh) if is_grad_enabled() else _gelu_bwd(d_y, x, ctx.tanh)
        return d_x, None


def _save_gelu(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    x, ctx.tanh = inputs
    ctx.save_for_backward(x)


fake("gelu", lambda x, tanh: like(x))
fake("gelu_bwd", lambda d_y, x, tanh: like(x))
_gelu_grad: Op = _Gelu.apply
_gelu_func: Op = gradient("gelu", _save_gelu, _Gelu.backward)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) · up, of the same shape and type. Under autocast both are taken in the wider type."""
    if stand_in(gate, up):
        return instead(swiglu, (gate, up), gate, up)
    if gate.dtype is not up.dtype and autocast_on(gate):
        gate, up = promoted(gate, up)
    if is_compiling():
        return _swiglu(gate, up)
    if (gate.requires_grad or up.requires_grad) and is_grad_enabled() or forward_mode():
        return _swiglu_func(gate, up) if functorch_active() else _swiglu_grad(gate, up)
    return _swiglu_fwd(gate, up)


class _Swiglu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return _swiglu_fwd(gate, up)

    @staticmethod
    def backward(ctx: Any, d_y: Tensor) -> Any:
        gate, up = ctx.saved_tensors
        need_gate, need_up = ctx.needs_input_grad
        if is_grad_enabled():
            d_gate = d_y * up * _silu_slope(gate) if need_gate else None
            return d_gate, d_y * torch.nn.functional.silu(gate) if need_up else None
        d_gate, d_up = _swiglu_bwd(d_y, gate, up, need_gate, need_up)
        return only(need_gate, d_gate), only(need_up, d_up)


def _save_two(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.save_for_backward(*inputs)


def _fake_swiglu_bwd(d_y: Tensor, gate: Tensor, up: Tensor, need_gate: bool, need_up: bool) -> tuple[Tensor, Tensor]:
    return wanted(need_gate, gate), wanted(need_up, up)


fake("swiglu", lambda gate, up: like(gate))
fake("swiglu_bwd", _fake_swiglu_bwd)
_swiglu_grad: Op = _Swiglu.apply
_swiglu_func: Op = gradient("swiglu", _save_two, _Swiglu.backward)
