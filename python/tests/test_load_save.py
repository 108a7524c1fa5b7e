"""`ironhorse.load` and `ironhorse.save`: every format there and back, as numpy and torch."""

from __future__ import annotations

import os
import shutil
from dataclasses import replace
from pathlib import Path

import ironhorse
import numpy as np
import pytest
import safetensors.torch
import torch
from conftest import SMALL_CONFIG, Exported
from ironhorse import _native
from ironhorse.errors import Code, FormatError, IronhorseError
from ironhorse.formats.bf16 import from_bf16, to_bf16
from ironhorse.formats.llmc import read_model
from ironhorse.formats.safetensors import read_safetensors
from ironhorse.formats.tokenizer import Tokenizer
from ironhorse.params import param_shapes
from load_save_files import KINDS, same_folders

NAMES = list(param_shapes(SMALL_CONFIG))


# ---- there and back --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("framework", ["numpy", "torch"])
@pytest.mark.parametrize("looked_at", [False, True])
@pytest.mark.parametrize("name", KINDS)
def test_a_file_round_trips(files: dict[str, Path], tmp_path: Path, name: str, framework: str, looked_at: bool):
    loaded = ironhorse.load(files[name], framework)
    assert (loaded.kind, loaded.path) == (KINDS[name], files[name])
    if looked_at:
        kind = torch.Tensor if framework == "torch" else np.ndarray
        assert all(isinstance(value, kind) for value in loaded.tensors.values())
    target = tmp_path / "again" / files[name].name
    target.parent.mkdir()
    saved = ironhorse.save(target, loaded)
    assert target.read_bytes() == files[name].read_bytes()
    assert (saved.kind, saved.path, saved.bytes) == (KINDS[name], target, target.stat().st_size)
    assert os.listdir(target.parent) == [target.name]
    assert repr(loaded).count("\n") == 0 and KINDS[name] in str(loaded) and str(target) in str(saved)
    ironhorse.save(target, ironhorse.load(target, config=loaded.config))  # onto itself, while it is mapped
    assert target.read_bytes() == files[name].read_bytes()


def test_names_and_shapes_are_those_of_the_table(small: Exported):
    key = read_safetensors(small.key).tensors
    model, state = ironhorse.load(small.model), ironhorse.load(small.state)
    assert model.config == state.config == SMALL_CONFIG and (model.dtype, state.dtype) == ("f32", "f32")
    assert list(model.tensors) == NAMES == list(model.params) == list(ironhorse.load(small.key).params)
    for name, shape in param_shapes(SMALL_CONFIG).items():
        assert model.tensors[name].shape == model.tensors.shape(name) == shape
        assert np.array_equal(model.tensors[name], key[f"param.{name}"])
        assert np.array_equal(state.tensors[f"grad.{name}"], key[f"grad.{name}"])
    for name in ("x", "y", "logits", "loss"):
        assert np.array_equal(state.tensors[name], key[name]) and state.tensors[name].dtype == key[name].dtype
    loaded = ironhorse.load(small.key)
    assert loaded.config == SMALL_CONFIG and loaded.meta["format"] == "ironhorse-answer-key"
    assert len(state.params) == 0


def test_bf16_four_ways(small: Exported, monkeypatch: pytest.MonkeyPatch):
    exact = {name: from_bf16(to_bf16(array)) for name, array in read_model(small.model).params.items()}
    converted, bits = ironhorse.load(small.model_bf16), ironhorse.load(small.model_bf16, bf16="bits")
    tensors = ironhorse.load(small.model_bf16, "torch")
    assert converted.dtype == bits.dtype == tensors.dtype == "bf16"
    for name, array in exact.items():
        assert converted.tensors[name].dtype == np.float32 and np.array_equal(converted.tensors[name], array)
        assert bits.tensors[name].dtype == np.uint16 and np.array_equal(from_bf16(bits.tensors[name]), array)
        assert tensors.tensors[name].dtype == torch.bfloat16
        assert np.array_equal(tensors.tensors[name].float().numpy(), array)
    try:
        import ml_dtypes
    except ImportError:
        with pytest.raises(IronhorseError, match="pip install ml_dtypes") as caught:
            ironhorse.load(small.model_bf16, bf16="ml_dtypes")
        assert caught.value.code == Code.NOT_AVAILABLE
    else:
        other = ironhorse.load(small.model_bf16, bf16="ml_dtypes").tensors["ln_f.bias"]
        assert other.dtype == ml_dtypes.bfloat16 and np.array_equal(other.astype(np.float32), exact["ln_f.bias"])


