"""`ironhorse.verify` and `ironhorse.export` in this process. Loading and saving: test_load_save*.py."""

from __future__ import annotations

import inspect
import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import ironhorse
import pytest
from cli import one_changed, rewrite_key
from conftest import SMALL, SMALL_BATCH, SMALL_CONFIG, SMALL_SEQ, Exported
from ironhorse import _native
from ironhorse.errors import Code, InvalidValueError, IronhorseError, NotAvailableError, OutOfMemoryError
from ironhorse.formats.llmc import read_model, write_model
from ironhorse.formats.safetensors import read_safetensors

# ---- verify ----------------------------------------------------------------------------------------------------


def test_a_key_agrees_and_nothing_is_printed(small: Exported, capfd: pytest.CaptureFixture[str]):
    report = ironhorse.verify(small.key)
    assert report.passed and report and report.first_wrong is None and report.wrong == ()
    assert (report.compared_with, report.device, report.dtype, report.ops) == ("answers", "cpu", "f32", ())
    assert 0 < report.seconds < 60 and report.tolerances == "fixed"
    key = read_safetensors(small.key).tensors
    assert {"logits", "loss", "losses", "act.h.1.mlp.gelu", "grad.wte.weight", "after.ln_f.bias"} <= {
        tensor.name for tensor in report.tensors
    }
    for tensor in report.tensors:
        assert tensor.ok and tensor.error <= tensor.allowed and tensor.shape == key[tensor.name].shape, tensor
        assert tensor.kind == tensor.name.split(".")[0] and tensor.worst is not None
    assert report.losses == pytest.approx(key["losses"].tolist(), rel=1e-5)
    captured = capfd.readouterr()
    assert (captured.out, captured.err) == ("", "")


