"""The weights of a Mixtral or Llama folder as f32, for the export."""

from __future__ import annotations

from pathlib import Path

from ..config_moe import MoEConfig
from ..errors import FormatError
from .bf16 import from_bf16
from .header import Array
from .hf import read_hf
from .hf_files import CONFIG


def read_hf_moe(folder: Path) -> tuple[MoEConfig, dict[str, Array]]:
    """Sizes and parameters in f32, in the order of the table; every parameter must be there, and none besides."""
    found = read_hf(folder)
    if not isinstance(found.config, MoEConfig):
        kind = found.settings.get("model_type")
        raise FormatError(f"{folder / CONFIG}: model_type is {kind!r}; expected mixtral or llama")
    params = {
        name: from_bf16(array) if found.dtypes[name] == "BF16" else array.astype("<f4")
        for name, array in found.params.items()
    }
    return found.config, params
