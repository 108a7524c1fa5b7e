"""`Model.train` and `Model.tune`: the trainer of `ironhorse train`, its settings, its files, and who may stop it."""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import ironhorse
import numpy as np
import pytest
from ironhorse.errors import InvalidValueError, IronhorseError
from ironhorse.model import _bars

pytest.importorskip("transformers")

from cli import ironhorse as command  # noqa: E402
from lm_models import sentence, write_model  # noqa: E402

SETTINGS: dict[str, Any] = {"batch": 4, "seq": 16, "lr": 3e-3, "val_batches": 2, "sample_tokens": 0, "progress": False}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("gpt2")
    write_model(made, "gpt2")
    return made


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A text, in a folder of the test's own where prepared data and runs go."""
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "text.txt"
    path.write_text("\n".join(sentence(seed % 5, 12) for seed in range(60)) + "\n")
    return path


@pytest.fixture
def model(folder: Path) -> ironhorse.Model:
    return ironhorse.Model.from_pretrained(folder, device="cpu")


def steps_of(run: Path) -> list[dict]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def assert_same_weights(a: ironhorse.Model, b: ironhorse.Model) -> None:
    ours, theirs = a.state_dict(), b.state_dict()
    assert set(ours) == set(theirs) and all(np.array_equal(ours[name], theirs[name]) for name in ours)


def test_training_lowers_the_loss_and_leaves_a_run(model, data: Path, tmp_path: Path) -> None:
    ids = model.encode(data.read_text())[:40]
    before, weights = model.loss(ids), model.state_dict()["wte.weight"].copy()
    lines: list[dict] = []
    report = model.train(data, out=tmp_path / "run", steps=30, val_every=10, callback=lines.append, **SETTINGS)
    assert (report.ending, report.steps, report.stopped_by) == ("done", 30, None)
    assert model.loss(ids) < before - 1 and not np.array_equal(model.state_dict()["wte.weight"], weights)
    assert lines == steps_of(report.run)
    assert [line["step"] for line in lines] == list(range(30))
    assert [line["step"] for line in lines if "val_loss" in line] == [0, 10, 20, 29]
    for line in lines:
        assert {"step", "loss", "lr", "grad_norm", "tokens_per_s"} <= set(line) and line["tokens"] == 64
    assert report.last_loss == pytest.approx(lines[-1]["loss"]) and report.first_val_loss == lines[0]["val_loss"]
    assert report.best is not None and report.best.val_loss <= report.first_val_loss
    # the files of the command, which goes on from them
    assert model.path == report.checkpoint and (report.run / "config.toml").exists()
    assert "ending" in str(report) and "done" in str(report)
    started = json.loads((report.run / "run.json").read_text())["started"]["command"]
    assert started[:2] == ["ironhorse", "train"] and "--steps=30" in started
    loaded = ironhorse.Model.from_pretrained(report.run, device="cpu")
    assert_same_weights(loaded, model)
    assert loaded.loss(ids) == model.loss(ids)
    # and a second training starts where the first ended
    again = model.train(data, out=tmp_path / "more", steps=2, warmup=0, **SETTINGS)
    assert abs(steps_of(again.run)[0]["val_loss"] - report.last_val_loss) < 1e-6


def test_a_run_that_a_callback_stops_is_resumed_by_the_command(model, folder, data: Path, tmp_path: Path) -> None:
    def stop_at_5(line: dict) -> bool:
        return line["step"] < 4

    report = model.train(data, out="run", steps=12, callback=stop_at_5, **SETTINGS)
    assert (report.ending, report.steps, report.stopped_by) == ("stopped", 5, "the caller")
    assert report.run == Path("run") and "step-000005" in str(model.path)
    resumed = command("train", "--resume", report.run)
    assert resumed.returncode == 0, resumed.stderr
    # the same as without the stop, to the bit; and the same as by the command
    whole = ironhorse.Model.from_pretrained(folder, device="cpu")
    whole.train(data, out="whole", steps=12, **SETTINGS)
    assert_same_weights(ironhorse.Model.from_pretrained(report.run, device="cpu"), whole)
    flags = "--batch 4 --seq 16 --lr 3e-3 --val-batches 2 --sample-tokens 0 --steps 12 --device cpu".split()
    by_command = command("train", "--init", folder, "--data", data, "--out", "by-command", *flags)
    assert by_command.returncode == 0, by_command.stderr
    assert_same_weights(ironhorse.Model.from_pretrained("by-command", device="cpu"), whole)
    assert Path("by-command/config.toml").read_text() == Path("whole/config.toml").read_text()


