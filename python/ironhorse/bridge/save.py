"""`ironhorse.save`: tensors, or what `load` gave, into any of the formats; the whole file or nothing."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from ..answer_key import crc32_table, json_text
from ..config import GPT2Config, ModelConfig, MoEConfig, parse_config
from ..errors import FormatError, InvalidValueError
from ..formats.bf16 import from_bf16, to_bf16
from ..formats.checkpoint import TOKENIZER, CheckpointFolder, CheckpointParts, is_checkpoint_file, write_checkpoint
from ..formats.hf import HfFolder, HfLayout, text_tokens, write_hf
from ..formats.hf_files import SHARD_SIZE, is_ours, parse_size
from ..formats.llmc import DebugState, write_debug_state, write_model
from ..formats.safetensors import write_safetensors
from ..formats.shards import write_shard
from ..formats.staging import StagedFolder, Staging
from ..formats.tokenizer import Tokenizer, write_tokenizer
from ..params import param_shapes
from .load import Loaded
from .tables import Printed
from .tensors import Raw, encode

if TYPE_CHECKING:
    from ..nn.config import Config

PathLike = str | os.PathLike[str]
Format = Literal["model", "state", "key", "hf", "checkpoint", "safetensors", "shard", "tokenizer"]

_FOLDERS = ("hf", "checkpoint")


@dataclass(frozen=True, repr=False)
class Saved(Printed):
    """What was written."""

    kind: str
    path: Path
    bytes: int  # of all files

    def __str__(self) -> str:
        return f"{self.path}: {self.kind}, {self.bytes:,} bytes"

    def __repr__(self) -> str:
        return f"<Saved {self}>"


@dataclass(frozen=True)
class _Job:
    """What to write, as files hold it."""

    path: Path
    what: object
    raws: dict[str, Raw]
    config: ModelConfig | None
    dtype: str | None
    metadata: Mapping[str, str]
    shard: int  # bytes

    def sizes(self) -> ModelConfig:
        if self.config is None:
            raise InvalidValueError(f"save: {self.path}: give config=, the sizes of the model")
        return self.config

    def gpt2(self) -> GPT2Config:
        """For llm.c's files."""
        sizes = self.sizes()
        if not isinstance(sizes, GPT2Config):
            raise FormatError(f"{self.path}: llm.c's .bin holds a GPT-2 only, not a {sizes.kind}; save a folder")
        return sizes

    @property
    def tokenizer(self) -> Tokenizer | None:
        """Goes beside the weights of what was loaded with one."""
        return self.what.tokenizer if isinstance(self.what, Loaded) else None

    def owns(self, name: str) -> bool:
        """Whether this file of a Hugging Face folder may be replaced; a tokenizer only by another."""
        return is_ours(name) or (name == TOKENIZER and self.tokenizer is not None)

    def params(self) -> dict[str, Raw]:
        """The parameters, checked, in `dtype`."""
        loaded = self.what if isinstance(self.what, Loaded) else None
        raws = _raws(loaded.params) if loaded is not None else self.raws
        shapes = param_shapes(self.sizes())
        for name, shape in shapes.items():
            if name not in raws:
                raise FormatError(f"{self.path}: no tensor {name} to save; names are those of the parameter table")
            found = raws[name].array.shape
            if found != shape:
                raise FormatError(f"{self.path}: {name} is {list(found)}, expected {list(shape)}")
        more = [name for name in raws if name not in shapes]
        if more:
            raise FormatError(f"{self.path}: {more[0]} is not a parameter of this model; take it out first")
        return {name: self._as(name, raws[name]) for name in shapes}

    def _as(self, name: str, raw: Raw) -> Raw:
        if raw.array.dtype.kind != "f" and raw.dtype != "BF16":
            raise FormatError(f"{self.path}: {name} is {raw.array.dtype}, expected floats")
        if self.dtype is None:
            return raw
        if self.dtype == "bf16":
            return raw if raw.dtype == "BF16" else Raw(to_bf16(raw.array), "BF16")
        return Raw(from_bf16(raw.array) if raw.dtype == "BF16" else np.asarray(raw.array, np.float32), "F32")


