"""One index per row of logits. The same seeds draw the same indices."""

from __future__ import annotations

from math import prod

import numpy as np

from .. import _native
from ..errors import InvalidValueError
from ._types import F32, I32, U64, Device


def argmax(
    logits: F32, out: I32 | None = None, rows: int | None = None, vocab: int | None = None, *, device: Device = "auto"
) -> I32:
    """The index of the largest of each row, the lowest among equals."""
    return _native.argmax(logits, out, rows, vocab, device)


def sample(
    logits: F32,
    out: I32 | None = None,
    seeds: U64 | None = None,
    rows: int | None = None,
    vocab: int | None = None,
    temperature: float = 1.0,
    *,
    device: Device = "auto",
) -> I32:
    """An index drawn from softmax(logits / temperature) of each row. Without seeds, one per row is drawn."""
    if seeds is None:
        seeds = _seeds(logits, rows)
    return _native.sample(logits, out, seeds, rows, vocab, temperature, device)


def topk_sample(
    logits: F32,
    out: I32 | None = None,
    seeds: U64 | None = None,
    rows: int | None = None,
    vocab: int | None = None,
    k: int = 50,
    temperature: float = 1.0,
    *,
    device: Device = "auto",
) -> I32:
    """As `sample`, from the k largest of each row."""
    if seeds is None:
        seeds = _seeds(logits, rows)
    return _native.topk_sample(logits, out, seeds, rows, vocab, k, temperature, device)


def topp_sample(
    logits: F32,
    out: I32 | None = None,
    seeds: U64 | None = None,
    rows: int | None = None,
    vocab: int | None = None,
    p: float | None = None,
    temperature: float = 1.0,
    *,
    top_p: float | None = None,
    device: Device = "auto",
) -> I32:
    """As `sample`, from the fewest largest of each row that together have at least the share p, 0.9 if not given.

    `top_p` is another name of p.
    """
    if p is not None and top_p is not None:
        raise InvalidValueError(f"topp_sample: `p` is {p} and `top_p` is {top_p}, expected only one: they are the same")
    if p is None:
        p = 0.9 if top_p is None else top_p
    if seeds is None:
        seeds = _seeds(logits, rows)
    return _native.topp_sample(logits, out, seeds, rows, vocab, p, temperature, device)


def _seeds(logits: F32, rows: int | None) -> U64:
    """One seed from the system for each row; wrong arguments are left for the op to refuse."""
    count = prod(getattr(logits, "shape", ())[:-1]) if rows is None else max(int(rows), 0)
    return np.random.default_rng().integers(0, 2**64, size=min(count, 2**31), dtype=np.uint64)
