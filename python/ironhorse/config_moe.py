"""The sizes of a mixture-of-experts transformer, and of the dense Llama shape it is without experts. Needs no torch."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from .config import INT32_MAX, load_json, load_toml
from .errors import ConfigError

# Each field, with the other names under which it may be written down.
ALIASES: dict[str, tuple[str, ...]] = {
    "hidden": ("hidden", "hidden_dim", "hidden_size", "n_embd", "width", "d_model", "C"),
    "n_layer": ("n_layer", "n_layers", "layers", "depth", "L"),
    "n_head": ("n_head", "n_heads", "heads", "NH"),
    "n_kv_head": ("n_kv_head", "n_kv_heads", "kv_heads", "NKV"),
    "head_dim": ("head_dim", "HD"),
    "n_experts": ("n_experts", "experts", "E"),
    "top_k": ("top_k", "top_k_experts", "K"),
    "ffn": ("ffn", "ffn_dim", "intermediate_size", "F"),
    "vocab_size": ("vocab_size", "vocabulary", "vocab", "V"),
    "max_seq_len": ("max_seq_len", "block_size", "n_positions", "n_ctx", "context", "maxT"),
    "rope_base": ("rope_base", "rope_theta"),
    "rope_alpha": ("rope_alpha",),
    "rms_eps": ("rms_eps", "rms_norm_eps"),
    "aux_alpha": ("aux_alpha", "aux_loss_alpha"),
}
_FIELD_OF = {alias: field for field, aliases in ALIASES.items() for alias in aliases}
_FLOATS = ("rope_base", "rope_alpha", "rms_eps", "aux_alpha")
_KIND = "kind"

# What is meant when a description leaves these out. Without head_dim it is hidden / n_head; without n_experts none.
_DEFAULTS: dict[str, Any] = {
    "n_kv_head": 1,
    "n_experts": 0,
    "top_k": 0,
    "vocab_size": 32000,
    "max_seq_len": 32768,
    "rope_base": 10000.0,
    "rope_alpha": 1.0,
    "rms_eps": 1e-5,  # Mixtral's and Llama 2's
    "aux_alpha": 0.01,
}


@dataclass(frozen=True)
class MoEConfig:
    """Sizes and constants. B and T belong to a batch, not to the model, and are not here."""

    hidden: int  # C
    n_layer: int  # L
    n_head: int  # NH
    n_kv_head: int  # NKV, a divisor of NH
    head_dim: int  # HD, even; NH * HD need not be C
    n_experts: int  # E; 0 is the dense Llama shape
    top_k: int  # K, experts of a token; 0 without experts
    ffn: int  # F, width inside an expert or the MLP
    vocab_size: int  # V
    max_seq_len: int  # the longest sequence
    rope_base: float = 10000.0
    rope_alpha: float = 1.0  # NTK: stretches the wavelengths for longer contexts; 1 changes nothing
    rms_eps: float = 1e-5
    aux_alpha: float = 0.01  # weight of each layer's load-balancing loss

    @property
    def rope_theta(self) -> float:
        """base * alpha^(HD/(HD-2)): the slowest pair of a head turns alpha times slower."""
        if self.head_dim == 2:  # the only pair turns by one radian a position, whatever the base
            return self.rope_base
        return float(self.rope_base * self.rope_alpha ** (self.head_dim / (self.head_dim - 2)))

    @property
    def kind(self) -> str:
        """`moe`, or `llama` without experts."""
        return "moe" if self.n_experts else "llama"

    @property
    def name(self) -> str:
        """`moe-6.9b`, `moe-tiny`, else `custom`."""
        return next((name for name, config in NAMED.items() if config == self), "custom")

    def validate(self) -> MoEConfig:
        """Raises ConfigError unless a model of these sizes can exist; returns self."""
        for field, value in asdict(self).items():
            if field in _FLOATS:
                _check_float(field, value)
            else:
                _check_int(field, value, least=0 if field in ("n_experts", "top_k") else 1)
        if self.n_experts == 0 and self.top_k:
            raise ConfigError(f"top_k is {self.top_k}, but there are no experts; leave it out or set n_experts")
        if self.n_experts and not 1 <= self.top_k <= self.n_experts:
            raise ConfigError(f"top_k is {self.top_k}; it must be from 1 to n_experts, which is {self.n_experts}")
        if self.n_head % self.n_kv_head:
            raise ConfigError(
                f"n_kv_head {self.n_kv_head} does not divide n_head {self.n_head}; "
                f"each head of keys and values serves the same number of query heads"
            )
        if self.head_dim % 2:
            raise ConfigError(f"head_dim is {self.head_dim}; it must be even, because RoPE turns pairs")
        return self

    def computes_as(self, other: MoEConfig) -> bool:
        """Whether both have the same parameters and compute the same logits from them."""

        def plain(config: MoEConfig) -> MoEConfig:
            return replace(config, rope_base=1.0, rope_alpha=1.0, aux_alpha=0.0)

        same_angles = math.isclose(self.rope_theta, other.rope_theta, rel_tol=1e-12)
        return plain(self) == plain(other) and same_angles

    def to_dict(self) -> dict[str, int | float]:
        """As the answer key stores it."""
        return asdict(self)

    @staticmethod
    def parse(text: str) -> MoEConfig:
        """A name (moe-tiny), a .toml or .json file, or `hidden=64,n_layer=2,n_head=4,ffn=256,...`."""
        text = text.strip()
        if text in NAMED:
            return NAMED[text]
        if "=" in text and not os.path.exists(text):
            return from_pairs(_inline_pairs(text), where=f"'{text}'")
        suffix = Path(text).suffix.lower()
        if suffix == ".toml":
            return from_pairs(load_toml(text).items(), where=text)
        if suffix == ".json":
            table = load_json(text)
            return from_hf_dict(table, text) if "model_type" in table else from_pairs(table.items(), where=text)
        raise ConfigError(
            f"unknown model '{text}'; give {', '.join(NAMED)}, a .toml or .json file, "
            f"or sizes such as hidden=64,n_layer=2,n_head=4,n_experts=4,top_k=2,ffn=256"
        )


NAMED: dict[str, MoEConfig] = {
    "moe-6.9b": MoEConfig(768, 30, 12, 1, 64, 16, 4, 6144, 32000, 32768, rope_alpha=8.0),
    "moe-tiny": MoEConfig(64, 2, 4, 1, 16, 4, 2, 256, 1000, 512),
}


def describes_moe(text: str) -> bool:
    """Whether a model's name, sizes or file mean this kind of model, not GPT-2, which has no `ffn` of its own."""
    text = text.strip()
    if text in NAMED:
        return True
    if "=" in text and not os.path.exists(text):
        return any(_FIELD_OF.get(item.partition("=")[0].strip()) == "ffn" for item in text.split(","))
    if Path(text).suffix.lower() not in (".toml", ".json") or not os.path.exists(text):
        return False
    table = load_toml(text) if Path(text).suffix.lower() == ".toml" else load_json(text)
    return any(_FIELD_OF.get(key) == "ffn" for key in table)


