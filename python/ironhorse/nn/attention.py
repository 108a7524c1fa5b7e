"""Attention with rotary positions, and fewer heads of keys and values than of queries."""

from __future__ import annotations

from typing import Any

import numpy as np

from .. import _native
from ..config import MoEConfig
from ..errors import InvalidValueError
from .config import Config
from .layers import F32, Layer, Linear, check_device, floats, kept_floats
from .tensor import Seed, Tensor, generator


class RopeTables:
    """cos and sin (positions, head_dim / 2) of the angles, taken in f64, for as many positions as were asked for."""

    def __init__(self, sizes: MoEConfig) -> None:
        self.most = sizes.max_seq_len
        pairs = np.arange(0, sizes.head_dim, 2, dtype=np.float64)
        self.speed = sizes.rope_theta ** (-pairs / sizes.head_dim)
        self.cos: F32 = np.empty((0, len(pairs)), np.float32)
        self.sin: F32 = self.cos

    def upto(self, positions: int) -> tuple[F32, F32]:
        """Tables of at least so many positions, which the context must have."""
        if positions > self.most:
            raise InvalidValueError(f"attention: {positions} positions, and max_seq_len is {self.most}")
        if positions > len(self.cos):
            rows = min(self.most, max(positions, 2 * len(self.cos), 64))
            angles = np.arange(rows, dtype=np.float64)[:, None] * self.speed
            self.cos, self.sin = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
        return self.cos, self.sin


class KVCache:
    """The turned keys and the values of the positions so far, of one layer: (batch, positions, kv heads · head_dim)."""

    def __init__(self, batch: int, positions: int, width: int) -> None:
        self.keys = np.empty((batch, positions, width), np.float32)
        self.values = np.empty_like(self.keys)
        self.length = 0

    def extend(self, k: F32, v: F32) -> tuple[F32, F32]:
        """Adds positions; returns all."""
        end = self.length + k.shape[1]
        if end > self.keys.shape[1]:
            raise InvalidValueError(f"attention: {end} positions, and the cache has {self.keys.shape[1]}")
        self.keys[:, self.length : end], self.values[:, self.length : end] = k, v
        self.length = end
        return self.keys[:, :end], self.values[:, :end]


class MQAttention(Layer):
    """Causal attention: (batch, seq, hidden_dim) -> (batch, seq, hidden_dim).

    Query head h reads the head h / (n_heads / n_kv_heads) of keys and values. The pair (i, i + head_dim / 2) of a head
    turns by position · θ^(-2i / head_dim), θ = rope_base · rope_alpha^(head_dim / (head_dim - 2)).
    """

    def __init__(
        self, config: Config, *, seed: Seed = None, device: str = "auto", tables: RopeTables | None = None
    ) -> None:
        sizes, rng = Config.sizes_of(config, "MQAttention"), generator(seed)
        self.config, self.hidden_dim = config, config.hidden_dim
        self.n_heads, self.n_kv_heads, self.head_dim = config.n_heads, config.n_kv_heads, config.head_dim
        self.scale, self.device = config.head_dim**-0.5, check_device(device, "MQAttention")
        C, q, kv = config.hidden_dim, config.n_heads * config.head_dim, config.n_kv_heads * config.head_dim
        self.w_q = Linear(C, q, seed=rng, device=device)
        self.w_k = Linear(C, kv, seed=rng, device=device)
        self.w_v = Linear(C, kv, seed=rng, device=device)
        self.w_o = Linear(q, C, seed=rng, device=device)
        self._tables = RopeTables(sizes) if tables is None else tables
        self._last: tuple[F32, F32, F32, F32, F32] | None = None  # turned q and k, v, out, lse

    def forward(self, x: Any) -> Tensor:
        """(batch, seq, hidden_dim) -> the same."""
        x = kept_floats(x, "MQAttention", "x", self.hidden_dim)
        if x.ndim != 3:
            raise InvalidValueError(f"MQAttention: `x` is {list(x.shape)}, expected [batch, seq, {self.hidden_dim}]")
        return Tensor._wrap(self._fwd(x))

    def _fwd(self, x: F32, cache: KVCache | None = None) -> F32:
        first, device = (0 if cache is None else cache.length), self.device
        cos, sin = self._tables.upto(first + x.shape[1])
        q = _native.nn_rope(self.w_q._fwd(x), cos, sin, offset=first, device=device)
        k = _native.nn_rope(self.w_k._fwd(x), cos, sin, offset=first, device=device)
        v = self.w_v._fwd(x)
        if cache is not None:
            k, v = cache.extend(k, v)
        out, lse = _native.nn_attention(q, k, v, heads=self.n_heads, kv_heads=self.n_kv_heads, device=device)
        # Positions of a cache were not computed here, so there is no gradient to give them.
        self._last = (q, k, v, out, lse) if cache is None else None
        return self.w_o._fwd(out)

    def backward(self, grad_output: Any) -> Tensor:
        """The gradient of x."""
        return Tensor._wrap(self._bwd(floats(grad_output, "MQAttention.backward", "grad_output", self.hidden_dim)))

    def _bwd(self, grad: F32) -> F32:
        kept, device = self._kept(self._last), self.device
        heads, kv_heads = self.n_heads, self.n_kv_heads
        d_out = self.w_o._bwd(grad)
        d_q, d_k, d_v = _native.nn_attention_bwd(d_out, *kept, heads=heads, kv_heads=kv_heads, device=device)
        cos, sin = self._tables.upto(d_q.shape[1])
        d_x = self.w_q._bwd(_native.nn_rope(d_q, cos, sin, back=True, device=device))
        d_x = self.w_k._bwd(_native.nn_rope(d_k, cos, sin, back=True, device=device), d_x)
        return self.w_v._bwd(d_v, d_x)

    def parameters(self) -> list[Tensor]:
        """Those of the queries, keys, values and the output."""
        return [layer.weight for layer in (self.w_q, self.w_k, self.w_v, self.w_o)]
