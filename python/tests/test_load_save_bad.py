"""What `ironhorse.load` and `ironhorse.save` refuse: damaged files, wrong arguments, other folders."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import ironhorse
import numpy as np
import pytest
import torch
from conftest import SMALL_CONFIG, Exported
from ironhorse.bridge import Loaded
from ironhorse.errors import Code, FormatError, IronhorseError
from ironhorse.formats.tokenizer import Tokenizer
from load_save_files import KINDS


@pytest.mark.parametrize("name", KINDS)
def test_damaged_files(files: dict[str, Path], tmp_path: Path, name: str):
    good = files[name].read_bytes()
    path = tmp_path / "damaged.bin"
    for damaged in (b"", good[:3], good[:8], good[:100], good[:-1], good + b"\0", b"\xff" * 2000, b"text " * 400):
        path.write_bytes(damaged)
        with pytest.raises(IronhorseError) as caught:
            ironhorse.load(path, config=SMALL_CONFIG)
        assert str(path) in str(caught.value) and "\n" not in str(caught.value)
        assert caught.value.code == Code.INVALID_VALUE


def test_a_changed_number_in_a_key(small: Exported, tmp_path: Path):
    raw = bytearray(small.key.read_bytes())
    raw[-3] ^= 1
    (tmp_path / "k.key.safetensors").write_bytes(raw)
    with pytest.raises(FormatError, match="has crc32"):
        ironhorse.load(tmp_path / "k.key.safetensors")
    assert ironhorse.load(tmp_path / "k.key.safetensors", check=False).kind == "key"


def test_a_changed_checkpoint_is_refused_unless_asked(checkpoint: Path, tmp_path: Path):
    folder = tmp_path / "c"
    shutil.copytree(checkpoint, folder)
    raw = bytearray((folder / "state.safetensors").read_bytes())
    raw[-1] ^= 1
    (folder / "state.safetensors").write_bytes(raw)
    with pytest.raises(FormatError, match="state.safetensors: crc32 is"):
        ironhorse.load(folder)
    assert ironhorse.load(folder, check=False).kind == "checkpoint"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("no-such-file",), "no-such-file: cannot read it"),
        ((5,), "path is of type int"),
        (("a\0b",), "cannot read it"),
        (("x.bin", "jax"), "framework is 'jax'"),
    ],
)
def test_bad_arguments_of_load(arguments: tuple, says: str):
    with pytest.raises(IronhorseError, match=says):
        ironhorse.load(*arguments)
    with pytest.raises(IronhorseError, match="bf16 is 'f32'"):
        ironhorse.load("x.bin", bf16="f32")


def test_bad_folders(hf: Path, tmp_path: Path):
    def refused(says: str) -> None:
        with pytest.raises(FormatError, match=says) as caught:
            ironhorse.load(folder)
        assert "\n" not in str(caught.value)

    folder = tmp_path / "f"
    folder.mkdir()
    refused("folder is without config.json")
    (folder / "checkpoints").mkdir()
    refused("run is without a checkpoint: the run ended before the first was written")
    (folder / "checkpoints").rmdir()
    shutil.copy(hf / "one" / "config.json", folder)
    refused("model.safetensors: cannot read it")
    (folder / "model.safetensors").write_bytes(b"12")
    refused("file size is 2 bytes")
    (folder / "config.json").write_text("{]")
    refused("config.json: content is not valid")
    settings = json.loads((hf / "one" / "config.json").read_text())
    for changes, says in (
        ({"activation_function": "relu"}, 'activation_function is "relu", expected "gelu_new"'),
        ({"n_layer": 1}, "tensor is `transformer.h.1.*`, expected only those of"),
        ({"n_layer": 1000}, "number of tensors is .*, expected at least 12 for each"),
        ({"n_embd": 24}, r"wte.weight` is \[131, 12\], expected \[131, 24\]"),
    ):
        (folder / "config.json").write_text(json.dumps(settings | changes))
        shutil.copy(hf / "one" / "model.safetensors", folder)
        refused(says)
    shutil.rmtree(folder)
    shutil.copytree(hf / "many", folder)
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    part = index["weight_map"]["transformer.ln_f.bias"]
    for table, says in (
        ({"weight_map": index["weight_map"] | {"more": part}}, "tensor `more` is missing, expected in"),
        ({"weight_map": index["weight_map"] | {"transformer.ln_f.bias": "../x"}}, "of files in this folder"),
        ({"weight_map": []}, "weight_map is \\[\\], expected"),
        ({}, "weight_map is missing, expected"),
    ):
        (folder / "model.safetensors.index.json").write_text(json.dumps(table))
        refused(says)
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / part).unlink()
    refused("file is missing, expected in the folder, as model.safetensors.index.json says")


def refuses(path: Path, what: object, says: str, **options: object) -> None:
    before = path.read_bytes() if path.is_file() else None
    there = sorted(os.listdir(path.parent)) if path.parent.is_dir() else None
    with pytest.raises(IronhorseError, match=says) as caught:
        ironhorse.save(path, what, **options)
    assert "\n" not in str(caught.value) and ".tmp" not in str(caught.value)
    if there is not None:
        assert sorted(os.listdir(path.parent)) == there  # nothing half-written, nothing temporary
    assert (path.read_bytes() if path.is_file() else None) == before


def test_bad_arguments_of_save(small: Exported, tmp_path: Path):
    model, state, key = (ironhorse.load(path) for path in (small.model, small.state, small.key))
    tensors = dict(model.tensors)
    old = tmp_path / "old.bin"
    old.write_bytes(b"what was there")
    for target in (old, tmp_path / "new.bin"):
        refuses(target, tensors, "give config=")
        refuses(target, {}, "no tensor wte.weight", config=SMALL_CONFIG)
        refuses(target, tensors, r"wte.weight is \[131, 12\], expected", config="d12")
        refuses(target, tensors | {"more": np.ones(1)}, "more is not a parameter", config=SMALL_CONFIG)
        refuses(target, tensors | {"ln_f.bias": np.ones(12, int)}, "ln_f.bias is int64", config=SMALL_CONFIG)
        refuses(target, tensors | {"ln_f.bias": np.array([None] * 12)}, "object cannot be saved", config=SMALL_CONFIG)
        refuses(target, tensors | {5: np.ones(1)}, "the name 5 is not a string")
        refuses(target, model, "format is 'gguf'", format="gguf")
        refuses(target, model, "dtype is 'f64'", dtype="f64")
        refuses(target, model, "no tensor x to save", format="state")
        refuses(target, model, "there is no tokenizer", format="tokenizer")
        refuses(target, model, "a shard is one row", format="shard")
        refuses(target, model, "only a key that was loaded", format="key")
        refuses(target, model, "only a checkpoint that was loaded|is a file", format="checkpoint")
        refuses(target, np.array([-1]), "tokens from -1")
        refuses(target, np.array([[1]]), r"tokens are int64 \[1, 1\]")
        refuses(target, np.array([0.5]), "expected what load gave")
        refuses(target, object(), "cannot be saved")
        refuses(target, {"tokens": np.array([70000, -1])}, "tokens from -1")
        refuses(target, Tokenizer((b"x" * 256,), 0), "expected 1 to 255")
        refuses(target, Tokenizer((b"x",), 1), "end-of-text token is 1")
    state.tensors["logits"] = state.tensors["logits"][:1]
    refuses(old, state, "logits")
    refuses(tmp_path / "a.safetensors", {"x": torch.ones(2, device="meta")}, "x: this torch.float32 tensor cannot")
    refuses(tmp_path / "a.safetensors", {"x": torch.eye(2).to_sparse()}, "x: this torch.float32 tensor cannot")
    refuses(tmp_path / "a.safetensors", {"x": np.ones(2, complex)}, "complex128 cannot be saved")
    refuses(tmp_path / "a.gguf", model, "give format=")
    refuses(tmp_path / "no" / "such" / "m.bin", model, "make it first")
    refuses(tmp_path, model, "is a folder|holds", format="model")
    with pytest.raises(IronhorseError, match="path is of type int"):
        ironhorse.save(5, model)
    assert isinstance(key, Loaded) and sorted(os.listdir(tmp_path)) == ["old.bin"]


def test_a_folder_with_other_files_is_not_replaced(small: Exported, tmp_path: Path):
    model = ironhorse.load(small.model)
    folder = tmp_path / "thesis"
    folder.mkdir()
    (folder / "thesis.tex").write_text("precious")
    refuses(folder, model, "not replaced because it holds thesis.tex")
    assert os.listdir(folder) == ["thesis.tex"]
    (tmp_path / "file").write_text("")
    refuses(tmp_path / "file", model, "is a file", format="hf")
    wrong = dict(model.tensors) | {"ln_f.bias": np.ones(12)}  # f64
    refuses(tmp_path / "new", wrong, "F64; weights are", config=SMALL_CONFIG)


def test_the_name_of_the_metadata_is_no_tensors(tmp_path):
    with pytest.raises(ironhorse.IronhorseError, match="__metadata__"):
        ironhorse.save(tmp_path / "a.safetensors", {"__metadata__": np.zeros(2, np.float32)})
    assert list(tmp_path.iterdir()) == []


def test_masked_arrays_are_refused(tmp_path):
    with pytest.raises(FormatError, match="a: a masked array, and files hold no masks"):
        ironhorse.save(tmp_path / "a.safetensors", {"a": np.ma.masked_array(np.ones(3), mask=[0, 1, 0])})
    assert os.listdir(tmp_path) == []
