"""The masks of dropout: the same bits as crates/core/src/dropout.rs, from seed, step, place, row and column.

A word of 32 random bits decides about two columns that are 8 apart, its lower half about the first, its upper half
about the second. An element is dropped if its 16 bits are below the rate times 2¹⁶.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

_GOLDEN = 0x9E3779B9
_DROPOUT = 0x2545F491
_U32 = 0xFFFFFFFF

# The numbers of the places in the model; a layer has three.
EMBEDDING = 0


def probabilities(layer: int) -> int:
    """Of the attention."""
    return 3 * layer + 1


def after_attention(layer: int) -> int:
    """What the attention adds to the residual stream."""
    return 3 * layer + 2


def after_mlp(layer: int) -> int:
    """What the MLP adds to it."""
    return 3 * layer + 3


def _mix(x: int) -> int:
    x &= _U32
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & _U32
    x = ((x ^ (x >> 15)) * 0x846CA68B) & _U32
    return x ^ (x >> 16)


@dataclass
class Dropout:
    """Dropout of a GPT-2 in training. `step` counts optimizer steps from 1, `micro_step` within a step from 0."""

    rate: float
    seed: int
    step: int = 0
    micro_step: int = 0

    @property
    def threshold(self) -> int:
        """Of 2¹⁶ elements so many are dropped, in the mean; `DropRate::new` rounds halves up too."""
        return min(int(self.rate * 65536 + 0.5), 65535)

    def _key(self, site: int) -> tuple[int, int]:
        first = _mix((self.seed & _U32) ^ _mix(self.step + _GOLDEN))
        second = _mix((self.seed >> 32) ^ first)
        first = _mix(first ^ _mix(site + _DROPOUT))
        return first, _mix(second ^ _mix(self.micro_step + first))

    def bits(self, site: int, rows: int, cols: int) -> np.ndarray:
        """(rows, cols): the 16 random bits of each element."""
        first, second = self._key(site)
        words = (cols + 15) // 16 * 8
        before = np.arange(rows, dtype=np.uint64) * np.uint64(words)
        low = (before + np.uint64(first)).astype(np.uint32)[:, None]  # wraps, as the high part does
        high = ((before >> np.uint64(32)) + np.uint64(second)).astype(np.uint32)[:, None]
        x = low + np.arange(words, dtype=np.uint32)
        x = (x ^ (x >> np.uint32(16))) * np.uint32(0x7FEB352D)
        x ^= high
        x = (x ^ (x >> np.uint32(15))) * np.uint32(0x846CA68B)
        x ^= x >> np.uint32(16)
        halves = np.stack([x & np.uint32(0xFFFF), x >> np.uint32(16)], axis=1)  # (rows, 2, words)
        return halves.reshape(rows, 2, words // 8, 8).swapaxes(1, 2).reshape(rows, 2 * words)[:, :cols]

    def drop(self, site: int, x: Tensor) -> Tensor:
        """`x` with dropped elements 0, the others times 1 / (1 - rate), rounded once. Its last dimension is a row."""
        cols = x.shape[-1]
        kept = self.bits(site, x.numel() // max(cols, 1), cols) >= self.threshold
        wide = torch.promote_types(x.dtype, torch.float32)
        factors = torch.from_numpy(kept).view(x.shape).to(wide) * (65536 / (65536 - self.threshold))
        return (x.to(wide) * factors).to(x.dtype)
