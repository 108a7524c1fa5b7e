"""Any model: what files and the bridge need of one without knowing which it is. Needs no torch."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeAlias

from . import config as gpt2
from . import config_moe as moe
from . import params, params_moe
from .config import GPT2Config
from .config_moe import MoEConfig
from .errors import ConfigError

ModelConfig: TypeAlias = GPT2Config | MoEConfig

# Sizes that both kinds have; another spelling of one says nothing about the kind.
_SHARED = ("n_layer", "n_head", "vocab_size", "max_seq_len")
_ONLY_MOE = {
    alias for field, aliases in moe.ALIASES.items() if field not in _SHARED for alias in aliases
} - {alias for aliases in gpt2.ALIASES.values() for alias in aliases}  # fmt: skip
# Parameters with a row for each token: padded in memory and in a checkpoint's moments.
VOCAB_TABLES = ("wte.weight", "model.embed_tokens.weight", "lm_head.weight")


def kind_of(config: ModelConfig) -> str:
    """`gpt2`, `moe` or `llama`."""
    return config.kind if isinstance(config, MoEConfig) else "gpt2"


def param_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """The parameter table."""
    return params_moe.param_shapes(config) if isinstance(config, MoEConfig) else params.param_shapes(config)


def parse_config(text: str) -> ModelConfig:
    """A name (d12, moe-tiny), a .toml or .json file, or sizes; the kind is said or follows from the keys."""
    text = text.strip()
    return MoEConfig.parse(text) if text in moe.NAMED or _is_moe(_table(text)) else GPT2Config.parse(text)


def from_dict(table: Mapping[str, Any], kind: object, where: str) -> ModelConfig:
    """Sizes as a key or a checkpoint holds them; `kind` is gpt2, moe or llama."""
    if kind in ("moe", "llama"):
        return moe.from_pairs(table.items(), where)
    return gpt2.from_pairs(table.items(), where)


def from_hf_dict(table: Mapping[str, Any], where: str) -> ModelConfig:
    """A Hugging Face config.json."""
    kind = table.get("model_type")
    if kind in ("mixtral", "llama"):
        return moe.from_hf_dict(table, where)
    known = "gpt2, mixtral or llama"
    if "model_type" not in table and "n_embd" not in table:  # GPT-2's own size tells it as well
        raise ConfigError(f"{where}: model_type is missing; expected {known}")
    if "model_type" in table and kind != "gpt2":
        raise ConfigError(f"{where}: model_type is {kind!r}; expected {known}")
    return gpt2.from_hf_dict(table, where)


def _table(text: str) -> Mapping[str, Any]:
    """What describes the model, as far as its kind can be told from it."""
    if "=" in text and not os.path.exists(text):
        pairs = (item.partition("=") for item in text.split(","))
        return {key.strip(): value.strip() for key, _, value in pairs}
    suffix = Path(text).suffix.lower()
    return gpt2.load_toml(text) if suffix == ".toml" else gpt2.load_json(text) if suffix == ".json" else {}


def _is_moe(table: Mapping[str, Any]) -> bool:
    if "model_type" in table:
        return table["model_type"] in ("mixtral", "llama")
    return table["kind"] in ("moe", "llama") if "kind" in table else any(key in _ONLY_MOE for key in table)
