"""Copies and pickles of ops, modules and kernels of ironhorse.jit, and of what holds them."""

from __future__ import annotations

import copy
import io
import pickle
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from ironhorse import jit
from jit_cases import SQUARE

pytestmark = pytest.mark.usefixtures("cache")

PARTS = '#include "part.cuh"\n__global__ void twice(const float* x, float* y, long n) { y[0] = TWO * FOUR * x[0]; }'


def scaled(x: torch.Tensor, a: float) -> torch.Tensor:
    return a * x * x


class Layer(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.rand(4))
        self.op = jit.op(SQUARE, forward="square", defaults={"a": 2.0}, cpu=scaled)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.op(x) * self.weight


def test_deepcopy_of_a_module_that_holds_an_op():
    layer = Layer()
    for twin in (copy.deepcopy(layer), copy.copy(layer)):
        assert twin.op is layer.op, "an op never changes"
    twin = copy.deepcopy(layer)
    assert twin.weight is not layer.weight
    x = torch.rand(3, 4)
    assert torch.equal(twin(x), layer(x))
    twin(x).sum().backward()
    assert twin.weight.grad is not None and layer.weight.grad is None
    assert torch.equal(copy.deepcopy(layer).double()(x.double()), layer.double()(x.double()))


def test_pickles_in_one_process_are_the_op_itself():
    layer = Layer()
    assert pickle.loads(pickle.dumps(layer)).op is layer.op
    file = io.BytesIO()
    torch.save(layer, file)
    file.seek(0)
    again = torch.load(file, weights_only=False)
    x = torch.rand(3, 4)
    assert again.op is layer.op and torch.equal(again(x), layer(x))


def test_a_pickle_in_another_process(tmp_path: Path):
    layer = Layer()
    x = torch.rand(3, 4)
    (tmp_path / "layer.pickle").write_bytes(pickle.dumps((layer, x, layer(x))))
    program = f"""
import pickle, sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
data = open({str(tmp_path / "layer.pickle")!r}, "rb").read()
(layer, x, y), (other, _, _) = pickle.loads(data), pickle.loads(data)
assert layer.op is other.op, "made once"
assert (layer(x) == y).all() and repr(layer.op).startswith("<ironhorse.jit.Op square(")
layer(x).sum().backward()
assert layer.weight.grad is not None
print("same")
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and done.stdout == "same\n", done.stderr


def test_modules_and_kernels(tmp_path: Path):
    (tmp_path / "part.cuh").write_text("#define TWO 2\n")
    module = jit.source(PARTS, name="mine.cu", include=tmp_path, defines={"FOUR": 4})
    kernel = module["twice"]
    assert copy.deepcopy(module) is module and copy.deepcopy(kernel) is kernel and copy.copy(kernel) is kernel
    again = pickle.loads(pickle.dumps(kernel))
    assert (again.name, again.params, again.module.name) == ("twice", kernel.params, "mine.cu")
    assert again.module.text == PARTS and again.module.flags == ["-DFOUR=4"] == module.flags
    assert again.module._folders == module._folders == [str(tmp_path)]
    (tmp_path / "part.cuh").unlink()
    data = pickle.dumps(module)
    tmp_path.rmdir()
    with pytest.raises(jit._module.InvalidValueError, match="does not exist"):
        pickle.loads(data)


def test_a_function_without_a_name_is_named_by_pickle():
    op = jit.op(SQUARE, forward="square", cpu=lambda x, a: a * x * x)
    with pytest.raises((pickle.PicklingError, AttributeError), match="lambda"):
        pickle.dumps(op)
    assert copy.deepcopy(op) is op and np.array_equal(op(np.ones(3, np.float32), 2.0), [2, 2, 2])
