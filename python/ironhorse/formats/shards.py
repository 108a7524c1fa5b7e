"""Token shards `*_train.bin`, `*_val.bin`: one long stream of token numbers, 16 bits each, or 32 when wide."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from ..errors import FormatError
from .header import HEADER_BYTES, Array, expect_size, header_bytes, map_file, read_header

NARROW_MAGIC, NARROW_VERSION = 20240520, 1
WIDE_MAGIC, WIDE_VERSION = 20240801, 7
NARROW = np.dtype("<u2")
WIDE = np.dtype("<u4")


def write_shard(path: Path | str, tokens: Array, wide: bool | None = None) -> None:
    """Writes a shard; `wide=None` takes 32 bits only when a token needs them."""
    tokens = np.asarray(tokens)
    if tokens.ndim != 1 or not np.issubdtype(tokens.dtype, np.integer):
        raise FormatError(f"{path}: tokens are {tokens.dtype} {list(tokens.shape)}; expected a row of integers")
    low, high = (int(tokens.min()), int(tokens.max())) if tokens.size else (0, 0)
    wide = high > 0xFFFF if wide is None else wide
    limit = 0xFFFFFFFF if wide else 0xFFFF
    if low < 0 or high > limit:
        raise FormatError(f"{path}: tokens from {low} to {high}; this variant holds 0 to {limit}")
    if tokens.size > 2**31 - 1:
        raise FormatError(f"{path}: {tokens.size} tokens; the header counts at most {2**31 - 1}, write more shards")
    magic, version, dtype = (WIDE_MAGIC, WIDE_VERSION, WIDE) if wide else (NARROW_MAGIC, NARROW_VERSION, NARROW)
    with open(path, "wb") as file:
        file.write(header_bytes(magic, version, tokens.size))
        file.write(np.ascontiguousarray(tokens, dtype).data)


def read_shard(path: Path | str) -> Array:
    """The tokens of a shard: uint16, or uint32 for the wide variant."""
    return np.array(map_shard(path))


def map_shard(path: Path | str) -> Array:
    """Like `read_shard`, as a view of the mapped file."""
    path = Path(path)
    header = read_header(path, "token shard", {NARROW_MAGIC: (NARROW_VERSION,), WIDE_MAGIC: (WIDE_VERSION,)})
    dtype = NARROW if header[0] == NARROW_MAGIC else WIDE
    count = int(header[2])
    if count < 0:
        raise FormatError(f"{path}: {count} tokens; the header is damaged")
    expect_size(path, "token shard", HEADER_BYTES + count * dtype.itemsize)
    return map_file(path, HEADER_BYTES).view(dtype)
