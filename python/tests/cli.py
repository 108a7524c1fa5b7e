"""Running the `ironhorse` binary from tests, and changing the files it is given."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ironhorse.answer_key import crc32_table, json_text
from ironhorse.formats.safetensors import read_safetensors, write_safetensors


@dataclass(frozen=True)
class Verified:
    """The outcome of `ironhorse verify`: exit code, its --json report, all it printed."""

    code: int
    report: dict[str, Any]
    text: str

    @property
    def first_wrong(self) -> dict[str, Any]:
        assert self.report["first_wrong"] is not None, self.text
        return self.report["first_wrong"]

    def failing(self) -> list[str]:
        return [tensor["name"] for tensor in self.report["tensors"] if not tensor["pass"]]


def ironhorse(*arguments: object) -> subprocess.CompletedProcess[str]:
    """Runs the binary named by IRONHORSE_BIN; its absence is a failure, never a skip."""
    binary = os.environ.get("IRONHORSE_BIN")
    if not binary:
        pytest.fail("IRONHORSE_BIN is not set; build the binary and set it to the path of `ironhorse`", pytrace=False)
    if not Path(binary).is_file():
        pytest.fail(f"IRONHORSE_BIN is '{binary}', and there is no such file; build it first", pytrace=False)
    command = [binary, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=300)


class Server:
    """A command of the binary that serves on a free port."""

    def __init__(self, *arguments: object, cwd: Path | None = None) -> None:
        command = [os.environ["IRONHORSE_BIN"], *map(str, arguments), "--listen", "127.0.0.1:0"]
        self.process = subprocess.Popen(command, cwd=cwd, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        found = re.search(r"http://[0-9.:]+", line)
        if found is None:
            pytest.fail(f"the server did not start: {line} {self.process.communicate()[1]}")
        self.url = found.group(0)

    def end(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        self.process.communicate(timeout=60)
        return self.process.returncode


def verify(folder: Path, *arguments: object) -> Verified:
    """`ironhorse verify ... --json`; it must have been able to run (exit 0 or 1)."""
    report = folder / "verify.json"
    run = ironhorse("verify", *arguments, "--json", report)
    assert run.returncode in (0, 1), f"exit {run.returncode}\n{run.stdout}{run.stderr}"
    return Verified(run.returncode, json.loads(report.read_text()), run.stdout + run.stderr)


def convert(source: Path, target: Path, *flags: object) -> subprocess.CompletedProcess[str]:
    """`ironhorse convert` between a .bin file and a Hugging Face folder; the kinds follow from the names."""
    return ironhorse("convert", source, target, *flags)


def newest_checkpoint(run: Path) -> Path:
    """The checkpoint of a run with the most steps."""
    return max((run / "checkpoints").glob("step-*"), key=lambda folder: int(folder.name[5:]))


def assert_could_not_run(run: subprocess.CompletedProcess[str]) -> None:
    """Exit code 2, one line on stderr, no panic."""
    assert run.returncode == 2, f"exit {run.returncode}\n{run.stdout}{run.stderr}"
    assert len(run.stderr.strip().splitlines()) == 1, run.stderr
    assert "panicked" not in run.stdout + run.stderr


def one_changed(values: np.ndarray, index: tuple[int, ...]) -> np.ndarray:
    """A copy with exactly one number moved, by 1 % of the tensor's norm: far beyond any rounding, yet one number."""
    copy = np.array(values, copy=True)
    copy[index] += np.float32(0.01 * max(float(np.linalg.norm(values)), 1e-3))
    assert copy[index] != values[index]
    return copy


def rewrite_key(
    source: Path | str, target: Path | str, changes: Mapping[str, np.ndarray], refresh_crc: bool = True
) -> None:
    """Copies a key with some tensors replaced.

    With `refresh_crc=False` the checksums stay those of the original, as after damage to the file; otherwise
    the copy is a sound file that claims something else.
    """
    file = read_safetensors(source)
    tensors = {name: changes.get(name, array) for name, array in file.tensors.items()}
    strings = dict(file.metadata)
    if refresh_crc:
        strings["crc32"] = json_text(crc32_table(tensors))
    write_safetensors(target, tensors, strings, file.dtypes)
