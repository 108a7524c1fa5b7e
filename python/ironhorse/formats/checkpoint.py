"""Our checkpoints: a Hugging Face folder with everything beside it that training needs to go on.

    config.json, model.safetensors   the weights as the engine holds them, F32 or BF16
    master.safetensors               beside BF16 weights: their F32 masters, or the 16 bits (I16) that they lack
    state.safetensors                AdamW's moments, m.NAME and v.NAME, F32 or BF16
    tokenizer.bin                    optional
    trainer.json                     step, settings, element types, size and CRC-32 of every other file

Weights, masters and moments may be in several files, `state-00001-of-00003.safetensors`. Version 1 had no masters, no
sizes and no element types. Weights here are the exact ones: the masters where there are any.
"""

from __future__ import annotations

import json
import re
import warnings
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from .. import _native
from ..config import made
from ..params import param_shapes
from .bf16 import convert, join_master, split_master, to_bf16
from .header import Array
from .hf import PREFIX, HfFolder, read_hf, text_tokens, tokenizer_tokens, turned
from .hf_files import CONFIG, INDEX
from .safetensors import SafetensorsFile, read_safetensors, write_safetensors
from .tokenizer import Tokenizer, read_tokenizer, write_tokenizer

TRAINER, TOKENIZER = "trainer.json", "tokenizer.bin"
_CHUNK = 1 << 22


def is_checkpoint_file(name: str) -> bool:
    """Whether a file of that name may be one of a checkpoint's."""
    return name in (CONFIG, INDEX, TOKENIZER, TRAINER) or _stem(name) is not None


def _stem(name: str) -> str | None:
    """`state` of state.safetensors and of state-00001-of-00003.safetensors."""
    match = re.fullmatch(r"(model|master|state)(-[0-9]{5,}-of-[0-9]{5,})?\.safetensors", name)
    return match[1] if match else None


@dataclass(frozen=True)
class Stored:
    """Tensors as they are stored, in one file or several."""

    files: dict[str, SafetensorsFile]  # by file name

    def tensor(self, name: str) -> Array:
        """A tensor that is there."""
        return next(file.tensors[name] for file in self.files.values() if name in file.tensors)

    def write(self, folder: Path, changed: Mapping[str, Array]) -> None:
        """The same files again, with other numbers in some tensors."""
        for name, file in self.files.items():
            tensors = {tensor: changed.get(tensor, array) for tensor, array in file.tensors.items()}
            bf16 = {tensor: "BF16" for tensor, dtype in file.dtypes.items() if dtype == "BF16"}
            write_safetensors(folder / name, tensors, file.metadata, bf16)


@dataclass(frozen=True)
class CheckpointFolder:
    """An open checkpoint; arrays are views of its files."""

    path: Path
    weights: HfFolder  # of model.safetensors, rounded where there is a master
    master: dict[str, Array]  # by parameter, without padding: f32, or i16; empty where the weights are exact
    moments: dict[str, Array]  # m.NAME and, but for Muon, v.NAME in the parameters' shapes; bf16 is uint16
    moments_dtype: str  # F32 or BF16
    trainer: dict[str, Any]
    trainer_json: bytes
    tokenizer: Tokenizer | None
    stored: dict[str, Stored]  # model, master, state
    index_json: bytes | None  # of weights in several files

    def text_tokens(self) -> dict[str, Any]:
        """The tokens before and after a text: the tokenizer's, or what config.json says."""
        return text_tokens(self.weights.settings) if self.tokenizer is None else tokenizer_tokens(self.tokenizer.eot)

    def f32(self, name: str) -> Array:
        """A parameter, exactly."""
        weights, master = self.weights.params[name], self.master.get(name)
        if master is None:
            return convert(weights, self.weights.dtypes[name], "F32")
        return join_master(weights, master) if master.dtype == np.int16 else master


