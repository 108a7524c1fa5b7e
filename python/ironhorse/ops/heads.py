"""What works on heads: rotary embedding and attention. Arrays are (batch, seq, heads, head_dim)."""

from __future__ import annotations

from typing import Any, overload

from .. import _native
from ..errors import InvalidValueError
from ._types import F32, Device


@overload
def rope_freqs(
    max_seq: int, head_dim: int, /, *, base: float = 10000.0, alpha: float = 1.0, device: Device = "auto"
) -> F32: ...
@overload
def rope_freqs(
    freqs: F32 | None = None,
    max_seq: int | None = None,
    head_dim: int | None = None,
    base: float = 10000.0,
    alpha: float = 1.0,
    *,
    device: Device = "auto",
) -> F32: ...
def rope_freqs(
    freqs: Any = None,
    max_seq: int | None = None,
    head_dim: int | None = None,
    base: float = 10000.0,
    alpha: float = 1.0,
    *,
    device: Device = "auto",
) -> F32:
    """The angles (max_seq, head_dim / 2): p / (base alpha^(d / (d - 2)))^(2 i / d) at position p, d = head_dim.

    alpha is the NTK factor, 1 for none. `rope_freqs(max_seq, head_dim)` or `rope_freqs(freqs, max_seq, head_dim, ...)`.
    """
    if head_dim is None and isinstance(freqs, int):
        freqs, max_seq, head_dim = None, freqs, max_seq
    if max_seq is None or head_dim is None:
        raise InvalidValueError("rope_freqs: max_seq and head_dim must be given")
    return _native.rope_freqs(freqs, max_seq, head_dim, base, alpha, device)


def rope_forward(
    x: F32,
    freqs: F32,
    out: F32 | None = None,
    batch: int | None = None,
    seq: int | None = None,
    heads: int | None = None,
    head_dim: int | None = None,
    offset: int = 0,
    *,
    half: bool = False,
    device: Device = "auto",
) -> F32:
    """x with pairs of elements rotated by freqs[offset + position]. `out` may be `x`.

    The pairs are 2i and 2i + 1 (LLaMA); with `half`, i and i + head_dim / 2 (GPT-NeoX, Hugging Face). `offset` is how
    many positions a cache holds already.
    """
    return _native.rope_forward(x, freqs, out, batch, seq, heads, head_dim, offset, half, device)


def rope_qk(
    q: F32,
    k: F32,
    freqs: F32,
    q_out: F32 | None = None,
    k_out: F32 | None = None,
    batch: int | None = None,
    seq: int | None = None,
    q_heads: int | None = None,
    kv_heads: int | None = None,
    head_dim: int | None = None,
    offset: int = 0,
    *,
    half: bool = False,
    device: Device = "auto",
) -> tuple[F32, F32]:
    """rope_forward of q and of k, which may have fewer heads. Returns (q_out, k_out)."""
    return _native.rope_qk(q, k, freqs, q_out, k_out, batch, seq, q_heads, kv_heads, head_dim, offset, half, device)


def flash_attention(
    q: F32,
    k: F32,
    v: F32,
    out: F32 | None = None,
    batch: int | None = None,
    seq: int | None = None,
    heads: int | None = None,
    head_dim: int | None = None,
    scale: float | None = None,
    causal: bool = True,
    *,
    device: Device = "auto",
) -> F32:
    """softmax(scale q k^T) v for each head; scale is 1 / sqrt(head_dim) unless given.

    k and v may have fewer heads than q (a divisor: grouped heads) and another length; `causal` then lets the last query
    see all keys. Memory does not grow with the square of the length.
    """
    return _native.flash_attention(q, k, v, out, batch, seq, heads, head_dim, scale, causal, device)


attention = flash_attention
