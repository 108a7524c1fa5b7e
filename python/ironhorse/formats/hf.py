"""Hugging Face GPT-2 folders: `config.json` and `model.safetensors`, in one file or several with an index.

Their names carry the prefix `transformer.`, their linear layers are stored (in, out), and wte has V rows. Here they are
parameter name -> array in our shapes, as views: nothing is read before it is looked at.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..config import GPT2Config, from_hf_dict
from ..errors import ConfigError, FormatError
from ..params import param_shapes
from .header import Array
from .safetensors import SafetensorsFile, read_safetensors, write_safetensors

CONFIG = "config.json"
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
PREFIX = "transformer."

# Hugging Face's Conv1D keeps (in, out); ours, like nn.Linear, is (out, in).
TRANSPOSED = ("attn.c_attn.weight", "attn.c_proj.weight", "mlp.c_fc.weight", "mlp.c_proj.weight")
# Tensors of old files that hold no parameter: causal masks, and the head that is tied to wte.
_BUFFERS = (".attn.bias", ".attn.masked_bias")
_FLOATS = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}


@dataclass(frozen=True)
class HfLayout:
    """What the files of a folder say beyond sizes and numbers, to write the same bytes again."""

    config_json: bytes
    metadata: dict[str, str]
    names: list[str]  # of the file, in its order


@dataclass(frozen=True)
class HfFolder:
    """`params` are views in our names and shapes; bf16 is uint16, told by `dtypes`."""

    config: GPT2Config
    settings: dict[str, Any]  # config.json
    params: dict[str, Array]
    dtypes: dict[str, str]
    layout: HfLayout


def read_hf(folder: Path) -> HfFolder:
    """Maps a folder and checks that every parameter is there in its shape, and none that would be left out."""
    path = folder / CONFIG
    text = read_bytes(path)
    settings = parse_json(path, text)
    try:
        config = from_hf_dict(settings, str(path))
    except ConfigError as error:
        raise FormatError(str(error)) from None
    file = read_weights(folder)
    prefix = PREFIX if f"{PREFIX}wte.weight" in file.tensors else ""
    # before the table is made: it grows with n_layer
    if len(file.tensors) < 12 * config.n_layer:
        raise FormatError(f"{folder}: {len(file.tensors)} tensors, expected 12 for each of {config.n_layer} layers")
    params: dict[str, Array] = {}
    for name, shape in param_shapes(config).items():
        stored = prefix + name
        if stored not in file.tensors:
            raise FormatError(f"{folder}: no tensor {stored}; is this a GPT-2?")
        if file.dtypes[stored] not in _FLOATS:
            raise FormatError(f"{folder}: {stored} is {file.dtypes[stored]}, expected {', '.join(_FLOATS)}")
        params[name] = turned(name, file.tensors[stored])
        if params[name].shape != shape:
            want = list(shape[::-1] if name.endswith(TRANSPOSED) else shape)
            raise FormatError(f"{folder}: {stored} is {list(file.tensors[stored].shape)}, expected {want}")
    ours = {prefix + name for name in params}
    for stored in file.tensors:
        if stored not in ours and stored != "lm_head.weight" and not stored.endswith(_BUFFERS):
            raise FormatError(f"{folder}: tensor {stored} is not one of GPT2LMHeadModel")
    dtypes = {name: file.dtypes[prefix + name] for name in params}
    layout = HfLayout(text, file.metadata, [name for name in file.tensors if name in ours])
    return HfFolder(config, settings, params, dtypes, layout)


def write_hf(
    folder: Path, config: GPT2Config, params: Mapping[str, Array], dtypes: Mapping[str, str], layout: HfLayout | None
) -> None:
    """Writes the two files into a folder that exists; uint16 arrays are bf16 as `dtypes` says."""
    kinds = {dtypes[name] for name in param_shapes(config)}
    if not kinds <= set(_FLOATS):
        raise FormatError(f"{folder}: {', '.join(sorted(kinds - set(_FLOATS)))}; weights are {', '.join(_FLOATS)}")
    if layout is None:
        names = [PREFIX + name for name in param_shapes(config)]
        layout = HfLayout(config_json(config, kinds), {"format": "pt"}, names)
    (folder / CONFIG).write_bytes(layout.config_json)
    stored = {name: turned(name, params[name.removeprefix(PREFIX)]) for name in layout.names}
    bf16 = {name: "BF16" for name in stored if dtypes[name.removeprefix(PREFIX)] == "BF16"}
    write_safetensors(folder / WEIGHTS, stored, layout.metadata, bf16)


def config_json(config: GPT2Config, kinds: set[str]) -> bytes:
    """The `config.json` of a model with these sizes, as `ironhorse convert` writes it."""
    eot = config.vocab_size - 1
    table = {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "activation_function": "gelu_new",
        "attn_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "resid_pdrop": 0.0,
        "bos_token_id": eot,
        "eos_token_id": eot,
        "initializer_range": 0.02,
        "layer_norm_epsilon": 1e-5,
        "n_ctx": config.max_seq_len,
        "n_embd": config.n_embd,
        "n_head": config.n_head,
        "n_inner": None,
        "n_layer": config.n_layer,
        "n_positions": config.max_seq_len,
        "scale_attn_weights": True,
        "tie_word_embeddings": True,
        "torch_dtype": _FLOATS[kinds.pop()] if len(kinds) == 1 else "float32",
        "use_cache": True,
        "vocab_size": config.vocab_size,
    }
    return (json.dumps(table, indent=2).replace("1e-05", "0.00001") + "\n").encode()  # as Rust writes it


def turned(name: str, array: Array) -> Array:
    """Between (in, out) and (out, in), for the four matrices of a layer; a view."""
    return array.T if name.endswith(TRANSPOSED) and array.ndim == 2 else array


def read_weights(folder: Path) -> SafetensorsFile:
    """All tensors of a folder, from one file or from several."""
    if (folder / WEIGHTS).is_file():
        return read_safetensors(folder / WEIGHTS)
    path = folder / INDEX
    if not path.is_file():
        raise FormatError(f"{folder}: neither {WEIGHTS} nor {INDEX} in it; save it again with safe_serialization=True")
    places = parse_json(path, read_bytes(path)).get("weight_map")
    if not isinstance(places, dict) or not all(isinstance(file, str) for file in places.values()):
        raise FormatError(f"{path}: weight_map is missing or wrong, expected tensor names and their files")
    whole = SafetensorsFile({}, {}, {})
    for name in sorted(set(places.values())):
        if Path(name).name != name:
            raise FormatError(f"{path}: the file {name!r} is not in this folder")
        part = read_safetensors(folder / name)
        twice = whole.tensors.keys() & part.tensors.keys()
        if twice:
            raise FormatError(f"{folder / name}: {min(twice)} is in another file as well")
        whole.tensors.update(part.tensors)
        whole.dtypes.update(part.dtypes)
        whole.metadata.update(part.metadata)
    missing = [name for name in places if name not in whole.tensors]
    if missing:
        raise FormatError(f"{folder / places[missing[0]]}: no tensor {missing[0]}, which the index promises")
    return whole


def read_bytes(path: Path) -> bytes:
    """A small file, whole."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise FormatError(f"{path}: cannot read it ({error.strerror})") from None


def parse_json(path: Path, text: bytes) -> dict[str, Any]:
    """A JSON object."""
    try:
        table = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise FormatError(f"{path}: not valid JSON ({error})") from None
    if not isinstance(table, dict):
        raise FormatError(f"{path}: expected a JSON object")
    return table
