"""`gpt2_*.bin` (weights) and `gpt2_*_debug_state.bin` (one batch with its logits, loss and gradients).

Both hold the same sixteen tensors in the same order, layers stacked inside a tensor, wte padded with zero
rows from V to Vp. Here they are dictionaries of parameter name -> array in the true, unpadded shape.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np

from .. import _native
from ..config import GPT2Config, made
from ..errors import ConfigError, FormatError
from ..params import bin_order, param_shapes
from .bf16 import from_bf16, to_bf16
from .header import INT32, Array, header_bytes
from .safetensors import map_places

MODEL_MAGIC = 20240326
STATE_MAGIC = 20240327
VERSION_OF = {"f32": 3, "bf16": 5}
STATE_VERSION = 2

F32 = np.dtype("<f4")
BF16_BITS = np.dtype("<u2")

Params = Mapping[str, Array]


@dataclass(frozen=True)
class ModelFile:
    """A model .bin: `params` are f32 whatever the file's dtype (bf16 to f32 is exact)."""

    config: GPT2Config
    dtype: str  # "f32" or "bf16"
    params: dict[str, Array]


@dataclass(frozen=True)
class DebugState:
    """A debug state: what PyTorch computed on one batch."""

    x: Array  # (B, T) int32
    y: Array  # (B, T) int32
    logits: Array  # (B, T, V) f32
    loss: float
    grads: dict[str, Array]


def write_model(path: Path | str, config: GPT2Config, params: Params, dtype: str = "f32") -> None:
    """Writes a version 3 (f32) or version 5 (bf16) model file; arrays are f32, or uint16 with the bits of bf16."""
    if dtype not in VERSION_OF:
        raise FormatError(f"dtype '{dtype}'; a model file is f32 or bf16")
    config.validate()
    if config.act != "gelu":
        raise FormatError(f"{path}: a model .bin has GELU and no other activation, but this model has {config.act}")
    _check_shapes(config, params)
    sizes = (config.max_seq_len, config.vocab_size, config.n_layer, config.n_head, config.n_embd)
    with open(path, "wb") as file:
        file.write(header_bytes(MODEL_MAGIC, VERSION_OF[dtype], *sizes, config.padded_vocab_size))
        _write_tensors(file, config, params, dtype)


def read_model(path: Path | str) -> ModelFile:
    """Reads either version. The zero rows beyond V are dropped."""
    file = map_model(path)
    convert = np.array if file.dtype == "f32" else from_bf16
    return ModelFile(file.config, file.dtype, {name: convert(values) for name, values in file.params.items()})


def map_model(path: Path | str) -> ModelFile:
    """Like `read_model`, but `params` are views of the mapped file in its own type: bf16 as uint16."""
    described, places = _native.file_model(path)
    try:
        config = made(*described)
    except ConfigError as error:
        raise FormatError(f"{path}: {error}") from None
    tensors, dtypes = map_places(places)
    assert isinstance(config, GPT2Config)
    return ModelFile(config, dtypes["wte.weight"].lower(), {name: tensors[name] for name in param_shapes(config)})


def write_debug_state(path: Path | str, config: GPT2Config, state: DebugState) -> None:
    """Writes a version 2 debug state."""
    B, T = state.x.shape
    if state.y.shape != (B, T) or state.logits.shape != (B, T, config.vocab_size):
        raise FormatError(
            f"{path}: x is {state.x.shape}, y {state.y.shape}, logits {state.logits.shape}; "
            f"expected (B,T), (B,T), (B,T,{config.vocab_size})"
        )
    _check_shapes(config, state.grads)
    with open(path, "wb") as file:
        file.write(header_bytes(STATE_MAGIC, STATE_VERSION, B, T))
        for tokens in (state.x, state.y):
            file.write(np.ascontiguousarray(tokens, INT32).data)
        file.write(np.ascontiguousarray(state.logits, F32).data)
        file.write(np.array([state.loss], F32).data)
        _write_tensors(file, config, state.grads, "f32")


def read_debug_state(path: Path | str, config: GPT2Config) -> DebugState:
    """Reads a debug state. Its header holds only B and T, so the model's config has to be given."""
    state = map_debug_state(path, config)
    grads = {name: np.array(values) for name, values in state.grads.items()}
    return DebugState(np.array(state.x), np.array(state.y), np.array(state.logits), state.loss, grads)


def map_debug_state(path: Path | str, config: GPT2Config) -> DebugState:
    """Like `read_debug_state`, but the arrays are views of the mapped file."""
    tensors, _ = map_places(_native.file_state(path, config.json()))
    grads = {name: tensors[name] for name in param_shapes(config)}
    return DebugState(tensors["x"], tensors["y"], tensors["logits"], float(tensors["loss"]), grads)


def _check_shapes(config: GPT2Config, params: Params) -> None:
    for name, shape in param_shapes(config).items():
        if name not in params:
            raise FormatError(f"{name} is missing")
        if params[name].shape != shape:
            raise FormatError(f"{name} is {list(params[name].shape)}, expected {list(shape)}")


def _write_tensors(file: BinaryIO, config: GPT2Config, params: Params, dtype: str) -> None:
    for tensor in bin_order(config):
        for name in tensor.names(config):
            bits = _stored(params[name], dtype)
            file.write(bits.data)
            padding = int(np.prod(tensor.shape)) - bits.size  # rows V..Vp of wte, 0 for all others
            file.write(bytes(padding * bits.itemsize))


def _stored(values: Array, dtype: str) -> Array:
    """As they stand in the file. uint16 are the bits of bf16."""
    if values.dtype == BF16_BITS:
        return np.ascontiguousarray(values if dtype == "bf16" else from_bf16(values))
    floats = np.ascontiguousarray(values, F32)
    return floats if dtype == "f32" else to_bf16(floats).astype(BF16_BITS)
