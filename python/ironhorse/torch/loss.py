"""Cross-entropy over the last dimension."""

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
    fake,
    forward_mode,
    functorch_active,
    gradient,
    instead,
    like,
    public,
    raw,
    stand_in,
)

__all__ = ["cross_entropy"]

_cross_entropy: Ops = public("cross_entropy")
_cross_entropy_fwd: Ops = raw("cross_entropy_fwd")
_cross_entropy_bwd: Op = raw("cross_entropy_bwd")

# As `Reduction` of crates/py/src/torch/loss.rs.
_REDUCTIONS = {"none": 0, "mean": 1, "sum": 2}


def cross_entropy(logits: Tensor, targets: Tensor, ignore_index: int = -100, reduction: str = "mean") -> Tensor:
    """-log softmax(logits)[target] of each row, as their mean, their sum, or each of them ("none").

    Like torch.nn.functional.cross_entropy with class numbers (int64 or int32), but the classes are always the last
    dimension: logits (..., classes), targets (...). Rows whose target is `ignore_index` do not count. Rows without
    classes are an error. A target that is no class is one on the CPU; on a GPU, which nobody waits for, its loss and
    gradient are NaN. The maths are float32 also for less precise logits; under autocast the loss is float32 too.
    """
    number = _REDUCTIONS.get(reduction)
    if number is None:
        raise ValueError(f"cross_entropy: `reduction` is {reduction!r}, expected 'none', 'mean' or 'sum'")
    if stand_in(logits, targets):
        given = (logits, targets)
        return instead(cross_entropy, given, *given, ignore_index=ignore_index, reduction=reduction)
    wide = autocast_on(logits)
    if is_compiling():
        return _cross_entropy(logits, targets, ignore_index, number, wide)[0]
    if logits.requires_grad and is_grad_enabled() or forward_mode():
        if functorch_active():
            return _cross_entropy_func(logits, targets, ignore_index, number, wide)[0]
        return _cross_entropy_grad(logits, targets, ignore_index, number, wide)
    return _cross_entropy_fwd(logits, targets, ignore_index, number, wide)[0]


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, ignore_index: int, reduction: int, wide: bool) -> Tensor:
        loss, lse, inv_count = _cross_entropy_fwd(logits, targets, ignore_index, reduction, wide)
        ctx.save_for_backward(logits, targets, lse, inv_count)
        ctx.ignore_index, ctx.reduction = ignore_index, reduction
        return loss

    @staticmethod
    def backward(ctx: Any, d_loss: Tensor, d_lse: Tensor | None = None, d_inv_count: Tensor | None = None) -> Any:
        logits, targets, lse, inv_count = ctx.saved_tensors
        if d_loss is None:
            return None, None, None, None, None
        if is_grad_enabled():
            d_logits = _gradient(d_loss, logits, targets, inv_count, ctx.ignore_index)
        else:
            d_logits = _cross_entropy_bwd(d_loss, logits, targets, lse, inv_count, ctx.ignore_index, ctx.reduction)
        return d_logits, None, None, None, None


def _gradient(d_loss: Tensor, logits: Tensor, targets: Tensor, inv_count: Tensor, ignore_index: int) -> Tensor:
    counts = (targets != ignore_index).unsqueeze(-1)
    classes = targets.long().masked_fill(~counts.squeeze(-1), 0).unsqueeze(-1)
    d = torch.softmax(logits.to(acc(logits)), -1)
    d = d - torch.zeros_like(d).scatter(-1, classes, 1.0)
    factor = d_loss.to(d.dtype) * inv_count if inv_count.dim() == 0 else d_loss.to(d.dtype)
    d = d * (factor if factor.dim() == 0 else factor.unsqueeze(-1))
    # Not by multiplying: where nothing counts, the factor is infinite.
    return torch.where(counts, d, 0).to(logits.dtype)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    logits, targets, ctx.ignore_index, ctx.reduction, _ = inputs
    ctx.save_for_backward(logits, targets, output[1], output[2])
    ctx.mark_non_differentiable(output[1], output[2])
    ctx.set_materialize_grads(False)


def _fake(
    logits: Tensor, targets: Tensor, ignore_index: int, reduction: int, wide: bool
) -> tuple[Tensor, Tensor, Tensor]:
    each = reduction == 0
    dtype = acc(logits) if wide else logits.dtype
    loss = logits.new_empty(targets.shape if each else (), dtype=dtype)
    inv_count = logits.new_empty((0,) if each else (), dtype=acc(logits))
    return loss, logits.new_empty(targets.shape, dtype=acc(logits)), inv_count


fake("cross_entropy", _fake)
fake(
    "cross_entropy_bwd",
    lambda d_loss, logits, targets, lse, inv_count, ignore_index, reduction: like(logits),
)
_cross_entropy_grad: Op = _CrossEntropy.apply
_cross_entropy_func: Ops = gradient("cross_entropy", _save, _CrossEntropy.backward)
