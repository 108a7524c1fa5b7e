"""Hugging Face folders of GPT-2, Llama, Mistral, Mixtral and Qwen: `config.json`, and weights in one file or several.

GPT-2's names carry the prefix `transformer.` there, its linear layers are stored (in, out), and wte has V rows. Here
they are parameter name -> array in our shapes, as views: nothing is read before it is looked at.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .. import _native
from ..config import GPT2Config, ModelConfig, made
from ..errors import FormatError
from ..params import param_shapes
from .header import Array
from .hf_files import CONFIG, SHARD_SIZE, parse_size, write_weights
from .safetensors import map_places

PREFIX = "transformer."

# Hugging Face's Conv1D keeps (in, out); ours, like nn.Linear, is (out, in). Only GPT-2's names end so.
TRANSPOSED = ("attn.c_attn.weight", "attn.c_proj.weight", "mlp.c_fc.weight", "mlp.c_proj.weight")
# The tokens before and after a text. Ours computes nothing from them, but transformers stops writing at the second.
_TEXT_TOKENS = ("bos_token_id", "eos_token_id")
_FLOATS = ("F32", "BF16", "F16")


@dataclass(frozen=True)
class HfLayout:
    """What the files of a folder say beyond sizes and numbers, to write the same bytes again."""

    config_json: bytes
    metadata: dict[str, str]
    names: list[str]  # of the file, in its order


@dataclass(frozen=True)
class HfFolder:
    """`params` are views in our names and shapes; bf16 is uint16, told by `dtypes`."""

    config: ModelConfig
    settings: dict[str, Any]  # config.json
    params: dict[str, Array]
    dtypes: dict[str, str]
    layout: HfLayout


def read_hf(folder: Path) -> HfFolder:
    """Maps a folder; the native module checks that every parameter is there in its shape, and no other."""
    described, metadata, places = _native.file_hf(folder)
    config = made(*described)
    tensors, dtypes = map_places(places)
    stored = {name: name if name in tensors else PREFIX + name for name in param_shapes(config)}
    text = (folder / CONFIG).read_bytes()
    return HfFolder(
        config,
        json.loads(text),
        {name: turned(name, tensors[key]) for name, key in stored.items()},
        {name: dtypes[key] for name, key in stored.items()},
        HfLayout(text, dict(metadata), list(tensors)),
    )


def write_hf(
    folder: Path,
    config: ModelConfig,
    params: Mapping[str, Array],
    dtypes: Mapping[str, str],
    layout: HfLayout | None,
    shard: int | None = None,
    tokens: Mapping[str, Any] | None = None,
) -> None:
    """Writes the files into a folder that exists; uint16 arrays are bf16 as `dtypes` says.

    `shard` is the most bytes of weights in one of them; `tokens` are those of `config_json`.
    """
    kinds = {dtypes[name] for name in param_shapes(config)}
    if not kinds <= set(_FLOATS):
        raise FormatError(f"{folder}: {', '.join(sorted(kinds - set(_FLOATS)))}; weights are {', '.join(_FLOATS)}")
    if layout is None:
        prefix = PREFIX if isinstance(config, GPT2Config) else ""
        names = [prefix + name for name in param_shapes(config)]
        layout = HfLayout(config_json(config, kinds, tokens), {"format": "pt"}, names)
    (folder / CONFIG).write_bytes(layout.config_json)
    stored = {name: turned(name, params[name.removeprefix(PREFIX)]) for name in layout.names}
    bf16 = {name: "BF16" for name in stored if dtypes[name.removeprefix(PREFIX)] == "BF16"}
    write_weights(folder, stored, layout.metadata, bf16, shard or parse_size(SHARD_SIZE))


def text_tokens(settings: Mapping[str, Any]) -> dict[str, Any]:
    """What a config.json says that is not computed from: the tokens before and after a text, and the rest of it."""
    return dict(settings)


def tokenizer_tokens(eot: int) -> dict[str, Any]:
    """The same where a tokenizer says them."""
    return dict.fromkeys(_TEXT_TOKENS, eot)


def config_json(config: ModelConfig, kinds: set[str], tokens: Mapping[str, Any] | None = None) -> bytes:
    """The `config.json` of a model with these sizes, as `ironhorse convert` writes it.

    `tokens` are what `text_tokens` gave; without them the last of the vocabulary is meant, as in GPT-2.
    """
    dtype = next(iter(kinds)) if len(kinds) == 1 else "F32"
    said = None if tokens is None else json.dumps(dict(tokens))
    return _native.model_write_hf(config.kind, config.json(), dtype, said).encode()


def turned(name: str, array: Array) -> Array:
    """Between (in, out) and (out, in), for the four matrices of a layer of GPT-2; a view."""
    return array.T if name.endswith(TRANSPOSED) and array.ndim == 2 else array
