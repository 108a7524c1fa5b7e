"""Our checkpoints: a Hugging Face folder with AdamW's moments and the trainer's position beside the weights.

`config.json`, `model.safetensors` · `state.safetensors` (m.NAME, v.NAME) · `tokenizer.bin` (optional) · `trainer.json`
with the CRC-32 of every other file.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from ..config_moe import MoEConfig
from ..errors import ConfigError, FormatError
from ..models import VOCAB_TABLES, ModelConfig, from_dict, kind_of, param_shapes
from .header import Array
from .hf import HfFolder, HfLayout, read_hf, text_tokens, tokenizer_tokens, write_hf
from .hf_files import CONFIG, WEIGHTS, parse_json, read_bytes
from .safetensors import read_safetensors, write_safetensors
from .tokenizer import Tokenizer, read_tokenizer, write_tokenizer

STATE, TRAINER, TOKENIZER = "state.safetensors", "trainer.json", "tokenizer.bin"
FILES = (WEIGHTS, CONFIG, STATE, TRAINER, TOKENIZER)
FORMAT = "ironhorse-checkpoint"
_CHUNK = 1 << 22


@dataclass(frozen=True)
class CheckpointFolder:
    """`moments` are m.NAME and v.NAME in the parameters' shapes; `trainer` is trainer.json."""

    weights: HfFolder
    moments: dict[str, Array]
    trainer: dict[str, Any]
    trainer_json: bytes
    padded: int  # rows of the moments of token tables in the file
    tokenizer: Tokenizer | None

    def text_tokens(self) -> dict[str, Any]:
        """The tokens before and after a text: the tokenizer's, or what config.json says."""
        return text_tokens(self.weights.settings) if self.tokenizer is None else tokenizer_tokens(self.tokenizer.eot)


def read_checkpoint(folder: Path, check: bool = True) -> CheckpointFolder:
    """Maps a checkpoint. `check` reads every file once to compare its checksum."""
    path = folder / TRAINER
    text = read_bytes(path)
    trainer = parse_json(path, text)
    if (trainer.get("format"), trainer.get("version")) != (FORMAT, 1):
        raise FormatError(f"{path}: format {trainer.get('format')!r}, version {trainer.get('version')!r}; "
                          f"expected {FORMAT!r}, 1")  # fmt: skip
    sums = trainer.get("crc32")
    if not isinstance(sums, dict) or not {WEIGHTS, CONFIG, STATE} <= sums.keys() <= set(FILES):
        raise FormatError(f"{path}: crc32 must name {WEIGHTS}, {CONFIG}, {STATE} and perhaps {TOKENIZER}")
    for name, want in sums.items() if check else ():
        found = crc32_of(folder / name)
        if found != want:
            raise FormatError(f"{folder / name}: crc32 is {found}, expected {want}, as {TRAINER} says; it was changed")
    weights = _with_sizes(read_hf(folder), trainer, path)
    state = read_safetensors(folder / STATE)
    moments: dict[str, Array] = {}
    shapes = param_shapes(weights.config)
    for name, shape in ((f"{part}.{name}", shape) for part in "mv" for name, shape in shapes.items()):
        if name not in state.tensors or state.dtypes[name] != "F32":
            raise FormatError(f"{folder / STATE}: no F32 tensor {name}")
        moments[name] = state.tensors[name][: shape[0]]  # token tables are padded there
        if moments[name].shape != shape:
            raise FormatError(f"{folder / STATE}: {name} is {list(state.tensors[name].shape)}, expected {list(shape)}")
    padded = len(state.tensors[f"m.{next(iter(shapes))}"])  # the first of every table has a row for each token
    tokenizer = read_tokenizer(folder / TOKENIZER) if TOKENIZER in sums else None
    return CheckpointFolder(weights, moments, trainer, text, padded, tokenizer)


def _with_sizes(weights: HfFolder, trainer: Mapping[str, Any], path: Path) -> HfFolder:
    """The sizes of trainer.json, which knows RoPE's alpha apart from its base; config.json must mean the same."""
    if not isinstance(weights.config, MoEConfig):
        return weights
    table = trainer.get("config")
    try:
        if not isinstance(table, dict):
            raise ConfigError("not a table")
        pairs = {name: value for name, value in table.items() if name != "padded_vocab_size"}
        config = from_dict(pairs, kind_of(weights.config), f"{path}: config")
    except ConfigError as error:
        raise FormatError(f"{path}: config is not the sizes of a model ({error})") from None
    if not isinstance(config, MoEConfig) or not config.computes_as(weights.config):
        raise FormatError(f"{path}: config is another model than that of {CONFIG}")
    return replace(weights, config=config)


@dataclass(frozen=True)
class CheckpointParts:
    """What a checkpoint is written from; `tensors` are parameters and moments."""

    config: ModelConfig
    tensors: Mapping[str, Array]
    dtypes: Mapping[str, str]
    layout: HfLayout | None
    tokens: Mapping[str, Any]  # before and after a text
    trainer: Mapping[str, Any]
    trainer_json: bytes  # as it was read, kept where nothing in it changes
    padded: int
    tokenizer: Tokenizer | None


def write_checkpoint(folder: Path, parts: CheckpointParts) -> None:
    """Writes all files into a folder that exists, with new checksums."""
    names = list(param_shapes(parts.config))
    write_hf(folder, parts.config, parts.tensors, parts.dtypes, parts.layout, tokens=parts.tokens)
    moments: dict[str, Array] = {}
    for name in (f"{part}.{name}" for part in "mv" for name in names):
        values = np.asarray(parts.tensors[name], "<f4")
        if name[2:] in VOCAB_TABLES:
            values = np.concatenate([values, np.zeros((parts.padded - len(values), values.shape[1]), "<f4")])
        moments[name] = values
    write_safetensors(folder / STATE, moments)
    if parts.tokenizer is not None:
        write_tokenizer(folder / TOKENIZER, parts.tokenizer)
    sums = {entry.name: crc32_of(entry) for entry in folder.iterdir()}
    trainer = {**parts.trainer, "crc32": dict(sorted(sums.items()))}
    text = parts.trainer_json
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
