"""A mixture of experts trained by ironhorse and by PyTorch from the same weights on the same batches: the same losses.

`benches/moe_curve.py` does it over 1,000 steps; these are its first steps, where nothing has had time to part.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import re
import sys
import xml.etree.ElementTree
from pathlib import Path

import numpy as np
import pytest
import torch
from cli import assert_could_not_run, ironhorse
from ironhorse.formats.safetensors import read_safetensors, write_safetensors
from ironhorse.reference.bench import prepare, run, write_moe
from ironhorse.reference.gpt2 import fused_attention
from ironhorse.reference.init_moe import init_weights
from ironhorse.reference.moe import MoE, MoEConfig

BENCHES = Path(__file__).resolve().parents[2] / "benches"
SIZES = "hidden=32,n_layer=2,n_head=4,n_kv_head=2,n_experts=5,top_k=2,ffn=48,vocab_size=256,max_seq_len=64"
STEPS = 20
TOLERANCE = 5e-6  # ten units in the last place of a loss of 5


def module(name: str):
    sys.path.insert(0, str(BENCHES))
    try:
        spec = importlib.util.spec_from_file_location(name, BENCHES / f"{name}.py")
        loaded = importlib.util.module_from_spec(spec)
        sys.modules[name] = loaded  # dataclasses look their module up
        spec.loader.exec_module(loaded)
    finally:
        sys.path.remove(str(BENCHES))
    return loaded


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """The script, the folder of a run, and its metrics."""
    if not os.environ.get("IRONHORSE_BIN"):
        pytest.fail("IRONHORSE_BIN is not set; build the binary and set it to the path of `ironhorse`", pytrace=False)
    script, folder = module("moe_curve"), tmp_path_factory.mktemp("curve")
    arguments = ["--model", SIZES, "--steps", STEPS, "--warmup", 5, "--batch", 3, "--seq", 24, "--threads", 1]
    args = script.parse(list(map(str, arguments)))
    write_moe(init_weights(MoE(MoEConfig.parse(SIZES)), args.seed), folder / "moe")
    return script, folder, script.train_ironhorse(args, folder)


def test_the_first_steps_are_those_of_torch(trained):
    script, folder, metrics = trained
    rates, ours = [m["lr"] for m in metrics], script.of_metrics(metrics, 3 * 24)
    theirs = script.train_torch(folder, rates, torch.float32, fused_attention, "cpu")
    assert len(ours.losses) == STEPS and ours.losses[-1] < ours.losses[0] - 0.3
    found = script.compare(ours, theirs)
    assert found["first_step_with_other_experts"] is None
    assert found["max"] <= TOLERANCE
    other = script.train_torch(folder, [rate * 1.01 for rate in rates], torch.float32, fused_attention, "cpu")
    assert script.compare(ours, other)["max"] > 10 * TOLERANCE, "the tolerance would not see another learning rate"


def test_saved_batches_are_windows_of_the_corpus(trained):
    _, folder, _ = trained
    tokens = read_safetensors(folder / "batches.safetensors").tensors
    x, y = tokens["x"], tokens["y"]
    assert x.shape == y.shape == (STEPS, 3, 24) and x.dtype == np.int32
    assert (x[..., 1:] == y[..., :-1]).all() and x.min() >= 0 and x.max() < 256
    assert len({row.tobytes() for row in x.reshape(-1, 24)}) > 2 * STEPS, "the windows differ"


def test_picture_and_summary(trained):
    script, _, metrics = trained
    losses = [m["loss"] for m in metrics]
    sides = ("ironhorse f32", "torch f32", "torch f64", "torch f32, other order")
    apart = {side: losses if side != "torch f64" else [x + 1 for x in losses] for side in sides}
    svg = script.picture({"steps": STEPS, "losses": apart})
    # a curve and its running mean for both losses and for one difference: the other is 0 and has no logarithm
    assert svg.startswith("<svg") and svg.count("<path") == 6 and "nan" not in svg
    a, b = script.Run([1.0, 2.0, 5.0], [[1, 1]] * 3), script.Run([1.0, 2.5, 3.0], [[1, 1], [1, 1], [2, 0]])
    found = script.compare(a, b)
    assert (found["first_step_with_other_experts"], found["max_before"], found["max_after"]) == (2, 0.5, 2.0)


def test_the_picture_has_the_style_of_those_in_rust():
    style, rust = module("curve_svg"), BENCHES.parent / "crates/train/src/picture/svg.rs"
    text = rust.read_text()
    for name in ("COLOURS", "DASHES"):
        listed = re.search(rf"const {name}: \[&str; 4\] = \[(.*?)\];", text)
        assert tuple(re.findall(r'"(.*?)"', listed[1])) == getattr(style, name)
    for name in ("INK", "LABEL", "PALE", "BASE", "GRID", "FINE_GRID", "FONT"):
        assert f'const {name}: &str = "{getattr(style, name)}";' in text
    for name in ("NORMAL", "LARGE"):
        assert f"const {name}: f64 = {getattr(style, name)}.0;" in text


def test_the_scaling_picture_is_drawn_from_its_report():
    script, folder = module("scaling_svg"), BENCHES.parent / "docs"
    report = json.loads((folder / "benchmarks" / "cpu-d12-scaling.json").read_text())
    svg = script.picture(report)
    assert svg == (folder / "img" / "cpu-scaling.svg").read_text(), "draw it anew with benches/scaling_svg.py"
    xml.etree.ElementTree.fromstring(svg)
    # a line for each way to grow, a mark for each row and one in the legend; units on both axes
    assert (svg.count("<path"), svg.count("<circle"), svg.count('width="8"')) == (2, 4 + 1, 5 + 1)
    assert "speed (tokens/s)" in svg and "tokens of a step" in svg and "nan" not in svg
    # twice the speed is twice as high
    rows = [dict(row, tokens_per_s=speed) for row, speed in zip(report["rows"][:2], (50.0, 100.0), strict=True)]
    marks = re.findall(r'cy="([0-9.]+)"', script.picture(dict(report, rows=rows)))
    assert script.BOTTOM - float(marks[1]) == pytest.approx(2 * (script.BOTTOM - float(marks[0])), abs=0.2)


def test_comparison_starts_both_sides_alike(tmp_path):
    """What benches/compare_torch.py does for a mixture of experts."""
    prepare(SIZES, 2, 8, 0, tmp_path)
    options = dict(files=tmp_path, threads=1, warmup=1, steps=3, lr=1e-4, dtype="f32")
    theirs = run(argparse.Namespace(**options, fused=False))["losses"]
    report = tmp_path / "report.json"
    shape = ("--batch", 2, "--seq", 8, "--warmup", 1, "--steps", 3, "--json", report)
    bench = ironhorse("bench", "--model", tmp_path / "moe", "--data", tmp_path / "tokens.safetensors", *shape)
    assert bench.returncode == 0, bench.stderr
    assert json.loads(report.read_text())["losses"] == pytest.approx(theirs, rel=1e-6)


@pytest.mark.parametrize("what", ["shape", "vocabulary", "missing", "dtype"])
def test_bench_refuses_bad_tokens(tmp_path, what: str):
    x = np.zeros((2, 8), np.int32)
    y = {"shape": x[:1], "vocabulary": x + 256, "missing": None, "dtype": x.astype(np.float32)}[what]
    write_safetensors(tmp_path / "tokens.safetensors", {"x": x} if y is None else {"x": x, "y": y})
    arguments = ("--model", SIZES, "--batch", 2, "--seq", 8, "--data", tmp_path / "tokens.safetensors")
    assert_could_not_run(ironhorse("bench", *arguments))


def test_experts_table(tmp_path, capsys):
    script = module("moe_experts")
    sizes = ["--hidden", "16", "--ffn", "16", "--heads", "2", "--vocab", "40", "--batch", "1", "--seq", "16"]
    binary = os.environ["IRONHORSE_BIN"]
    quick = ["--experts", "2,6", "--steps", "2", "--rounds", "2", "--threads", "1", "--bin", binary]
    assert script.main([*sizes, *quick, "--json", str(tmp_path / "r.json")]) == 0
    rows = json.loads((tmp_path / "r.json").read_text())["rows"]
    assert [row["experts"] for row in rows] == [2, 6] and rows[0]["tokens_ratio"] == 1
    assert all(row["tokens_ms"] > row["products_ms"] > 0 and row["update_ms"] > 0 for row in rows)
    assert "rows each" in capsys.readouterr().out
    assert script.main([*sizes, *quick, "--top-k", "3"]) == 2
