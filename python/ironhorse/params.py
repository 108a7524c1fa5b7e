"""The parameter table of a model: names, shapes, and where each tensor is in a .bin file. Needs no torch."""

from __future__ import annotations

from dataclasses import dataclass

from . import _native
from .config import GPT2Config, ModelConfig


def param_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Every parameter by name, in model order, with its true shape: tables have V rows, linear weights are (out, in).

    Within a layer of a mixture the experts' w1 and w3 alternate and all w2 follow, so that in memory they are one
    (E, 2F, C) and one (E, C, F).
    """
    return {name: tuple(shape) for name, shape, _ in _native.model_tensors(config.kind, config.json())}


def decays(shape: tuple[int, ...]) -> bool:
    """Weight decay falls on matrices, the router's and the embeddings included, and not on biases and norms."""
    return len(shape) == 2


def total_params(config: ModelConfig) -> int:
    """All parameters."""
    return _native.model_params(config.kind, config.json())[0]


def active_params(config: ModelConfig) -> int:
    """Parameters used for one token: all except the experts it is not sent to. Embedding and head count in full."""
    return _native.model_params(config.kind, config.json())[1]


@dataclass(frozen=True)
class BinTensor:
    """One tensor of a .bin file of a GPT-2: `stem` is the parameter's name, per layer when `stacked`."""

    stem: str
    shape: tuple[int, ...]  # of one layer, as in the file (wte has Vp rows)
    stacked: bool

    def names(self, config: GPT2Config) -> list[str]:
        """The parameters that follow each other in this tensor."""
        return [f"h.{layer}.{self.stem}" for layer in range(config.n_layer)] if self.stacked else [self.stem]


def bin_order(config: GPT2Config) -> list[BinTensor]:
    """The sixteen tensors of a .bin file, in file order."""
    shapes = param_shapes(config)
    shapes["wte.weight"] = (config.padded_vocab_size, config.n_embd)
    first_layer = (name for name in shapes if not name.startswith("h.") or name.startswith("h.0."))
    return [BinTensor(name.removeprefix("h.0."), shapes[name], name.startswith("h.0.")) for name in first_layer]
