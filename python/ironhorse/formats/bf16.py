"""bf16 in numpy: the upper 16 bits of an f32, kept as uint16 because numpy has no such type."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray


def to_bf16(values: NDArray[Any]) -> NDArray[np.uint16]:
    """f32 to bf16 bits, rounding to nearest even as PyTorch and the hardware do. NaN stays a (quiet) NaN."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    # Adding 0x7fff, plus one more when the kept part is odd, carries exactly when rounding up is right.
    rounded = (bits + (((bits >> 16) & 1) + np.uint32(0x7FFF))) >> 16
    is_nan = (bits & 0x7FFFFFFF) > 0x7F800000
    return np.where(is_nan, (bits >> 16) | 0x40, rounded).astype(np.uint16)


def from_bf16(bits: NDArray[Any]) -> NDArray[np.float32]:
    """bf16 bits to the f32 of the same value; exact."""
    return (bits.astype(np.uint32) << 16).view(np.float32)
