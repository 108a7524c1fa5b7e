"""Folders with a model in them: a checkpoint, a Hugging Face folder, or a run, whose newest checkpoint counts."""

from __future__ import annotations

import re
import warnings
from pathlib import Path
from typing import Literal

import numpy as np

from ..config import ModelConfig, MoEConfig
from ..errors import FormatError
from .bf16 import convert
from .checkpoint import TRAINER, CheckpointFolder, read_checkpoint
from .header import Array
from .hf import HfFolder, read_hf
from .hf_files import CONFIG

CHECKPOINTS = "checkpoints"
_EARLIER = "checkpoint"  # where a run of an earlier version has its only one


def sniff_folder(path: Path) -> Literal["checkpoint", "hf", "run"] | None:
    """What a folder is, by the names in it."""
    if (path / TRAINER).exists():
        return "checkpoint"
    if (path / CONFIG).exists():
        return "hf"
    ours = (path / "config.toml").exists() and any((path / name).exists() for name in ("run.json", "metrics.jsonl"))
    return "run" if ours or (path / CHECKPOINTS).is_dir() or (path / _EARLIER / TRAINER).is_file() else None


def open_folder(path: Path, check: bool = True, state: bool = True) -> CheckpointFolder | HfFolder:
    """Maps what is in it. `check` compares sizes and checksums of a checkpoint; without `state` its moments, up to
    four times its weights, are neither read nor needed."""
    kind = sniff_folder(path)
    if kind == "checkpoint":
        return read_checkpoint(path, check, state)
    if kind == "hf":
        return read_hf(path)
    if kind == "run":
        return _latest(path, check, state)
    raise FormatError(f"{path}: no {CONFIG} in it; expected a run, a checkpoint or a Hugging Face folder")


def checkpoints_of(run: Path) -> list[Path]:
    """What is named and shaped like a checkpoint, the one with the most steps first. Their files are not looked at."""
    folder = run / CHECKPOINTS
    entries = folder.iterdir() if folder.is_dir() else ()
    named = [entry for entry in entries if re.fullmatch("step-[0-9]{6,}", entry.name)]
    named.sort(key=lambda entry: int(entry.name[5:]), reverse=True)
    return [entry for entry in (*named, run / _EARLIER) if (entry / TRAINER).is_file()]


def _latest(run: Path, check: bool, state: bool) -> CheckpointFolder:
    """The newest that can be read; a warning names those that cannot."""
    damage: list[str] = []
    for folder in checkpoints_of(run):
        try:
            found = read_checkpoint(folder, check, state)
        except FormatError as error:
            damage.append(str(error))
            continue
        for text in damage:
            warnings.warn(f"{text}; {folder.name} is taken instead", stacklevel=3)
        return found
    if damage:
        raise FormatError(f"{run}: a run without a whole checkpoint ({damage[0]})")
    raise FormatError(f"{run}: a run without a checkpoint: it ended before its first was written")


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
    """The same of a mixture of experts or a Llama."""
    config, params = read_f32(folder)
    if not isinstance(config, MoEConfig):
        raise FormatError(f"{folder}: model_type is {config.kind!r}; expected mixtral or llama")
    return config, params


def _check_finite(folder: Path, name: str, array: Array) -> None:
    finite = np.isfinite(array)
    if not finite.all():
        place = np.unravel_index(int(np.argmin(finite)), array.shape)
        value = "NaN" if np.isnan(array[place]) else str(array[place])
        raise FormatError(f"{folder}: {name}[{', '.join(map(str, place))}] is {value}, expected a finite number")