def test_arrays_are_mapped_and_the_file_stays(small: Exported, tmp_path: Path):
    path = tmp_path / "m.bin"
    shutil.copy(small.model, path)
    model = ironhorse.load(path)
    bias = model.tensors["h.1.ln_2.bias"]
    assert not bias.flags.owndata and model.tensors["h.1.ln_2.bias"] is bias
    bias[3] = 7
    assert ironhorse.load(path).tensors["h.1.ln_2.bias"][3] != 7
    model.tensors["ln_f.bias"] = np.ones(12)
    ironhorse.save(tmp_path / "n.bin", model)
    again = ironhorse.load(tmp_path / "n.bin", "torch").tensors
    assert again["h.1.ln_2.bias"][3] == 7 and again["ln_f.bias"].tolist() == [1] * 12
    assert path.read_bytes() == small.model.read_bytes()


# ---- folders ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["one", "many", "bf16"])
def test_hugging_face_folders(small: Exported, hf: Path, tmp_path: Path, name: str):
    loaded = ironhorse.load(hf / name)
    assert (loaded.kind, loaded.config, list(loaded.tensors)) == ("hf", SMALL_CONFIG, NAMES)
    assert loaded.meta["model_type"] == "gpt2" and loaded.dtype == ("bf16" if name == "bf16" else "f32")
    source = ironhorse.load(small.model_bf16 if name == "bf16" else small.model)
    for key, array in source.tensors.items():
        assert np.array_equal(loaded.tensors[key], array), key
    ironhorse.save(tmp_path / "again", loaded)
    again = tmp_path / "again"
    if name != "many":
        for file in ("config.json", "model.safetensors"):
            assert (again / file).read_bytes() == (hf / name / file).read_bytes(), file
    ironhorse.save(tmp_path / "m.bin", loaded)
    assert (tmp_path / "m.bin").read_bytes() == source.path.read_bytes()
    assert ironhorse.load(again / "model.safetensors").kind == "hf"
    import transformers

    model = transformers.GPT2LMHeadModel.from_pretrained(again)
    assert torch.equal(model.transformer.wte.weight.float(), torch.from_numpy(np.array(source.tensors["wte.weight"])))
    if name != "bf16":
        assert ironhorse.verify(small.key, model=again)


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_a_folder_is_what_convert_writes(small: Exported, tmp_path: Path, dtype: str):
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    assert _native.command(["ironhorse", "convert", str(small.model), str(theirs), "--dtype", dtype]) == 0
    ironhorse.save(ours, ironhorse.load(small.model), dtype=dtype)
    assert same_folders(ours, theirs)
    ironhorse.save(ours, ironhorse.load(ours))  # replaced whole
    assert same_folders(ours, theirs)
    assert _native.command(["ironhorse", "convert", str(ours), str(tmp_path / "m.bin"), "--dtype", dtype]) == 0
    assert (tmp_path / "m.bin").read_bytes() == (small.model if dtype == "f32" else small.model_bf16).read_bytes()


