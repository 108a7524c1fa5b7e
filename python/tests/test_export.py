"""`python -m ironhorse.export`: what it writes, that it writes the same twice, and how it refuses."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zlib

import numpy as np
import pytest
import safetensors
import safetensors.numpy
import torch
from activations import activation_names
from adamw import ten_steps
from cli import rewrite_key
from conftest import SMALL, SMALL_BATCH, SMALL_CONFIG, SMALL_SEQ, Exported, export
from ironhorse.export import main
from ironhorse.formats.bf16 import from_bf16, to_bf16
from ironhorse.formats.llmc import read_debug_state, read_model
from ironhorse.formats.safetensors import read_safetensors
from ironhorse.formats.staging import Staging, write_json
from ironhorse.params import param_shapes
from ironhorse.reference.gpt2 import GPT2
from ironhorse.reference.train import AdamW

NAMES = list(param_shapes(SMALL_CONFIG))
ACTS = activation_names(SMALL_CONFIG)
B, T, V = SMALL_BATCH, SMALL_SEQ, SMALL_CONFIG.vocab_size


@pytest.fixture(scope="module")
def key(small: Exported) -> dict[str, np.ndarray]:
    return safetensors.numpy.load_file(small.key)  # the package itself, not our reader


@pytest.fixture(scope="module")
def meta(small: Exported) -> dict[str, str]:
    with safetensors.safe_open(small.key, "np") as file:
        return file.metadata()


def test_files_and_sizes(small: Exported):
    names = {"gpt2_custom.bin", "gpt2_custom_bf16.bin", "gpt2_custom_debug_state.bin", "gpt2_custom.key.safetensors"}
    assert {path.name for path in small.folder.iterdir()} == names  # and no temporary file
    shapes = {**param_shapes(SMALL_CONFIG), "wte.weight": (256, 12)}  # wte padded
    count = sum(int(np.prod(shape)) for shape in shapes.values())
    assert small.model.stat().st_size == 1024 + 4 * count
    assert small.model_bf16.stat().st_size == 1024 + 2 * count
    assert small.state.stat().st_size == 1024 + 4 * (2 * B * T + B * T * V + 1 + count)
    assert small.report["parameters"] == count - (256 - V) * 12
    assert {file["name"]: file["bytes"] for file in small.report["files"]} == {
        path.name: path.stat().st_size for path in small.folder.iterdir()
    }


def test_key_tensors(key: dict[str, np.ndarray]):
    expected = {"x", "y", "logits", "loss", "losses"}
    expected |= {f"{kind}.{name}" for kind in ("param", "grad", "after") for name in NAMES}
    expected |= {f"{kind}.{name}" for kind in ("act", "dact") for name in ACTS}
    assert set(key) == expected
    for name, shape in param_shapes(SMALL_CONFIG).items():
        assert all(key[f"{kind}.{name}"].shape == shape for kind in ("param", "grad", "after"))
    assert key["x"].dtype == key["y"].dtype == np.int32
    assert all(value.dtype == np.float32 for name, value in key.items() if name not in ("x", "y"))
    assert key["x"].shape == key["y"].shape == (B, T)
    assert key["logits"].shape == (B, T, V) and key["loss"].shape == () and key["losses"].shape == (10,)


def test_key_metadata(meta: dict[str, str], key: dict[str, np.ndarray]):
    assert (meta["format"], meta["version"], meta["model"], meta["dtype"]) == (
        "ironhorse-answer-key",
        "1",
        "gpt2",
        "f32",
    )
    assert meta["torch"] == torch.__version__ and meta["seed"] == "3"
    sizes = {"max_seq_len": 11, "vocab_size": 131, "padded_vocab_size": 256, "n_layer": 2, "n_head": 3, "n_embd": 12}
    assert json.loads(meta["config"]) == sizes
    assert json.loads(meta["acts"]) == ACTS
    assert json.loads(meta["optimizer"]) == {
        "name": "adamw", "lr": 1e-4, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.1, "steps": 10,
        "decay": "matrices",
    }  # fmt: skip
    assert json.loads(meta["crc32"]) == {name: zlib.crc32(value.tobytes()) for name, value in key.items()}


def test_torch_error_is_small_and_says_where_it_is_not(meta: dict[str, str], key: dict[str, np.ndarray]):
    errors = json.loads(meta["torch_error"])
    assert set(errors) == set(key) - {"x", "y"} - {f"param.{name}" for name in NAMES}
    assert all(0 <= error < 1e-5 for name, error in errors.items() if not name.startswith("after."))
    assert 0 < errors["losses"] < 1e-6
    # K's bias has zero gradient; Adam turns its rounding noise into steps, and only there.
    noisy = {name for name, error in errors.items() if error > 1e-5}
    assert noisy <= {f"after.h.{layer}.attn.c_attn.bias" for layer in range(2)}


def test_the_error_in_bf16_is_that_of_its_rounding(meta: dict[str, str]):
    errors, errors_bf16 = json.loads(meta["torch_error"]), json.loads(meta["torch_error_bf16"])
    assert set(errors_bf16) == set(errors)
    for name, error in errors_bf16.items():
        if name.startswith(("act.", "dact.", "grad.", "logits")):
            assert 1e-4 < error < 0.1, name
    assert 0 < errors_bf16["loss"] < 0.01 and 0 < errors_bf16["losses"] < 0.01
    # the weights that AdamW changes are f32: closer than bf16 could hold them
    assert 1e-7 < errors_bf16["after.wte.weight"] < 2**-9


def test_all_files_tell_the_same_story(small: Exported, key: dict[str, np.ndarray]):
    model, model_bf16 = read_model(small.model), read_model(small.model_bf16)
    state = read_debug_state(small.state, SMALL_CONFIG)
    assert model.config == model_bf16.config == SMALL_CONFIG
    for name in NAMES:
        assert np.array_equal(model.params[name], key[f"param.{name}"])
        assert np.array_equal(model_bf16.params[name], from_bf16(to_bf16(key[f"param.{name}"])))
        assert np.array_equal(state.grads[name], key[f"grad.{name}"])
    assert np.array_equal(state.x, key["x"]) and np.array_equal(state.y, key["y"])
    assert np.array_equal(state.logits, key["logits"]) and np.float32(state.loss) == key["loss"] == key["losses"][0]


def test_padding_is_zero(small: Exported):
    padded = np.frombuffer(small.model.read_bytes()[1024:], "<f4")[: 256 * 12].reshape(256, 12)
    assert padded[:V].all() and not padded[V:].any()
    start = 1024 + 4 * (2 * B * T + B * T * V + 1)
    grads = np.frombuffer(small.state.read_bytes()[start:], "<f4")[: 256 * 12].reshape(256, 12)
    assert grads[:V].any() and not grads[V:].any()


def test_the_key_can_be_recomputed_from_the_files(small: Exported, key: dict[str, np.ndarray]):
    """From the .bin weights: logits and loss, then ten AdamW steps written out by hand, in f64."""
    model = GPT2(SMALL_CONFIG)
    model.load_state_dict(
        {name: torch.from_numpy(value.copy()) for name, value in read_model(small.model).params.items()}
    )
    model.double()
    x, y = (torch.from_numpy(key[name]).long() for name in "xy")
    assert np.allclose(model.loss(x, y)[0].detach().numpy(), key["logits"], rtol=0, atol=1e-5)
    ten_steps(model, key)
    for name, p in model.named_parameters():
        got, want = key[f"after.{name}"], p.detach().numpy()
        assert np.linalg.norm(got - want) <= (1e-2 if "c_attn.bias" in name else 1e-6) * np.linalg.norm(want), name


def test_decay_falls_on_matrices_only():
    model = GPT2(SMALL_CONFIG)
    groups = AdamW(weight_decay=0.1).build(model).param_groups
    assert [(group["weight_decay"], {p.dim() for p in group["params"]}) for group in groups] == [(0.1, {2}), (0.0, {1})]
    assert sum(len(group["params"]) for group in groups) == len(NAMES)


def test_same_command_same_bytes(small: Exported, tmp_path):
    again = export(tmp_path / "out", SMALL, B, T, "--seed", "3", "--weight-decay", "0.1")
    for path in small.folder.iterdir():
        assert path.read_bytes() == (again.folder / path.name).read_bytes(), path.name
    other = export(tmp_path / "other", SMALL, B, T, "--seed", "4", "--weight-decay", "0.1", "--no-bf16")
    assert other.model.read_bytes() != small.model.read_bytes()


def test_options(tmp_path):
    bare = export(tmp_path / "bare", SMALL, 1, 1, "--steps", "0", "--no-acts", "--stem", "my", "--init", "gpt2")
    path = bare.folder / "my_custom.key.safetensors"
    file = read_safetensors(path)
    assert not any(name.startswith(("act.", "dact.", "after.", "losses")) for name in file.tensors)
    assert "torch_error" not in file.metadata and "logits" in json.loads(file.metadata["torch_error_bf16"])
    without = export(tmp_path / "without", SMALL, 1, 1, "--steps", "1", "--no-bf16")
    assert "torch_error_bf16" not in read_safetensors(without.key).metadata
    assert json.loads(file.metadata["acts"]) == []
    assert json.loads(file.metadata["optimizer"])["steps"] == 0
    assert bare.report["losses"] == []


@pytest.mark.parametrize(
    ("model", "batch", "seq"),
    [
        ("n_layer=1,n_head=1,n_embd=1,vocab_size=1,max_seq_len=1", 1, 1),
        ("n_layer=1,n_head=1,n_embd=8,vocab_size=128,max_seq_len=4", 2, 4),
    ],
)
def test_smallest_models(tmp_path, model: str, batch: int, seq: int):
    assert np.isfinite(export(tmp_path / "out", model, batch, seq, "--steps", "2").report["loss"])


def test_hugging_face_folder(tmp_path):
    import transformers

    config = transformers.GPT2Config(
        n_layer=1, n_head=2, n_embd=8, vocab_size=40, n_positions=6, bos_token_id=0, eos_token_id=0
    )
    theirs = transformers.GPT2LMHeadModel(config).eval()
    theirs.save_pretrained(tmp_path / "hf")
    ours = export(tmp_path / "out", str(tmp_path / "hf"), 2, 5)
    file = read_safetensors(ours.key)
    with torch.no_grad():
        expected = theirs(torch.from_numpy(file.tensors["x"].astype(np.int64))).logits.numpy()
    assert np.allclose(file.tensors["logits"], expected, rtol=0, atol=1e-5)
    same = export(
        tmp_path / "same", "n_layer=1,n_head=2,n_embd=8,vocab_size=40,max_seq_len=6", 2, 5, "--hf", str(tmp_path / "hf")
    )
    assert same.key.read_bytes() == ours.key.read_bytes()
    assert (
        main(["gpt2", "--model", "d12", "--hf", str(tmp_path / "hf"), "--seq", "5", "--out", str(tmp_path / "no")]) == 2
    )
    assert main(["gpt2", "--hf", str(tmp_path / "hf"), "--seq", "7", "--out", str(tmp_path / "no")]) == 2
    assert not (tmp_path / "no").exists()


def test_rewrite_key(small: Exported, tmp_path):
    copy = tmp_path / "copy"
    rewrite_key(small.key, copy, {})
    assert copy.read_bytes() == small.key.read_bytes()
    name = "act.h.0.mlp.gelu"
    changed = read_safetensors(small.key).tensors[name] + 1
    for refresh in (True, False):
        rewrite_key(small.key, copy, {name: changed}, refresh_crc=refresh)
        file = read_safetensors(copy)
        crc = json.loads(file.metadata["crc32"])
        assert (crc[name] == zlib.crc32(changed.tobytes())) is refresh


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--model", "d13"], "unknown model"),
        (["--model", "d12", "--seq", "1025"], "max_seq_len"),
        (["--model", "d12", "--seq", "0"], "--seq is 0"),
        (["--model", "d12", "--batch", "0"], "--batch is 0"),
        (["--model", "d12", "--batch", "x"], "invalid int"),
        (["--model", "d12", "--steps", "-1"], "--steps"),
        (["--model", "d12", "--seed", "-1"], "--seed"),
        (["--model", "d12", "--lr", "nan"], "--lr"),
        (["--model", "d12", "--beta2", "1"], "--beta2"),
        (["--model", "d12", "--stem", "a/b"], "--stem"),
        (["--model", "d12", "--init", "other"], "--init"),
        (["--model", "d12", "--hf", "nowhere"], "no such folder"),
        (["--model", "./nowhere"], "no such file or folder"),
        (["--model", "nowhere.toml"], "cannot read"),
        (["--model", "n_layer=1,n_head=3,n_embd=8"], "n_head is 3, expected a divisor of n_embd, 8"),
        (["--model", SMALL, "--seq", "4", "--lr", "1e30"], "not finite"),
        (["--model", "n_layer=1,n_head=1,n_embd=500,vocab_size=2147483519"], "out of memory"),
        (["--model", "n_layer=1,n_head=1,n_embd=1000000000"], "expected at most 2^40"),
        ([], "no --model"),
    ],
)
def test_refusals(tmp_path, capsys, arguments: list[str], says: str):
    out = tmp_path / "deep" / "out"
    assert main(["gpt2", *arguments, "--out", str(out)]) == 2
    captured = capsys.readouterr()
    assert says in captured.err and captured.err.count("\n") == 1 and captured.err.startswith("error: ")
    assert captured.out == "" and list(tmp_path.iterdir()) == []


def test_output_that_cannot_be_written(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    for out in ("file", "file/below"):
        assert main(["gpt2", "--model", SMALL, "--seq", "4", "--out", str(tmp_path / out)]) == 2
        assert capsys.readouterr().err.count("\n") == 1


def test_a_failed_export_leaves_the_old_files(tmp_path, monkeypatch):
    good = export(tmp_path / "out", SMALL, 1, 2, "--steps", "0")
    before = {path.name: path.read_bytes() for path in good.folder.iterdir()}

    def disk_full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("ironhorse.export_model.write_key", disk_full)
    assert main(["gpt2", "--model", SMALL, "--seq", "4", "--out", str(good.folder)]) == 2
    assert {path.name: path.read_bytes() for path in good.folder.iterdir()} == before


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_a_failure_after_the_writing_leaves_no_temporary_file(tmp_path, monkeypatch, call: str):
    real, calls = getattr(os, call), []

    def fails_the_second_time(*arguments: object) -> None:
        calls.append(arguments)
        if len(calls) == 2:
            raise OSError(5, "Input/output error")
        real(*arguments)

    monkeypatch.setattr(os, call, fails_the_second_time)
    with pytest.raises(OSError, match="Input/output"), Staging(tmp_path / "new" / "out") as staging:
        for name in ("a", "b", "c"):
            staging.path(name).write_text(name)
    left = [path.name for path in tmp_path.rglob("*") if path.is_file()]
    assert left == ([] if call == "fsync" else ["a"])  # renamed before the failure, and complete
    assert (tmp_path / "new").exists() == (call == "replace")


def test_json_path_is_checked_before_the_work(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("ironhorse.export_model.export_model", lambda *_: pytest.fail("the work was done"))
    for bad in (tmp_path, tmp_path / "missing" / "report.json", tmp_path / "out", tmp_path / "deep"):
        out = tmp_path / ("deep/out" if bad.name == "deep" else "out")
        assert main(["gpt2", "--model", SMALL, "--seq", "4", "--out", str(out), "--json", str(bad)]) == 2
        captured = capsys.readouterr()
        assert captured.err.startswith("error: --json ") and captured.err.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_json_may_lie_in_the_new_folder_and_is_whole_or_old(tmp_path, monkeypatch):
    out = tmp_path / "out"
    arguments = ["gpt2", "--model", SMALL, "--seq", "4", "--steps", "0", "--out", str(out)]
    assert main([*arguments, "--json", str(out / "report.json")]) == 0
    before = (out / "report.json").read_text()
    assert json.loads(before)["seq"] == 4

    def disk_full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", disk_full)
    with pytest.raises(OSError, match="No space"):
        write_json(out / "report.json", {"other": 1})
    assert (out / "report.json").read_text() == before
    assert len(list(out.iterdir())) == 5
    write_json(os.devnull, {})
    assert not os.path.isfile(os.devnull)  # written to, not replaced


def test_an_error_of_torch_is_one_line(tmp_path, capsys, monkeypatch):
    def broken(*_: object) -> None:
        raise RuntimeError("mat1 and mat2 shapes cannot be multiplied\nC++ frames follow")

    monkeypatch.setattr("ironhorse.export_answers.compute_answers", broken)
    arguments = ["gpt2", "--model", SMALL, "--seq", "4", "--out", str(tmp_path / "out")]
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("error: mat1 and mat2") and captured.err.count("\n") == 1
    monkeypatch.setenv("IRONHORSE_DEBUG", "1")
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert "Traceback" in captured.err and captured.err.splitlines()[-1].startswith("error: mat1 and mat2")
    assert list(tmp_path.iterdir()) == []


def run_command(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-m", "ironhorse.export", *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=environment)


def test_as_a_command(tmp_path):
    """The real thing once, in a process of its own: exit code and one line, no traceback."""
    refused = run_command("gpt2", "--model", "d13", "--out", str(tmp_path / "out"))
    assert (refused.returncode, refused.stdout) == (2, "") and refused.stderr.startswith("error: unknown model `d13`")
    helped = run_command("gpt2", "--help")
    assert helped.returncode == 0 and "--weight-decay" in helped.stdout and "n_layer=3,n_head=5" in helped.stdout
