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


def join_master(weights: NDArray[Any], residual: NDArray[Any]) -> NDArray[np.float32]:
    """The f32 masters of bf16 weights (their bits) and the 16 bits that each lacks of its master."""
    below = residual.astype(np.int32).view(np.uint32)
    return np.ascontiguousarray((weights.astype(np.uint32) << 16) + below).view(np.float32)  # wraps around


def split_master(masters: NDArray[Any]) -> tuple[NDArray[np.uint16], NDArray[np.int16]]:
    """The inverse, as the engine does it: ties are rounded away from 0, a NaN becomes 0x7fc0 with residual 0."""
    masters = np.ascontiguousarray(masters, dtype=np.float32)
    bits = np.where(np.isnan(masters), np.uint32(0x7FC00000), masters.view(np.uint32))
    return ((bits + np.uint32(0x8000)) >> 16).astype(np.uint16), bits.astype(np.uint16).view(np.int16)


def convert(array: NDArray[Any], was: str, to: str) -> NDArray[Any]:
    """Numbers of one type of safetensors (F32, BF16, F16, F64) as another; bf16 is uint16."""
    if was == to:
        return array
    values = from_bf16(array) if was == "BF16" else np.asarray(array, np.float32)
    return to_bf16(values) if to == "BF16" else values.astype(np.float16) if to == "F16" else values
