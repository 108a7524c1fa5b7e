"""`ironhorse.load`: any of our files, by what is in it, as tensors under the names of the parameter table."""

from __future__ import annotations

import json
import os
import zlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from .. import _native
from ..answer_key import FORMAT as KEY_FORMAT
from ..config import GPT2Config, ModelConfig, aliases, from_dict
from ..errors import ConfigError, FormatError, InvalidValueError, IronhorseError
from ..formats.checkpoint import TOKENIZER, CheckpointFolder
from ..formats.folders import open_folder
from ..formats.hf import HfFolder
from ..formats.hf_files import INDEX, WEIGHTS
from ..formats.llmc import map_debug_state, map_model
from ..formats.safetensors import SafetensorsFile, read_safetensors
from ..formats.shards import map_shard
from ..formats.tokenizer import Tokenizer, read_tokenizer
from .tables import Printed
from .tensors import Bf16, Framework, Maker, Raw, Tensors

PathLike = str | os.PathLike[str]

_SHOWN = 40  # rows of a printed file


@dataclass(eq=False, repr=False)
class Loaded(Printed):
    """A file, open. `print` shows what is in it.

    `kind` is model, state, key, hf, checkpoint, safetensors, shard or tokenizer. Tensors have the names and shapes of
    the parameter table: `h.0.attn.c_attn.weight` is (out, in), wte has V rows, whatever the file does; a mixture of
    experts and a Llama have Hugging Face's (`model.layers.0.block_sparse_moe.experts.2.w1.weight`). A state and a
    key have `x`, `y`, `logits`, `loss`, `grad.NAME`, a key also `param.NAME`, `act.NAME` and more; a checkpoint has
    `m.NAME` and `v.NAME` beside the parameters, which are its exact ones: the f32 masters of bf16 weights; a shard has
    `tokens`. Any other safetensors file keeps its names. `path` is what was read: of a run, the checkpoint.
    """

    kind: str
    path: Path
    config: ModelConfig | None
    tensors: Tensors
    meta: dict[str, Any]  # metadata of a safetensors file, config.json of a folder, trainer.json of a checkpoint
    tokenizer: Tokenizer | None = None
    source: HfFolder | CheckpointFolder | None = field(default=None, compare=False)

    @property
    def params(self) -> Tensors:
        """Only the parameters, by their names; empty for files that have none."""
        if self.kind == "key":
            return self.tensors.under("param.")
        if self.kind not in ("model", "hf", "checkpoint"):
            return self.tensors.under("no such name")
        params = self.tensors.under("")
        for name in [name for name in params if name.startswith(("m.", "v."))]:
            del params[name]
        return params

    @property
    def dtype(self) -> str:
        """How most of the numbers are stored: f32, bf16, f16, u16, ..."""
        counts: dict[str, int] = {}
        for name in self.tensors:
            stored = self.tensors.stored(name).lower()
            counts[stored] = counts.get(stored, 0) + int(np.prod(self.tensors.shape(name), dtype=object))
        return max(counts, key=lambda stored: counts[stored]) if counts else ""

    def __str__(self) -> str:
        lines = [repr(self)[1:-1]]
        if self.config is not None:
            lines.append(", ".join(f"{name} {value}" for name, value in self.config.to_dict().items()))
        if self.tokenizer is not None:
            lines.append(f"tokenizer: {len(self.tokenizer.tokens)} tokens, end of text {self.tokenizer.eot}")
        if len(self.tensors):
            lines += ["", self.tensors.rows(_SHOWN)]
        return "\n".join(lines)

    def __repr__(self) -> str:
        numbers = sum(int(np.prod(self.tensors.shape(name), dtype=object)) for name in self.tensors)
        what = f"{len(self.tensors)} tensors, {numbers:,} numbers, {self.dtype}" if len(self.tensors) else "no tensors"
        return f"<{self.kind} {self.path}: {what}>"


def load(
    path: PathLike,
    framework: Framework = "numpy",
    *,
    config: GPT2Config | PathLike | None = None,
    bf16: Bf16 = "float32",
    check: bool = True,
) -> Loaded:
    """Opens a model .bin (f32 or bf16), debug state, answer key, Hugging Face folder (one file or several) of a GPT-2,
    Llama, Mistral, Mixtral, Qwen 2, Qwen 3, Qwen 3 MoE or Gemma 3 (text), checkpoint, run, safetensors file, token
    shard or tokenizer; which one is found out from its content. Of a run it is the newest checkpoint that is whole; a
    warning names damaged ones that are newer.

    Arrays are numpy's or torch's, made when they are looked at and mapped from the file where its type allows. bf16 is
    bfloat16 in torch; in numpy it becomes float32 (exact), or stays as its `"bits"` (uint16; see
    `ironhorse.formats.bf16`), or with `"ml_dtypes"` that package's bfloat16. A debug state does not say how large its
    model is: `config` is a GPT2Config, sizes, or the model's file; if not given, the model .bin beside it tells.
    `check` compares the checksums (and sizes) that keys and checkpoints carry, which reads them whole.
    """
    maker = Maker(framework, bf16).check()
    if not isinstance(path, (str, os.PathLike)):
        raise InvalidValueError(f"load: path is of type {type(path).__name__}, expected a path")
    place = Path(path)
    try:
        return _load(place, maker, config, check)
    except (OSError, ValueError) as error:  # a NUL byte in the path is a ValueError
        if isinstance(error, IronhorseError):
            raise
        raise FormatError(f"{place!s}: cannot read it ({getattr(error, 'strerror', None) or error})") from None


