"""Losses and their gradients, and the gradient of an embedding table."""

from __future__ import annotations

from .. import _native
from ._types import F32, I32, Device


def cross_entropy_forward(
    logits: F32,
    targets: I32,
    loss: F32 | None = None,
    log_probs: F32 | None = None,
    rows: int | None = None,
    vocab: int | None = None,
    *,
    device: Device = "auto",
) -> tuple[F32, F32]:
    """log_probs = log softmax(logits) and loss = the mean of -log_probs at the targets. Returns (loss, log_probs).

    A given `loss` has one element; without one, an array without dimensions is made, which works as a number.
    """
    return _native.cross_entropy_forward(logits, targets, loss, log_probs, rows, vocab, device)


def cross_entropy_backward(
    log_probs: F32,
    targets: I32,
    d_logits: F32 | None = None,
    rows: int | None = None,
    vocab: int | None = None,
    scale: float | None = None,
    *,
    device: Device = "auto",
) -> F32:
    """d_logits = (e^log_probs - onehot(targets)) * scale; scale is 1 / rows unless given: the gradient of the mean."""
    return _native.cross_entropy_backward(log_probs, targets, d_logits, rows, vocab, scale, device)


def aux_loss_forward(
    probs: F32,
    idx: I32,
    aux: F32 | None = None,
    f_counts: F32 | None = None,
    p_means: F32 | None = None,
    rows: int | None = None,
    experts: int | None = None,
    k: int | None = None,
    alpha: float = 0.01,
    *,
    device: Device = "auto",
) -> tuple[F32, F32, F32]:
    """The load-balancing loss of a router: aux = alpha * experts * sum(f_counts * p_means).

    probs (rows, experts) are its probabilities, idx (rows, k) its choices; f_counts[e] is the share of rows sent to e,
    p_means[e] its mean probability. Returns (aux, f_counts, p_means).
    """
    return _native.aux_loss_forward(probs, idx, aux, f_counts, p_means, rows, experts, k, alpha, device)


aux_loss = aux_loss_forward


def scatter_add(
    grad_out: F32,
    idx: I32,
    grad_weight: F32,
    n_idx: int | None = None,
    dim: int | None = None,
    *,
    device: Device = "auto",
) -> F32:
    """grad_weight[idx[i]] += grad_out[i] for each i in order: the gradient of an embedding. Returns grad_weight."""
    return _native.scatter_add(grad_out, idx, grad_weight, n_idx, dim, device)
