"""Descriptions of models: a GPT-2, or a decoder of Llama's design, dense or a mixture of experts. Needs no torch.

What a description may say, its defaults, its other spellings and its limits are in the native module, which the command
uses as well; the classes here hold what it has read.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

from . import _native
from .errors import ConfigError

Read = TypeVar("Read", "GPT2Config", "MoEConfig")


class _Described:
    """What both classes share."""

    @property
    def kind(self) -> str:
        """`gpt2`, `moe`, `llama`, `mistral`, `qwen2`, `qwen3`, `qwen3_moe` or `gemma3_text`."""
        raise NotImplementedError

    def to_dict(self) -> dict[str, Any]:
        """The sizes as an answer key stores them."""
        return asdict(self)  # type: ignore[call-overload, no-any-return]

    def json(self) -> str:
        """The sizes as the native module reads them. JSON has no NaN and no types of numpy: those become strings."""
        table: dict[str, Any] = asdict(self)  # type: ignore[call-overload]
        return json.dumps({name: value if _is_json(value) else repr(value) for name, value in table.items()})

    @property
    def name(self) -> str:
        """The name of these sizes, such as `d12` or `moe-tiny`, else `custom`."""
        return next((name for name, config in NAMED.items() if config == self), "custom")


def _is_json(value: object) -> bool:
    return isinstance(value, (bool, int, str)) or (isinstance(value, float) and math.isfinite(value))


@dataclass(frozen=True)
class GPT2Config(_Described):
    """Sizes of a GPT-2. B and T belong to a batch, not to the model, and are not here."""

    max_seq_len: int  # rows of wpe, the longest sequence
    vocab_size: int  # V, without padding
    n_layer: int  # L
    n_head: int  # NH
    n_embd: int  # C
    act: str = "gelu"  # the activation of the MLP

    @property
    def kind(self) -> str:
        """`gpt2`."""
        return "gpt2"

    @property
    def padded_vocab_size(self) -> int:
        """Vp: V rounded up to a multiple of 128; the .bin files store wte with Vp rows."""
        return (self.vocab_size + 127) // 128 * 128

    @property
    def head_size(self) -> int:
        """HD = C / NH."""
        return self.n_embd // self.n_head

    def validate(self) -> GPT2Config:
        """Raises ConfigError unless a model of these sizes can exist; returns self."""
        _native.model_read(self.json(), "json", self.kind)
        return self

    def to_dict(self) -> dict[str, Any]:
        """The sizes as an answer key stores them, padded vocabulary included."""
        padded = {"padded_vocab_size": self.padded_vocab_size}
        table = {"max_seq_len": self.max_seq_len, "vocab_size": self.vocab_size} | padded | asdict(self)
        if self.act == "gelu":  # what every GPT-2 was before there was a choice; files leave it out
            del table["act"]
        return table

    @staticmethod
    def parse(text: str) -> GPT2Config:
        """A name (d12, gpt2), a .toml or .json file, or `n_layer=3,n_head=5,n_embd=80,...`."""
        return _only(GPT2Config, _parse(text, "gpt2"), text)


@dataclass(frozen=True)
class MoEConfig(_Described):
    """Sizes of a decoder of Llama's design. B and T belong to a batch, not to the model, and are not here."""

    hidden: int  # C
    n_layer: int  # L
    n_head: int  # NH
    n_kv_head: int  # NKV, a divisor of NH
    head_dim: int  # HD, even; NH * HD need not be C
    n_experts: int  # E; 0 is the dense Llama
    top_k: int  # K, experts of a token; 0 without experts
    ffn: int  # F, width inside an expert or the MLP
    vocab_size: int  # V
    max_seq_len: int  # the longest sequence
    rope_base: float = 10000.0
    rope_alpha: float = 1.0  # NTK: stretches the wavelengths for longer contexts; 1 changes nothing
    rms_eps: float = 1e-5
    aux_alpha: float = 0.01  # weight of each layer's load-balancing loss
    family: str = "llama"  # llama (with experts Mixtral), mistral, qwen2, qwen3 or gemma3_text
    tied: bool = False  # whether the head is the token table
    rope_type: str = "default"  # how RoPE was changed for a longer context: default, linear or llama3
    rope_factor: float = 1.0  # how much longer the context became
    rope_low: float = 1.0  # of llama3: turns in the original context below which a pair is slowed down by all of it
    rope_high: float = 4.0  # and above which a pair keeps its speed
    rope_original: int = 8192  # of llama3: the context before the change
    window: int = 0  # how many keys a query reaches at most, its own included; 0 reaches all
    window_from: int = 0  # the first layer with the window
    window_every: int = 0  # of Gemma 3: every n-th layer reaches all keys, the others have the window
    rope_local: float = 10000.0  # of Gemma 3: RoPE's base in layers with the window
    query_scalar: int = 0  # of Gemma 3: scores are divided by the root of this; 0 is head_dim

    @property
    def rope_theta(self) -> float:
        """base * alpha^(HD/(HD-2)): the slowest pair of a head turns alpha times slower."""
        if self.head_dim == 2:  # the only pair turns by one radian a position, whatever the base
            return self.rope_base
        return float(self.rope_base * self.rope_alpha ** (self.head_dim / (self.head_dim - 2)))

    @property
    def kind(self) -> str:
        """`moe`, `llama`, `mistral`, `qwen2`, `qwen3`, `qwen3_moe` or `gemma3_text`."""
        if not self.n_experts:
            return self.family
        return "moe" if self.family == "llama" else f"{self.family}_moe"

    @property
    def has_qkv_bias(self) -> bool:
        """Whether q, k and v have biases."""
        return self.family == "qwen2"

    @property
    def has_qk_norm(self) -> bool:
        """Whether each head of q and k is normalised."""
        return self.family in ("qwen3", "gemma3_text")

    @property
    def is_gemma3(self) -> bool:
        """Whether norms multiply by 1 + weight and follow attention and MLP too, embeddings are scaled, and GELU is the
        gate."""
        return self.family == "gemma3_text"

    @property
    def query_scale(self) -> float:
        """What normalised queries are multiplied by, because attention divides scores by √HD."""
        return math.sqrt(self.head_dim / self.query_scalar) if self.query_scalar else 1.0

    def window_of(self, layer: int) -> int | None:
        """How many keys a query of this layer reaches at most; None reaches all."""
        reaches_all = self.window_every and (layer + 1) % self.window_every == 0
        return self.window if self.window and layer >= self.window_from and not reaches_all else None

    def to_dict(self) -> dict[str, Any]:
        """The sizes as an answer key stores them: without what models did not always have, where it is the default."""
        rope = ("rope_type", "rope_factor", "rope_low", "rope_high", "rope_original")
        windows = ("window", "window_from", "window_every")
        later = ("family", "tied", *rope, *windows, "rope_local", "query_scalar")
        defaults = {field.name: field.default for field in fields(self)}
        return {name: value for name, value in asdict(self).items() if name not in later or value != defaults[name]}

    def validate(self) -> MoEConfig:
        """Raises ConfigError unless a model of these sizes can exist; returns self."""
        _native.model_read(self.json(), "json", self.kind)
        return self

    def computes_as(self, other: MoEConfig) -> bool:
        """Whether both have the same parameters and compute the same logits from them."""

        def plain(config: MoEConfig) -> MoEConfig:
            # a window over the whole context masks nothing, and one that no layer has is of no account
            masks = config.window < config.max_seq_len and config.window_every != 1
            window, window_from = (config.window, config.window_from) if masks else (0, 0)
            return replace(
                config, rope_base=1.0, rope_alpha=1.0, aux_alpha=0.0, window=window, window_from=window_from,
                window_every=min(config.window_every, config.n_layer + 1),
                rope_local=1.0 if config.window_every == 1 else config.rope_local,
                query_scalar=config.query_scalar or config.head_dim,
            )  # fmt: skip

        same_angles = math.isclose(self.rope_theta, other.rope_theta, rel_tol=1e-12)
        return plain(self) == plain(other) and same_angles

    @staticmethod
    def parse(text: str) -> MoEConfig:
        """A name (moe-tiny), a .toml or .json file, or `hidden=64,n_layer=2,n_head=4,ffn=256,...`."""
        return _only(MoEConfig, _parse(text, "moe"), text)


