"""Hugging Face folders of Mixtral and Llama: `config.json` and `model.safetensors` in their names, which are ours."""

from __future__ import annotations

import json
from pathlib import Path

from ..config_moe import MoEConfig, from_hf_dict, to_hf_config
from ..errors import ConfigError, FormatError
from ..params_moe import param_shapes
from .bf16 import from_bf16
from .header import Array
from .hf import CONFIG, parse_json, read_bytes, read_weights


def config_json(config: MoEConfig) -> str:
    """The text of `config.json`."""
    return json.dumps(to_hf_config(config), indent=2) + "\n"


def read_hf_moe(folder: Path) -> tuple[MoEConfig, dict[str, Array]]:
    """Sizes and parameters in f32, in the order of the table; every parameter must be there, and none besides."""
    path = folder / CONFIG
    try:
        config = from_hf_dict(parse_json(path, read_bytes(path)), str(path))
    except ConfigError as error:
        raise FormatError(str(error)) from None
    file = read_weights(folder)
    # before the table is made, which grows with the sizes the file claims
    expected = 3 + config.n_layer * (7 + 3 * config.n_experts if config.n_experts else 9)
    if expected > 2 * len(file.tensors):
        raise FormatError(f"{folder}: {len(file.tensors)} tensors, expected {expected}")
    shapes = param_shapes(config)
    for name in file.tensors:
        if name not in shapes and not name.endswith("rotary_emb.inv_freq"):
            raise FormatError(f"{folder}: tensor {name} is not one of a {config.kind} of these sizes")
    params: dict[str, Array] = {}
    for name, shape in shapes.items():
        if name not in file.tensors:
            raise FormatError(f"{folder}: no tensor {name}")
        array, dtype = file.tensors[name], file.dtypes[name]
        if array.shape != shape:
            raise FormatError(f"{folder}: {name} is {list(array.shape)}, expected {list(shape)}")
        if dtype not in ("F32", "BF16", "F16"):
            raise FormatError(f"{folder}: {name} is {dtype}, expected F32, BF16 or F16")
        params[name] = from_bf16(array) if dtype == "BF16" else array.astype("<f4")
    return config, params
