"""ironhorse.jit on a GPU. Runs where torch sees one; test_jit.py has what needs none."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from ironhorse import jit
from ironhorse.errors import InvalidValueError, IronhorseError, LaunchFailedError
from jit_cases import AFFINE, ROWS, SQUARE

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")

FLOATS = [torch.float32, torch.float64, torch.float16, torch.bfloat16]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("IRONHORSE_CACHE", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def square():
    return jit.op(SQUARE, forward="square", backward="square_bwd", defaults={"a": 1.0}, cpu=lambda x, a: a * x * x)


@pytest.fixture(scope="module")
def affine():
    return jit.op(AFFINE, forward="affine", backward=["affine_bwd_x", "affine_bwd_w"])


def test_a_raw_launch_on_numpy_arrays_and_tensors():
    kernel = jit.source(SQUARE)["square<float>"]
    x, y = np.arange(1000, dtype=np.float32), np.zeros(1000, np.float32)
    kernel[4, 256](x, y, 1000, 2.0)
    np.testing.assert_array_equal(y, 2 * x * x)
    kernel[4, 256](x[:500], y[:500], 100, 0.0)  # writes a part: the rest comes back as it was
    np.testing.assert_array_equal(y[100:], 2 * x[100:] ** 2)
    assert not y[:100].any()
    kernel[4, 256](y, y, 1000, 1.0)  # in place
    tx, ty = torch.arange(1000.0, device="cuda"), torch.zeros(1000, device="cuda")
    kernel[4, 256](tx, ty, 1000, 2.0)
    torch.testing.assert_close(ty, 2 * tx * tx)
    with pytest.raises(InvalidValueError, match="arrays are on cuda:0 and the host"):
        kernel[4, 256](tx, y, 1000, 1.0)
    with pytest.raises(InvalidValueError, match="two arrays overlap"):
        kernel[1, 256](y[:100], y[50:150], 100, 1.0)


def test_numbers_of_every_type():
    text = """
    #include "ironhorse.cuh"
    extern "C" __global__ void f(double* y, bool a, signed char b, unsigned char c, short d, unsigned short e, int f,
        unsigned g, long h, unsigned long long i, float j, double k, f16 l, bf16 m) {
        double v[] = {(double)a, (double)b, (double)c, (double)d, (double)e, (double)f, (double)g, (double)h, (double)i,
            j, k, to_float(l), to_float(m)};
        for (int i = 0; i < 13; i++) y[i] = v[i];
    }"""
    kernel = jit.source(text)["f"]
    y = np.zeros(13)
    values = [True, -128, 255, -32768, 65535, -(2**31), 2**32 - 1, -(2**52), 2**52, 0.1, 0.1, 0.1, 0.1]
    kernel[1, 1](y, *values)
    want = [float(v) for v in values]
    want[9], want[11], want[12] = float(np.float32(0.1)), float(np.float16(0.1)), float(torch.tensor(0.1).bfloat16())
    np.testing.assert_array_equal(y, want)
    for at, bad in ((1, 128), (2, -1), (5, 2**31), (5, 1.5), (8, -1), (9, "x")):
        changed = list(values)
        changed[at] = bad
        with pytest.raises(IronhorseError, match=f"argument {at + 2} "):
            kernel[1, 1](y, *changed)


def test_launches_that_cannot_be():
    kernel = jit.source(SQUARE)["square<float>"]
    x = torch.zeros(4, device="cuda")
    y = torch.zeros_like(x)
    with pytest.raises(InvalidValueError, match=r"a block of \[2048, 1, 1\] has 2048 threads; 1024 is the most"):
        kernel[1, 2048](x, y, 4, 1.0)
    with pytest.raises(InvalidValueError, match="has no threads"):
        kernel[1, 0](x, y, 4, 1.0)
    with pytest.raises(InvalidValueError, match="bytes of dynamic shared memory; .* is the most"):
        kernel[1, 32, 1 << 20](x, y, 4, 1.0)
    with pytest.raises(InvalidValueError, match="too many blocks in y; 65535 is the most"):
        kernel[(1, 70000), 32](x, y, 4, 1.0)
    kernel[1, 32, 100 << 10](x, y, 4, 1.0)  # more than 48 KiB needs a word with the driver
    kernel[0, 32](x, y, 4, 1.0)
    assert kernel.on(0).registers > 0 and kernel.on(0).max_threads == 1024


@pytest.mark.parametrize("dtype", FLOATS)
def test_an_op_and_its_gradient(square, dtype: torch.dtype):
    for shape in ((), (0, 3), (1,), (31,), (33, 7), (1000003,)):
        x = torch.randn(shape, device="cuda", dtype=dtype, requires_grad=True)
        y = square(x, 0.5)
        torch.testing.assert_close(y, 0.5 * x * x)
        y.sum().backward()
        torch.testing.assert_close(x.grad, x.detach())
    x = torch.randn(64, 64, device="cuda", dtype=dtype)
    torch.testing.assert_close(square(x.t(), 1.0), (x * x).t())
    torch.testing.assert_close(square(x[:, 1::2], 1.0), (x * x)[:, 1::2])


def test_numpy_arrays_give_what_tensors_give(square, affine):
    x = np.random.default_rng(0).normal(size=(33, 7)).astype(np.float32)
    np.testing.assert_allclose(square(x, 0.5), 0.5 * x * x, rtol=1e-6)
    assert square(x[:0], 1.0).shape == (0, 7)
    np.testing.assert_allclose(square(x.T.astype(np.float16)), (x.T.astype(np.float16)) ** 2, rtol=2e-3)
    w, b = x[0].copy(), x[1].copy()
    np.testing.assert_allclose(affine(x, w, b), x * w + b, rtol=1e-5, atol=1e-6)


def test_check_passes(square, affine):
    report = jit.check(square, torch.randn(4, 5, device="cuda"), 0.5)
    assert report and all(c.passed for c in report.checks), str(report)
    cuda = [torch.randn(s, device="cuda") for s in ((4, 5), (5,), (5,))]
    report = jit.check(affine, *cuda, reference=lambda x, w, b: x * w + b, sizes=(0, 1, 31, 33), tolerance=1e-5)
    assert report, str(report)


def test_several_outputs(square):
    top = jit.op(
        ROWS, forward="top<T, 4>", out={"best": lambda x: x.shape[:-1], "at": lambda x: x.shape[:-1]},
        grid=lambda rows: rows, block=32, defaults={"low": False, "skip": 0},
    )  # fmt: skip
    x = torch.randn(5, 3, 77, device="cuda")
    best, at = top(x)
    assert torch.equal(best, x.max(-1).values) and torch.equal(at.long(), x.argmax(-1))


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled_without_breaks(square, affine, dynamic: bool):
    def model(x, w, b):
        return square(affine(x, w, b) + 1, a=2.0).sum()

    compiled = torch.compile(model, fullgraph=True, dynamic=dynamic)
    for rows in (4, 7, 1):
        ours = [torch.randn(s, device="cuda", requires_grad=True) for s in ((rows, 5), (5,), (5,))]
        theirs = [t.detach().clone().requires_grad_() for t in ours]
        compiled(*ours).backward()
        x, w, b = theirs
        (2 * (x * w + b + 1) ** 2).sum().backward()
        for a, b in zip(ours, theirs, strict=True):
            torch.testing.assert_close(a.grad, b.grad, rtol=1e-4, atol=1e-4)


class Whole:
    """Counts the calls of an op that went through torch's dispatcher."""

    def __init__(self, op: jit.Op, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0
        run = op.run_forward

        def counted(*args, **kwargs):
            self.count += 1
            return run(*args, **kwargs)

        monkeypatch.setattr(op, "run_forward", counted)


def test_a_call_like_an_earlier_one_is_launched_at_once(affine, monkeypatch):
    square = jit.op(SQUARE, forward="square", backward="square_bwd")
    whole = Whole(square, monkeypatch)
    for seed, a in enumerate((2.0, 3.0, -1, 0.5)):
        x = torch.randn(1000, generator=torch.Generator("cuda").manual_seed(seed), device="cuda")
        torch.testing.assert_close(square(x, a), a * x * x)
    assert whole.count == 1
    square(torch.nn.Parameter(x).detach(), 2.0)
    with torch.no_grad():
        torch.testing.assert_close(square(torch.nn.Parameter(x), 2.0), 2 * x * x)
    with torch.inference_mode():
        assert square(x, 2.0).is_inference()
    assert whole.count == 1
    for other in (x[:10], x.double(), x.half(), x.reshape(10, 100)):
        for _ in range(2):
            torch.testing.assert_close(square(other, 2.0), 2 * other * other)
    assert whole.count == 5
    empty = torch.empty(0, 4, device="cuda")
    assert square(empty, 1.0).shape == square(empty, 1.0).shape == (0, 4)
    x, w, b = torch.randn(31, 7, device="cuda"), torch.randn(7, device="cuda"), torch.randn(7, device="cuda")
    for _ in range(3):
        torch.testing.assert_close(affine(x, w, b), x * w + b)
    with pytest.raises(IronhorseError, match="expected"):
        affine(x, w, b.cpu())


def test_what_an_operator_of_torch_means_stays(square, monkeypatch):
    x = torch.randn(64, 8, device="cuda")
    for _ in range(2):
        square(x, 2.0)
    whole = Whole(square, monkeypatch)
    for other in (x.t(), x[:, ::2], torch.complex(x, x).conj().imag):  # strides, and a tensor that is negated when read
        for _ in range(2):
            torch.testing.assert_close(square(other, 2.0), 2 * other * other)
    assert whole.count == 6
    leaf = x.clone().requires_grad_()
    for _ in range(2):
        (grad,) = torch.autograd.grad(square(leaf, 2.0).sum(), leaf)
        torch.testing.assert_close(grad, 4 * x)
    whole.count = 0
    with torch.autograd.forward_ad.dual_level():
        square(torch.autograd.forward_ad.make_dual(x, x), 2.0)
    assert whole.count == 1
    traced = torch.fx.experimental.proxy_tensor.make_fx(lambda x: square(x, 2.0))(x)
    assert "ironhorse_jit" in traced.code
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        square(x, 2.0)
    assert any("ironhorse_jit" in event.key for event in profile.key_averages())
    with pytest.raises(RuntimeError, match="functorch"):  # an operator of torch.library does not take this transform
        torch.func.grad(lambda x: square(x, 2.0).sum())(x)


def test_functions_of_the_launch_are_kept_only_if_they_depend_on_numbers(monkeypatch):
    x = torch.randn(33, 5, device="cuda")

    def made(grid):
        return jit.op(SQUARE, forward="square", grid=grid, block=64)

    blocks = {"grid": 3}
    kept = made(lambda n: max(1, (n + 63) // 64))
    asked = made(lambda n: blocks["grid"])
    for op, count in ((kept, 1), (asked, 3)):
        whole = Whole(op, monkeypatch)
        for _ in range(3):
            torch.testing.assert_close(op(x, 1.0), x * x)
        assert whole.count == count


def test_addresses_of_vectors_are_checked_in_every_call(monkeypatch):
    text = """extern "C" __global__ void twice(const float4* x, float* y, long n) {
        long i = blockIdx.x * (long)blockDim.x + threadIdx.x;
        if (i < n) y[i] = 2 * ((const float*)x)[i];
    }"""
    op = jit.op(text, forward="twice")
    x = torch.arange(17.0, device="cuda")
    whole = Whole(op, monkeypatch)
    for start in (0, 0, 1, 1):
        torch.testing.assert_close(op(x[start : start + 16]), 2 * x[start : start + 16])
    assert whole.count == 3


def test_the_current_stream_is_used(square):
    x = torch.zeros(1 << 24, device="cuda")
    stream = torch.cuda.Stream()
    square(x, 1.0)
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
        x.fill_(3.0)
        y = square(x, 1.0)
    stream.synchronize()
    assert torch.equal(y, torch.full_like(y, 9.0))


def test_graphs_can_be_captured(square):
    x = torch.ones(1000, device="cuda")
    square(x, 2.0)  # loads the kernel, which a capture does not allow
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = square(x, 2.0)
    x.fill_(3.0)
    graph.replay()
    assert torch.equal(y, torch.full_like(y, 18.0))


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one GPU")
def test_another_device(square):
    x = torch.ones(10, device="cuda:1", requires_grad=True)
    square(x, 2.0).sum().backward()
    assert x.grad.device == x.device and torch.equal(x.grad, torch.full_like(x, 4.0))
    with pytest.raises(IronhorseError):
        jit.source(SQUARE)["square<float>"][1, 32](x, torch.ones(10, device="cuda:0"), 10, 1.0)


def test_mixed_devices_are_refused(affine):
    with pytest.raises(InvalidValueError, match="`x` is on cuda:0, `w` on cpu; expected one device"):
        affine(torch.zeros(2, 3, device="cuda"), torch.zeros(3), torch.zeros(3, device="cuda"))


def test_threads_at_once(square):
    errors = []

    def work(i: int) -> None:
        try:
            with torch.cuda.stream(torch.cuda.Stream()):
                for n in range(1, 50):
                    x = torch.full((n * 1000 + i,), float(i), device="cuda")
                    assert torch.equal(square(x, 1.0), x * x)
            y = np.full(1000 + i, i, np.float32)
            assert (square(y, 1.0) == y * y).all()
        except BaseException as error:  # noqa: BLE001
            errors.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    assert not errors


def test_a_kernel_that_writes_outside_is_an_exception_and_python_lives():
    code = """
import numpy as np
from ironhorse import jit
kernel = jit.source('extern "C" __global__ void f(float* x, long i) { x[i] = 1; }')["f"]
try:
    kernel[1, 1](np.zeros(4, np.float32), 1 << 40)
except jit._module.InvalidValueError: raise
except Exception as error:
    print(type(error).__name__, error)
print("alive")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert LaunchFailedError.__name__ in done.stdout and "compute-sanitizer" in done.stdout and "alive" in done.stdout


def test_the_toolkits_headers():
    half = jit.op(
        "#include <cuda_fp16.h>\ntemplate <class T> __global__ void f(const T* x, T* y, int n) "
        "{ int i = blockIdx.x * blockDim.x + threadIdx.x; if (i < n) y[i] = x[i] + x[i]; }",
        forward="f",
    )
    x = torch.randn(100, device="cuda", dtype=torch.float16)
    try:
        y = half(x)
    except jit.CompileError as error:
        pytest.skip(str(error))
    assert torch.equal(y, x + x)