def test_ctrl_c_saves_and_raises(model, data: Path) -> None:
    run = Path("run")

    def interrupt() -> None:
        while not (run / "metrics.jsonl").exists() or len(steps_of(run)) < 3:
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        model.train(data, out=run, steps=10**6, **SETTINGS)
    thread.join()
    made = len(steps_of(run))
    assert made >= 3 and model.path == run / f"checkpoints/step-{made:06}"
    assert np.isfinite(model.loss([1, 2, 3]))


def test_an_error_of_the_callback_ends_the_run_and_is_raised(model, data: Path) -> None:
    def fail(line: dict) -> None:
        if line["step"] == 2:
            raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        model.train(data, out="run", steps=9, callback=fail, **SETTINGS)
    assert model.path == Path("run/checkpoints/step-000003")

    def use(line: dict) -> None:
        model.logits([1, 2])

    with pytest.raises(InvalidValueError, match="a callback cannot use it"):
        model.train(data, out="other", steps=9, callback=use, **SETTINGS)
    assert np.isfinite(model.loss([1, 2, 3]))


def test_other_threads_wait_for_a_run(model, data: Path) -> None:
    began, losses = threading.Event(), []

    def compute() -> None:
        began.wait()
        losses.append(model.loss([1, 2, 3]))

    thread = threading.Thread(target=compute)
    thread.start()
    model.train(data, out="run", steps=5, callback=lambda line: began.set(), **SETTINGS)
    thread.join()
    assert losses == [model.loss([1, 2, 3])]


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"learning_rate": 1e-3}, "train: key `learning_rate`: unexpected argument .* tip: here it is lr"),
        ({"lr": "fast"}, "train: key `lr`: invalid value 'fast'"),
        ({"lr": -1.0}, "train: key `lr`: invalid value '-1"),
        ({"steps": 0}, "train: key `steps`: invalid value '0'"),
        ({"steps": 2.5}, "train: key `steps`: invalid value '2.5'"),
        ({"seq": 4096}, "train: seq 4096 is beyond the model's context of 48"),
        ({"data": "none/*.bin"}, "none"),
        ({"init": "gpt2"}, "train: `init` is not a setting here: training starts from the weights of this model"),
        ({"resume": "runs/1"}, "train: `resume` is not a setting here: a run is resumed with `ironhorse train"),
        ({"lr": object()}, "train: lr is of type object, expected a number"),
        ({"device": "tpu"}, "tpu"),
    ],
)  # fmt: skip
def test_settings_that_are_wrong_are_named(folder: Path, data: Path, settings: dict[str, Any], text: str) -> None:
    model = ironhorse.Model.from_pretrained(folder, device="cpu")
    before = model.loss([1, 2, 3])
    with pytest.raises(IronhorseError, match=text) as raised:
        model.train(**{"data": data, "out": "run", "steps": 3, **SETTINGS, **settings})
    assert "\n" not in str(raised.value) and "--" not in str(raised.value).replace("train --resume", "")
    assert model.loss([1, 2, 3]) == before and not Path("run").exists()


def test_a_run_folder_is_not_overwritten(model, folder: Path, data: Path) -> None:
    model.train(data, out="run", steps=2, **SETTINGS)
    with pytest.raises(IronhorseError, match="holds a run already"):
        model.train(data, out="run", steps=2, **SETTINGS)
    with pytest.raises(IronhorseError, match="is inside out, which overwrite would remove"):
        model.train(data, out="run", steps=2, overwrite=True, **SETTINGS)
    model = ironhorse.Model.from_pretrained(folder, device="cpu")
    model.train(data, out="run", steps=3, overwrite=True, **SETTINGS)
    assert len(steps_of(Path("run"))) == 3


