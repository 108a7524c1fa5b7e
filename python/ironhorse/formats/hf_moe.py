"""The weights of a Mixtral or Llama folder as f32, for the export."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from ..config_moe import MoEConfig
from ..errors import FormatError
from .bf16 import from_bf16
from .checkpoint import TRAINER, read_checkpoint
from .header import Array
from .hf import read_hf
from .hf_files import CONFIG


def read_hf_moe(folder: Path) -> tuple[MoEConfig, dict[str, Array]]:
    """Sizes and parameters in f32, in the order of the table; every parameter must be there, and none besides.

    What is no finite number is refused, and a checkpoint whose files are not those it was written with.
    """
    found = read_checkpoint(folder).weights if (folder / TRAINER).exists() else read_hf(folder)
    if not isinstance(found.config, MoEConfig):
        kind = found.settings.get("model_type")
        raise FormatError(f"{folder / CONFIG}: model_type is {kind!r}; expected mixtral or llama")
    params = {
        name: from_bf16(array) if found.dtypes[name] == "BF16" else array.astype("<f4")
        for name, array in found.params.items()
    }
    for name, array in params.items():
        _check_finite(folder, name, array)
    return found.config, params


def _check_finite(folder: Path, name: str, array: Array) -> None:
    finite = np.isfinite(array)
    if not finite.all():
        place = np.unravel_index(int(np.argmin(finite)), array.shape)
        value = "NaN" if np.isnan(array[place]) else str(array[place])
        raise FormatError(f"{folder}: {name}[{', '.join(map(str, place))}] is {value}, expected a finite number")
