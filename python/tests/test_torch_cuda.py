"""ironhorse.torch on a GPU: the current stream, the right device, CUDA graphs, torch's own memory."""

from __future__ import annotations

import gc
import threading

import ironhorse.torch as ops
import pytest
import torch
from torch_cases import BY_NAME, again, each_case, run

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
LARGE = 1 << 22


@each_case
def test_no_call_waits(case):
    """Every op only puts work on the stream: it returns while a long wait before it is still running."""
    arguments = case.arguments(case.shapes[3], "cuda", torch.float32)
    run(case.ours, arguments)
    torch.cuda.synchronize()
    torch.cuda._sleep(1_000_000_000)
    waiting = torch.cuda.Event()
    waiting.record()
    run(case.ours, arguments)
    assert not waiting.query()
    torch.cuda.synchronize()


def test_the_current_stream_is_used():
    x = torch.zeros(LARGE, device="cuda")
    ops.square(x)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(100_000_000)
        x.fill_(3.0)
        y = ops.square(x)
    stream.synchronize()
    assert (y == 9.0).all()


def test_backward_on_the_stream_of_forward():
    x = torch.zeros(LARGE, device="cuda", requires_grad=True)
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(100_000_000)
        with torch.no_grad():
            x.fill_(3.0)
        y = ops.square(x)
    torch.cuda.current_stream().wait_stream(stream)
    y.sum().backward()
    torch.cuda.synchronize()
    assert (x.grad == 6.0).all()


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one CUDA device")
@each_case
def test_a_device_that_is_not_the_current_one(case):
    arguments = case.arguments(case.shapes[3], "cuda:1", torch.float32)
    assert torch.cuda.current_device() == 0
    got = run(case.ours, arguments)
    assert torch.cuda.current_device() == 0 and all(t.device.index == 1 for t in got)
    want = run(case.ours, case.arguments(case.shapes[3], "cuda:0", torch.float32))
    assert all(torch.equal(a.cpu(), b.cpu()) for a, b in zip(got, want, strict=True))


@each_case
def test_cuda_graph(case):
    """Captured once, replayed on other values: forward and backward."""
    shape = case.shapes[3]
    arguments = case.arguments(shape, "cuda", torch.float32)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            run(case.ours, arguments)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run(case.ours, arguments)
    with torch.no_grad():
        for a in arguments:
            if a.is_floating_point():
                a.mul_(0.5).add_(0.25)
    graph.replay()
    torch.cuda.synchronize()
    want = run(case.ours, again(arguments))
    assert all(torch.equal(a, b) for a, b in zip(captured, want, strict=True))


def test_make_graphed_callables():
    class Layer(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(64))

        def forward(self, x):
            return ops.gelu(ops.rmsnorm(x, self.weight))

    layer = Layer().cuda()
    x = torch.randn(32, 64, device="cuda", requires_grad=True)
    graphed = torch.cuda.make_graphed_callables(layer, (x.clone().detach().requires_grad_(),))
    graphed(x).sum().backward()
    got = layer.weight.grad.clone()
    want = torch.autograd.grad(ops.gelu(ops.rmsnorm(x, layer.weight)).sum(), layer.weight)[0]
    assert torch.allclose(got, want)


@each_case
def test_memory_is_torchs_and_comes_back(case):
    arguments = case.arguments(case.shapes[3], "cuda", torch.float32)
    run(case.ours, arguments)
    gc.collect()  # what earlier tests left in cycles
    torch.cuda.synchronize()
    free, _ = torch.cuda.mem_get_info()
    before = torch.cuda.memory_allocated()
    for _ in range(1000):
        run(case.ours, arguments)
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() == before
    # Nothing is taken from the driver behind torch's back; a little for what else runs on the machine.
    assert free - torch.cuda.mem_get_info()[0] < 64 << 20


@pytest.mark.parametrize("name", ["square", "layernorm", "cross_entropy_mean", "attention_causal"])
def test_threads_with_streams_of_their_own(name):
    case = BY_NAME[name]
    arguments = case.arguments(case.shapes[3], "cuda", torch.float32)
    want = [t.clone() for t in run(case.ours, again(arguments))]
    torch.cuda.synchronize()
    wrong: list[str] = []

    def work():
        with torch.cuda.stream(torch.cuda.Stream()):
            for _ in range(50):
                got = run(case.ours, again(arguments))
                torch.cuda.current_stream().synchronize()
                if not all(torch.equal(a, b) for a, b in zip(got, want, strict=True)):
                    wrong.append("differs")

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_out_of_memory_is_an_exception_and_survived():
    x = torch.empty(1 << 20, device="cuda")
    with pytest.raises(RuntimeError, match="memory"):
        ops.softmax(x.expand(1 << 24, 1 << 20))
    assert ops.square(x).shape == x.shape


