"""Checkpoints of every kind, made of one that was trained in f32; ours is not the code that writes them here."""

from __future__ import annotations

import json
import shutil
import zlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from cli import ironhorse, newest_checkpoint
from ironhorse.formats.hf import TRANSPOSED
from ironhorse.formats.safetensors import read_safetensors, write_safetensors

# 260 is padded to 384 rows in masters and moments.
SIZES = "n_layer=1,n_head=2,n_embd=32,vocab_size=260,max_seq_len=32"
VOCAB, PADDED = 260, 384


@dataclass(frozen=True)
class Kind:
    """How a run keeps its numbers."""

    weights: str = "f32"
    master: str = "f32"
    moments: str = "f32"
    part: int = 4 << 30  # bytes of a file

    @property
    def precision(self) -> dict[str, str]:
        return {"weights": self.weights, "grads": self.weights, "master": self.master, "moments": self.moments}


KINDS = {
    "f32": Kind(),
    "bf16": Kind("bf16"),
    "residual": Kind("bf16", "i16"),
    "lean": Kind("bf16", "i16", "bf16"),
    "f32-parts": Kind(part=20_000),
    "bf16-parts": Kind("bf16", part=20_000),
    "lean-parts": Kind("bf16", "i16", "bf16", part=1),
}


@dataclass(frozen=True)
class Made:
    """A checkpoint and what it holds: exact parameters and moments, as f32, in our names and shapes."""

    folder: Path
    params: dict[str, np.ndarray]
    moments: dict[str, np.ndarray]


def train(out: Path, steps: int = 2) -> Path:
    """A checkpoint in f32 that the command wrote."""
    flags = ["--batch", 2, "--seq", 16, "--steps", steps, "--sample-tokens", 0, "--device", "cpu", "--out", out]
    run = ironhorse("train", "--model", SIZES, *flags)
    assert run.returncode == 0, run.stderr
    return newest_checkpoint(out)


def make(source: Path, folder: Path, kind: Kind) -> Made:
    """The checkpoint `source` as a run of that kind would have written it."""
    rng = np.random.default_rng(5)
    folder.mkdir(parents=True)
    model, state = read_safetensors(source / "model.safetensors"), read_safetensors(source / "state.safetensors")
    params = {name.removeprefix("transformer."): array for name, array in model.tensors.items()}
    params = {name: np.array(array.T if name.endswith(TRANSPOSED) else array) for name, array in params.items()}
    weights, master = dict(params), {}
    for name, array in params.items() if kind.weights == "bf16" else ():
        padding = np.full((PADDED - VOCAB, array.shape[-1]), 7, "<f4") if name == "wte.weight" else array[:0]
        bits = np.concatenate([array, padding]).view("<u4").astype(np.int64)
        if kind.master == "i16":
            rounded = (bits + 0x8000) >> 16
            master[name] = (bits - (rounded << 16)).astype("<i2")
        else:
            rounded = (bits >> 16) + rng.integers(0, 2, bits.shape)  # at random, as in training
            master[name] = bits.astype("<u4").view("<f4")
        weights[name] = rounded.astype("<u2")[: len(array)]
    stored = {f"transformer.{n}": array.T if n.endswith(TRANSPOSED) else array for n, array in weights.items()}
    low = kind.moments == "bf16"
    moments = {n: (a.view("<u4") >> 16).astype("<u2") if low else np.array(a) for n, a in state.tensors.items()}
    places = _write(folder, "model", stored, kind.part, kind.weights == "bf16", {"format": "pt"})
    if len(set(places.values())) > 1:
        (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))
    if master:
        _write(folder, "master", master, kind.part, False, {})
    _write(folder, "state", moments, kind.part, low, {})
    shutil.copy(source / "tokenizer.bin", folder)
    config = (source / "config.json").read_text()
    (folder / "config.json").write_text(config.replace("float32", "bfloat16") if master else config)
    write_manifest(folder, json.loads((source / "trainer.json").read_text()) | {"precision": kind.precision})
    shown = {n: (a.astype("<u4") << 16).view("<f4") if low else a for n, a in moments.items()}
    return Made(folder, params, {name: array[: len(params[name[2:]])] for name, array in shown.items()})


def make_version_1(source: Path, folder: Path) -> Path:
    """A checkpoint in f32 as the first version wrote it."""
    shutil.copytree(source, folder)
    trainer = json.loads((folder / "trainer.json").read_text()) | {"version": 1}
    for later in ("precision", "bytes", "best", "bad_in_a_row", "rolled_back_from"):
        del trainer[later]
    (folder / "trainer.json").write_text(json.dumps(trainer, indent=2))
    return folder


def write_manifest(folder: Path, trainer: dict) -> None:
    """trainer.json, with the sizes and checksums of what is there."""
    files = {file.name: file.read_bytes() for file in sorted(folder.iterdir()) if file.name != "trainer.json"}
    trainer["bytes"] = {name: len(content) for name, content in files.items()}
    trainer["crc32"] = {name: zlib.crc32(content) for name, content in files.items()}
    (folder / "trainer.json").write_text(json.dumps(trainer, indent=2))


def flip(path: Path) -> None:
    """Changes the last bit of a file."""
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def _write(
    folder: Path, stem: str, tensors: dict[str, np.ndarray], part: int, bf16: bool, metadata: dict[str, str]
) -> dict[str, str]:
    """The tensors in one file or several; which is in which."""
    parts: list[dict[str, np.ndarray]] = [{}]
    for name, array in tensors.items():
        if parts[-1] and sum(a.nbytes for a in parts[-1].values()) + array.nbytes > part:
            parts.append({})
        parts[-1][name] = array
    places = {}
    for number, some in enumerate(parts, 1):
        file = f"{stem}.safetensors" if len(parts) == 1 else f"{stem}-{number:05}-of-{len(parts):05}.safetensors"
        write_safetensors(folder / file, some, metadata, dict.fromkeys(some, "BF16") if bf16 else None)
        places |= dict.fromkeys(some, file)
    return places
