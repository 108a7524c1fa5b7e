"""Programs written for a hand-made extension `custom_ops` run with the import changed, and the example trains."""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
from pathlib import Path

import ironhorse.torch as custom_ops
import pytest
import torch
from torch import nn
from torch_cases import each_device

ROOT = Path(__file__).parents[2]


@each_device
def test_fused_op_forward(device):
    input_tensor = torch.randn(32, 64, device=device, requires_grad=True)
    bias = torch.randn(64, device=device, requires_grad=True)
    output = custom_ops.fused_op_forward(input_tensor, bias, scale=2.0)
    loss = output.sum()
    loss.backward()
    assert input_tensor.grad is not None
    open_gates = (input_tensor * 2 + bias > 0).float()
    assert torch.equal(input_tensor.grad, 2 * open_gates)
    assert torch.allclose(bias.grad, open_gates.sum(0))


@each_device
def test_square_forward(device):
    x = torch.randn(10, device=device, requires_grad=True)
    y = custom_ops.square_forward(x)
    loss = y.sum()
    loss.backward()
    assert torch.equal(y, x * x) and torch.equal(x.grad, 2 * x)


class CustomLayer(nn.Module):
    def __init__(self, features):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(features, features))
        self.bias = nn.Parameter(torch.zeros(features))

    def forward(self, x):
        return custom_ops.fused_op_forward(torch.matmul(x, self.weight), self.bias, scale=1.0)


@each_device
def test_the_layer_in_a_model(device):
    model = nn.Sequential(nn.Linear(784, 256), CustomLayer(256), nn.Linear(256, 10)).to(device)
    optimizer = torch.optim.Adam(model.parameters())
    x, classes = torch.randn(64, 784, device=device), torch.randint(0, 10, (64,), device=device)
    losses = []
    for _ in range(15):
        loss = nn.functional.cross_entropy(model(x), classes)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in model.parameters())


def test_the_profiler_sees_it():
    x = torch.randn(8, 8)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as prof:
        custom_ops.square(x)
    assert "ironhorse::square" in str(prof.key_averages())


def test_the_example_trains():
    path = ROOT / "examples" / "python" / "custom_layer.py"
    first, last = runpy.run_path(str(path))["main"](["--steps", "60"])
    assert last < 0.6 * first


ALL_OPS = "(values or opcheck or gradcheck or wrong or strides or autocast or compile_once) and not float16"


@pytest.mark.parametrize("chosen", ["values and float32", pytest.param(ALL_OPS, marks=pytest.mark.in_full)])
def test_without_the_shim(chosen: str):
    """The way for torch before 2.10: the same operators by torch.library, here with this torch."""
    if os.environ.get("IRONHORSE_TORCH_SHIM") == "0":
        pytest.skip("this is that run")
    files = [f"test_torch_{name}.py" for name in ("values", "grad", "compile", "bad", "seed")]
    chosen = f"({chosen}) and not torch_func"
    ran = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", "--no-header", "-p", "no:cacheprovider", "-k", chosen, *files],
        cwd=Path(__file__).parent,
        env={**os.environ, "IRONHORSE_TORCH_SHIM": "0"},
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert ran.returncode == 0, ran.stdout[-3000:]
    told = subprocess.run(
        [sys.executable, "-c", "from ironhorse.torch._library import SHIM; print(SHIM)"],
        env={**os.environ, "IRONHORSE_TORCH_SHIM": "0"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert told.stdout.strip() == "False"
