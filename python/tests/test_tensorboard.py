"""The event files of a run, read by TensorBoard, trackio, W&B, and a reader of the format that checks every record.

Needs IRONHORSE_BIN. Each of these is skipped without its package: `tensorboard`, `trackio[tensorboard]`, `wandb`.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cli import ironhorse

SIZES = "hidden=24,layers=2,heads=4,kv_heads=2,experts=3,top_k=2,ffn=20,vocab=256,context=32,rope_alpha=2"
FLAGS = ["--batch", 2, "--seq", 16, "--val-every", 4, "--sample-every", 5, "--sample-tokens", 8, "--device", "cpu"]
QUESTION = {"query": "Ivy was", "choices": [" a cat", " a dog"], "gold": 0}


def log_of(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def crc32c(data: bytes) -> int:
    """Bit by bit, from its definition."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF


def masked(data: bytes) -> int:
    crc = crc32c(data)
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def files_of(run: Path) -> list[Path]:
    return sorted((run / "tensorboard").glob("events.out.tfevents.*"))


def records(path: Path) -> list[bytes]:
    """Every record of a file; nothing may be left over."""
    data, found = path.read_bytes(), []
    while data:
        (size,), (crc,) = struct.unpack("<Q", data[:8]), struct.unpack("<I", data[8:12])
        message, (crc_of_data,) = data[12 : 12 + size], struct.unpack("<I", data[12 + size : 16 + size])
        assert crc == masked(data[:8]) and crc_of_data == masked(message) and len(message) == size
        found.append(message)
        data = data[16 + size :]
    return found


def numbers(events: Any, tag: str) -> np.ndarray:
    """Steps and values of a tag, as TensorBoard has them."""
    return np.array([(event.step, event.value) for event in events.Scalars(tag)])


def train(run: Path, steps: int, *more: object) -> None:
    done = ironhorse("train", "--model", SIZES, *FLAGS, "--steps", steps, "--out", run, *more)
    assert done.returncode == 0, done.stderr


def resume(run: Path, *more: object) -> None:
    done = ironhorse("train", "--resume", run, *more)
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was killed, its last record torn, and resumed at its checkpoint of step 8; tests change nothing."""
    folder = tmp_path_factory.mktemp("tensorboard")
    questions = folder / "questions.jsonl"
    questions.write_text("".join(json.dumps(QUESTION) + "\n" for _ in range(3)))
    run = folder / "run"
    train(run, 20, "--save-every", 8, "--keep", 0, "--eval", f"cats={questions}", "--eval-every", 4)
    for checkpoint in (run / "checkpoints").iterdir():
        if checkpoint.name != "step-000008":
            shutil.rmtree(checkpoint)
    file = files_of(run)[0]
    file.write_bytes(file.read_bytes()[:-5])
    resume(run)
    return run


def test_every_record_is_whole_and_has_its_checksums(run: Path):
    files = files_of(run)
    assert len(files) == 2, "one for each start"
    for file in files:
        found = records(file)
        assert b"brain.Event:2" in found[0] and len(found) > 8
        # a record that is torn, as a reader sees it while it is written
        whole = file.read_bytes()
        with pytest.raises((AssertionError, struct.error)):
            path = run.parent / "torn"
            path.write_bytes(whole[:-1])
            records(path)


def test_tensorboard_shows_the_log(run: Path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(
        str(run / "tensorboard"), size_guidance=dict.fromkeys(("scalars", "tensors", "histograms"), 0)
    )
    events.Reload()
    log = log_of(run)
    assert [line["step"] for line in log] == list(range(20))
    tags = {
        "loss/training": "loss",
        "loss/validation": "val_loss",
        "learning_rate": "lr",
        "gradient_norm": "grad_norm",
        "speed/tokens_per_s": "tokens_per_s",
        "speed/step_ms": "ms",
        "speed/data_ms": "data_ms",
    }
    for tag, field in tags.items():
        expected = [(line["step"], line[field]) for line in log if field in line]
        assert numbers(events, tag) == pytest.approx(np.array(expected), rel=1e-6), tag
    assert len(events.Scalars("loss/validation")) == 6
    graded = [(line["step"], line["eval"]["cats"]["acc"]) for line in log if "eval" in line]
    assert numbers(events, "eval/cats/acc") == pytest.approx(np.array(graded)) and len(graded) == 5
    for layer in range(2):
        name = f"experts/layer_{layer:02}"
        loads = [line["router"][layer]["load"] for line in log]
        busiest = [max(load) * 3 / sum(load) for load in loads]
        assert [event.value for event in events.Scalars(f"{name}/busiest")] == pytest.approx(busiest, rel=1e-5)
        histograms = events.Histograms(f"{name}/load")
        assert [event.step for event in histograms] == [0, 10]
        for event in histograms:
            assert event.histogram_value.bucket == pytest.approx(loads[event.step], rel=1e-6)
            assert event.histogram_value.bucket_limit == [0.5, 1.5, 2.5]
    times = [event.wall_time for event in events.Scalars("loss/training")]
    assert times == sorted(times)


def test_samples_are_text(run: Path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(run / "tensorboard"), size_guidance={"tensors": 0})
    events.Reload()
    assert events.PluginTagToContent("text") == {"samples": b""}
    shown = {event.step: event.tensor_proto.string_val[0].decode() for event in events.Tensors("samples")}
    files = {int(file.stem[5:]): file.read_bytes().decode(errors="replace") for file in (run / "samples").iterdir()}
    assert sorted(shown) == sorted(files) == [5, 10, 15, 20]
    for step, text in files.items():
        assert shown[step] == "".join(f"    {line}\n" for line in text.removesuffix("\n").split("\n")), step


def test_a_run_of_a_version_without_events_gets_them(run: Path, tmp_path: Path):
    copy = tmp_path / "copy"
    shutil.copytree(run, copy)
    shutil.rmtree(copy / "tensorboard")
    resume(copy, "--steps", 22)
    of_log, since = files_of(copy)
    assert len(records(of_log)) == 2 + 20, "the head and the steps"
    assert len(records(since)) == 2 + 2 + 1, "the head, two steps, a sample"


def test_a_run_that_is_overwritten_takes_its_events_along(tmp_path: Path):
    run = tmp_path / "run"
    train(run, 2)
    train(run, 3, "--overwrite")
    assert len(files_of(run)) == 1 and not (run / "previous").exists()


def test_ranks_write_one_file(tmp_path: Path):
    run = tmp_path / "run"
    train(run, 3, "--ranks", 2, "--accumulate", 2)
    (file,) = files_of(run)
    assert len(records(file)) == 2 + 3 + 1, "the head, three steps and the sample at the end"


TRACKIO = """
import json, sys, trackio
from trackio.sqlite_storage import SQLiteStorage