def test_checkpoints(checkpoint: Path, tmp_path: Path):
    loaded = ironhorse.load(checkpoint)
    assert loaded.kind == "checkpoint" and loaded.meta["step"] == 2 and len(loaded.tokenizer.tokens) == 256
    assert len(loaded.tensors) == 3 * len(loaded.params) and loaded.config.n_layer == 1
    assert loaded.tensors["m.wte.weight"].shape == (256, 32) and loaded.tensors["v.ln_f.bias"].any()
    assert "tokenizer: 256 tokens" in str(loaded)
    ironhorse.save(tmp_path / "again", loaded)
    assert same_folders(checkpoint, tmp_path / "again")
    loaded.tensors["ln_f.bias"] = loaded.tensors["ln_f.bias"] + np.float32(1)
    ironhorse.save(tmp_path / "again", loaded)
    assert np.array_equal(ironhorse.load(tmp_path / "again").tensors["ln_f.bias"], loaded.tensors["ln_f.bias"])
    assert _native.command(["ironhorse", "convert", str(tmp_path / "again"), str(tmp_path / "m.bin")]) == 0
    assert list(ironhorse.load(tmp_path / "m.bin").tensors) == list(loaded.params)
    ironhorse.save(tmp_path / "plain", loaded, format="hf")
    assert ironhorse.load(tmp_path / "plain").kind == "hf"


# ---- from tensors ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("framework", ["numpy", "torch"])
def test_a_model_from_tensors(small: Exported, tmp_path: Path, framework: str):
    tensors = dict(ironhorse.load(small.model, framework).tensors)
    sizes = "n_layer=2,n_head=3,n_embd=12,vocab_size=131,max_seq_len=11"
    ironhorse.save(tmp_path / "a.bin", tensors, config=SMALL_CONFIG)
    ironhorse.save(tmp_path / "b.bin", tensors, config=sizes, dtype="bf16")
    assert (tmp_path / "a.bin").read_bytes() == small.model.read_bytes()
    assert (tmp_path / "b.bin").read_bytes() == small.model_bf16.read_bytes()
    ironhorse.save(tmp_path / "h", tensors, config=SMALL_CONFIG)
    assert list(ironhorse.load(tmp_path / "h").tensors) == NAMES
    if framework == "torch":
        low = {name: tensor.bfloat16().requires_grad_() for name, tensor in tensors.items()}
        ironhorse.save(tmp_path / "c.bin", low, config=SMALL_CONFIG)
        assert (tmp_path / "c.bin").read_bytes() == small.model_bf16.read_bytes()


def test_torch_tensors_of_every_type(tmp_path: Path):
    types = (
        torch.float64,
        torch.float32,
        torch.float16,
        torch.bfloat16,
        torch.int64,
        torch.int8,
        torch.uint8,
        torch.bool,
    )
    tensors = {str(kind): (torch.randn(3, 4) * 9).to(kind).t() for kind in types}
    tensors |= {"scalar": torch.tensor(2.5), "empty": torch.zeros(0, 3), "param": torch.nn.Parameter(torch.ones(2))}
    ironhorse.save(tmp_path / "t.safetensors", tensors, metadata={"a": "b"})
    theirs = safetensors.torch.load_file(tmp_path / "t.safetensors")
    ours = ironhorse.load(tmp_path / "t.safetensors", "torch")
    assert ours.meta == {"a": "b"}
    for name, tensor in tensors.items():
        for other in (theirs[name], ours.tensors[name]):
            assert other.dtype == tensor.dtype and torch.equal(other, tensor.detach()), name


def test_a_changed_key_gets_new_checksums(small: Exported, tmp_path: Path):
    key = ironhorse.load(small.key)
    key.tensors["act.h.1.ln_2"][0, 0, 0] += 1
    ironhorse.save(tmp_path / "k.key.safetensors", key)
    ironhorse.load(tmp_path / "k.key.safetensors")  # its checksums agree
    report = ironhorse.verify(tmp_path / "k.key.safetensors")
    assert (report.first_wrong.op, report.first_wrong.tensor) == ("residual_layernorm_fwd", "act.h.1.ln_2")


