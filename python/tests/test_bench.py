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
    assert "time/FLOPs" in capsys.readouterr().out
    assert str(tmp_path) not in report.read_text()


@pytest.mark.parametrize("arguments", [["--batch", "0"], ["--seq", "2000"], ["--model", "d13"], ["--bin", "nowhere"]])
def test_refusals(script, capsys, arguments: list[str]):
    extra = [] if "--bin" in arguments else ["--torch-only"]
    assert script.main([*arguments, *extra]) == 2
    assert capsys.readouterr().err.count("\n") == 1
