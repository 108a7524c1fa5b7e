"""The files of a Hugging Face folder: JSON, and weights in `model.safetensors` or in several files with an index."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..errors import FormatError, InvalidValueError
from .header import Array
from .safetensors import SafetensorsFile, read_safetensors, write_safetensors

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


def read_weights(folder: Path) -> SafetensorsFile:
    """All tensors of a folder, from one file or from several; where the index and the files differ is an error."""
    if (folder / WEIGHTS).is_file():
        return read_safetensors(folder / WEIGHTS)
    path = folder / INDEX
    if not path.is_file():
        alone = min((entry.name for entry in folder.iterdir() if is_part_name(entry.name)), default=None)
        if alone is not None:
            raise FormatError(f"{path}: missing, but {alone} is there; the index says which tensor is in which file")
        raise FormatError(f"{folder}: neither {WEIGHTS} nor {INDEX} in it; save it again with safe_serialization=True")
    places = parse_json(path, read_bytes(path)).get("weight_map")
    if not isinstance(places, dict) or not places or not all(isinstance(file, str) for file in places.values()):
        raise FormatError(f"{path}: weight_map is missing or wrong, expected tensor names and their files")
    whole = SafetensorsFile({}, {}, {})
    for name in sorted(set(places.values())):
        if Path(name).name != name or "\\" in name:
            raise FormatError(f"{path}: the file {name!r} is not in this folder")
        if not (folder / name).is_file():
            raise FormatError(f"{folder / name}: missing, but {INDEX} names it; it may not have been copied")
        part = read_safetensors(folder / name)
        twice = whole.tensors.keys() & part.tensors.keys()
        if twice:
            raise FormatError(f"{folder / name}: {min(twice)} is in another file as well")
        for tensor in part.tensors:
            if places.get(tensor) != name:
                said = places.get(tensor, "nowhere")
                raise FormatError(f"{folder / name}: tensor {tensor} is in this file, but {INDEX} says {said}")
        whole.tensors.update(part.tensors)
        whole.dtypes.update(part.dtypes)
        whole.metadata.update(part.metadata)
    missing = [name for name in places if name not in whole.tensors]
    if missing:
        raise FormatError(f"{folder / places[missing[0]]}: no tensor {missing[0]}, which the index promises")
    return whole


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


def read_bytes(path: Path) -> bytes:
    """A small file, whole."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise FormatError(f"{path}: cannot read it ({error.strerror})") from None


def parse_json(path: Path, text: bytes) -> dict[str, Any]:
    """A JSON object; a byte-order mark before it is passed over."""
    try:
        table = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise FormatError(f"{path}: not valid JSON ({error})") from None
    if not isinstance(table, dict):
        raise FormatError(f"{path}: expected a JSON object")
    return table
