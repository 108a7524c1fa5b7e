"""The transformer: embedding, blocks of attention and experts, norm, head.

From tokens to logits:
    x = embedding[tokens]
    for each block:  x = x + attention(attn_norm(x))
                     x = x + moe(ffn_norm(x))
    logits = lm_head(final_norm(x))
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np

from .. import ops
from ..errors import InvalidValueError
from ..formats.folders import read_hf_moe
from . import generation
from .attention import KVCache, MQAttention, RopeTables
from .config import Config
from .layers import (
    F32,
    I32,
    Embedding,
    Layer,
    Linear,
    RMSNorm,
    check_device,
    check_sizes,
    floats,
    kept_floats,
    token_ids,
)
from .moe import MoELayer, Router
from .tensor import Seed, Tensor, as_array, generator

__all__ = ["Config", "MQAttention", "MoELayer", "MoETransformer", "Router", "TransformerBlock"]


class TransformerBlock(Layer):
    """Attention, then experts, each behind a norm and added to x: (batch, seq, hidden_dim) -> the same."""

    def __init__(
        self, config: Config, *, seed: Seed = None, device: str = "auto", tables: RopeTables | None = None
    ) -> None:
        Config.sizes_of(config, "TransformerBlock")
        rng = generator(seed)
        self.config, self.device = config, check_device(device, "TransformerBlock")
        self.attn_norm = RMSNorm(config.hidden_dim, config.rms_eps, device=device)
        self.attention = MQAttention(config, seed=rng, device=device, tables=tables)
        self.ffn_norm = RMSNorm(config.hidden_dim, config.rms_eps, device=device)
        self.moe = MoELayer(config, seed=rng, device=device)

    def forward(self, x: Any) -> Tensor:
        """(batch, seq, hidden_dim) -> the same."""
        x, C = kept_floats(x, "TransformerBlock", "x", self.config.hidden_dim), self.config.hidden_dim
        if x.ndim != 3:
            raise InvalidValueError(f"TransformerBlock: `x` is {list(x.shape)}, expected [batch, seq, {C}]")
        return Tensor._wrap(self._fwd(x))

    def _fwd(self, x: F32, cache: KVCache | None = None) -> F32:
        mixed = self.attention._fwd(self.attn_norm._fwd(x), cache)
        x = ops.add(x, mixed, mixed, device=self.device)
        made = self.moe._fwd(self.ffn_norm._fwd(x))
        return ops.add(x, made, made, device=self.device)

    def backward(self, grad_output: Any, aux_loss_alpha: float = 0.0) -> Tensor:
        """The gradient of x; with `aux_loss_alpha`, that of `aux_loss(aux_loss_alpha)` is in it."""
        grad = floats(grad_output, "TransformerBlock.backward", "grad_output", self.config.hidden_dim)
        return Tensor._wrap(self._bwd(grad, aux_loss_alpha))

    def _bwd(self, grad: F32, alpha: float) -> F32:
        inner = self.ffn_norm._bwd(self.moe._bwd(grad, alpha))
        grad = ops.add(grad, inner, inner, device=self.device)
        inner = self.attn_norm._bwd(self.attention._bwd(grad))
        return ops.add(grad, inner, inner, device=self.device)

    def parameters(self) -> list[Tensor]:
        """Those of the norms, the attention and the experts, in the order of use."""
        first = self.attn_norm.parameters() + self.attention.parameters()
        return first + self.ffn_norm.parameters() + self.moe.parameters()

    def aux_loss(self, alpha: float = 0.01) -> float:
        """The load-balancing loss of the last forward."""
        return self.moe.aux_loss(alpha)


class MoETransformer(Layer):
    """Token numbers (batch, seq) -> logits (batch, seq, vocab_size). The head is not tied to the embedding.

    Matrices start as N(0, 0.02), norms as 1; the same seed gives the same weights.
    """

    def __init__(self, config: Config, *, seed: Seed = None, device: str = "auto") -> None:
        sizes, rng = Config.sizes_of(config, "MoETransformer"), generator(seed)
        self.config, self.device = config, check_device(device, "MoETransformer")
        tables = RopeTables(sizes)
        self.embedding = Embedding(config.vocab_size, config.hidden_dim, seed=rng, device=device)
        self.blocks = [TransformerBlock(config, seed=rng, device=device, tables=tables) for _ in range(config.n_layers)]
        self.final_norm = RMSNorm(config.hidden_dim, config.rms_eps, device=device)
        self.lm_head = Linear(config.hidden_dim, config.vocab_size, seed=rng, device=device)

    @classmethod
    def from_config(cls, config: Config, *, seed: Seed = None, device: str = "auto") -> MoETransformer:
        """A model of these sizes."""
        return cls(config, seed=seed, device=device)

    @classmethod
    def tiny(cls, *, seed: Seed = None, device: str = "auto") -> MoETransformer:
        """A model of `Config.tiny()`."""
        return cls(Config.tiny(), seed=seed, device=device)

    @classmethod
    def from_folder(cls, folder: str | PathLike[str], *, device: str = "auto") -> MoETransformer:
        """The model of a Mixtral's folder, as `ironhorse convert` and `transformers` write it, of a checkpoint, or of a
        run's newest one."""
        sizes, tensors = read_hf_moe(Path(folder))
        return cls(Config.from_sizes(sizes), seed=0, device=device).load_tensors(tensors)

    def forward(self, x: Any) -> Tensor:
        """x: token numbers (batch, seq)."""
        ids = token_ids(x, "MoETransformer", "x", self.config.vocab_size)
        if ids.ndim != 2:
            raise InvalidValueError(f"MoETransformer: `x` is {list(ids.shape)}, expected [batch, seq]")
        return Tensor._wrap(self._fwd(ids))

    def forward_ids(self, token_ids: Sequence[int], batch: int = 1, seq_len: int | None = None) -> Tensor:
        """Tokens of `batch` sequences, one after the other; seq_len is their number over batch unless given."""
        ids = as_array(token_ids, "forward_ids", "token_ids")
        check_sizes("forward_ids", batch=batch)
        if seq_len is None:
            seq_len = ids.size // batch
        else:
            check_sizes("forward_ids", seq_len=seq_len)
        if seq_len < 1 or ids.size != batch * seq_len:
            found = f"{ids.size} token ids, batch {batch} and seq_len {seq_len}"
            raise InvalidValueError(f"forward_ids: {found}, expected batch · seq_len ids, at least one")
        return self.forward(ids.reshape(batch, seq_len))

    def _fwd(self, ids: I32, caches: list[KVCache] | None = None) -> F32:
        first = caches[0].length if caches else 0
        if first + ids.shape[1] > self.config.max_seq_len:
            found, most = first + ids.shape[1], self.config.max_seq_len
            raise InvalidValueError(f"MoETransformer: {found} positions, and max_seq_len is {most}")
        x = self.embedding._fwd(ids)
        for i, block in enumerate(self.blocks):
            try:
                x = block._fwd(x, caches[i] if caches else None)
            except InvalidValueError as error:
                raise InvalidValueError(f"model.layers.{i}: {error}") from None
        if caches:  # only the last position is asked for its successor
            x = x[:, -1:]
        return self.lm_head._fwd(self.final_norm._fwd(x))

    def backward(self, grad_output: Any, aux_loss_alpha: float = 0.0) -> Tensor:
        """Of the gradient of the logits: the gradients of all parameters; returns that of the embedded tokens.

        With `aux_loss_alpha`, the gradient of `total_aux_loss(aux_loss_alpha)` is in all of them.
        """
        V = self.config.vocab_size
        grad = self.final_norm._bwd(self.lm_head._bwd(floats(grad_output, "MoETransformer.backward", "grad_output", V)))
        for block in reversed(self.blocks):
            grad = block._bwd(grad, aux_loss_alpha)
        self.embedding._bwd(grad)
        return Tensor._wrap(grad)

    def parameters(self) -> list[Tensor]:
        """All parameters, in the order of use."""
        inner = [parameter for block in self.blocks for parameter in block.parameters()]
        return self.embedding.parameters() + inner + self.final_norm.parameters() + self.lm_head.parameters()

    def named_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """All parameters under the names of Hugging Face's Mixtral, which all files of ironhorse use."""
        yield "model.embed_tokens.weight", self.embedding.weight
        for number, block in enumerate(self.blocks):
            for name, parameter in _named(block):
                yield f"model.layers.{number}.{name}.weight", parameter
        yield "model.norm.weight", self.final_norm.weight
        yield "lm_head.weight", self.lm_head.weight

    def load_tensors(self, tensors: Mapping[str, Any]) -> MoETransformer:
        """Takes the values of all parameters by the names of `named_parameters`. Returns the model."""
        found = {name: parameter for name, parameter in self.named_parameters()}
        missing, strange = found.keys() - tensors.keys(), tensors.keys() - found.keys()
        if missing or strange:
            first = f"{min(missing)} is missing" if missing else f"{min(strange)} is not a parameter of this model"
            raise InvalidValueError(f"load_tensors: {first}")
        for name, parameter in found.items():
            value = as_array(tensors[name], "load_tensors", name)
            if value.dtype.kind in "OSUcMm":
                raise InvalidValueError(f"load_tensors: `{name}` is of type {value.dtype}, expected numbers")
            if value.shape != parameter.shape:
                shapes = f"is {list(value.shape)}, expected {list(parameter.shape)}"
                raise InvalidValueError(f"load_tensors: `{name}` {shapes}")
        for name, parameter in found.items():
            parameter._data[...] = np.asarray(tensors[name])
        return self

    generate, generate_greedy = generation.generate, generation.generate_greedy
    generate_sample = generation.generate_sample
    generate_top_k, generate_top_p = generation.generate_top_k, generation.generate_top_p

    def total_aux_loss(self, alpha: float = 0.01) -> float:
        """The load-balancing losses of all blocks, of the last forward."""
        return sum(block.aux_loss(alpha) for block in self.blocks)


def _named(block: TransformerBlock) -> Iterator[tuple[str, Tensor]]:
    """The parameters of a block by Mixtral's names."""
    attention, moe = block.attention, block.moe
    yield "input_layernorm", block.attn_norm.weight
    for name, linear in (("q", attention.w_q), ("k", attention.w_k), ("v", attention.w_v), ("o", attention.w_o)):
        yield f"self_attn.{name}_proj", linear.weight
    yield "post_attention_layernorm", block.ffn_norm.weight
    yield "block_sparse_moe.gate", moe.router.gate.weight
    for e, expert in enumerate(moe.experts):
        for name, linear in (("w1", expert.gate), ("w2", expert.down), ("w3", expert.up)):
            yield f"block_sparse_moe.experts.{e}.{name}", linear.weight
