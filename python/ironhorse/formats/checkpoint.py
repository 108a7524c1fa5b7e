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
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from ..config import MoEConfig, from_dict
from ..errors import ConfigError, FormatError
from ..params import VOCAB_TABLES, param_shapes
from .bf16 import convert, join_master, split_master, to_bf16
from .header import Array
from .hf import PREFIX, HfFolder, read_hf, text_tokens, tokenizer_tokens, turned
from .hf_files import CONFIG, INDEX, WEIGHTS, parse_json, read_bytes
from .safetensors import SafetensorsFile, read_safetensors, write_safetensors
from .tokenizer import Tokenizer, read_tokenizer, write_tokenizer

TRAINER, TOKENIZER = "trainer.json", "tokenizer.bin"
FORMAT = "ironhorse-checkpoint"
VERSIONS = (1, 2)

_FLOATS = ("f32", "bf16")
_PRECISION = {"weights": _FLOATS, "grads": _FLOATS, "master": ("f32", "i16"), "moments": _FLOATS}
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

    def find(self, name: str) -> tuple[Array, str] | None:
        """A tensor and its type."""
        for file in self.files.values():
            if name in file.tensors:
                return file.tensors[name], file.dtypes[name]
        return None

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
    moments: dict[str, Array]  # m.NAME and v.NAME in the parameters' shapes; bf16 is uint16
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
    """Maps a checkpoint. `check` compares the sizes and checksums of its files, which reads them whole.

    Without `state` the moments are neither looked at nor needed.
    """
    path = folder / TRAINER
    text = read_bytes(path)
    trainer = parse_json(path, text)
    _check_manifest(path, trainer)
    names = [name for name in sorted(trainer["crc32"]) if state or _stem(name) != "state"]
    if check:
        _check_files(folder, trainer, names)
    weights = _with_sizes(read_hf(folder), trainer, path)
    stored = {
        stem: Stored({name: read_safetensors(folder / name) for name in names if _stem(name) == stem})
        for stem in ("model", "master", "state")
    }
    shapes = param_shapes(weights.config)
    precision = trainer["precision"] if trainer["version"] > 1 else {}
    for name, dtype in weights.dtypes.items() if precision else ():
        if dtype.lower() != precision["weights"]:
            raise FormatError(
                f"{folder}: {name} is {dtype}, expected {precision['weights'].upper()}, as {TRAINER} says"
            )
    master: dict[str, Array] = {}
    if precision.get("weights") == "bf16":
        dtype = precision["master"].upper()
        master = {name: _pool_tensor(folder, stored["master"], name, shapes[name], dtype) for name in shapes}
    dtype = precision.get("moments", "f32").upper()
    names_of_moments = [f"{part}.{name}" for part in "mv" for name in shapes] if state else []
    moments = {name: _pool_tensor(folder, stored["state"], name, shapes[name[2:]], dtype) for name in names_of_moments}
    tokenizer = read_tokenizer(folder / TOKENIZER) if TOKENIZER in names else None
    index = read_bytes(folder / INDEX) if INDEX in names else None
    return CheckpointFolder(folder, weights, master, moments, dtype, trainer, text, tokenizer, stored, index)


def _check_manifest(path: Path, trainer: Mapping[str, Any]) -> None:
    """What trainer.json must say before its files are looked at."""
    version = trainer.get("version")
    if trainer.get("format") != FORMAT or type(version) is not int or version not in VERSIONS:
        raise FormatError(f"{path}: format {trainer.get('format')!r}, version {version!r}; "
                          f"expected {FORMAT!r}, {' or '.join(map(str, VERSIONS))}")  # fmt: skip
    sums, sizes = trainer.get("crc32"), trainer.get("bytes", {})
    if not isinstance(sums, dict) or CONFIG not in sums or not sums.keys() & {WEIGHTS, INDEX}:
        raise FormatError(f"{path}: crc32 must name {CONFIG} and {WEIGHTS} or {INDEX}")
    other = next((name for name in sums if not is_checkpoint_file(name)), None)
    if other is not None:
        raise FormatError(f"{path}: crc32 is of {other!r}, expected files of a checkpoint, such as {WEIGHTS}")
    if version == 1:
        return
    if not isinstance(sizes, dict) or not sums.keys() <= sizes.keys():
        raise FormatError(f"{path}: bytes must have the size of every file that crc32 names")
    precision = trainer.get("precision")
    if not isinstance(precision, dict) or precision.keys() != _PRECISION.keys():
        raise FormatError(f"{path}: precision must have {', '.join(_PRECISION)}")
    for field, known in _PRECISION.items():
        if precision[field] not in known:
            raise FormatError(f"{path}: precision.{field} is {precision[field]!r}, expected {' or '.join(known)}")


def _check_files(folder: Path, trainer: Mapping[str, Any], names: list[str]) -> None:
    """Sizes first: a torn file is found without reading the others."""
    sizes = trainer["bytes"] if trainer["version"] > 1 else {}
    for name in (name for name in names if name in sizes):
        try:
            found = (folder / name).stat().st_size
        except OSError as error:
            raise FormatError(f"{folder / name}: cannot read it ({error.strerror})") from None
        if found != sizes[name]:
            raise FormatError(f"{folder / name}: {found} bytes, expected {sizes[name]}, as {TRAINER} says")
    for name in names:
        found, want = crc32_of(folder / name), trainer["crc32"][name]
        if found != want:
            raise FormatError(f"{folder / name}: crc32 is {found}, expected {want}, as {TRAINER} says; it was changed")


def _pool_tensor(folder: Path, stored: Stored, name: str, shape: tuple[int, ...], dtype: str) -> Array:
    """A tensor beside the weights, without the rows that pad a token table."""
    found = stored.find(name)
    where = folder / next(iter(stored.files)) if len(stored.files) == 1 else folder
    if found is None or found[1] != dtype:
        raise FormatError(f"{where}: no {dtype} tensor {name}")
    array = found[0]
    padded = name.removeprefix("m.").removeprefix("v.") in VOCAB_TABLES
    rows = array[: shape[0]] if padded and array.ndim else array
    if rows.shape != shape:
        raise FormatError(f"{where}: {name} is {list(array.shape)}, expected {list(shape)}")
    return rows


def _with_sizes(weights: HfFolder, trainer: Mapping[str, Any], path: Path) -> HfFolder:
    """The sizes of trainer.json, which knows RoPE's alpha apart from its base; config.json must mean the same."""
    table = trainer.get("config")
    try:
        if not isinstance(table, dict):
            raise ConfigError("not a table")
        pairs = {name: value for name, value in table.items() if name != "padded_vocab_size"}
        config = from_dict(pairs, weights.config.kind, f"{path}: config")
    except ConfigError as error:
        raise FormatError(f"{path}: config is not the sizes of a model ({error})") from None
    same = config == weights.config
    if isinstance(config, MoEConfig) and isinstance(weights.config, MoEConfig):
        same = config.computes_as(weights.config)
    if not same:
        raise FormatError(f"{path}: config is another model than that of {CONFIG}")
    return replace(weights, config=config)


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
    padded: dict[str, Array] = {}
    for name, array in arrays.items():
        found = stored.find(name)
        more = found[0][len(array) :] if found is not None else array[:0]
        padded[name] = np.concatenate([array, more]) if len(more) else array
    return padded


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
    try:
        with open(path, "rb") as file:
            while chunk := file.read(_CHUNK):
                crc = zlib.crc32(chunk, crc)
    except OSError as error:
        raise FormatError(f"{path}: cannot read it ({error.strerror})") from None
    return crc
