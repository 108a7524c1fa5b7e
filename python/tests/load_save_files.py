"""Files of every kind, for the tests of `ironhorse.load` and `ironhorse.save`; conftest.py has the fixtures."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import safetensors.torch
import torch
from cli import newest_checkpoint
from conftest import Exported
from ironhorse import _native
from ironhorse.formats.llmc import read_model
from ironhorse.formats.shards import write_shard
from ironhorse.formats.tokenizer import Tokenizer, write_tokenizer


def write_hf_folders(small: Exported, folder: Path) -> None:
    """The small model as transformers writes it."""
    import transformers

    model = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(vocab_size=131, n_positions=11, n_embd=12, n_layer=2, n_head=3)
    )
    params = {name: torch.from_numpy(array) for name, array in read_model(small.model).params.items()}
    from ironhorse.reference.hf import to_hf_state

    model.load_state_dict(to_hf_state(params))
    model.save_pretrained(folder / "one")
    model.save_pretrained(folder / "many", max_shard_size="10KB")
    model.bfloat16().save_pretrained(folder / "bf16")
    assert (folder / "many" / "model.safetensors.index.json").is_file()


def trained_checkpoint(out: Path) -> Path:
    """A checkpoint that `ironhorse train --out` wrote."""
    sizes = "n_layer=1,n_head=2,n_embd=32,vocab_size=256,max_seq_len=32"
    line = f"ironhorse train --model {sizes} --batch 2 --seq 16 --steps 2 --sample-tokens 0 --device cpu --out {out}"
    assert _native.command(line.split()) == 0
    return newest_checkpoint(out)


def write_files(small: Exported, folder: Path) -> dict[str, Path]:
    """A file of each kind that is one file, by the names of KINDS."""
    write_shard(folder / "narrow.bin", np.array([1, 50256, 65535]))
    write_shard(folder / "wide.bin", np.array([1, 2]), wide=True)
    write_tokenizer(folder / "tokenizer.bin", Tokenizer((b"a", b"\xff\x00", b"<|endoftext|>"), 2))
    values = {"b": torch.randn(3, 2).bfloat16(), "a": torch.arange(4), "half": torch.randn(5).half()}
    safetensors.torch.save_file(values, folder / "any.safetensors", {"note": "x"})
    return {
        "model": small.model, "bf16": small.model_bf16, "state": small.state, "key": small.key,
        "narrow": folder / "narrow.bin", "wide": folder / "wide.bin", "tokenizer": folder / "tokenizer.bin",
        "safetensors": folder / "any.safetensors",
    }  # fmt: skip


KINDS = {
    "model": "model", "bf16": "model", "state": "state", "key": "key", "narrow": "shard", "wide": "shard",
    "tokenizer": "tokenizer", "safetensors": "safetensors",
}  # fmt: skip


def same_folders(one: Path, two: Path) -> bool:
    names = sorted(os.listdir(one))
    return names == sorted(os.listdir(two)) and all((one / n).read_bytes() == (two / n).read_bytes() for n in names)
