"""Element by element. `out` may be an input; it has the shape of the inputs, or is flat with as many elements."""

from __future__ import annotations

from typing import Any, overload

from .. import _native
from ._types import F32, Device


def silu(x: F32, out: F32 | None = None, *, device: Device = "auto") -> F32:
    """x / (1 + e^-x). Returns `out`, a new array if it is None."""
    return _native.silu(x, out, device)


def gelu(x: F32, out: F32 | None = None, *, device: Device = "auto") -> F32:
    """0.5 x (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3))): GPT-2's, PyTorch's `approximate="tanh"`."""
    return _native.gelu(x, out, device)


def add(a: F32, b: F32, out: F32 | None = None, *, device: Device = "auto") -> F32:
    """a + b, of equal shapes."""
    return _native.add(a, b, out, device)


def mul(a: F32, b: F32, out: F32 | None = None, *, device: Device = "auto") -> F32:
    """a * b, of equal shapes."""
    return _native.mul(a, b, out, device)


def swiglu(gate: F32, up: F32, out: F32 | None = None, *, device: Device = "auto") -> F32:
    """silu(gate) * up, of equal shapes."""
    return _native.swiglu(gate, up, out, device)


@overload
def scale(x: F32, out: float, /, *, device: Device = "auto") -> F32: ...
@overload
def scale(x: F32, out: F32 | None = None, scale: float | None = None, *, device: Device = "auto") -> F32: ...
def scale(x: F32, out: Any = None, scale: Any = None, *, device: Device = "auto") -> F32:
    """x * scale: `scale(x, 2.0)`, `scale(x, scale=2.0)` or `scale(x, out, 2.0)`."""
    if scale is None:
        out, scale = None, out
    return _native.scale(x, out, scale, device)