ModelConfig: TypeAlias = GPT2Config | MoEConfig


def made(kind: str, sizes: str, any_padding: bool = False) -> ModelConfig:
    """The class of what the native module has read: its kind, and its sizes as JSON."""
    table = json.loads(sizes)
    if kind != "gpt2":
        return MoEConfig(**table)
    padded = table.pop("padded_vocab_size")
    config = GPT2Config(**table)
    if padded != config.padded_vocab_size and not any_padding:
        raise ConfigError(
            f"padded_vocab_size is {padded}, expected {config.padded_vocab_size}, "
            f"the next multiple of 128 of vocab_size {config.vocab_size}"
        )
    return config


NAMED: dict[str, ModelConfig] = {names[0]: made(kind, sizes) for names, kind, sizes in _native.model_names()}


def aliases(kind: str) -> dict[str, tuple[str, ...]]:
    """The keys of a description of this kind, each with all spellings of it, its own first."""
    return {names[0]: tuple(names) for names in _native.model_keys(kind)}


def _only(expected: type[Read], config: ModelConfig, text: str) -> Read:
    if not isinstance(config, expected):
        raise ConfigError(f"{text} is a {config.kind}, expected a {expected.__name__}")
    return config


def _located(where: str, read: Callable[[], tuple[str, str]]) -> ModelConfig:
    """What `read` gives; an error names where it comes from."""
    try:
        return made(*read())
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None


def _parse(text: str, kind: str | None) -> ModelConfig:
    text = text.strip()
    path = Path(text)
    notation = path.suffix.lower().removeprefix(".")
    if notation not in ("toml", "json") or ("=" in text and not os.path.exists(path)):
        return made(*_native.model_read(text, "line", kind))
    try:
        content = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError:
        raise ConfigError(f"{text}: not a text file") from None
    except OSError as error:
        raise ConfigError(f"{text}: cannot read it ({error.strerror})") from None
    if notation == "json" and '"model_type"' in content:  # how every Hugging Face config.json says that it is one
        return made(*_native.model_read_hf(content, text))
    return _located(text, lambda: _native.model_read(content, notation, kind))


def parse_config(text: str) -> ModelConfig:
    """A name (d12, moe-tiny), a .toml or .json file, or sizes; the kind is said or follows from the keys."""
    return _parse(text, None)


def from_dict(table: Mapping[str, Any], kind: str, where: str) -> ModelConfig:
    """Sizes as a key or a checkpoint holds them; `kind` is that of the model, such as gpt2 or llama."""
    return _located(where, lambda: _native.model_read(json.dumps(table, default=repr), "json", kind))


def from_hf_dict(table: Mapping[str, Any], where: str) -> ModelConfig:
    """A Hugging Face config.json. A key that is neither obeyed nor known to change nothing is an error."""
    return made(*_native.model_read_hf(json.dumps(table, default=str), where))


def to_hf_config(config: ModelConfig, dtype: str = "F32") -> dict[str, Any]:
    """The config.json of this model, as `ironhorse convert` writes it: `transformers` computes the same from it.

    RoPE's alpha goes into `rope_theta`.
    """
    table: dict[str, Any] = json.loads(_native.model_write_hf(config.kind, config.json(), dtype))
    return table
