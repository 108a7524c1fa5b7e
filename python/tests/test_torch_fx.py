"""ironhorse.torch in torch.fx: every op is one node of the graph, and the graph computes what the function does."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from ironhorse import jit
from ironhorse import torch as ops
from ironhorse.torch import silu
from jit_cases import SQUARE
from torch_cases import CASES, Case


def _traced(call: Callable[..., torch.Tensor], arguments: tuple[Any, ...]) -> torch.fx.GraphModule:
    """fx wants plain arguments."""
    names = ", ".join(f"t{at}" for at in range(len(arguments)))
    scope = {"call": call}
    exec(f"def plain({names}): return call({names})", scope)
    return torch.fx.symbolic_trace(scope["plain"])


@pytest.mark.parametrize("case", [case for case in CASES if case.operator != "rope"], ids=lambda case: case.name)
def test_an_op_is_one_node(case: Case):
    given = case.arguments(case.shapes[-1], "cpu", torch.float32)
    traced = _traced(case.ours, given)
    (node,) = [node for node in traced.graph.nodes if node.op == "call_function"]
    assert node.target.__module__.startswith("ironhorse.torch.")
    torch.testing.assert_close(traced(*given), case.ours(*given), rtol=0, atol=0)


@pytest.mark.parametrize("interleaved", [False, True])
def test_rope_with_its_tables(interleaved: bool):
    given = (torch.rand(2, 5, 8), *ops.rope_tables(7, 8))
    traced = _traced(lambda x, cos, sin: ops.rope(x, cos, sin, interleaved, offset=2), given)
    (node,) = [node for node in traced.graph.nodes if node.op == "call_function"]
    assert node.target is ops.rope
    assert torch.equal(traced(*given), ops.rope(*given, interleaved, offset=2))


class Block(torch.nn.Module):
    """A little of everything, by module and by name."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.rand(6))
        self.linear = torch.nn.Linear(6, 6)

    # torch 2.11 cannot pickle a traced module with annotations that are strings, as they are here.
    def forward(self, x):
        y = ops.softmax(silu(self.linear(ops.rmsnorm(x, self.weight))), dim=0)
        return ops.gelu(y, approximate="tanh") + ops.square_forward(x)


def test_a_module_with_gradients():
    torch.manual_seed(0)
    block = Block()
    traced = torch.fx.symbolic_trace(block)
    targets = {node.target for node in traced.graph.nodes if node.op == "call_function"}
    assert {ops.softmax, silu, ops.rmsnorm, ops.gelu, ops.square} <= targets
    x, same = (torch.rand(3, 6, generator=torch.Generator().manual_seed(1), requires_grad=True) for _ in range(2))
    block(x).sum().backward()
    grads = {name: param.grad.clone() for name, param in block.named_parameters()}
    block.zero_grad()
    traced(same).sum().backward()
    assert torch.equal(x.grad, same.grad)
    assert all(torch.equal(param.grad, grads[name]) for name, param in traced.named_parameters())
    again = pickle.loads(pickle.dumps(copy.deepcopy(traced)))
    assert torch.equal(again(x.detach()), block(x.detach()))


def test_wrong_arguments_are_refused_while_tracing():
    with pytest.raises(ValueError, match="`approximate` is 'erf'"):
        torch.fx.symbolic_trace(lambda x: ops.gelu(x, approximate="erf"))


def test_a_jit_op_is_one_node():
    square = jit.op(SQUARE, forward="square", defaults={"a": 1.0}, cpu=lambda x, a: a * x * x)
    traced = torch.fx.symbolic_trace(lambda x: square(x, 3.0) + 1)
    assert [node.target for node in traced.graph.nodes if node.op == "call_function"][0] is square.torch
    x = torch.rand(5, requires_grad=True)
    torch.testing.assert_close(traced(x), 3 * x * x + 1)
    (d_x,) = torch.autograd.grad(traced(x).sum(), x)
    torch.testing.assert_close(d_x, 6 * x)


def test_subclasses_of_tensors_stay_what_they_are():
    class Named(torch.Tensor):
        pass

    x = torch.rand(3, 4).as_subclass(Named)
    assert type(ops.softmax(x)) is Named
    assert torch.equal(ops.softmax(x).as_subclass(torch.Tensor), ops.softmax(x.as_subclass(torch.Tensor)))
    with torch.device("cpu"):  # a mode of torch functions
        assert torch.equal(ops.silu(torch.ones(3)), torch.nn.functional.silu(torch.ones(3)))
