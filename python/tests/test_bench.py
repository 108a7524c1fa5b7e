"""The PyTorch side of the comparison, and the comparison's own arithmetic. No timing is asserted."""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
from pathlib import Path

import pytest
from conftest import SMALL, SMALL_CONFIG
from ironhorse.formats.llmc import read_debug_state
from ironhorse.reference.bench import STATE_FILE, prepare, run

SCRIPT = Path(__file__).resolve().parents[2] / "benches" / "compare_torch.py"

STUB = """#!{python}
import json, sys
options = dict(zip(sys.argv[2::2], sys.argv[3::2]))
open(sys.argv[0].rsplit("/", 1)[0] + "/calls", "a").write(options["--steps"] + "/" + options["--warmup"] + "\\n")
tokens = int(options["--batch"]) * int(options["--seq"])
report = dict(ms_per_step=tokens / 10, loss=5.0, peak_bytes=1, version="0")
open(options["--json"], "w").write(json.dumps(report))
"""


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("compare_torch", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    sys.modules["compare_torch"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def test_torch_worker_starts_from_the_prepared_files(tmp_path: Path):
    prepare(SMALL, 2, 5, 0, tmp_path)
    state = read_debug_state(tmp_path / STATE_FILE, SMALL_CONFIG)
    options = dict(files=tmp_path, threads=1, warmup=2, steps=3, lr=1e-4)
    plain, fused, bf16 = (
        run(argparse.Namespace(**options, dtype=dtype, fused=is_fused))
        for dtype, is_fused in (("f32", False), ("f32", True), ("bf16", True))
    )
    assert plain["losses"][0] == pytest.approx(state.loss, rel=1e-6)
    assert len(plain["losses"]) == 5 and len(plain["step_ms"]) == 3
    assert plain["losses"] == sorted(plain["losses"], reverse=True)
    assert fused["losses"] == pytest.approx(plain["losses"], rel=1e-5)
    assert bf16["losses"] == pytest.approx(plain["losses"], rel=1e-2)


def test_flops_and_loss_difference(script):
    # L=1, C=2, V=3, T=1: 24*4 + 2*3*2 + 2*2*2 = 116 a token forward
    config = script.GPT2Config(4, 3, 1, 1, 2)
    assert script.step_flops(config, 5, 1) == 3 * 5 * 116
    assert script.loss_difference([4.0, 2.0], [4.0, 2.5]) == 0.25
    assert script.loss_difference([9.0, 4.0, 2.0], [4.0, 2.0]) == 0.0


def test_scaling_table(script, tmp_path: Path, capsys):
    stub = tmp_path / "ironhorse"
    stub.write_text(STUB.format(python=sys.executable))
    stub.chmod(0o755)
    model = "n_layer=1,n_head=1,n_embd=8,vocab_size=9,max_seq_len=128"
    report = tmp_path / "report.json"
    assert script.main(["--scaling", "--model", model, "--bin", str(stub), "--json", str(report)]) == 0
    rows = json.loads(report.read_text())["rows"]
    assert [(row["batch"], row["seq"]) for row in rows] == [(1, 64), (2, 64), (4, 64), (8, 64), (1, 64), (1, 128)]
    assert [row["time_ratio"] for row in rows] == [1, 2, 4, 8, 1, 2]
    assert rows[3]["flops_ratio"] == 8 and rows[-1]["flops_ratio"] > 2
    assert [row["tokens_per_s"] for row in rows] == [pytest.approx(10_000)] * 6
    assert (tmp_path / "calls").read_text().split() == ["3/1"] * 5  # steps/warm-up; the shared shape once
    table = capsys.readouterr().out
    assert all(word in table for word in ("tokens/s", "expected", "measured"))
    assert str(tmp_path) not in report.read_text()


FIELDS = {"hardware", "commit", "command", "torch", "threads", "model", "batch", "seq", "rows",
          "ratio_vs_torch_fused", "ratio_vs_torch_default"}  # fmt: skip
ROW = {"name", "ms_per_step", "tokens_per_s", "speed_vs_torch_f32", "peak_bytes", "losses", "rounds_ms"}


def test_comparison_report(script, monkeypatch, tmp_path: Path, capsys):
    """Both AdamWs in every round; medians over all steps; the schema of the JSON."""
    asked = []

    def fake_torch(args: argparse.Namespace, folder: Path, dtype: str, adamw: str) -> dict:
        asked.append((dtype, adamw))
        ms = {"fused": 4.0, "default": 6.0}[adamw] / (2 if dtype == "bf16" else 1)
        return dict(ms_per_step=ms, step_ms=[ms] * 3, losses=[5.0], torch="2", max_rss_bytes=9, rss_at_start_bytes=1)

    rounds = iter([[1.0, 1.0, 9.0], [2.0, 2.0, 2.0]])  # the median of the rounds' medians would be 1.5

    def fake_ironhorse(*_: object, **__: object) -> dict:
        steps = next(rounds)
        memory = dict(peak_bytes=7, planned_bytes=6, max_rss_bytes=8)
        return dict(ms_per_step=sorted(steps)[1], step_ms=steps, losses=[5.0], version="0", **memory)

    monkeypatch.setattr(script, "run_child", lambda *_: 0)
    monkeypatch.setattr(script, "run_torch", fake_torch)
    monkeypatch.setattr(script, "run_ironhorse", fake_ironhorse)
    path = tmp_path / "report.json"
    assert script.main(["--model", SMALL, "--seq", "4", "--rounds", "2", "--bin", __file__, "--json", str(path)]) == 0
    report = json.loads(path.read_text())
    assert asked == [("f32", "fused"), ("f32", "default"), ("bf16", "fused")] * 2
    assert report.keys() >= FIELDS and all(row.keys() >= ROW for row in report["rows"])
    names = ["torch f32, fused AdamW", "torch f32, default AdamW", "torch bf16 autocast", "ironhorse f32"]
    assert [row["name"] for row in report["rows"]] == names
    assert [row["ms_per_step"] for row in report["rows"]] == [4, 6, 2, 2]
    assert [row["peak_bytes"] for row in report["rows"]] == [9, 9, 9, 7]
    assert (report["ratio_vs_torch_fused"], report["ratio_vs_torch_default"]) == (2, 3)
    assert "3.00x the speed of torch f32 with its default AdamW, 2.00x with fused=True" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("value", "text"),
    [(830.26, "830.3"), (12.345, "12.35"), (0.0425, "0.0425"), (3e-8, "3.00e-08"), (3271984987.63, "3.27e+09")],
)
def test_figures_fit(script, value: float, text: str):
    assert script.figure(value) == text


def test_json_path_is_checked_first(script, tmp_path: Path, capsys, monkeypatch):
    monkeypatch.setattr(script, "run_child", lambda *_: pytest.fail("the work was done"))
    for bad in (tmp_path, tmp_path / "missing" / "report.json"):
        assert script.main(["--model", SMALL, "--seq", "4", "--torch-only", "--json", str(bad)]) == 2
        error = capsys.readouterr().err
        assert error.startswith("error: --json ") and error.count("\n") == 1


@pytest.mark.parametrize("arguments", [["--batch", "0"], ["--seq", "2000"], ["--model", "d13"], ["--bin", "nowhere"]])
def test_refusals(script, capsys, arguments: list[str]):
    extra = [] if "--bin" in arguments else ["--torch-only"]
    assert script.main([*arguments, *extra]) == 2
    assert capsys.readouterr().err.count("\n") == 1
