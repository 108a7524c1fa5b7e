"""Cross-entropy over the last dimension."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ._library import Op, acc, autocast_on, differentiable, fake, instead, like, raw, stand_in

__all__ = ["cross_entropy"]

# As `Reduction` of crates/py/src/torch/loss.rs.
_REDUCTIONS = {"none": 0, "mean": 1, "sum": 2}


def cross_entropy(logits: Tensor, targets: Tensor, ignore_index: int = -100, reduction: str = "mean") -> Tensor:
    """-log softmax(logits)[target] of each row, as their mean, their sum, or each of them ("none").

    Like torch.nn.functional.cross_entropy with class numbers (int64 or int32), but the classes are always the last
    dimension: logits (..., classes), targets (...). Rows whose target is `ignore_index` do not count. Rows without
    classes are an error. A target that is out of range is an error on the CPU; on a GPU, where finding out would mean
    waiting, its loss and gradient are NaN. The computation is float32 also for less precise logits; under autocast the
    loss is float32 too.
    """
    number = _REDUCTIONS.get(reduction)
    if number is None:
        raise ValueError(f"cross_entropy: `reduction` is {reduction!r}, expected 'none', 'mean' or 'sum'")
    if stand_in("cross_entropy", logits=logits, targets=targets):
        given = (logits, targets)
        return instead(cross_entropy, given, *given, ignore_index=ignore_index, reduction=reduction)
    return _cross_entropy(logits, targets, ignore_index, number, autocast_on(logits))


def _graph(ctx: Any, d_loss: Tensor) -> tuple[Tensor]:
    logits, targets, _, inv_count = ctx.saved_tensors
    ignore_index = ctx.numbers[0]
    counts = (targets != ignore_index).unsqueeze(-1)
    classes = targets.long().masked_fill(~counts.squeeze(-1), 0).unsqueeze(-1)
    d = torch.softmax(logits.to(acc(logits)), -1)
    d = d - torch.zeros_like(d).scatter(-1, classes, 1.0)
    factor = d_loss.to(d.dtype) * inv_count if inv_count.dim() == 0 else d_loss.to(d.dtype)
    d = d * (factor if factor.dim() == 0 else factor.unsqueeze(-1))
    # Not by multiplying: where nothing counts, the factor is infinite.
    return (torch.where(counts, d, 0).to(logits.dtype),)


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
_cross_entropy_bwd: Op = raw("cross_entropy_bwd")
_cross_entropy = differentiable(
    "cross_entropy",
    2,
    save=lambda args, outputs: (args[0], args[1], outputs[1], outputs[2]),
    kernel=lambda ctx, d_loss: (_cross_entropy_bwd(d_loss, *ctx.saved_tensors, *ctx.numbers[:2]),),
    graph=_graph,
)
