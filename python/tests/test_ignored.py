"""Targets of -100: loss, gradients and steps are PyTorch's, and verify proves it. Needs IRONHORSE_BIN."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from cli import assert_could_not_run, ironhorse, rewrite_key, verify
from conftest import SMALL
from ironhorse.export import main
from ironhorse.formats.safetensors import read_safetensors
from ironhorse.reference.init import IGNORED, with_ignored

MIXTURE = "C=24,L=2,NH=6,NKV=3,E=3,K=2,F=40,V=99,aux_alpha=0.1"
QWEN = "kind=qwen3,C=24,L=2,NH=6,NKV=2,HD=8,F=20,V=99"


def key_of(folder: Path, kind: str, model: str, *flags: object) -> Path:
    arguments = ["--batch", 3, "--seq", 7, "--steps", 3, "--no-bf16", "--out", folder, *flags]
    assert main([kind, "--model", model, *map(str, arguments)]) == 0
    [key] = folder.glob("*.key.safetensors")
    return key


@pytest.mark.parametrize(
    ("kind", "model", "flags"),
    [
        ("gpt2", SMALL, ("--ignored", 0.7)),
        ("gpt2", SMALL, ("--ignored", 0.999)),
        ("moe", MIXTURE, ("--ignored", 0.6)),
        ("moe", QWEN, ("--ignored", 0.6, "--reference", "transformers")),
    ],
)
def test_verify_agrees_with_torch_where_targets_are_ignored(
    kind: str, model: str, flags: tuple[object, ...], tmp_path: Path
) -> None:
    key = key_of(tmp_path / "out", kind, model, *flags)
    ignored = int((read_safetensors(key).tensors["y"] == IGNORED).sum())
    assert ignored == min(round(float(str(flags[1])) * 21), 20)
    outcome = verify(tmp_path, "--key", key, "--device", "cpu")
    assert outcome.code == 0, outcome.text
    names = {tensor["name"] for tensor in outcome.report["tensors"]}
    assert {"loss", "losses"} <= names and any(name.startswith("grad.") for name in names)


def test_another_mask_is_noticed(tmp_path: Path) -> None:
    key = key_of(tmp_path / "out", "gpt2", SMALL, "--ignored", 0.5)
    y = np.array(read_safetensors(key).tensors["y"])
    y[tuple(np.argwhere(y != IGNORED)[0])] = IGNORED
    rewrite_key(key, tmp_path / "other.safetensors", {"y": y})
    outcome = verify(tmp_path, "--key", tmp_path / "other.safetensors", "--device", "cpu")
    assert outcome.code == 1 and "loss" in outcome.failing()


def test_other_negative_targets_are_refused(tmp_path: Path) -> None:
    key = key_of(tmp_path / "out", "gpt2", SMALL, "--ignored", 0.5)
    for name, at, value in (("y", (0, 0), -99), ("x", (1, 2), IGNORED)):
        tokens = np.array(read_safetensors(key).tensors[name])
        tokens[at] = value
        rewrite_key(key, tmp_path / "other.safetensors", {name: tokens})
        run = ironhorse("verify", "--key", tmp_path / "other.safetensors", "--device", "cpu")
        assert_could_not_run(run)
        assert f"{name}[{at[0] * 7 + at[1]}]" in run.stderr and str(value) in run.stderr


def test_one_target_is_left() -> None:
    targets = torch.arange(6).view(2, 3)
    assert torch.equal(with_ignored(targets, 0.0, 1), targets)
    assert int((with_ignored(targets, 0.5, 1) == IGNORED).sum()) == 3
    assert int((with_ignored(targets, 0.99, 1) == IGNORED).sum()) == 5
    assert torch.equal(targets, torch.arange(6).view(2, 3)), "the targets given stay as they are"


@pytest.mark.parametrize("part", [1, -0.1, math.nan])
def test_senseless_parts_are_refused(part: float, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["gpt2", "--model", SMALL, f"--ignored={part}", "--out", str(tmp_path / "out")]) == 2
    assert "--ignored is" in (said := capsys.readouterr().err) and "it must be at least 0 and below 1" in said
