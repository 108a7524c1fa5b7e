"""benches/gpu_torch_moe.py computes what the reference computes, and runs without a GPU."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

import pytest
import torch
from ironhorse.config import MoEConfig
from ironhorse.reference.init_moe import init_weights, routed_batch
from ironhorse.reference.moe import MoE

BENCHES = Path(__file__).resolve().parents[2] / "benches"
# widths of which grouped products take every stride: multiples of 16 bytes
CONFIG = MoEConfig.parse("C=16,L=2,NH=4,NKV=2,HD=8,E=5,K=2,F=24,V=53,maxT=40,rope_alpha=2.5,aux_alpha=0.3")


@pytest.fixture(scope="module")
def bench():
    sys.path.insert(0, str(BENCHES))
    try:
        spec = importlib.util.spec_from_file_location("gpu_torch_moe", BENCHES / "gpu_torch_moe.py")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(BENCHES))
    return module


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("experts", ["grouped", "loop"])
@pytest.mark.parametrize("how", ["spread", "idle", "single"])
def test_equals_the_reference(bench, how: str, experts: str, recompute: bool):
    if experts == "grouped" and not hasattr(torch, "_grouped_mm"):
        pytest.skip("this torch has no grouped products")
    reference = init_weights(MoE(CONFIG), 1, how)
    x, y, _ = routed_batch(reference, 3, 9, 1)
    model = bench.Model(CONFIG, experts, recompute).load_reference(reference)
    expected, loss, aux = reference.loss(x, y)
    loss.backward()
    logits, same_loss, same_aux = model.loss(x, y)
    same_loss.backward()
    assert torch.allclose(logits, expected, rtol=0, atol=1e-5) and torch.allclose(aux, same_aux)
    assert same_loss.item() == pytest.approx(loss.item(), rel=1e-6)
    for ours, theirs in zip(model.layers, reference.model.layers, strict=True):
        moe = theirs.block_sparse_moe
        w2 = torch.stack([expert.w2.weight.grad for expert in moe.experts])
        w13 = torch.stack([torch.cat([expert.w1.weight.grad, expert.w3.weight.grad]) for expert in moe.experts])
        pairs = [(ours.w2.grad, w2), (ours.w13.grad, w13), (ours.gate.weight.grad, moe.gate.weight.grad),
                 (ours.norm_1.grad, theirs.input_layernorm.weight.grad)]  # fmt: skip
        for got, want in pairs:
            assert (got - want).norm() <= 1e-4 * want.norm()


def test_runs_without_a_gpu(bench, tmp_path, capsys):
    shape = ["--device", "cpu", "--model", "moe-tiny", "--batch", "1", "--seq", "8", "--mode", "eager"]
    quick = ["--steps", "1", "--seconds", "0", "--warmup", "0", "--experts", "loop", "--json", str(tmp_path / "r.json")]
    for flags in (["--layers", "1"], ["--recipe", "bf16", "--recompute"], ["--dtype", "f32"]):
        assert bench.main([*shape, *quick, *flags]) == 0
        report = json.loads((tmp_path / "r.json").read_text())
        assert report["tokens_per_s"] > 0 and 6 < report["first_loss"] < 8
        assert report["layers"] == (1 if "--layers" in flags else 2) and report["active"] < report["parameters"]
    for wrong in (["--seq", "513"], ["--model", "moe-small"], ["--model", "C=12,L=1,NH=3,F=7"]):
        assert bench.main([*shape, *quick, *wrong]) == 2
        assert capsys.readouterr().err.startswith("error: ")
