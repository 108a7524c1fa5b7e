"""What changes parameters and gradients in place. `n`, if given, limits the work to the first n elements."""

from __future__ import annotations

from .. import _native
from ._types import F32, Device


def adamw_step(
    param: F32,
    grad: F32,
    m: F32,
    v: F32,
    lr: float,
    beta1: float = 0.9,
    beta2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    step: int = 1,
    n: int | None = None,
    *,
    device: Device = "auto",
) -> F32:
    """One step of PyTorch's AdamW on param, m and v; `step` counts from 1. Returns param."""
    return _native.adamw_step(param, grad, m, v, lr, beta1, beta2, eps, weight_decay, step, n, device)


def zero_grad(grad: F32, n: int | None = None, *, device: Device = "auto") -> F32:
    """grad = 0. Returns grad."""
    return _native.zero_grad(grad, n, device)


def grad_clip(
    grad: F32,
    partial: F32 | None = None,
    total_norm: F32 | None = None,
    clip: float = 1.0,
    n: int | None = None,
    *,
    device: Device = "auto",
) -> F32:
    """Scales grad in place so that its norm is at most `clip`, as PyTorch's clip_grad_norm_. Returns the norm before.

    `partial` is scratch of the C interface and may be None.
    """
    return _native.grad_clip(grad, partial, total_norm, clip, n, device)
