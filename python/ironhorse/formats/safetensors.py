"""A safetensors reader and writer on numpy alone, whose output depends on nothing but its input.

A file is: u64 length n · n bytes of JSON, padded with spaces so that the data starts at a multiple of 8 ·
the tensors, back to back. `__metadata__` comes first in the JSON; tensors keep the caller's order, except that
wider element types go first so that every tensor starts at a multiple of its own element size.
bf16 tensors are uint16 arrays here, named as such by `dtypes={"name": "BF16"}`.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from .. import _native
from ..errors import FormatError
from .header import Array, map_file

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
    """Maps `path`; the native module checks its whole header before anything is used."""
    metadata, places = _native.file_safetensors(path)
    return SafetensorsFile(*map_places(places), dict(metadata))


def map_places(places: Iterable[_native.Place]) -> tuple[dict[str, Array], dict[str, str]]:
    """Views of tensors whose places the native module has checked, and their types, by name."""
    files: dict[Path, Array] = {}
    tensors: dict[str, Array] = {}
    dtypes: dict[str, str] = {}
    for name, dtype, shape, file, offset in places:
        if dtype not in _NUMPY_OF:
            raise FormatError(f"{file}: tensor {name} is {dtype}, a type that numpy does not have")
        if file not in files:
            files[file] = map_file(file, 0)
        element = np.dtype(_NUMPY_OF[dtype])
        end = offset + element.itemsize * math.prod(shape)
        tensors[name] = files[file][offset:end].view(element).reshape(shape)
        dtypes[name] = dtype
    return tensors, dtypes


def _little_endian(name: str, array: Array) -> Array:
    array = np.asarray(array)
    little = array.dtype.newbyteorder("<")
    if little.str not in _NAME_OF:
        raise FormatError(f"{name}: {array.dtype} has no safetensors type")
    return np.asarray(array, dtype=little, order="C")
