"""The 1024 bytes that open every .bin file: 256 little-endian int32, [0] the kind of file, [1] its version."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import FormatError

HEADER_INTS = 256
HEADER_BYTES = 4 * HEADER_INTS
INT32 = np.dtype("<i4")

Array = NDArray[Any]


def header_bytes(*fields: int) -> bytes:
    """`fields` go to [0], [1], ...; the rest is 0."""
    header = np.zeros(HEADER_INTS, INT32)
    header[: len(fields)] = fields
    return header.tobytes()


def read_header(path: Path, what: str, versions: dict[int, tuple[int, ...]]) -> Array:
    """The 256 ints of `path`, after checking magic and version. `versions` maps magic to accepted versions."""
    try:
        with open(path, "rb") as file:
            raw = file.read(HEADER_BYTES)
    except OSError as error:
        raise FormatError(f"{path}: cannot read it ({error.strerror})") from None
    if len(raw) < HEADER_BYTES:
        raise FormatError(f"{path}: {len(raw)} bytes, too short for the 1024-byte header of a {what}")
    header = np.frombuffer(raw, INT32)
    magic, version = int(header[0]), int(header[1])
    if magic not in versions:
        raise FormatError(f"{path}: starts with {magic}, a {what} starts with {' or '.join(map(str, versions))}")
    if version not in versions[magic]:
        raise FormatError(
            f"{path}: {what} version {version}; this reads version {' or '.join(map(str, versions[magic]))}"
        )
    return header


def expect_size(path: Path, what: str, expected: int) -> None:
    """The file must be exactly as long as its header says: a truncated file must not look like data."""
    actual = path.stat().st_size
    if actual != expected:
        raise FormatError(f"{path}: {actual} bytes, but the header of this {what} promises {expected}; copy it again")


def map_file(path: Path, offset: int) -> Array:
    """The bytes from `offset` on, in memory once they are looked at. Writing to them changes memory, not the file."""
    try:
        if path.stat().st_size <= offset:
            return np.zeros(0, np.uint8)
        try:
            return np.memmap(path, np.uint8, "c", offset).view(np.ndarray)
        except OSError:  # a file larger than memory could not be changed in it
            return np.memmap(path, np.uint8, "r", offset).view(np.ndarray)
    except OSError as error:
        raise FormatError(f"{path}: cannot read it ({error.strerror})") from None