@each_case
def test_bits_repeat(case):
    arguments = case.arguments(case.shapes[3], "cuda", torch.bfloat16)
    first, second = run(case.ours, again(arguments)), run(case.ours, again(arguments))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("cols", [1000, 2048, 4096, 8192, 8200, 16384, 20000, 50257, 70001])
@pytest.mark.parametrize("op", ["softmax", "rmsnorm", "layernorm", "cross_entropy", "fused"])
def test_long_rows(op, cols, dtype):
    """Rows that take a block, that no longer fit its registers, and that are read several times."""
    generator = torch.Generator("cuda").manual_seed(cols)
    x = torch.randn(5, cols, device="cuda", dtype=torch.float64, generator=generator).to(dtype)
    w, b = (torch.randn(cols, device="cuda", dtype=torch.float64, generator=generator).to(dtype) for _ in range(2))
    targets = torch.randint(cols, (5,), device="cuda", generator=generator)
    F = torch.nn.functional
    ours, theirs, inputs = {
        "softmax": (ops.softmax, lambda x: F.softmax(x, -1), [x]),
        "rmsnorm": (ops.rmsnorm, lambda x, w: F.rms_norm(x, (cols,), w, 1e-6), [x, w]),
        "layernorm": (ops.layernorm, lambda x, w, b: F.layer_norm(x, (cols,), w, b), [x, w, b]),
        "cross_entropy": (lambda x: ops.cross_entropy(x, targets, reduction="none"),
                          lambda x: F.cross_entropy(x, targets, reduction="none"), [x]),
        "fused": (lambda x, b: ops.fused_scale_bias_relu(x, b, 1.5), lambda x, b: torch.relu(x * 1.5 + b), [x, b]),
    }[op]  # fmt: skip

    def results(function, inputs, d_y=None):
        inputs = [t.detach().requires_grad_() for t in inputs]
        y = function(*inputs)
        if d_y is None:
            d_y = torch.randn(y.shape, device="cuda", dtype=torch.float64, generator=generator).to(dtype)
        return d_y, [y, *torch.autograd.grad(y, inputs, d_y.to(y.dtype))]

    d_y, got = results(ours, inputs)
    _, torchs = results(theirs, inputs, d_y)
    _, true = results(theirs, [t.double() for t in inputs], d_y.double())
    eps = torch.finfo(dtype).eps
    for i, (mine, his, truth) in enumerate(zip(got, torchs, true, strict=True)):
        size = truth.norm().clamp_min(1e-30)
        error, other = ((t.double() - truth).norm() / size for t in (mine, his))
        bound = max(2 * other, eps / 2 if eps > 1e-4 else 20 * eps)
        assert error <= bound, f"result {i}: {error:.2e}, torch {other:.2e}"


@pytest.mark.parametrize("cols", [8, 24, 64, 1024, 7])
def test_the_gate_of_fused_scale_bias_relu(cols):
    """With bits and, for odd columns, without: NaN, one number as the gradient, a gradient at an odd address, again."""
    x = torch.randn(33, cols, device="cuda", requires_grad=True)
    bias = torch.randn(cols, device="cuda", requires_grad=True)
    with torch.no_grad():
        x[3, 2] = float("nan")

    def check(d_y):
        want = torch.autograd.grad(torch.relu(x * 2 + bias), (x, bias), d_y)
        got = torch.autograd.grad(ops.fused_scale_bias_relu(x, bias, 2.0), (x, bias), d_y)
        for g, w in zip(got, want, strict=True):
            torch.testing.assert_close(g, w)

    check(torch.randn(33, cols, device="cuda"))
    check(torch.tensor(1.5, device="cuda").expand(33, cols))
    check(torch.randn(33 * cols + 1, device="cuda")[1:].view(33, cols))
    check(torch.randn(cols, 33, device="cuda").t())
    y = ops.fused_scale_bias_relu(x, bias, 2.0)
    d_y = torch.randn(33, cols, device="cuda", requires_grad=True)
    (d_x,) = torch.autograd.grad(y, x, d_y, create_graph=True)
    (again,) = torch.autograd.grad(d_x.sum(), d_y)
    torch.testing.assert_close(again, 2.0 * ~(y.detach() <= 0))