trackio.import_tf_events(sys.argv[1], project="ironhorse")
print(json.dumps({name: SQLiteStorage.get_logs("ironhorse", name) for name in SQLiteStorage.get_runs("ironhorse")}))
"""


def test_trackio_imports_the_log(run: Path, tmp_path: Path):
    pytest.importorskip("trackio")
    pytest.importorskip("tbparse")
    environment = {**os.environ, "TRACKIO_DIR": str(tmp_path), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-c", TRACKIO, run]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120)
    assert done.returncode == 0, done.stderr
    (logged,) = json.loads(done.stdout.splitlines()[-1]).values()
    log = log_of(run)
    for tag, field in (("loss/training", "loss"), ("loss/validation", "val_loss"), ("learning_rate", "lr")):
        # it knows nothing of restarts, so that the files themselves must have each step once
        found = sorted((one["step"], one[tag]) for one in logged if tag in one)
        expected = [(line["step"], line[field]) for line in log if field in line]
        assert np.array(found) == pytest.approx(np.array(expected), rel=1e-6), tag


WANDB = """
import os, subprocess, sys, time, wandb

folder, *command = sys.argv[1:]
os.makedirs(folder + "/run/tensorboard")
run = wandb.init(mode="offline", dir=folder, project="ironhorse")
run._tensorboard_callback(folder + "/run/tensorboard", save=False, root_logdir=folder + "/run/tensorboard")
time.sleep(2)
subprocess.run(command, check=True, capture_output=True)
time.sleep(5)
run.finish()
"""


def wandb_history(data: bytes) -> list[dict[str, str]]:
    """The history of a file of W&B's: LevelDB's log format after seven bytes, with protobuf messages inside."""
    from wandb.proto import wandb_internal_pb2

    at, part, found = 7, b"", []
    while at + 7 <= len(data):
        if (left := 32768 - at % 32768) < 7:
            at += left
            continue
        _, size, kind = struct.unpack("<IHB", data[at : at + 7])
        part = (part if kind in (3, 4) else b"") + data[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(part)
            if record.WhichOneof("record_type") == "history":
                found.append({one.key or "/".join(one.nested_key): one.value_json for one in record.history.item})
    return found


def test_wandb_follows_a_run(tmp_path: Path):
    wandb = pytest.importorskip("wandb")
    if not hasattr(wandb.Run, "_tensorboard_callback"):
        pytest.skip(f"wandb {wandb.__version__} follows event files in another way")
    # the folder of the run is there before: W&B looks at folders that exist, and --out takes an empty one
    train = [os.environ["IRONHORSE_BIN"], "train", "--model", SIZES, *FLAGS, "--steps", 20, "--out", tmp_path / "made"]
    shell = f"{shlex.join(map(str, train))} && cp {tmp_path}/made/tensorboard/* {tmp_path}/run/tensorboard/"
    command = [sys.executable, "-c", WANDB, str(tmp_path), "sh", "-c", shell]
    environment = {**os.environ, "WANDB_SILENT": "true"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120)
    assert done.returncode == 0, done.stderr
    (file,) = tmp_path.glob("wandb/offline-run-*/*.wandb")
    history = wandb_history(file.read_bytes())
    for tag, field in (("loss/training", "loss"), ("loss/validation", "val_loss"), ("gradient_norm", "grad_norm")):
        found = [(int(one["global_step"]), float(one[tag])) for one in history if tag in one]
        expected = [(line["step"], line[field]) for line in log_of(tmp_path / "made") if field in line]
        assert np.array(found) == pytest.approx(np.array(expected), rel=1e-6), tag
