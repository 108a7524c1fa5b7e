"""The five numbers that define a GPT-2, and every way a user may write them down. Needs no torch."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from .errors import ConfigError

INT32_MAX = 2**31 - 1

ALIASES: dict[str, tuple[str, ...]] = {
    "max_seq_len": ("max_seq_len", "block_size", "n_positions", "n_ctx", "context", "maxT"),
    "vocab_size": ("vocab_size", "vocabulary", "vocab", "V"),
    "n_layer": ("n_layer", "layers", "depth", "L"),
    "n_head": ("n_head", "heads", "NH"),
    "n_embd": ("n_embd", "width", "d_model", "C"),
}
# May be said as well; the padding is always the same, so it must be V rounded up to a multiple of 128.
_PADDED = ("padded_vocab_size", "Vp")
_KIND = "kind"
_FIELD_OF = {alias: field for field, aliases in ALIASES.items() for alias in aliases}

# What GPT-2 means when a description leaves these two out.
_DEFAULTS = {"max_seq_len": 1024, "vocab_size": 50257}

# Keys of a Hugging Face config.json that change the mathematics, with the only values ironhorse computes.
_HF_REQUIRED: dict[str, tuple[Any, ...]] = {
    "model_type": ("gpt2",),
    "activation_function": ("gelu_new", "gelu_pytorch_tanh"),
    "layer_norm_epsilon": (1e-5,),
    "tie_word_embeddings": (True,),
    "scale_attn_weights": (True,),
    "scale_attn_by_inverse_layer_idx": (False,),
    "add_cross_attention": (False,),
}


@dataclass(frozen=True)
class GPT2Config:
    """Sizes of a GPT-2. B and T belong to a batch, not to the model, and are not here."""

    max_seq_len: int  # rows of wpe, the longest sequence
    vocab_size: int  # V, without padding
    n_layer: int  # L
    n_head: int  # NH
    n_embd: int  # C

    @property
    def padded_vocab_size(self) -> int:
        """Vp: V rounded up to a multiple of 128; the .bin files store wte with Vp rows."""
        return (self.vocab_size + 127) // 128 * 128

    @property
    def head_size(self) -> int:
        """HD = C / NH."""
        return self.n_embd // self.n_head

    @property
    def name(self) -> str:
        """`d12` ... `d48` when these are the sizes of a published GPT-2, else `custom`."""
        return next((name for name, config in NAMED.items() if config == self), "custom")

    def validate(self) -> GPT2Config:
        """Raises ConfigError unless a model of these sizes can exist; returns self."""
        for field, value in asdict(self).items():
            if isinstance(value, bool) or not isinstance(value, int):
                raise ConfigError(f"{field} is {value!r}; it must be a whole number")
            if not 1 <= value <= INT32_MAX - 127:
                raise ConfigError(f"{field} is {value}; it must be at least 1 and fit in 32 bits")
        if self.n_embd % self.n_head:
            raise ConfigError(
                f"n_head {self.n_head} does not divide n_embd {self.n_embd}; "
                f"choose a width that is a multiple of the number of heads"
            )
        return self

    def to_dict(self) -> dict[str, int]:
        """The sizes as the answer key stores them, padded vocabulary included."""
        return {
            "max_seq_len": self.max_seq_len,
            "vocab_size": self.vocab_size,
            "padded_vocab_size": self.padded_vocab_size,
            "n_layer": self.n_layer,
            "n_head": self.n_head,
            "n_embd": self.n_embd,
        }

    @staticmethod
    def parse(text: str) -> GPT2Config:
        """A size name (d12), a .toml or .json file, or `n_layer=3,n_head=5,n_embd=80,...`."""
        text = text.strip()
        if text in NAMED:
            return NAMED[text]
        if "=" in text and not os.path.exists(text):
            return from_pairs(_inline_pairs(text), where=f"'{text}'")
        suffix = Path(text).suffix.lower()
        if suffix == ".toml":
            return from_pairs(load_toml(text).items(), where=text)
        if suffix == ".json":
            return _from_json(load_json(text), where=text)
        raise ConfigError(
            f"unknown model '{text}'; give {', '.join(NAMED)}, a .toml or .json file, "
            f"or sizes such as n_layer=3,n_head=5,n_embd=80"
        )


NAMED: dict[str, GPT2Config] = {
    "d12": GPT2Config(1024, 50257, 12, 12, 768),
    "d24": GPT2Config(1024, 50257, 24, 16, 1024),
    "d36": GPT2Config(1024, 50257, 36, 20, 1280),
    "d48": GPT2Config(1024, 50257, 48, 25, 1600),
}


def from_hf_dict(table: Mapping[str, Any], where: str) -> GPT2Config:
    """A Hugging Face config.json. Keys that do not touch the mathematics (dropout, token ids) are ignored."""
    for key, allowed in _HF_REQUIRED.items():
        if key in table and table[key] not in allowed:
            raise ConfigError(f"{where}: {key} is {table[key]!r}; ironhorse computes only {allowed[0]!r}")
    pairs = [(key, value) for key, value in table.items() if key in _FIELD_OF]
    try:
        config = from_pairs(pairs, where, twice=True)
    except ConfigError as error:
        theirs = "n_positions" if "n_positions" in table else "n_ctx"
        raise ConfigError(str(error).replace(f"{where}: max_seq_len is", f"{where}: {theirs} is")) from None
    inner = table.get("n_inner")
    if inner not in (None, 4 * config.n_embd):
        raise ConfigError(f"{where}: n_inner is {inner!r}; ironhorse computes only 4*n_embd = {4 * config.n_embd}")
    return config


def from_pairs(pairs: Iterable[tuple[str, Any]], where: str, twice: bool = False) -> GPT2Config:
    """Sizes under any of their names, as crates/train/src/model/config_text.rs reads them.

    `twice` allows a size under two names with one value, as Hugging Face writes n_positions and n_ctx.
    """
    found: dict[str, tuple[str, Any]] = {}
    for key, value in pairs:
        if key == _KIND:
            if value != "gpt2":
                raise ConfigError(f"{where}: kind is {value!r}; the only kind is gpt2")
            continue
        field = "padded_vocab_size" if key in _PADDED else _FIELD_OF.get(key)
        if field is None:
            known = ", ".join((*ALIASES, _PADDED[0], _KIND))
            raise ConfigError(f"{where}: unknown key '{key}'; known keys: {known} and their aliases")
        if field in found and not (twice and found[field][1] == value):
            earlier, other = found[field]
            raise ConfigError(f"{where}: '{earlier}' is {other} and '{key}' is {value}; both mean {field}, keep one")
        found[field] = (key, value)
    _, padded = found.pop("padded_vocab_size", (None, None))
    sizes = _DEFAULTS | {field: value for field, (_, value) in found.items()}
    missing = [field for field in ALIASES if field not in sizes]
    if missing:
        raise ConfigError(f"{where}: {', '.join(missing)} not given; add e.g. {missing[0]}=...")
    try:
        config = GPT2Config(**sizes).validate()
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None
    if padded is not None and (type(padded) is not int or padded != config.padded_vocab_size):
        raise ConfigError(
            f"{where}: padded_vocab_size is {padded!r}; for vocab_size {config.vocab_size} it must be "
            f"{config.padded_vocab_size}, the next multiple of 128"
        )
    return config


def _from_json(table: Mapping[str, Any], where: str) -> GPT2Config:
    """`model_type` is how every Hugging Face config.json says that it is one."""
    return from_hf_dict(table, where) if "model_type" in table else from_pairs(table.items(), where)


def _inline_pairs(text: str) -> Iterable[tuple[str, Any]]:
    for item in filter(None, map(str.strip, text.split(","))):  # a comma at the end is no mistake
        key, equals, value = (part.strip() for part in item.partition("="))
        if not equals:
            raise ConfigError(f"'{text}': '{item}' is not of the form key=number")
        if key == _KIND:
            yield key, value
            continue
        if not re.fullmatch(r"[+-]?[0-9]{1,20}", value):  # int() would also take 1_000 and digits of other scripts
            raise ConfigError(f"'{text}': {key} is '{value}'; it must be a whole number")
        yield key, int(value)


def load_json(path: str) -> Mapping[str, Any]:
    try:
        table = json.loads(_read_text(path))
    except json.JSONDecodeError as error:
        raise ConfigError(f"{path}: not JSON (line {error.lineno}: {error.msg})") from None
    if not isinstance(table, dict):
        raise ConfigError(f"{path}: expected a JSON object with the model's sizes")
    return table


def load_toml(path: str) -> Mapping[str, Any]:
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        try:
            import tomli as tomllib
        except ImportError:
            raise ConfigError(f"{path}: reading TOML needs Python 3.11 or `pip install tomli`") from None
    text = _read_text(path)
    try:
        table: Mapping[str, Any] = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path}: not TOML ({error})") from None
    return table


def _read_text(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8-sig")
    except UnicodeDecodeError:
        raise ConfigError(f"{path}: not a text file") from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot read it ({error.strerror})") from None