def _load(path: Path, maker: Maker, config: GPT2Config | PathLike | None, check: bool) -> Loaded:
    kind = _native.file_kind(path)
    if kind in ("hf", "checkpoint", "run"):
        return _folder(path, maker, check)
    if kind == "hf-file" and (path.name == INDEX or (path.name == WEIGHTS and not path.with_name(INDEX).exists())):
        return _folder(path.parent, maker, check)
    if kind in ("hf-file", "safetensors", "key"):
        return _safetensors(path, maker, check)
    if kind == "adapter":  # a folder of PEFT
        return _safetensors(path / "adapter_model.safetensors", maker, check)
    if kind == "model":
        model = map_model(path)
        dtype = model.dtype.upper()
        raws = {name: Raw(array, dtype) for name, array in model.params.items()}
        return Loaded("model", path, model.config, Tensors(raws, maker), {})
    if kind == "state":
        return _state(path, maker, config)
    if kind == "shard":
        return Loaded("shard", path, None, Tensors({"tokens": Raw.of(map_shard(path))}, maker), {})
    if kind == "tokenizer":
        return Loaded("tokenizer", path, None, Tensors({}, maker), {}, read_tokenizer(path))
    if kind == "gguf":
        raise FormatError(f"{path}: a GGUF file, which is written and not read here; load what it was made of")
    raise FormatError(f"{path}: a {kind} file, which holds no tensors")


def _folder(path: Path, maker: Maker, check: bool) -> Loaded:
    found = open_folder(path, check)
    if isinstance(found, CheckpointFolder):
        tensors = Tensors(_checkpoint_raws(found), maker)
        return Loaded("checkpoint", found.path, found.weights.config, tensors, found.trainer, found.tokenizer, found)
    tensors = Tensors(_hf_raws(found), maker)
    tokenizer = read_tokenizer(path / TOKENIZER) if (path / TOKENIZER).exists() else None
    return Loaded("hf", path, found.config, tensors, found.settings, tokenizer, found)


def _hf_raws(weights: HfFolder) -> dict[str, Raw]:
    return {name: Raw(array, weights.dtypes[name]) for name, array in weights.params.items()}


def _checkpoint_raws(found: CheckpointFolder) -> dict[str, Raw]:
    raws = _hf_raws(found.weights)
    for name, master in found.master.items():
        residual = master.dtype == np.int16
        raws[name] = Raw(raws[name].array, "F32", master) if residual else Raw(master, "F32")
    return raws | {name: Raw(array, found.moments_dtype) for name, array in found.moments.items()}


def _safetensors(path: Path, maker: Maker, check: bool) -> Loaded:
    file = read_safetensors(path)
    tensors = Tensors({name: Raw(array, file.dtypes[name]) for name, array in file.tensors.items()}, maker)
    if file.metadata.get("format") != KEY_FORMAT:
        return Loaded("safetensors", path, None, tensors, dict(file.metadata))
    if check:
        _check_sums(path, file)
    return Loaded("key", path, _key_config(path, file.metadata), tensors, dict(file.metadata))


def _key_config(path: Path, metadata: dict[str, str]) -> ModelConfig | None:
    kind = metadata.get("model")
    if kind is None or not aliases(kind):
        return None  # a kind of model that has no table here; its tensors have the key's names all the same
    try:
        return from_dict(json.loads(metadata["config"]), kind, f"{path}: config")
    except (KeyError, ValueError, AttributeError, ConfigError) as error:
        raise FormatError(f"{path}: the metadata has no sizes of a {kind} ({error})") from None


def _check_sums(path: Path, file: SafetensorsFile) -> None:
    try:
        sums = dict(json.loads(file.metadata.get("crc32", "{}")))
    except (ValueError, TypeError):
        raise FormatError(f"{path}: crc32 in the metadata is not a table of checksums") from None
    for name, want in sums.items():
        if name not in file.tensors:
            raise FormatError(f"{path}: no tensor {name}, but a checksum of it")
        found = zlib.crc32(np.ascontiguousarray(file.tensors[name]).data)
        if found != want:
            raise FormatError(f"{path}: {name} has crc32 {found}, expected {want}; check=False loads it anyway")


def _state(path: Path, maker: Maker, config: GPT2Config | PathLike | None) -> Loaded:
    sizes = config if isinstance(config, GPT2Config) else _config_of(path, config)
    state = map_debug_state(path, sizes)
    raws = {"x": Raw.of(state.x), "y": Raw.of(state.y), "logits": Raw.of(state.logits)}
    raws["loss"] = Raw.of(np.array(state.loss, np.float32))
    raws |= {f"grad.{name}": Raw.of(array) for name, array in state.grads.items()}
    return Loaded("state", path, sizes, Tensors(raws, maker), {})


def _config_of(path: Path, config: PathLike | None) -> GPT2Config:
    """The sizes of a state's model: those that were said, or of the model beside it."""
    if config is None:
        beside = path.with_name(path.name.replace("_debug_state.bin", ".bin"))
        if beside == path or not beside.is_file():
            raise FormatError(
                f"{path}: a debug state does not say how large its model is; give config=, sizes or the model's file"
            )
        return map_model(beside).config
    text = os.fspath(config)
    if Path(text).suffix == ".bin":
        return map_model(text).config
    if Path(text).is_dir():
        found = open_folder(Path(text), check=False, state=False)
        sizes = found.weights.config if isinstance(found, CheckpointFolder) else found.config
        if not isinstance(sizes, GPT2Config):
            raise FormatError(f"{path}: a debug state is of a GPT-2; {text} is a {sizes.kind}")
        return sizes
    return GPT2Config.parse(text)