def test_it_finds_what_the_command_finds(small: Exported, tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    assert _native.command(["ironhorse", "verify", "--key", str(small.key), "--json", str(tmp_path / "r.json")]) == 0
    printed = capfd.readouterr().out
    report, command = ironhorse.verify(small.key), json.loads((tmp_path / "r.json").read_text())
    assert str(report) + "\n" == printed
    assert [(t.name, t.error, t.allowed, t.op) for t in report.tensors] == [
        (t["name"], t["rel_error"], t["tolerance"], t["op"]) for t in command["tensors"]
    ]


def test_a_model_and_its_state_agree(small: Exported):
    report = ironhorse.verify(model=small.model, state=str(small.state), steps=2)
    assert report.passed and len(report.losses) == 2
    assert report.hints[0].startswith("losses, not compared: ") and report.hints[0] in str(report)


@pytest.mark.parametrize(
    ("name", "index", "op", "origin", "section"),
    [
        ("act.h.1.mlp.c_fc", (1, 3, 5), "linear_fwd", "h.1.mlp.c_fc", "forward"),
        ("act.h.0.attn.sdpa", (0, 6, 11), "attention_fwd", "h.0.attn.sdpa", "forward"),
        ("grad.h.0.ln_1.weight", (7,), "layernorm_bwd", "h.0.ln_1", "backward"),
        ("after.wpe.weight", (10, 0), "adamw", "adamw", "update"),
    ],
)
def test_the_first_wrong_op_is_named(small: Exported, tmp_path: Path, name, index, op, origin, section):
    was = read_safetensors(small.key).tensors[name]
    wrong = tmp_path / "wrong.key.safetensors"
    rewrite_key(small.key, wrong, {name: one_changed(was, index)})
    report = ironhorse.verify(key=wrong)
    assert not report.passed and not report
    assert [tensor.name for tensor in report.wrong] == [name]
    first = report.first_wrong
    assert (first.tensor, first.op, first.origin, first.section) == (name, op, origin, section)
    assert first.element.index == index
    assert first.element.expected == pytest.approx(float(one_changed(was, index)[index]), rel=1e-6)
    assert f"first wrong op: {op} at {origin} ({section}), tensor {name}" in str(report)
    assert op in repr(report) and "FAILED" in repr(report)


def test_a_wrong_weight_is_named(small: Exported, tmp_path: Path):
    model = read_model(small.model)
    model.params["h.1.ln_2.bias"] = one_changed(model.params["h.1.ln_2.bias"], (3,))
    write_model(tmp_path / "m.bin", model.config, model.params)
    for arguments in ({"key": small.key}, {"state": small.state}):
        report = ironhorse.verify(model=tmp_path / "m.bin", **arguments)
        assert not report.passed
        assert (report.first_wrong.op, report.first_wrong.tensor) == ("file", "param.h.1.ln_2.bias")
    assert any("--key" in hint for hint in report.hints)  # what to type next


def test_a_damaged_key_is_named(small: Exported, tmp_path: Path):
    was = read_safetensors(small.key).tensors["grad.wpe.weight"]
    changed = {"grad.wpe.weight": one_changed(was, (0, 0))}
    rewrite_key(small.key, tmp_path / "d.key.safetensors", changed, refresh_crc=False)
    report = ironhorse.verify(tmp_path / "d.key.safetensors")
    assert report.first_wrong.section == "file" and report.first_wrong.tensor == "grad.wpe.weight"
    assert "checksum" in report.first_wrong.note


def test_lockstep(small: Exported):
    report = ironhorse.verify(small.key, lockstep=True, steps=1)
    assert report.passed and report.compared_with == "cpu" and report.tensors == () and report.losses == ()
    assert {"layernorm_fwd", "attention_bwd", "adamw"} <= {op.op for op in report.ops}
    assert all(op.ok and op.count > 0 and op.error <= op.allowed and op.where for op in report.ops)
    assert "cpu agrees with cpu" in str(report) and "kinds of ops" in repr(report)
    assert ironhorse.verify(model=SMALL, lockstep=True, batch=1, seq=3)


def test_the_report_is_plain(small: Exported):
    report = ironhorse.verify(small.key, steps=0)
    plain = json.loads(json.dumps(report.to_dict()))
    assert plain["passed"] is True and plain["tensors"][0]["name"] == "act.embed" and "text" not in plain
    assert repr(report).count("\n") == 0 and str(report).splitlines()[0].split()[0] == "tensor"
    assert not hasattr(report, "_repr_html_")  # a notebook shows the text

    class Printer:
        shown = ""

        def text(self, text: str) -> None:
            self.shown += text

    printer = Printer()
    report._repr_pretty_(printer, False)
    assert printer.shown == str(report)


@pytest.mark.parametrize(
    ("arguments", "kind", "says"),
    [
        ({"key": "no-such.safetensors"}, InvalidValueError, "verify: no-such.safetensors: cannot open"),
        ({}, InvalidValueError, "give state FILE with model, or key FILE"),
        ({"state": "s.bin"}, InvalidValueError, "model"),
        ({"steps": -1}, InvalidValueError, "'-1' for 'steps"),
        ({"steps": 11}, InvalidValueError, "steps is 11, expected at most 10"),
        ({"steps": 1.5}, InvalidValueError, "1.5"),
        ({"tolerance": float("nan")}, InvalidValueError, "tolerance"),
        ({"loss_tolerance": -1}, InvalidValueError, "'loss_tolerance"),
        ({"device": "gpu"}, InvalidValueError, "expected auto, cpu, cuda or cuda:N"),
        ({"device": "cuda:99"}, NotAvailableError, "cuda engine"),
        ({"dtype": "fp8", "device": "cpu"}, InvalidValueError, "use dtype bf16"),
        ({"dtype": "f33"}, InvalidValueError, "f33"),
        ({"recompute": "all"}, InvalidValueError, "recompute"),
        ({"batch": 3}, InvalidValueError, "batch"),
        ({"threads": "many"}, InvalidValueError, "threads"),
        ({"key": 5}, InvalidValueError, "key is of type int"),
        ({"key": "a\0b"}, InvalidValueError, "NUL"),
        ({"key": None, "model": "d48", "lockstep": True, "batch": 10**5, "seq": 1024}, OutOfMemoryError, "memory"),
    ],
)
def test_what_cannot_run_is_an_error(small: Exported, capfd: pytest.CaptureFixture[str], arguments, kind, says):
    key = {} if not arguments or "state" in arguments else {"key": small.key}
    with pytest.raises(kind) as caught:
        ironhorse.verify(**key | arguments)
    assert says in str(caught.value) and "\n" not in str(caught.value)
    assert isinstance(caught.value, IronhorseError) and caught.value.code == kind.code != Code.SUCCESS
    captured = capfd.readouterr()
    assert (captured.out, captured.err) == ("", "")


@pytest.mark.parametrize("cut", [0, 7, 100, -1])
def test_a_damaged_file_is_an_error(small: Exported, tmp_path: Path, cut: int):
    for name in ("key", "model", "state"):
        good = {"key": small.key} if name == "key" else {"model": small.model, "state": small.state}
        bad = tmp_path / good[name].name
        bad.write_bytes(good[name].read_bytes()[:cut])
        with pytest.raises(InvalidValueError, match=bad.name):
            ironhorse.verify(**good | {name: bad})


def test_other_threads_run_meanwhile(small: Exported):
    """A call that computes lets this thread have turn after turn; one that kept the lock would leave it one or two.

    One such call proves it. A busy machine may give this thread no time during a short call, so there are many.
    """
    enough, turns, most = 25, 0, 0

    def calls() -> None:
        nonlocal most
        for _ in range(500):
            before = turns
            ironhorse.verify(small.key)
            most = max(most, turns - before)
            if most >= enough:
                break

    interval = sys.getswitchinterval()
    sys.setswitchinterval(100)  # a thread that keeps the lock keeps it to the end
    try:
        thread = threading.Thread(target=calls)
        thread.start()
        while thread.is_alive():
            turns += 1
            time.sleep(0)
    finally:
        sys.setswitchinterval(interval)
    assert most >= enough


# ---- export ----------------------------------------------------------------------------------------------------


def test_export_writes_what_the_command_writes(small: Exported, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    made = ironhorse.export(
        "gpt2", model=SMALL, out=tmp_path / "out", batch=SMALL_BATCH, seq=SMALL_SEQ, seed=3, weight_decay=0.1
    )
    assert capsys.readouterr().out == ""
    for name in ("key", "model", "model_bf16", "state"):
        assert getattr(made, name).read_bytes() == getattr(small, name).read_bytes(), name
    assert (made.kind, made.name, made.batch, made.seq, made.seed) == ("gpt2", "custom", SMALL_BATCH, SMALL_SEQ, 3)
    assert made.config == SMALL_CONFIG.to_dict() and made.parameters == small.report["parameters"]
    assert made.loss == small.report["loss"] and list(made.losses) == small.report["losses"]
    assert [file.bytes for file in made.files] == [file.path.stat().st_size for file in made.files]
    assert str(made.key) in str(made) and "weights, bf16" in str(made) and repr(made).count("\n") == 0
    json.dumps(made.to_dict())
    assert ironhorse.verify(made.key)


def test_export_takes_a_config_and_leaves_out_what_is_not_wanted(tmp_path: Path):
    made = ironhorse.export(model=SMALL_CONFIG, out=tmp_path, batch=1, seq=2, steps=0, acts=False, bf16=False, stem="a")
    assert made.key.name == "a_custom.key.safetensors" and made.losses == ()
    assert not any(name.startswith("act.") for name in read_safetensors(made.key).tensors)


def test_export_is_a_module_and_a_function():
    from ironhorse import export
    from ironhorse.export import KINDS, Exported, main

    assert export is sys.modules["ironhorse.export"] is ironhorse.export and callable(export)
    assert callable(main) and "gpt2" in KINDS and inspect.signature(export).return_annotation == Exported.__name__
    assert list(inspect.signature(export).parameters)[:3] == ["kind", "model", "out"]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"kind": "gpt3"}, "export: kind is 'gpt3'; expected one of gpt2"),
        ({"seq": 12}, "export: seq is 12, but max_seq_len of this model is 11"),
        ({"batch": 0}, "batch is 0"),
        ({"batch": "4"}, "batch is '4', expected a number"),
        ({"weight_decay": -1}, "weight_decay is -1"),
        ({"model": None}, "no model"),
        ({"model": 12}, "model is of type int"),
        ({"model": "d13"}, "unknown model `d13`"),
        ({"init": "zeros"}, "init is 'zeros'"),
        ({"stem": "a/b"}, "stem is 'a/b'"),
        ({"hf": "./no-such-folder"}, "no such folder"),
    ],
)
def test_export_refuses(tmp_path: Path, arguments, says: str):
    with pytest.raises(IronhorseError) as caught:
        ironhorse.export(**{"kind": "gpt2", "model": SMALL, "out": tmp_path / "out", "seq": 3} | arguments)
    assert says in str(caught.value) and "--" not in str(caught.value)
    assert not (tmp_path / "out").exists()
    (tmp_path / "file").write_text("")
    with pytest.raises(IronhorseError, match="out"):
        ironhorse.export(model=SMALL, out=tmp_path / "file", seq=3)


# ---- the package -----------------------------------------------------------------------------------------------


def test_lazy_names_cost_nothing_and_need_no_torch(tmp_path: Path, small: Exported):
    assert {"export", "jit", "load", "nn", "ops", "save", "torch", "verify"} <= set(dir(ironhorse))
    code = f"""
import sys
sys.modules["torch"] = None
import ironhorse
from ironhorse import *
assert callable(load) and callable(save) and callable(verify) and callable(export)
model = load({str(small.model_bf16)!r})
save("m.safetensors", model)
assert verify({str(small.key)!r})
for what in (lambda: load({str(small.model)!r}, "torch"), lambda: export(model="d12", out="out")):
    try:
        what()
    except ironhorse.IronhorseError as error:
        assert error.code.name == "NOT_AVAILABLE" and "torch" in str(error), error
    else:
        raise SystemExit("no error")
try:
    ironhorse.no_such_thing
except AttributeError as error:
    assert "no_such_thing" in str(error)
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert os.listdir(tmp_path) == ["m.safetensors"]
    light = "import sys, ironhorse; print('numpy' in sys.modules, 'ironhorse.bridge' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", light], capture_output=True, text=True, timeout=120)
    assert done.stdout.split() == ["False", "False"]
