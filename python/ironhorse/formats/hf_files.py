"""The files of a Hugging Face folder: JSON, and weights in `model.safetensors` or in several files with an index."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..errors import InvalidValueError
from .header import Array
from .safetensors import write_safetensors

CONFIG = "config.json"
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
SHARD_SIZE = "5GB"  # what transformers took for long; its later default only makes larger files

_UNITS = {"": 1, "B": 1} | {unit: 1000**n for n, unit in enumerate(("KB", "MB", "GB", "TB"), 1)}
_UNITS |= {unit: 1024**n for n, unit in enumerate(("KIB", "MIB", "GIB", "TIB"), 1)}


def is_part_name(name: str) -> bool:
    """Whether it is the name of one weights file of several."""
    return re.fullmatch(r"model-[0-9]{5,}-of-[0-9]{5,}\.safetensors", name) is not None


def is_ours(name: str) -> bool:
    """Whether a file of that name belongs to a folder that we write, and may be replaced with it."""
    return name in (CONFIG, WEIGHTS, INDEX) or is_part_name(name)


def parse_size(size: int | str) -> int:
    """Bytes: 300, "20KB", "1.5GB" (powers of 1000, as transformers counts), "2GiB"."""
    text = str(size).strip()
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]*)?)\s*([A-Za-z]*)", text)
    unit = _UNITS.get(match[2].upper()) if match else None
    bytes_ = int(float(match[1]) * unit) if match and unit and not isinstance(size, bool) else 0
    if bytes_ < 1:
        raise InvalidValueError(f'save: shard_size is {size!r}; give bytes above 0, or text such as "500MB", "5GB"')
    return bytes_


def write_weights(
    folder: Path, tensors: Mapping[str, Array], metadata: Mapping[str, str], bf16: Mapping[str, str], shard: int
) -> None:
    """One file, or several of at most `shard` bytes of weights with an index; a tensor is never split."""
    parts: list[dict[str, Array]] = [{}]
    held = 0
    for name, array in tensors.items():
        if parts[-1] and held + array.nbytes > shard:
            parts.append({})
            held = 0
        parts[-1][name] = array
        held += array.nbytes
    if len(parts) == 1:
        write_safetensors(folder / WEIGHTS, tensors, metadata, bf16)
        return
    places: dict[str, str] = {}
    for number, part in enumerate(parts, 1):
        file = f"model-{number:05}-of-{len(parts):05}.safetensors"
        write_safetensors(folder / file, part, metadata, bf16)
        places |= dict.fromkeys(part, file)
    totals = {
        "total_parameters": sum(array.size for array in tensors.values()),
        "total_size": sum(array.nbytes for array in tensors.values()),
    }
    (folder / INDEX).write_bytes(json_bytes({"metadata": totals, "weight_map": dict(sorted(places.items()))}))


def json_bytes(table: Mapping[str, Any]) -> bytes:
    """JSON as the other files of the folder are written."""
    return (json.dumps(table, indent=2, ensure_ascii=False) + "\n").encode()
