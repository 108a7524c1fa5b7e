"""The weights of a Mixtral or Llama as f32, for the export and `ironhorse.nn`."""

from __future__ import annotations

from pathlib import Path

from ..config_moe import MoEConfig
from ..errors import FormatError
from ..models import kind_of
from .folders import read_f32
from .header import Array


def read_hf_moe(folder: Path) -> tuple[MoEConfig, dict[str, Array]]:
    """Sizes and parameters in f32, in the order of the table; every parameter must be there, and none besides.

    `folder` is a Hugging Face folder, a checkpoint or a run. Numbers that are not finite are refused, and a checkpoint
    whose files are not those it was written with.
    """
    config, params = read_f32(folder)
    if not isinstance(config, MoEConfig):
        raise FormatError(f"{folder}: model_type is {kind_of(config)!r}; expected mixtral or llama")
    return config, params
