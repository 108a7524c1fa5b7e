"""The answer key: everything PyTorch computed for one model and one batch, in one safetensors file. Needs no torch."""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from .config import ModelConfig
from .formats.header import Array
from .formats.safetensors import write_safetensors

FORMAT = "ironhorse-answer-key"
VERSION = "1"


@dataclass(frozen=True)
class KeyInfo:
    """The key's metadata, apart from what follows from the tensors."""

    config: ModelConfig
    torch: str  # version
    seed: int
    act_names: list[str]
    optimizer: Mapping[str, Any]
    torch_error: Mapping[str, float] = field(default_factory=dict)
    torch_error_bf16: Mapping[str, float] = field(default_factory=dict)
    model: str = "gpt2"
    dtype: str = "f32"
    # the smallest margin by which an expert was chosen over another
    router: Mapping[str, float] = field(default_factory=dict)
    dropout: float = 0.0  # how often elements were dropped, with masks of the seed
    reference: str = ""  # whose code computed it, where that is not our reference: transformers 5.22.2


def crc32_table(tensors: Mapping[str, Array]) -> dict[str, int]:
    """name -> CRC-32 of the tensor's bytes as they lie in the file."""
    return {name: zlib.crc32(np.ascontiguousarray(array).data) for name, array in tensors.items()}


def metadata(info: KeyInfo, tensors: Mapping[str, Array]) -> dict[str, str]:
    """The strings of `__metadata__`. Nothing in them depends on when or where the key was made."""
    strings = {
        "format": FORMAT,
        "version": VERSION,
        "model": info.model,
        "config": json_text(info.config.to_dict()),
        "torch": info.torch,
        "dtype": info.dtype,
        "seed": str(info.seed),
        "acts": json_text(info.act_names),
        "optimizer": json_text(dict(info.optimizer)),
        "crc32": json_text(crc32_table(tensors)),
    }
    tables = {"torch_error": info.torch_error, "torch_error_bf16": info.torch_error_bf16, "router": info.router}
    strings |= {"reference": info.reference} if info.reference else {}
    strings |= {"dropout": json_text(info.dropout)} if info.dropout else {}
    return strings | {name: json_text(dict(table)) for name, table in tables.items() if table}


def write_key(path: Path | str, info: KeyInfo, tensors: Mapping[str, Array]) -> None:
    """Writes the key; `tensors` are little-endian f32 (int32 for x, y and experts), already under the key's names."""
    write_safetensors(path, tensors, metadata(info, tensors))


def json_text(value: Any) -> str:
    """As the metadata holds it."""
    return json.dumps(value, separators=(",", ":"), allow_nan=False)
