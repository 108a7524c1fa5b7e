"""Continuing a prompt: ways to choose the next token, and the loop. Keys and values of earlier positions are kept."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from .. import ops
from ..errors import InvalidValueError
from .attention import KVCache
from .checks import check_count, check_real
from .config import Config
from .layers import token_ids
from .tensor import generator

Logits = NDArray[np.float32]


class Predicts(Protocol):
    """A model that can continue a prompt."""

    config: Config

    def _fwd(self, ids: NDArray[np.int32], caches: list[KVCache] | None = None) -> Logits: ...


class SamplingStrategy(ABC):
    """How the next token is chosen. The same seed chooses the same, run after run."""

    @abstractmethod
    def pick_token(self, logits: Logits) -> int:
        """The number of a token, of its logits (vocab_size)."""


class GreedySampling(SamplingStrategy):
    """The likeliest; the lowest number among equals."""

    def pick_token(self, logits: Logits) -> int:
        """See the class."""
        if not (logits < np.inf).all():  # also if there is a NaN; argmax would take it
            at = int((logits < np.inf).argmin())
            found = f"the logit of token {at} is {logits[at]}"
            raise InvalidValueError(f"greedy: {found}, expected a finite number or -inf")
        return int(ops.argmax(logits[None])[0])


class _Drawn(SamplingStrategy):
    def __init__(self, temperature: float, seed: int) -> None:
        self.temperature = check_real(type(self).__name__, "temperature", temperature)
        self._rng = generator(seed)

    def _seed(self) -> NDArray[np.uint64]:
        return self._rng.integers(0, 2**64, size=1, dtype=np.uint64)


class TemperatureSampling(_Drawn):
    """Drawn from softmax(logits / temperature)."""

    def __init__(self, temperature: float = 1.0, seed: int = 42) -> None:
        super().__init__(temperature, seed)

    def pick_token(self, logits: Logits) -> int:
        """See the class."""
        return int(ops.sample(logits[None], seeds=self._seed(), temperature=self.temperature)[0])


class TopKSampling(_Drawn):
    """Drawn from the k likeliest, or from all if there are fewer."""

    def __init__(self, k: int = 50, temperature: float = 1.0, seed: int = 42) -> None:
        super().__init__(temperature, seed)
        self.k = check_count("TopKSampling", "k", k)

    def pick_token(self, logits: Logits) -> int:
        """See the class."""
        k = min(self.k, logits.size)
        return int(ops.topk_sample(logits[None], seeds=self._seed(), k=k, temperature=self.temperature)[0])


class TopPSampling(_Drawn):
    """Drawn from the fewest likeliest that together have the share top_p."""

    def __init__(self, top_p: float = 0.9, temperature: float = 1.0, seed: int = 42) -> None:
        super().__init__(temperature, seed)
        self.top_p = check_real("TopPSampling", "top_p", top_p)

    def pick_token(self, logits: Logits) -> int:
        """See the class."""
        return int(ops.topp_sample(logits[None], seeds=self._seed(), p=self.top_p, temperature=self.temperature)[0])


# These are functions of a model and, in MoETransformer, its methods.


def generate(
    model: Predicts, prompt: Sequence[int], max_len: int, strategy: SamplingStrategy | None = None
) -> list[int]:
    """The prompt and what the model makes of it, up to `max_len` tokens in all; greedy unless a strategy is given."""
    config = model.config
    strategy = GreedySampling() if strategy is None else strategy
    ids = token_ids(prompt, "generate", "prompt", config.vocab_size)
    if ids.ndim != 1:
        raise InvalidValueError(f"generate: `prompt` is {list(ids.shape)}, expected a list of token ids")
    check_count("generate", "max_len", max_len)
    if not callable(getattr(strategy, "pick_token", None)):
        raise InvalidValueError(f"generate: strategy is of type {type(strategy).__name__}, expected SamplingStrategy")
    if len(ids) > config.max_seq_len:
        found = f"`prompt` has {len(ids)} tokens"
        raise InvalidValueError(f"generate: {found}, and max_seq_len is {config.max_seq_len}; shorten it")
    if max_len > config.max_seq_len:
        raise InvalidValueError(f"generate: max_len is {max_len}, and max_seq_len is {config.max_seq_len}")
    tokens: list[int] = ids.tolist()
    if len(tokens) >= max_len:
        return tokens
    width = config.n_kv_heads * config.head_dim
    caches = [KVCache(1, max_len, width) for _ in range(config.n_layers)]
    fresh = ids[None]
    while len(tokens) < max_len:
        tokens.append(strategy.pick_token(model._fwd(fresh, caches)[0, -1]))
        fresh = np.array([[tokens[-1]]], np.int32)
    return tokens


def generate_greedy(model: Predicts, prompt: Sequence[int], max_len: int) -> list[int]:
    """Always the likeliest token."""
    return generate(model, prompt, max_len)


def generate_sample(
    model: Predicts, prompt: Sequence[int], max_len: int, temperature: float = 1.0, seed: int = 42
) -> list[int]:
    """Drawn from all tokens."""
    return generate(model, prompt, max_len, TemperatureSampling(temperature, seed))


def generate_top_k(
    model: Predicts, prompt: Sequence[int], max_len: int, k: int = 50, temperature: float = 1.0, seed: int = 42
) -> list[int]:
    """Drawn from the k likeliest tokens."""
    return generate(model, prompt, max_len, TopKSampling(k, temperature, seed))


def generate_top_p(
    model: Predicts,
    prompt: Sequence[int],
    max_len: int,
    top_p: float = 0.9,
    temperature: float = 1.0,
    seed: int = 42,
) -> list[int]:
    """Drawn from the fewest likeliest tokens that together have the share top_p."""
    return generate(model, prompt, max_len, TopPSampling(top_p, temperature, seed))
