"""Row by row, where a row is the last dimension or, if given, `rows` times `cols` (`dim`). `out` may be `x`."""

from __future__ import annotations

from typing import Any, overload

from .. import _native
from ._types import F32, I32, Device


def softmax(
    x: F32, out: F32 | None = None, rows: int | None = None, cols: int | None = None, *, device: Device = "auto"
) -> F32:
    """softmax of each row."""
    return _native.softmax(x, out, rows, cols, device)


@overload
def softmax_topk(x: F32, k: int, /, *, device: Device = "auto") -> tuple[F32, I32]: ...
@overload
def softmax_topk(
    x: F32,
    weights: F32 | None = None,
    idx: I32 | None = None,
    rows: int | None = None,
    cols: int | None = None,
    k: int | None = None,
    *,
    device: Device = "auto",
) -> tuple[F32, I32]: ...
def softmax_topk(
    x: F32,
    weights: Any = None,
    idx: I32 | None = None,
    rows: int | None = None,
    cols: int | None = None,
    k: Any = None,
    *,
    device: Device = "auto",
) -> tuple[F32, I32]:
    """The k largest probabilities of each row, largest first, divided by their sum, and their indices.

    `softmax_topk(x, 2)`, `softmax_topk(x, k=2)` or `softmax_topk(x, weights, idx, rows, cols, 2)`.
    """
    if k is None:
        weights, k = None, weights
    return _native.softmax_topk(x, weights, idx, rows, cols, k, device)


def rmsnorm(
    x: F32,
    weight: F32,
    out: F32 | None = None,
    rows: int | None = None,
    dim: int | None = None,
    eps: float = 1e-6,
    *,
    device: Device = "auto",
) -> F32:
    """x / sqrt(mean(x^2) + eps) * weight."""
    return _native.rmsnorm(x, weight, out, rows, dim, eps, device)


def rmsnorm_residual(
    x: F32,
    residual: F32,
    weight: F32,
    out: F32 | None = None,
    residual_out: F32 | None = None,
    rows: int | None = None,
    dim: int | None = None,
    eps: float = 1e-6,
    *,
    device: Device = "auto",
) -> tuple[F32, F32]:
    """residual_out = x + residual; out = rmsnorm(residual_out). Returns (out, residual_out)."""
    return _native.rmsnorm_residual(x, residual, weight, out, residual_out, rows, dim, eps, device)


def layernorm(
    x: F32,
    weight: F32,
    bias: F32,
    out: F32 | None = None,
    rows: int | None = None,
    dim: int | None = None,
    eps: float = 1e-5,
    *,
    device: Device = "auto",
) -> F32:
    """(x - mean) / sqrt(var + eps) * weight + bias."""
    return _native.layernorm(x, weight, bias, out, rows, dim, eps, device)
