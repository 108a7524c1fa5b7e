"""torch.compile: whole graphs, changing shapes, kernels of ours in both directions, autocast."""

from __future__ import annotations

import ironhorse.torch as ops
import pytest
import torch
from torch import nn
from torch_cases import BY_NAME, again, distance, each_case, each_device, run


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@each_device
@each_case
def test_fullgraph_forward_and_backward(case, device):
    compiled = torch.compile(case.ours, fullgraph=True, backend="aot_eager")
    for shape in case.shapes[1:3]:
        arguments = case.arguments(shape, device, torch.float32)
        got, want = run(compiled, arguments), run(case.ours, again(arguments))
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True)), shape


def _shapes(name: str) -> list[tuple[int, ...]]:
    if name.startswith("attention"):
        return [(3, 4, 2, 5, 6, 8), (5, 4, 2, 9, 11, 8), (7, 4, 2, 17, 19, 8)]
    if name.startswith("rope"):
        return [(2, 3, 5, 8), (6, 3, 7, 8), (4, 3, 9, 8)]
    return [(4, 6), (5, 6), (9, 6)]


@each_case
def test_changing_shapes_compile_once(case):
    from torch._dynamo.testing import CompileCounterWithBackend

    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(case.ours, fullgraph=True, dynamic=True, backend=counter)
    for shape in _shapes(case.name):
        arguments = case.arguments(shape, "cpu", torch.float32)
        got, want = run(compiled, arguments), run(case.ours, again(arguments))
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True)), shape
    # A float argument makes Dynamo start with an empty graph.
    assert len([graph for graph in counter.graphs if len(graph.graph.nodes)]) == 1


@each_case
def test_no_graph_breaks(case):
    arguments = case.arguments(_shapes(case.name)[0], "cpu", torch.float32)
    report = torch._dynamo.explain(case.ours)(*arguments)
    assert report.graph_break_count == 0 and report.graph_count == 1


def test_both_directions_run_our_kernels():
    from torch._dynamo.backends.common import aot_autograd

    graphs = []

    def keep(graph, _):
        graphs.append([str(node.target) for node in graph.graph.nodes if node.op == "call_function"])
        return graph.forward

    def function(x, w, b):
        return ops.fused_scale_bias_relu(ops.rmsnorm(x, w), b, 2.0)

    compiled = torch.compile(function, fullgraph=True, backend=aot_autograd(fw_compiler=keep, bw_compiler=keep))
    run(compiled, tuple(torch.randn(*s, requires_grad=True) for s in ((3, 5), (5,), (5,))))
    forward, backward = graphs
    assert "ironhorse.rmsnorm.default" in forward and "ironhorse.fused_scale_bias_relu.default" in forward
    assert "ironhorse.rmsnorm_bwd.default" in backward and "ironhorse.fused_scale_bias_relu_bwd.default" in backward
    assert not [name for name in backward if name.startswith("aten.") and "detach" not in name]


class Block(nn.Module):
    """A transformer block of our ops."""

    def __init__(self, dim: int = 32, heads: int = 4):
        super().__init__()
        self.heads = heads
        self.norm = nn.Parameter(torch.ones(dim))
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.gate_up, self.down = nn.Linear(dim, 4 * dim), nn.Linear(2 * dim, dim)

    def forward(self, x, cos, sin):
        batch, positions, dim = x.shape
        qkv = self.qkv(ops.rmsnorm(x, self.norm)).view(batch, positions, 3 * self.heads, -1)
        q, k, v = qkv.transpose(1, 2).chunk(3, 1)
        out = ops.attention(ops.rope(q, cos, sin), ops.rope(k, cos, sin), v)
        x = x + self.out(out.transpose(1, 2).reshape(batch, positions, dim))
        return x + self.down(ops.swiglu(*self.gate_up(x).chunk(2, -1)))


@each_device
@pytest.mark.parametrize(
    ("backend", "autocast"),
    [
        ("aot_eager", False),
        ("aot_eager", True),
        pytest.param("inductor", False, marks=pytest.mark.in_full),
        ("inductor", True),
    ],
)
def test_a_block(backend, autocast, device):
    torch.manual_seed(1)
    block = Block().to(device)
    x = torch.randn(2, 7, 32, device=device, requires_grad=True)
    cos, sin = ops.rope_tables(7, 8, device=device)

    def step(block):
        with torch.autocast(device, dtype=torch.bfloat16, enabled=autocast):
            y = block(x, cos, sin)
        y.float().square().mean().backward()
        grads = [p.grad.clone() for p in block.parameters()]
        block.zero_grad()
        return y, grads

    want, want_grads = step(block)
    try:
        got, grads = step(torch.compile(block, fullgraph=True, backend=backend))
    except torch._inductor.exc.InductorError as error:
        pytest.skip(f"inductor cannot compile here: {error}")
    tolerance = 2e-2 if autocast else 1e-5
    assert got.dtype == want.dtype and distance(got, want) < tolerance
    assert all(distance(a, b) < 2 * tolerance for a, b in zip(grads, want_grads, strict=True))


def test_export():
    class Model(nn.Module):
        def forward(self, x, w):
            return ops.rmsnorm(x, w)

    arguments = BY_NAME["rmsnorm"].arguments((3, 5), "cpu", torch.float32, grad=False)
    program = torch.export.export(Model(), arguments)
    assert torch.equal(program.module()(*arguments), ops.rmsnorm(*arguments))
    assert "ironhorse.rmsnorm.default" in str(program.graph)