def save(
    path: PathLike,
    what: Loaded | Mapping[str, Any] | Tokenizer | Any,
    *,
    format: Format | None = None,
    dtype: Literal["f32", "bf16"] | None = None,
    config: ModelConfig | Config | str | None = None,
    metadata: Mapping[str, str] | None = None,
    shard_size: int | str = SHARD_SIZE,
) -> Saved:
    """Writes what `load` gave, tensors by name (numpy or torch), a Tokenizer, or tokens (a row of integers).

    `format` follows from the name and from what is saved if it is not given: `.safetensors` and `.key.safetensors`, a
    `.bin` of the kind that was loaded (a model, for anything with parameters), a Hugging Face folder otherwise. A model
    made from tensors needs `config`, a GPT2Config, a MoEConfig, an nn.Config or text such as "d12" or "moe-tiny".
    `dtype` is how weights are stored; as they are if not given. `metadata` are strings for a safetensors file. A
    checkpoint keeps the types of its run: changed weights are written to the f32 masters and, rounded, to the bf16
    weights.
    `shard_size` is the most weights in one file of a Hugging Face folder, bytes or "500MB"; what is more goes into
    several with an index.

    Written beside and renamed: a failure leaves what was there before. Saving what was loaded, unchanged and in its own
    format, writes the same bytes (a Hugging Face folder is divided anew; zeros pad the vocabulary).
    """
    if not isinstance(path, (str, os.PathLike)):
        raise InvalidValueError(f"save: path is of type {type(path).__name__}, expected a path")
    place = Path(path)
    if dtype not in (None, "f32", "bf16"):
        raise InvalidValueError(f'save: dtype is {dtype!r}; expected "f32" or "bf16"')
    kind = format if format is not None else _kind(place, what)
    if kind not in _WRITERS:
        raise InvalidValueError(f"save: format is {kind!r}; expected one of {', '.join(_WRITERS)}")
    sizes = parse_config(config) if isinstance(config, str) else config
    # An nn.Config has `sizes`; its module is not imported for this, since it loads the extension.
    if sizes is not None and hasattr(sizes, "sizes"):
        sizes = sizes.sizes()
    if sizes is not None and not isinstance(sizes, (GPT2Config, MoEConfig)):
        kinds = "a GPT2Config, a MoEConfig, an nn.Config or text"
        raise InvalidValueError(f"save: config is of type {type(sizes).__name__}; expected {kinds}")
    if sizes is None and isinstance(what, Loaded):
        sizes = what.config
    strings: Mapping[str, str] = what.meta if isinstance(what, Loaded) and what.kind == kind else {}
    strings = metadata if metadata is not None else strings
    job = _Job(place, what, _tensors(place, what), sizes, dtype, strings, parse_size(shard_size))
    try:
        if kind in _FOLDERS:
            with StagedFolder(place, is_checkpoint_file if kind == "checkpoint" else job.owns) as folder:
                _write(kind, job, folder)
            return Saved(kind, place, sum(entry.stat().st_size for entry in place.iterdir()))
        if place.is_dir():
            raise FormatError(f"{place}: is a folder; expected the name of a file")
        target = place.resolve()  # a link stays a link
        if not target.parent.is_dir():
            raise FormatError(f"{place}: no folder {target.parent}; make it first")
        with Staging(target.parent) as staging:
            _write(kind, job, staging.path(target.name))
        return Saved(kind, place, place.stat().st_size)
    except OSError as error:
        raise FormatError(f"{place}: cannot write it ({error.strerror or error})") from None


def _write(kind: str, job: _Job, temporary: Path) -> None:
    try:
        _WRITERS[kind](job, temporary)
    except FormatError as error:  # names what was asked for, not the temporary
        raise FormatError(str(error).replace(str(temporary), str(job.path))) from None


def _kind(path: Path, what: object) -> str:
    """The format, where it is not said."""
    if isinstance(what, Tokenizer):
        return "tokenizer"
    loaded = what.kind if isinstance(what, Loaded) else None
    if path.suffix == ".safetensors":
        return "key" if loaded == "key" else "safetensors"
    if path.suffix == ".bin":
        if loaded in ("state", "shard", "tokenizer"):
            return loaded
        return "model" if loaded is not None or (isinstance(what, Mapping) and "tokens" not in what) else "shard"
    if path.suffix and path.suffix[1:].isalpha() and not path.is_dir():
        raise InvalidValueError(f"save: {path}: the name does not say what to write; give format=")
    return "checkpoint" if loaded == "checkpoint" else "hf"


def _tensors(path: Path, what: object) -> dict[str, Raw]:
    if isinstance(what, Tokenizer):
        return {}
    if isinstance(what, Loaded):
        return _raws(what.tensors)
    if isinstance(what, Mapping):
        wrong = [name for name in what if not isinstance(name, str)]
        if wrong:
            raise InvalidValueError(f"save: the name {wrong[0]!r} is not a string")
        return {name: encode(name, value) for name, value in what.items()}
    raw = encode("tokens", what)
    if raw.array.dtype.kind not in "iu" and raw.array.size:
        raise InvalidValueError(
            f"save: {path}: `what` is of type {type(what).__name__}, expected what load gave, tensors by name, "
            "a Tokenizer, or integer tokens"
        )
    return {"tokens": raw}


def _raws(tensors: Any) -> dict[str, Raw]:
    return {name: tensors.raw(name) for name in tensors}


def _model(job: _Job, path: Path) -> None:
    sizes = job.gpt2()
    params = job.params()
    dtype = job.dtype or ("bf16" if all(raw.dtype == "BF16" for raw in params.values()) else "f32")
    write_model(path, sizes, {name: raw.f32_or_bits() for name, raw in params.items()}, dtype)