def test_shards_and_tokenizers(tmp_path: Path):
    ironhorse.save(tmp_path / "a.bin", np.array([1, 2, 70000]))
    assert ironhorse.load(tmp_path / "a.bin").tensors["tokens"].tolist() == [1, 2, 70000]
    ironhorse.save(tmp_path / "a.bin", torch.tensor([1, 2], dtype=torch.int64))
    assert ironhorse.load(tmp_path / "a.bin").tensors["tokens"].dtype == np.uint16
    ironhorse.save(tmp_path / "a.bin", [5, 6])
    assert ironhorse.load(tmp_path / "a.bin", "torch").tensors["tokens"].tolist() == [5, 6]
    ironhorse.save(tmp_path / "empty.bin", np.zeros(0, np.uint16))
    assert ironhorse.load(tmp_path / "empty.bin").tensors["tokens"].size == 0
    tokenizer = Tokenizer((b"a", b"b"), 0)
    ironhorse.save(tmp_path / "t.bin", tokenizer)
    assert ironhorse.load(tmp_path / "t.bin").tokenizer == tokenizer


def test_a_third_number_that_looks_like_json(tmp_path: Path):
    """123 is the code of `{`, which opens the JSON of a safetensors file at the same place."""
    ironhorse.save(tmp_path / "s.bin", np.arange(123))
    assert ironhorse.load(tmp_path / "s.bin").kind == "shard"
    config = replace(SMALL_CONFIG, max_seq_len=123)
    tensors = {name: np.zeros(shape, np.float32) for name, shape in param_shapes(config).items()}
    ironhorse.save(tmp_path / "m.bin", tensors, config=config)
    assert ironhorse.load(tmp_path / "m.bin").config == config


def test_unaligned_tensors(tmp_path: Path):
    """A header of odd length puts every number at an odd place; torch gets a copy."""
    text = b'{"a":{"dtype":"F32","shape":[3],"data_offsets":[0,12]}}'
    text += b" " * (1 - len(text) % 2)
    data = np.arange(3, dtype=np.float32)
    (tmp_path / "a.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + data.tobytes())
    assert np.array_equal(ironhorse.load(tmp_path / "a.safetensors").tensors["a"], data)
    assert ironhorse.load(tmp_path / "a.safetensors", "torch").tensors["a"].tolist() == [0, 1, 2]


def test_a_state_finds_its_sizes(small: Exported, tmp_path: Path):
    alone = tmp_path / "alone_debug_state.bin"
    shutil.copy(small.state, alone)
    with pytest.raises(FormatError, match="give config="):
        ironhorse.load(alone)
    for config in (SMALL_CONFIG, small.model, "n_layer=2,n_head=3,n_embd=12,vocab_size=131,max_seq_len=11"):
        assert ironhorse.load(alone, config=config).config == SMALL_CONFIG
    with pytest.raises(FormatError, match="file size is .* bytes, expected"):
        ironhorse.load(alone, config="d12")


def test_a_link_stays_a_link(small: Exported, tmp_path: Path):
    (tmp_path / "real").mkdir()
    (tmp_path / "link.bin").symlink_to(tmp_path / "real" / "m.bin")
    ironhorse.save(tmp_path / "link.bin", ironhorse.load(small.model))
    assert (tmp_path / "link.bin").is_symlink()
    assert (tmp_path / "real" / "m.bin").read_bytes() == small.model.read_bytes()


def test_tensors_are_a_table(small: Exported):
    loaded = ironhorse.load(small.key)
    assert "... and" in str(loaded) and len(str(loaded.tensors).splitlines()) == len(loaded.tensors) + 1
    del loaded.tensors["x"]
    assert "x" not in loaded.tensors and len(loaded.tensors) == len(read_safetensors(small.key).tensors) - 1
    with pytest.raises(KeyError):
        loaded.tensors["x"]
    loaded.tensors["new"] = np.ones(3)
    assert loaded.tensors.shape("new") == (3,) and list(loaded.tensors)[-1] == "new"
    assert loaded.tensors != ironhorse.load(small.key).tensors and repr(loaded.tensors).startswith("<Tensors: ")