def _check_int(field: str, value: Any, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise ConfigError(f"{field} is {value!r}; it must be a whole number")
    if not least <= value <= INT32_MAX - 127:
        raise ConfigError(f"{field} is {value}; it must be at least {least} and fit in 32 bits")


def _check_float(field: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise ConfigError(f"{field} is {value!r}; it must be a number")
    if value < 0 or (value == 0 and field != "aux_alpha"):
        raise ConfigError(f"{field} is {value}; it must be {'0 or more' if field == 'aux_alpha' else 'above 0'}")


def from_pairs(pairs: Iterable[tuple[str, Any]], where: str) -> MoEConfig:
    """Sizes under any of their names."""
    found: dict[str, tuple[str, Any]] = {}
    for key, value in pairs:
        if key == _KIND:
            if value not in ("moe", "llama"):
                raise ConfigError(f"{where}: kind is {value!r}; expected moe or llama")
            continue
        field = _FIELD_OF.get(key)
        if field is None:
            raise ConfigError(f"{where}: unknown key '{key}'; known keys: {', '.join(ALIASES)} and their aliases")
        if field in found:
            earlier, other = found[field]
            raise ConfigError(f"{where}: '{earlier}' is {other} and '{key}' is {value}; both mean {field}, keep one")
        found[field] = (key, value)
    sizes = _DEFAULTS | {field: value for field, (_, value) in found.items()}
    try:
        return _complete(sizes)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None


def _complete(sizes: dict[str, Any]) -> MoEConfig:
    missing = [field for field in ALIASES if field not in sizes and field != "head_dim"]
    if missing:
        raise ConfigError(f"{', '.join(missing)} not given; add e.g. {missing[0]}=...")
    if "head_dim" not in sizes:
        for field in ("hidden", "n_head"):
            _check_int(field, sizes[field], least=1)
        if sizes["hidden"] % sizes["n_head"]:
            raise ConfigError(f"n_head {sizes['n_head']} does not divide hidden {sizes['hidden']}; give head_dim")
        sizes["head_dim"] = sizes["hidden"] // sizes["n_head"]
    config = MoEConfig(**sizes).validate()
    floats: dict[str, Any] = {field: float(getattr(config, field)) for field in _FLOATS}
    return MoEConfig(**asdict(config) | floats)


def _inline_pairs(text: str) -> Iterable[tuple[str, Any]]:
    for item in filter(None, map(str.strip, text.split(","))):  # a comma at the end is no mistake
        key, equals, value = (part.strip() for part in item.partition("="))
        if not equals:
            raise ConfigError(f"'{text}': '{item}' is not of the form key=number")
        if key == _KIND:
            yield key, value
        elif _FIELD_OF.get(key) in _FLOATS:
            if not re.fullmatch(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]{1,3})?", value):
                raise ConfigError(f"'{text}': {key} is '{value}'; it must be a number")
            yield key, float(value)
        else:
            if not re.fullmatch(r"[+-]?[0-9]{1,20}", value):  # int() would also take 1_000
                raise ConfigError(f"'{text}': {key} is '{value}'; it must be a whole number")
            yield key, int(value)


# Hugging Face's name of each field, in Mixtral's config.json; Llama's has the same without those of experts.
_HF_NAMES = {
    "hidden": "hidden_size",
    "n_layer": "num_hidden_layers",
    "n_head": "num_attention_heads",
    "n_kv_head": "num_key_value_heads",
    "head_dim": "head_dim",
    "ffn": "intermediate_size",
    "vocab_size": "vocab_size",
    "max_seq_len": "max_position_embeddings",
    "rms_eps": "rms_norm_eps",
}
_HF_EXPERTS = {"n_experts": "num_local_experts", "top_k": "num_experts_per_tok", "aux_alpha": "router_aux_loss_coef"}

# Keys of a config.json that change the mathematics, with the only values ironhorse computes.
_HF_REQUIRED: dict[str, tuple[Any, ...]] = {
    "model_type": ("mixtral", "llama"),
    "hidden_act": ("silu",),
    "tie_word_embeddings": (False,),
    "attention_bias": (False,),
    "mlp_bias": (False,),
    "router_jitter_noise": (0, 0.0),
    "quantization_config": (None,),
}


def to_hf_config(config: MoEConfig, dtype: str = "float32") -> dict[str, Any]:
    """The config.json of this model, as `ironhorse convert` writes it: `transformers` computes the same from it.

    alpha goes into `rope_theta`.
    """
    architecture, model_type = ("MixtralForCausalLM", "mixtral") if config.n_experts else ("LlamaForCausalLM", "llama")
    experts = {
        "num_local_experts": config.n_experts,
        "num_experts_per_tok": config.top_k,
        "router_aux_loss_coef": config.aux_alpha,
        "router_jitter_noise": 0.0,
        "output_router_logits": False,
        "sliding_window": None,
    }
    return {
        "architectures": [architecture],
        "model_type": model_type,
        "attention_dropout": 0.0,
        "bos_token_id": config.vocab_size - 1,
        "eos_token_id": config.vocab_size - 1,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "hidden_size": config.hidden,
        "initializer_range": 0.02,
        "intermediate_size": config.ffn,
        "max_position_embeddings": config.max_seq_len,
        "num_attention_heads": config.n_head,
        "num_hidden_layers": config.n_layer,
        "num_key_value_heads": config.n_kv_head,
        "rms_norm_eps": config.rms_eps,
        "rope_theta": config.rope_theta,  # where versions before 5 look
        "rope_parameters": {"rope_theta": config.rope_theta, "rope_type": "default"},
        "tie_word_embeddings": False,
        "torch_dtype": dtype,
        "use_cache": True,
        "vocab_size": config.vocab_size,
        **(experts if config.n_experts else {"attention_bias": False, "mlp_bias": False}),
    }


def from_hf_dict(table: Mapping[str, Any], where: str) -> MoEConfig:
    """A config.json of Mixtral or Llama. `rope_theta` becomes the base, with alpha 1: the same angles."""
    for key, allowed in _HF_REQUIRED.items():
        if key in table and table[key] not in allowed:
            raise ConfigError(f"{where}: {key} is {table[key]!r}; ironhorse computes only {allowed[0]!r}")
    mixtral = table.get("model_type") == "mixtral"
    names = _HF_NAMES | (_HF_EXPERTS if mixtral else {})
    for key in ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size"):
        if table.get(key) is None:
            raise ConfigError(f"{where}: {key} is {'null' if key in table else 'missing'}; it must be a whole number")
    for key in ("max_position_embeddings", "vocab_size"):  # may be absent; transformers does not take null either
        if key in table and table[key] is None:
            raise ConfigError(f"{where}: {key} is null; it must be a whole number")
    pairs = {ours: table[theirs] for ours, theirs in names.items() if table.get(theirs) is not None}
    pairs["rope_base"] = _rope_theta(table, where, 1e6 if mixtral else 1e4)
    # what transformers assumes of a file that does not say; null is as many as heads
    pairs.setdefault("vocab_size", 32000)
    pairs.setdefault("max_seq_len", 131072 if mixtral else 2048)
    pairs.setdefault("rms_eps", 1e-5 if mixtral else 1e-6)
    absent = mixtral and "num_key_value_heads" not in table
    pairs.setdefault("n_kv_head", 8 if absent else table.get("num_attention_heads"))
    whole = all(type(pairs.get(name)) is int and pairs[name] > 0 for name in ("hidden", "n_head"))
    if "head_dim" not in pairs and whole:
        pairs["head_dim"] = pairs["hidden"] // pairs["n_head"]
    if mixtral:
        pairs.setdefault("n_experts", 8)
        pairs.setdefault("top_k", 2)
        pairs.setdefault("aux_alpha", 0.001)
        if pairs["n_experts"] == 0:
            raise ConfigError(f"{where}: num_local_experts is 0; a Mixtral has at least 1")
    try:
        config = _complete(_DEFAULTS | pairs)
    except ConfigError as error:
        raise ConfigError(f"{where}: {_their_words(str(error))}") from None
    window = table.get("sliding_window") if mixtral else None
    if window is not None and not (type(window) is int and window >= config.max_seq_len):  # over all of it: none
        raise ConfigError(
            f"{where}: sliding_window is {window!r}; ironhorse computes only null, or max_position_embeddings and more"
        )
    return config


def _their_words(text: str) -> str:
    """Our names of sizes as those of the file."""
    names = _HF_NAMES | _HF_EXPERTS | {"rope_base": "rope_theta"}
    return re.sub(r"\w+", lambda word: names.get(word[0], word[0]), text)


def _rope_theta(table: Mapping[str, Any], where: str, default: float) -> Any:
    """In `rope_parameters` since transformers 5, whose name was `rope_scaling`; every other kind turns other angles."""
    theta = table.get("rope_theta")
    for key in ("rope_parameters", "rope_scaling"):  # the last one wins, as there
        rope = table.get(key)
        if rope is None:
            continue
        known = {"rope_type": ("default",), "type": ("default",), "partial_rotary_factor": (None, 1.0)}
        if not isinstance(rope, Mapping) or any(
            name != "rope_theta" and value not in known.get(name, ()) for name, value in rope.items()
        ):
            raise ConfigError(f"{where}: {key} is {rope!r}; ironhorse computes only the rope_type 'default'")
        theta = rope.get("rope_theta", table.get("rope_theta"))
        if "rope_theta" in rope and theta is None:  # transformers cannot build such a model either
            raise ConfigError(f"{where}: rope_theta in {key} is null; it must be a number, or be left out")
    return default if theta is None else theta
