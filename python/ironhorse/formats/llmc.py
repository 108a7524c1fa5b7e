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

from ..config import GPT2Config
from ..errors import ConfigError, FormatError
from ..params import bin_order, param_shapes
from .bf16 import from_bf16, to_bf16
from .header import HEADER_BYTES, INT32, expect_size, header_bytes, read_header

MODEL_MAGIC = 20240326
STATE_MAGIC = 20240327
VERSION_OF = {"f32": 3, "bf16": 5}
STATE_VERSION = 2

F32 = np.dtype("<f4")
BF16_BITS = np.dtype("<u2")

Params = Mapping[str, np.ndarray]


@dataclass(frozen=True)
class ModelFile:
    """A model .bin: `params` are f32 whatever the file's dtype (bf16 to f32 is exact)."""

    config: GPT2Config
    dtype: str  # "f32" or "bf16"
    params: dict[str, np.ndarray]


@dataclass(frozen=True)
class DebugState:
    """A debug state: what PyTorch computed on one batch."""

    x: np.ndarray  # (B, T) int32
    y: np.ndarray  # (B, T) int32
    logits: np.ndarray  # (B, T, V) f32
    loss: float
    grads: dict[str, np.ndarray]


def write_model(path: Path | str, config: GPT2Config, params: Params, dtype: str = "f32") -> None:
    """Writes a version 3 (f32) or version 5 (bf16) model file."""
    if dtype not in VERSION_OF:
        raise FormatError(f"dtype '{dtype}'; a model file is f32 or bf16")
    config.validate()
    _check_shapes(config, params)
    sizes = (config.max_seq_len, config.vocab_size, config.n_layer, config.n_head, config.n_embd)
    with open(path, "wb") as file:
        file.write(header_bytes(MODEL_MAGIC, VERSION_OF[dtype], *sizes, config.padded_vocab_size))
        _write_tensors(file, config, params, dtype)


def read_model(path: Path | str) -> ModelFile:
    """Reads either version. The zero rows beyond V are dropped."""
    path = Path(path)
    what = "GPT-2 model"
    header = read_header(path, what, {MODEL_MAGIC: tuple(VERSION_OF.values())})
    max_seq_len, vocab_size, n_layer, n_head, n_embd, padded = (int(n) for n in header[2:8])
    try:
        config = GPT2Config(max_seq_len, vocab_size, n_layer, n_head, n_embd).validate()
    except ConfigError as error:
        raise FormatError(f"{path}: {error}") from None
    if padded != config.padded_vocab_size:
        raise FormatError(f"{path}: padded vocabulary {padded}, expected {config.padded_vocab_size}")
    dtype = "f32" if header[1] == VERSION_OF["f32"] else "bf16"
    expect_size(path, what, HEADER_BYTES + _count(config) * (4 if dtype == "f32" else 2))
    with open(path, "rb") as file:
        file.seek(HEADER_BYTES)
        return ModelFile(config, dtype, _read_tensors(file, config, dtype))


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
    path = Path(path)
    (B, T), V = _batch_shape(path), config.vocab_size
    expect_size(path, "debug state of this model", HEADER_BYTES + 4 * (2 * B * T + B * T * V + 1 + _count(config)))
    with open(path, "rb") as file:
        file.seek(HEADER_BYTES)
        x, y = (np.fromfile(file, INT32, B * T).reshape(B, T) for _ in range(2))
        logits = np.fromfile(file, F32, B * T * V).reshape(B, T, V)
        loss = float(np.fromfile(file, F32, 1)[0])
        return DebugState(x, y, logits, loss, _read_tensors(file, config, "f32"))


def read_debug_tokens(path: Path | str) -> tuple[np.ndarray, np.ndarray]:
    """Only x and y (B, T) int32 of a debug state: needs no config and none of its memory."""
    path = Path(path)
    B, T = _batch_shape(path)
    tokens = np.fromfile(path, INT32, 2 * B * T, offset=HEADER_BYTES)
    if tokens.size != 2 * B * T:
        raise FormatError(f"{path}: ends inside its tokens; copy it again")
    return tokens[: B * T].reshape(B, T), tokens[B * T :].reshape(B, T)


def _batch_shape(path: Path) -> tuple[int, int]:
    header = read_header(path, "debug state", {STATE_MAGIC: (STATE_VERSION,)})
    B, T = int(header[2]), int(header[3])
    if B < 1 or T < 1:
        raise FormatError(f"{path}: batch {B}, sequence {T}; both must be at least 1")
    return B, T


def _count(config: GPT2Config) -> int:
    """Numbers in the sixteen tensors, padding included."""
    return sum(len(t.names(config)) * int(np.prod(t.shape, dtype=object)) for t in bin_order(config))


def _check_shapes(config: GPT2Config, params: Params) -> None:
    for name, shape in param_shapes(config).items():
        if name not in params:
            raise FormatError(f"{name} is missing")
        if params[name].shape != shape:
            raise FormatError(f"{name} is {list(params[name].shape)}, expected {list(shape)}")


def _write_tensors(file: BinaryIO, config: GPT2Config, params: Params, dtype: str) -> None:
    for tensor in bin_order(config):
        for name in tensor.names(config):
            values = np.ascontiguousarray(params[name], F32)
            bits = values if dtype == "f32" else to_bf16(values).astype(BF16_BITS)
            file.write(bits.data)
            padding = int(np.prod(tensor.shape)) - bits.size  # rows V..Vp of wte, 0 for all others
            file.write(bytes(padding * bits.itemsize))


def _read_tensors(file: BinaryIO, config: GPT2Config, dtype: str) -> dict[str, np.ndarray]:
    shapes = param_shapes(config)
    found: dict[str, np.ndarray] = {}
    for tensor in bin_order(config):
        for name in tensor.names(config):
            count = int(np.prod(tensor.shape))
            raw = np.fromfile(file, F32 if dtype == "f32" else BF16_BITS, count)
            values = raw if dtype == "f32" else from_bf16(raw)
            rows = shapes[name][0]
            found[name] = values.reshape(tensor.shape)[:rows]
    return {name: found[name] for name in shapes}
