"""A safetensors reader and writer on numpy alone, whose output depends on nothing but its input.

A file is: u64 length n · n bytes of JSON, padded with spaces so that the data starts at a multiple of 8 ·
the tensors, back to back. `__metadata__` comes first in the JSON; tensors keep the caller's order, except that
wider element types go first so that every tensor starts at a multiple of its own element size.
bf16 tensors are uint16 arrays here, named as such by `dtypes={"name": "BF16"}`.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import FormatError
from .header import Array, map_file

# A header longer than this is an attack or a mistake; the safetensors package draws the same line.
MAX_HEADER_BYTES = 100_000_000

_NUMPY_OF = {
    "F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2",
    "I64": "<i8", "I32": "<i4", "I16": "<i2", "I8": "<i1",
    "U64": "<u8", "U32": "<u4", "U16": "<u2", "U8": "<u1", "BOOL": "|b1",
}  # fmt: skip
_NAME_OF = {np.dtype(code).str: name for name, code in _NUMPY_OF.items() if name != "BF16"}


@dataclass(frozen=True)
class SafetensorsFile:
    """`tensors` are views of the mapped file, in header order; changes stay in memory. `dtypes` are its names."""

    tensors: dict[str, Array]
    dtypes: dict[str, str]
    metadata: dict[str, str]


def write_safetensors(
    path: Path | str,
    tensors: Mapping[str, Array],
    metadata: Mapping[str, str] | None = None,
    dtypes: Mapping[str, str] | None = None,
) -> None:
    """Writes `tensors`. `dtypes` overrides the type name of single tensors (only BF16 for uint16 makes sense)."""
    if "__metadata__" in tensors:
        raise FormatError(f"{path}: no tensor can be called __metadata__: the format keeps its texts there")
    arrays = {name: _little_endian(name, array) for name, array in tensors.items()}
    order = sorted(arrays, key=lambda name: -arrays[name].itemsize)  # stable: keeps the caller's order
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    at = 0
    for name in order:
        array = arrays[name]
        dtype = (dtypes or {}).get(name, _NAME_OF[array.dtype.str])
        if dtype not in _NUMPY_OF or np.dtype(_NUMPY_OF[dtype]) != array.dtype:
            raise FormatError(f"{name}: a {array.dtype} array cannot be written as {dtype}")
        header[name] = {"dtype": dtype, "shape": list(array.shape), "data_offsets": [at, at + array.nbytes]}
        at += array.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for name in order:
            file.write(arrays[name].reshape(-1).view(np.uint8).data)


def read_safetensors(path: Path | str) -> SafetensorsFile:
    """Maps `path` and checks its whole header before anything is used."""
    path = Path(path)
    try:
        with open(path, "rb") as file:
            header = _read_header(path, file.read(8), file.read)
            start = file.tell()
    except OSError as error:
        raise FormatError(f"{path}: cannot read it ({error.strerror})") from None
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(text, str) for text in metadata.values()):
        raise FormatError(f"{path}: __metadata__ must map names to strings")
    data = map_file(path, start)
    spans = {name: _checked_span(f"{path}: tensor '{name}'", entry, data.size) for name, entry in header.items()}
    _check_no_gaps(path, spans, data.size)
    tensors: dict[str, Array] = {}
    for name, (begin, end) in spans.items():
        dtype = np.dtype(_NUMPY_OF[header[name]["dtype"]])
        tensors[name] = data[begin:end].view(dtype).reshape(header[name]["shape"])
    return SafetensorsFile(tensors, {name: entry["dtype"] for name, entry in header.items()}, metadata)


def _little_endian(name: str, array: Array) -> Array:
    array = np.asarray(array)
    little = array.dtype.newbyteorder("<")
    if little.str not in _NAME_OF:
        raise FormatError(f"{name}: {array.dtype} has no safetensors type")
    return np.asarray(array, dtype=little, order="C")


def _read_header(path: Path, prefix: bytes, read: Any) -> dict[str, Any]:
    if len(prefix) < 8:
        raise FormatError(f"{path}: {len(prefix)} bytes, too short for a safetensors file")
    (length,) = struct.unpack("<Q", prefix)
    if length > MAX_HEADER_BYTES:
        raise FormatError(f"{path}: claims a header of {length} bytes; not a safetensors file")
    text = read(length)
    if len(text) < length:
        raise FormatError(f"{path}: ends inside its header ({len(text)} of {length} bytes)")
    try:
        header = json.loads(text, object_pairs_hook=_no_duplicates)
    except (ValueError, RecursionError) as error:
        raise FormatError(f"{path}: its header is not valid JSON ({error})") from None
    if not isinstance(header, dict):
        raise FormatError(f"{path}: its header is not a JSON object")
    return header


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) != len(pairs):
        raise ValueError("a name occurs twice")
    return table


def _checked_span(where: str, entry: Any, data_size: int) -> tuple[int, int]:
    """The byte range of one tensor, after checking that type, shape and range agree."""
    try:
        dtype, shape, (begin, end) = entry["dtype"], entry["shape"], entry["data_offsets"]
        numbers = [*shape, begin, end]
    except (TypeError, KeyError, ValueError):
        raise FormatError(f"{where}: needs dtype, shape and data_offsets") from None
    if not isinstance(dtype, str) or dtype not in _NUMPY_OF:
        raise FormatError(f"{where}: unknown type {dtype!r}")
    if not all(type(n) is int and n >= 0 for n in numbers):
        raise FormatError(f"{where}: shape and data_offsets must be whole numbers")
    if not begin <= end <= data_size:
        raise FormatError(f"{where}: bytes {begin} to {end} lie outside the {data_size} bytes of data")
    need = np.dtype(_NUMPY_OF[dtype]).itemsize
    for n in shape:
        need *= n
    if end - begin != need:
        raise FormatError(f"{where}: {dtype} {shape} takes {need} bytes, but data_offsets give {end - begin}")
    return begin, end


def _check_no_gaps(path: Path, spans: Mapping[str, tuple[int, int]], data_size: int) -> None:
    at = 0
    for begin, end in sorted(spans.values()):
        if begin != at:
            raise FormatError(f"{path}: tensors overlap or leave a gap at data byte {min(begin, at)}")
        at = end
    if at != data_size:
        raise FormatError(f"{path}: {data_size - at} bytes after the last tensor")