def read_checkpoint(folder: Path, check: bool = True, state: bool = True) -> CheckpointFolder:
    """Maps a checkpoint, or the newest whole one of a run: a warning names newer ones that are damaged.

    `check` compares the sizes and checksums of its files, which reads them whole. Without `state` the moments are not
    looked at, and need not be there. The native module checks everything except the numbers.
    """
    path, described, damage = _native.file_checkpoint(folder, state, check)
    for damaged in damage:
        warnings.warn(f"{damaged}; {path.name} is taken instead", stacklevel=3)
    text = (path / TRAINER).read_bytes()
    trainer = json.loads(text)
    names = [name for name in sorted(trainer["crc32"]) if state or _stem(name) != "state"]
    weights = replace(read_hf(path), config=made(*described, any_padding=True))
    stored = {
        stem: Stored({name: read_safetensors(path / name) for name in names if _stem(name) == stem})
        for stem in ("model", "master", "state")
    }
    rows = {name: shape[0] for name, shape in param_shapes(weights.config).items()}
    precision = trainer.get("precision") or {}
    has_master = precision.get("weights") == "bf16"
    master = {name: stored["master"].tensor(name)[:count] for name, count in rows.items() if has_master}
    each = [(f"{part}.{name}", count) for part in "mv" for name, count in rows.items() if state]
    held = {name for file in stored["state"].files.values() for name in file.tensors}  # Muon has no second moments
    moments = {name: stored["state"].tensor(name)[:count] for name, count in each if name in held}
    moments_dtype = precision.get("moments", "f32").upper()
    tokenizer = read_tokenizer(path / TOKENIZER) if TOKENIZER in names else None
    index = (path / INDEX).read_bytes() if INDEX in names else None
    return CheckpointFolder(path, weights, master, moments, moments_dtype, trainer, text, tokenizer, stored, index)


@dataclass(frozen=True)
class CheckpointParts:
    """What a checkpoint is written from."""

    source: CheckpointFolder  # the one that was read; its element types and its division into files are kept
    tensors: Mapping[str, Array]  # parameters and moments, of any float type
    dtypes: Mapping[str, str]
    trainer: Mapping[str, Any]
    tokenizer: Tokenizer | None


def write_checkpoint(folder: Path, parts: CheckpointParts) -> None:
    """Writes all files into a folder that exists, with new sizes and checksums."""
    source = parts.source
    weights, master = _split(parts)
    model = source.stored["model"]
    names = (name for file in model.files.values() for name in file.tensors)
    changed = {name: turned(name, weights[key]) for name in names if (key := name.removeprefix(PREFIX)) in weights}
    model.write(folder, changed)
    source.stored["master"].write(folder, _padded(source.stored["master"], master))
    dtype = source.moments_dtype
    moments = {name: convert(parts.tensors[name], parts.dtypes[name], dtype) for name in source.moments}
    source.stored["state"].write(folder, _padded(source.stored["state"], moments))
    (folder / CONFIG).write_bytes(source.weights.layout.config_json)
    if source.index_json is not None:  # says which tensor is in which file, and nothing that has changed
        (folder / INDEX).write_bytes(source.index_json)
    if parts.tokenizer is not None:
        write_tokenizer(folder / TOKENIZER, parts.tokenizer)
    _write_manifest(folder, parts)


def _split(parts: CheckpointParts) -> tuple[dict[str, Array], dict[str, Array]]:
    """Weights as the engine holds them, and masters; only of what has changed where there are masters.

    Numbers that are what they were keep their weights, which may have been rounded at random; others are rounded to
    the nearest.
    """
    source = parts.source
    weights: dict[str, Array] = {}
    master: dict[str, Array] = {}
    for name, held in source.weights.params.items():
        array, dtype = parts.tensors[name], parts.dtypes[name]
        if name not in source.master:
            weights[name] = convert(array, dtype, source.weights.dtypes[name])
            continue
        exact = np.ascontiguousarray(convert(array, dtype, "F32"), "<f4")
        was = np.ascontiguousarray(source.f32(name), "<f4")
        same = exact.view("<u4") == was.view("<u4")
        if same.all():
            continue
        if source.master[name].dtype == np.int16:
            rounded, residual = split_master(exact)
            master[name] = np.where(same, source.master[name], residual)
        else:
            rounded = to_bf16(exact)
            master[name] = exact
        weights[name] = np.where(same, held, rounded)
    return weights, master


def _padded(stored: Stored, arrays: Mapping[str, Array]) -> dict[str, Array]:
    """With the rows that pad token tables in the file."""
    more = {name: stored.tensor(name)[len(array) :] for name, array in arrays.items()}
    return {name: np.concatenate([array, more[name]]) if len(more[name]) else array for name, array in arrays.items()}


def _write_manifest(folder: Path, parts: CheckpointParts) -> None:
    """trainer.json; as it was read where nothing in it changes."""
    files = sorted(folder.iterdir())
    trainer = dict(parts.trainer)
    if trainer.get("version") != 1:
        trainer["bytes"] = {file.name: file.stat().st_size for file in files}
    trainer["crc32"] = {file.name: crc32_of(file) for file in files}
    text = parts.source.trainer_json
    if json.loads(text) != trainer:
        text = json.dumps(trainer, indent=2, ensure_ascii=False, allow_nan=False).encode()
    (folder / TRAINER).write_bytes(text)


def crc32_of(path: Path) -> int:
    """CRC-32 of a file's bytes."""
    crc = 0
    with open(path, "rb") as file:
        while chunk := file.read(_CHUNK):
            crc = zlib.crc32(chunk, crc)
    return crc
