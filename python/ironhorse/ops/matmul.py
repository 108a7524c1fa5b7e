"""Matrix products, row-major."""

from __future__ import annotations

from .. import _native
from ._types import F32, Device


def gemm(
    a: F32,
    b: F32,
    c: F32 | None = None,
    m: int | None = None,
    n: int | None = None,
    k: int | None = None,
    alpha: float = 1.0,
    beta: float = 0.0,
    *,
    device: Device = "auto",
) -> F32:
    """c = alpha a b + beta c with a (m, k), b (k, n), c (m, n); flat arrays need the sizes. Returns c.

    With beta = 0 what was in c is not read; without c, beta must be 0.
    """
    return _native.gemm(a, b, c, m, n, k, alpha, beta, device)


def gemm_batched(
    a: F32,
    b: F32,
    c: F32 | None = None,
    batch: int | None = None,
    m: int | None = None,
    n: int | None = None,
    k: int | None = None,
    alpha: float = 1.0,
    beta: float = 0.0,
    *,
    device: Device = "auto",
) -> F32:
    """gemm of each of `batch` matrices: a (batch, m, k), b (batch, k, n), c (batch, m, n). Returns c."""
    return _native.gemm_batched(a, b, c, batch, m, n, k, alpha, beta, device)