def test_progress_is_shown_where_people_look(model, data: Path, monkeypatch, capsys, caplog) -> None:
    settings = {**SETTINGS, "progress": True}
    model.train(data, out="tqdm", steps=3, **settings)
    shown = capsys.readouterr().err
    assert "3/3" in shown and "loss" in shown and "validation loss" in shown and "tokens a step" in shown
    # without tqdm: a line on a terminal, nothing elsewhere
    monkeypatch.setitem(sys.modules, "tqdm.auto", None)
    model.train(data, out="silent", steps=3, **settings)
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    model.train(data, out="terminal", steps=3, **settings)
    shown = capsys.readouterr().err
    assert "3/3" in shown and "\r" in shown and "validation loss" in shown
    with caplog.at_level(logging.INFO, "ironhorse"):
        model.train(data, out="log", steps=3, **SETTINGS)
    assert capsys.readouterr().err == "" and "validation loss" in caplog.text


def test_a_closed_terminal_does_not_end_a_run(model, data: Path, monkeypatch) -> None:
    class Broken(_bars.Silent):
        def show(self, done: int, text: str) -> None:
            raise OSError("closed")

    monkeypatch.setattr("ironhorse.model._training.bar", Broken)
    report = model.train(data, out="run", steps=3, **{**SETTINGS, "progress": True})
    assert report.ending == "done"


CHAT_TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {% if m.role == 'assistant' %}{% generation %}{{ m.content }}<|endoftext|>"
    "{% endgeneration %}{% else %}{{ m.content }}<|endoftext|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


@pytest.fixture
def chats(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Questions with one answer each."""
    monkeypatch.chdir(tmp_path)
    pairs = [(sentence(seed, 4), sentence(7, 3)) for seed in range(30)]
    turns = [[{"role": "user", "content": asked}, {"role": "assistant", "content": said}] for asked, said in pairs]
    path = tmp_path / "chat.jsonl"
    path.write_text("".join(json.dumps({"messages": messages}) + "\n" for messages in turns))
    return path


@pytest.mark.parametrize("lora", [None, 4])
def test_tuning_learns_the_answers(tmp_path: Path, chats: Path, lora: int | None) -> None:
    write_model(tmp_path / "qwen3", "qwen3")
    (tmp_path / "qwen3" / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    model = ironhorse.Model.from_pretrained(tmp_path / "qwen3", device="cpu")
    lines: list[dict] = []
    report = model.tune(
        chats, out=tmp_path / "run", lora=lora, lr=3e-3, epochs=4, callback=lines.append, progress=False
    )
    assert report.ending == "done" and report.steps == len(lines) > 4
    assert report.first_val_loss is not None and report.last_val_loss is not None
    assert report.last_val_loss < report.first_val_loss - 0.5
    config = (report.run / "config.toml").read_text()
    assert "chat = true" in config and ("lora = 4" in config) == (lora is not None)
    # the model has the weights of the run, those of the adapters included
    question = [{"role": "user", "content": sentence(31, 4)}]
    answer = model.generate(question, tokens=12, greedy=True)
    again = ironhorse.Model.from_pretrained(report.run, device="cpu")
    assert again.generate(question, tokens=12, greedy=True) == answer
    assert_same_weights(again, model)
    saved = ironhorse.Model.from_pretrained(model.save_pretrained(tmp_path / "saved"), device="cpu")
    assert saved.generate(question, tokens=12, greedy=True) == answer


def test_what_cannot_be_tuned_is_named(model, chats: Path, data: Path) -> None:
    with pytest.raises(InvalidValueError, match="tune: `init` is not a setting here"):
        model.tune(chats, init="gpt2")
    with pytest.raises(InvalidValueError, match="chat.jsonl: line 1.*no chat template"):
        model.tune(chats, progress=False)
    talk = {"messages": [{"role": "user", "content": "a"}]}
    for given in ([talk], talk):
        with pytest.raises(InvalidValueError, match="tune: `data` are samples in memory, expected files: write each"):
            model.tune(given)
    with pytest.raises(InvalidValueError, match="tune: `val_data` holds a value of type int, expected paths"):
        model.tune(chats, val_data=7)
    for name in ("rank", "lora_r"):
        with pytest.raises(InvalidValueError, match=f"tune: key `{name}`: unexpected argument .* tip: here it is lora"):
            model.tune(chats, **{name: 8})
    with pytest.raises(InvalidValueError, match="chats are lines of JSON"):
        model.tune(data, progress=False)
