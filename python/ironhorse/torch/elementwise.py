"""Elementwise functions."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..reference.activations import ACTIVATIONS
from ._library import Op, Ops, autocast_on, differentiable, fake, instead, like, promoted, raw, stand_in, wanted

__all__ = ["activation", "gelu", "silu", "square", "square_forward", "swiglu"]


def _unary(name: str, slope: Callable[..., Tensor]) -> Op:
    """An operator of x and flags with `NAME_bwd`. `slope` is its derivative in torch's own operations."""
    bwd: Op = raw(f"{name}_bwd")
    fake(name, lambda x, *flags: like(x))
    fake(f"{name}_bwd", lambda d_y, x, *flags: like(x))
    return differentiable(
        name,
        1,
        save=lambda args, outputs: (args[0],),
        kernel=lambda ctx, d_y: (bwd(d_y, *ctx.saved_tensors, *ctx.numbers),),
        graph=lambda ctx, d_y: (d_y * slope(*ctx.saved_tensors, *ctx.numbers),),
    )


def _silu_slope(x: Tensor) -> Tensor:
    s = torch.sigmoid(x)
    return s * (1 + x * (1 - s))


def _gelu_slope(x: Tensor, tanh: bool) -> Tensor:
    if not tanh:
        return 0.5 * (1 + torch.erf(x * math.sqrt(0.5))) + x * torch.exp(-0.5 * x * x) / math.sqrt(2 * math.pi)
    return ACTIVATIONS["gelu"].slope(x)


_square = _unary("square", lambda x: 2 * x)
_silu = _unary("silu", _silu_slope)
_gelu = _unary("gelu", _gelu_slope)


def square(x: Tensor) -> Tensor:
    """x². Like torch.square."""
    return instead(square, (x,), x) if stand_in("square", x=x) else _square(x)


square_forward = square


def activation(name: str) -> Op:
    """The function of an activation that models use."""
    op = _unary(name, ACTIVATIONS[name].slope)

    def function(x: Tensor) -> Tensor:
        return instead(function, (x,), x) if stand_in(name, x=x) else op(x)

    function.__name__ = function.__qualname__ = name
    function.__doc__ = ACTIVATIONS[name].doc
    return function


def silu(x: Tensor) -> Tensor:
    """x / (1 + e^-x). Like torch.nn.functional.silu."""
    return instead(silu, (x,), x) if stand_in("silu", x=x) else _silu(x)


def gelu(x: Tensor, approximate: str = "none") -> Tensor:
    """x Φ(x), or its tanh form with approximate="tanh". Like torch.nn.functional.gelu."""
    if approximate != "none" and approximate != "tanh":
        raise ValueError(f"gelu: `approximate` is {approximate!r}, expected 'none' or 'tanh'")
    if stand_in("gelu", x=x):
        return instead(gelu, (x,), x, approximate=approximate)
    return _gelu(x, approximate == "tanh")


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) · up, of the same shape and type. Under autocast both are taken in the wider type."""
    if stand_in("swiglu", gate=gate, up=up):
        return instead(swiglu, (gate, up), gate, up)
    if gate.dtype is not up.dtype and autocast_on(gate):
        gate, up = promoted(gate, up)
    return _swiglu(gate, up)


def _swiglu_graph(ctx: Any, d_y: Tensor) -> tuple[Tensor, Tensor]:
    gate, up = ctx.saved_tensors
    return d_y * up * _silu_slope(gate), d_y * torch.nn.functional.silu(gate)


fake("swiglu", lambda gate, up: like(gate))
fake("swiglu_bwd", lambda d_y, gate, up, need_gate, need_up: (wanted(need_gate, gate), wanted(need_up, up)))
_swiglu_bwd: Ops = raw("swiglu_bwd")
_swiglu = differentiable(
    "swiglu",
    2,
    save=lambda args, outputs: args,
    kernel=lambda ctx, d_y: _swiglu_bwd(d_y, *ctx.saved_tensors, *ctx.needs_input_grad),
    graph=_swiglu_graph,
)