def _state(job: _Job, path: Path) -> None:
    sizes = job.gpt2()
    missing = [name for name in ("x", "y", "logits", "loss") if name not in job.raws]
    missing += [f"grad.{name}" for name in param_shapes(sizes) if f"grad.{name}" not in job.raws]
    if missing:
        raise FormatError(f"{job.path}: no tensor {missing[0]} to save; a state has x, y, logits, loss, grad.NAME")
    arrays = {name: raw.array for name, raw in job.raws.items()}
    grads = {name: arrays[f"grad.{name}"] for name in param_shapes(sizes)}
    state = DebugState(arrays["x"], arrays["y"], arrays["logits"], float(arrays["loss"].reshape(())), grads)
    write_debug_state(path, sizes, state)


def _safetensors(job: _Job, path: Path, metadata: Mapping[str, str] | None = None) -> None:
    bf16 = {name: "BF16" for name, raw in job.raws.items() if raw.dtype == "BF16"}
    arrays = {name: raw.array for name, raw in job.raws.items()}
    write_safetensors(path, arrays, job.metadata if metadata is None else metadata, bf16)


def _key(job: _Job, path: Path) -> None:
    """As loaded, with the checksums of what is there now."""
    if job.metadata.get("format") != "ironhorse-answer-key":
        raise FormatError(f"{job.path}: only a key that was loaded can be saved; ironhorse.export makes new ones")
    sums = crc32_table({name: raw.array for name, raw in job.raws.items()})
    metadata = dict(job.metadata)
    if json.loads(metadata.get("crc32", "{}")) != sums:
        metadata["crc32"] = json_text(sums)
    _safetensors(job, path, metadata)


def _layout(job: _Job, weights: HfFolder, params: Mapping[str, Raw]) -> HfLayout | None:
    """That of the files it came from, where they describe the same model in the same type."""
    if weights.config != job.config:
        return None
    return weights.layout if all(raw.dtype == weights.dtypes[name] for name, raw in params.items()) else None


def _hf(job: _Job, folder: Path) -> None:
    params = job.params()
    source = job.what.source if isinstance(job.what, Loaded) else None
    layout = _layout(job, source, params) if isinstance(source, HfFolder) else None
    dtypes = {name: raw.dtype for name, raw in params.items()}
    tokens = text_tokens(source.settings) if isinstance(source, HfFolder) else source.text_tokens() if source else None
    arrays = {name: raw.array for name, raw in params.items()}
    write_hf(folder, job.sizes(), arrays, dtypes, layout, job.shard, tokens)
    if job.tokenizer is not None:
        write_tokenizer(folder / TOKENIZER, job.tokenizer)


def _checkpoint(job: _Job, folder: Path) -> None:
    source = job.what.source if isinstance(job.what, Loaded) else None
    if not isinstance(source, CheckpointFolder) or not isinstance(job.what, Loaded):
        raise FormatError(f'{job.path}: only a checkpoint that was loaded can be saved as one; use format="hf"')
    stored = {dtype.lower() for dtype in source.weights.dtypes.values()}
    if job.dtype is not None and stored != {job.dtype}:
        found = " and ".join(sorted(stored))
        raise FormatError(f"{job.path}: a checkpoint keeps its types, and the weights of this one are {found}; "
                          f'format="hf" writes weights alone in {job.dtype}')  # fmt: skip
    if job.config != source.weights.config:
        raise FormatError(f'{job.path}: a checkpoint keeps its sizes; format="hf" writes weights with others')
    params = replace(job, dtype=None).params()
    missing = [name for name in source.moments if name not in job.raws]
    if missing:
        raise FormatError(f"{job.path}: no tensor {missing[0]} to save")
    for name, was in source.moments.items():
        raw = job.raws[name]
        if raw.array.shape != was.shape:
            raise FormatError(f"{job.path}: {name} is {list(raw.array.shape)}, expected {list(was.shape)}")
        if raw.array.dtype.kind != "f" and raw.dtype != "BF16":
            raise FormatError(f"{job.path}: {name} is {raw.array.dtype}, expected floats")
    raws = job.raws | params
    tensors, dtypes = ({name: raw.array for name, raw in raws.items()}, {name: raw.dtype for name, raw in raws.items()})
    write_checkpoint(folder, CheckpointParts(source, tensors, dtypes, job.what.meta, job.what.tokenizer))


def _shard(job: _Job, path: Path) -> None:
    if list(job.raws) != ["tokens"]:
        raise FormatError(f"{job.path}: a shard is one row of integers, or {{'tokens': row}}")
    wide = job.raws["tokens"].dtype == "U32" if isinstance(job.what, Loaded) else None
    write_shard(path, job.raws["tokens"].array, wide)


def _tokenizer(job: _Job, path: Path) -> None:
    tokenizer = job.what.tokenizer if isinstance(job.what, Loaded) else job.what
    if not isinstance(tokenizer, Tokenizer):
        raise FormatError(f"{job.path}: there is no tokenizer to save")
    write_tokenizer(path, tokenizer)


_WRITERS: dict[str, Callable[[_Job, Path], None]] = {
    "model": _model,
    "state": _state,
    "key": _key,
    "hf": _hf,
    "checkpoint": _checkpoint,
    "safetensors": _safetensors,
    "shard": _shard,
    "tokenizer": _tokenizer,
}
