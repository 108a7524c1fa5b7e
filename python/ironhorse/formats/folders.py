"""Folders with a model in them: a checkpoint, a Hugging Face folder, or a run, whose newest checkpoint counts."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from .. import _native
from ..config import ModelConfig, MoEConfig
from ..errors import FormatError
from .bf16 import convert
from .checkpoint import CheckpointFolder, read_checkpoint
from .header import Array
from .hf import HfFolder, read_hf


def open_folder(path: Path, check: bool = True, state: bool = True) -> CheckpointFolder | HfFolder:
    """Maps what is in it. `check` compares sizes and checksums of a checkpoint; without `state` its moments, up to
    four times its weights, are neither read nor needed."""
    return read_hf(path) if _native.file_kind(path) == "hf" else read_checkpoint(path, check, state)


def read_f32(folder: Path) -> tuple[ModelConfig, dict[str, Array]]:
    """Sizes and parameters, exactly, as f32 arrays of their own, in the order of the table; all must be finite."""
    found = open_folder(folder, state=False)
    weights = found.weights if isinstance(found, CheckpointFolder) else found
    params: dict[str, Array] = {}
    for name, array in weights.params.items():
        exact = found.f32(name) if isinstance(found, CheckpointFolder) else convert(array, weights.dtypes[name], "F32")
        params[name] = np.array(exact, "<f4")
        _check_finite(folder, name, params[name])
    return weights.config, params


def read_hf_moe(folder: Path) -> tuple[MoEConfig, dict[str, Array]]:
    """The same of a decoder of Llama's design."""
    config, params = read_f32(folder)
    if not isinstance(config, MoEConfig):
        known = "llama, mistral, mixtral, qwen2, qwen3, qwen3_moe or gemma3_text"
        raise FormatError(f"{folder}: model_type is {config.kind!r}; expected {known}")
    return config, params


def _check_finite(folder: Path, name: str, array: Array) -> None:
    finite = np.isfinite(array)
    if not finite.all():
        place = np.unravel_index(int(np.argmin(finite)), array.shape)
        value = "NaN" if np.isnan(array[place]) else str(array[place])
        raise FormatError(f"{folder}: {name}[{', '.join(map(str, place))}] is {value}, expected a finite number")
