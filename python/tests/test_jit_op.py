"""ironhorse.jit: ops and their gradients, without a GPU: launches go to a stand-in that computes on the host what the
kernels compute. test_jit_cuda.py has the real ones."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import ironhorse
import numpy as np
import pytest
import torch
from ironhorse import jit
from ironhorse.errors import InvalidValueError, NotAvailableError
from jit_cases import AFFINE, ROWS, SQUARE, Stand
from jit_fixtures import ARCH, compiles

pytestmark = pytest.mark.usefixtures("cache")

# Ops.


@pytest.fixture
def square(stand: Stand):
    return jit.op(SQUARE, forward="square", backward="square_bwd", defaults={"a": 1.0})


@pytest.fixture
def affine(stand: Stand):
    return jit.op(AFFINE, forward="affine", backward=["affine_bwd_x", "affine_bwd_w"], out=jit.like("x"))


def test_an_op_on_numpy_arrays(square, stand: Stand):
    x = np.linspace(-1, 1, 1000).astype(np.float32).reshape(10, 100)
    np.testing.assert_allclose(square(x), x * x)
    np.testing.assert_allclose(square(x, a=3.0), 3 * x * x, rtol=1e-6)
    np.testing.assert_allclose(square(x.astype(np.float64).T, 2), 2 * x.T.astype(np.float64) ** 2)
    assert stand.launches[0] == ("square<float>", (4, 1, 1), (256, 1, 1), 0)
    assert stand.launches[-1][0] == "square<double>"
    assert square(np.zeros((0, 3), np.float32)).shape == (0, 3)
    assert square(np.zeros((), np.float32)).shape == ()


def test_several_outputs_shapes_numbers_and_launch_sizes(stand: Stand):
    top = jit.op(
        ROWS, forward="top<T, 4>", out={"best": lambda x: x.shape[:-1], "at": lambda x: x.shape[:-1]},
        grid=lambda rows: rows, block=lambda cols: 32 if cols < 64 else 128, shared=16,
        defaults={"low": False, "skip": 0},
    )  # fmt: skip
    x = np.random.default_rng(0).normal(size=(3, 5, 7)).astype(np.float32)
    best, at = top(x)
    np.testing.assert_array_equal(best, x.max(-1))
    np.testing.assert_array_equal(at, x.argmax(-1))
    assert at.dtype == np.int32 and stand.launches == [("top<float, 4>", (15, 1, 1), (32, 1, 1), 16)]
    np.testing.assert_array_equal(top(x, True, 2)[0], x[..., 2:].min(-1))
    best, at = top(torch.from_numpy(x).double())
    assert best.dtype == torch.float64 and at.dtype == torch.int32 and at.shape == (3, 5)
    assert str(top.__signature__) == "(x, low=False, skip=0)"


def test_the_gradient_by_names(affine, square, stand: Stand):
    torch.manual_seed(0)
    x, w, b = (torch.randn(s, requires_grad=True) for s in ((4, 5), (5,), (5,)))
    y = affine(x, w, b)
    y.backward(torch.ones(()).expand(4, 5))  # the gradient that sum() delivers: stride 0
    torch.testing.assert_close(y, x * w + b)
    torch.testing.assert_close(x.grad, w.detach().expand(4, 5))
    torch.testing.assert_close(w.grad, x.detach().sum(0))
    torch.testing.assert_close(b.grad, torch.full((5,), 4.0))
    stand.launches.clear()
    affine(x.detach(), w, b).sum().backward()
    assert [name for name, *_ in stand.launches] == ["affine", "affine_bwd_w"], "only gradients that are needed"
    z = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(square, (z, 0.5))
    (d,) = torch.autograd.grad(square(z, 0.5).sum(), z, create_graph=True)
    with pytest.raises(NotAvailableError, match="no second derivative"):
        d.sum().backward()


def test_torch_finds_nothing_wrong(affine, square):
    x = torch.randn(4, 5, requires_grad=True)
    torch.library.opcheck(square.torch, (x, 0.5))
    torch.library.opcheck(affine.torch, (x, torch.randn(5, requires_grad=True), torch.randn(5)))


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled_without_breaks(affine, square, dynamic: bool):
    def model(x, w, b):
        return square(affine(x, w, b), a=2.0).sum()

    compiled = torch.compile(model, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    for rows in (4, 7, 1):
        ours = [torch.randn(s, requires_grad=True) for s in ((rows, 5), (5,), (5,))]
        theirs = [t.detach().clone().requires_grad_() for t in ours]
        compiled(*ours).backward()
        x, w, b = theirs
        (2 * (x * w + b) ** 2).sum().backward()
        for a, b in zip(ours, theirs, strict=True):
            torch.testing.assert_close(a.grad, b.grad)


def test_no_gradient_is_not_silence(stand: Stand):
    x = torch.randn(3, requires_grad=True)
    with pytest.raises(NotAvailableError, match="the gradient of `x` is needed, and the op has no backward="):
        jit.op(SQUARE, forward="square")(x, 1.0).sum().backward()
    half = jit.op(AFFINE, forward="affine", backward="affine_bwd_x")
    w, b = torch.randn(3, requires_grad=True), torch.zeros(3)
    half(x.reshape(1, 3), w.detach(), b).sum().backward()
    with pytest.raises(NotAvailableError, match="no backward kernel writes d_w"):
        half(x.reshape(1, 3), w, b).sum().backward()


def test_wrong_arguments_of_an_op(affine, square):
    x = np.zeros((2, 3), np.float32)
    for call, words in [
        (lambda: square(x.astype(np.complex64)), "`x` is complex64; kernels take float16"),
        (lambda: square([1.0]), r"`x` is const T\*, got a list; expected a numpy array or a tensor"),
        (lambda: square(x, 1.0, 2.0), r"3 arguments; expected const T\* x, float a"),
        (lambda: square(x, b=1.0), "no argument `b`"),
        (lambda: square(), "`x` is missing"),
        (lambda: square(x, None), "argument 4 `a` is float, got None"),
        (lambda: affine(x.astype(np.float64), x, x), r"argument 1 `x` is const float\*, got a float64 array"),
        (lambda: affine(torch.zeros(2, 3), torch.zeros(3).int(), torch.zeros(3)), r"`w` is const float\*, got an i"),
        (lambda: affine(torch.zeros(2, 3), x, torch.zeros(3)), "expected a|ndarray"),
    ]:
        with pytest.raises((InvalidValueError, RuntimeError), match=words):
            call()
    two = jit.op("template <class T> __global__ void f(const T* a, const T* b, T* c, int n) {}", forward="f")
    with pytest.raises(InvalidValueError, match="`a` is float32 and `b` is float64, but both are T"):
        two(x, x.astype(np.float64))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"forward": "cube"}, "no kernel `cube`"),
        ({"forward": []}, "forward names no kernel"),
        ({"forward": "square", "out": {"z": "x"}}, "out has `z`; outputs are y"),
        ({"forward": "square", "defaults": {"z": 1}}, "defaults has `z`"),
        ({"forward": "square", "zero": "z"}, "zero has `z`, which no kernel writes"),
        ({"forward": "square", "backward": "top<T, 4>"}, "backward kernel top asks for|backward kernel top writes"),
        ({"forward": "square", "name": "a b"}, "not an identifier"),
        ({"forward": "none"}, "no kernel writes"),
        ({"forward": "alone"}, "no input: inputs are pointers to const"),
    ],
)
def test_ops_that_make_no_sense(options: dict, words: str):
    more = "__global__ void none(const float* x) {}\n__global__ void alone(float* y, int n) {}"
    with pytest.raises(InvalidValueError, match=words):
        jit.op(SQUARE + ROWS + more, **options)


def test_functions_get_what_they_name(stand: Stand):
    op = jit.op(SQUARE, forward="square", grid=lambda nothing: 1)
    with pytest.raises(InvalidValueError, match="grid asks for `nothing`; expected one of x, a, y, n, N, rows, cols"):
        op(np.zeros(3, np.float32), 1.0)


def test_sixteen_bits_need_a_header(stand: Stand):
    plain = jit.op(SQUARE.replace('#include "ironhorse.cuh"', ""), forward="square")
    with pytest.raises(InvalidValueError, match='16-bit floats need `#include "ironhorse.cuh"` \\(bf16\\)'):
        plain(torch.zeros(3, dtype=torch.bfloat16), 1.0)


def test_a_cpu_version_has_its_gradient_and_is_checked():
    op = jit.op(SQUARE, forward="square", backward="square_bwd", cpu=lambda x, a: a * x * x)
    x = np.arange(4, dtype=np.float32)
    if not ironhorse.ops.cuda_available():
        np.testing.assert_array_equal(op(x, 2.0), 2 * x * x)
    t = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda t: op(t, 2.0), (t,))
    assert torch.autograd.gradcheck(lambda t: op.torch(t, 2.0), (t,))
    compiled = torch.compile(lambda t: op(t, 2.0).sum(), fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(t), (2 * t * t).sum())
    for wrong, words in [
        (lambda x, a: x.sum(), r"cpu= gave `y` as float64 \[\], expected float64 \[3, 4\]"),
        (lambda x, a: x.float(), "as float32 .*, expected float64"),
        (lambda x, a: (x, x), "cpu= gave 2 results, expected 1"),
    ]:
        with pytest.raises(InvalidValueError, match=words):
            jit.op(SQUARE, forward="square", cpu=wrong)(t, 1.0)
    same = jit.op(SQUARE, forward="square", cpu=lambda x, a: x)
    torch.library.opcheck(same.torch, (t.detach(), 1.0), test_utils="test_schema")


def test_an_op_made_twice_does_not_replace_the_first(stand: Stand):
    first = jit.op(SQUARE, forward="square", name="twice")
    second = jit.op(SQUARE, forward="square", name="twice")
    assert str(first.torch) != str(second.torch)


# check


def test_check_passes_and_fails(capsys: pytest.CaptureFixture):
    good = jit.op(SQUARE, forward="square", backward="square_bwd", cpu=lambda x, a: a * x * x)
    report = jit.check(good, torch.randn(4, 5), 0.5, reference=lambda x, a: a * x * x, sizes=(0, 1, 33))
    assert report and report.passed, str(report)
    shown = capsys.readouterr().out
    assert "gradcheck" in shown and "size 5 -> 33" in shown
    assert shown.count("pass") == sum(c.passed is True for c in report.checks) == len(report.checks) - 3
    skipped = {c.name: c.detail for c in report.checks if c.passed is None}
    assert set(skipped) == {"kernel", "not contiguous", "offset by one element"}, "only CUDA tensors run the kernel"
    assert all("kernel not run" in detail for detail in skipped.values())
    report = jit.check(good, np.ones(6, np.float32), 0.5, reference=lambda x, a: 3 * x, sizes=(31,), show=False)
    failed = [c.name for c in report.checks if c.passed is False]
    assert not report.passed and failed == ["gradient of sum()", "size 31"]
    assert "element 0 is 0.5, expected 3" in str(report)
    with pytest.raises(InvalidValueError, match="size 31"):
        report.raise_if_failed()


def test_check_without_a_gpu_compares_nothing_with_itself():
    op = jit.op(SQUARE, forward="square", backward="square_bwd", cpu=lambda x, a: a * x * x)
    report = jit.check(op, torch.randn(4, 5), 0.5, sizes=(0, 31), show=False)
    assert report
    sizes = [c for c in report.checks if c.name.startswith("size ")]
    assert len(sizes) == 4 and all(c.passed is None and c.detail == "kernel not run" for c in sizes), str(report)


def test_check_compiles_what_it_cannot_run():
    wrong = SQUARE.replace("if (i < n)", "if (i < m)")
    assert wrong != SQUARE
    op = jit.op(wrong, forward="square", backward="square_bwd", cpu=lambda x, a: a * x * x)
    report = jit.check(op, torch.randn(4, 5), 0.5, sizes=(), show=False)
    (kernel,) = [c for c in report.checks if c.name == "kernel"]
    if kernel.passed is None:
        assert "not compiled either" in kernel.detail
        pytest.skip("NVRTC is not installed")
    assert kernel.passed is False and not report and '"m" is undefined' in kernel.detail, str(report)


def test_check_finds_a_wrong_gradient(stand: Stand, monkeypatch: pytest.MonkeyPatch):
    from jit_cases import _Launcher

    op = jit.op(SQUARE, forward="square", backward="square_bwd")
    good = jit.check(op, torch.randn(4, 5), 0.5, reference=lambda x, a: a * x * x, sizes=(0, 1, 31, 33), show=False)
    assert good, str(good)

    def wrong(self, d_y, x, d_x, n, a):
        d_x[:n] = a * x * d_y

    monkeypatch.setattr(_Launcher, "square_bwd", wrong)
    report = jit.check(op, torch.randn(4, 5), 0.5, reference=lambda x, a: a * x * x, sizes=(), show=False)
    assert {c.name for c in report.checks if c.passed is False} >= {"gradcheck", "gradient of sum()"}


# The example, and without torch.

EXAMPLE = Path(__file__).parents[2] / "examples" / "python" / "jit_layer.py"


@pytest.mark.skipif(not EXAMPLE.exists(), reason="not in the repository")
def test_the_example_trains(tmp_path: Path):
    numbers = tmp_path / "numbers.json"
    command = [sys.executable, str(EXAMPLE), "--device", "cpu", "--steps", "20", "--json", str(numbers)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(numbers.read_text())
    assert found["checks_passed"] and found["last_loss"] < found["first_loss"] / 2
    assert found["largest_difference_in_loss"] == 0


@compiles
@pytest.mark.skipif(not EXAMPLE.exists(), reason="not in the repository")
def test_the_kernels_of_the_example_compile():
    module = jit.load(EXAMPLE.with_name("bias_relu2.cu"))
    names = [f"{kernel.name}<{t}>" for kernel in module.kernels for t in ("float", "bf16")]
    assert len(module.compile(*names, arch=ARCH).lowered) == 6


def test_numpy_ops_need_no_torch():
    code = f"""
import sys; sys.modules["torch"] = None; del sys.modules["torch"]
class No:
    def find_spec(self, name, *rest):
        if name == "torch" or name.startswith("torch."): raise ImportError(name)
sys.meta_path.insert(0, No())
import numpy as np
from ironhorse import jit
op = jit.op({SQUARE!r}, forward="square", backward="square_bwd", cpu=lambda x, a: a * x * x)
print(op(np.float32([1, 2, 3]), 2.0), "torch" in sys.modules)
try: op.torch
except jit._op.NotAvailableError as error: print(error)
try: jit.check(op, np.ones(3), 1.0)
except jit._op.NotAvailableError as error: print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, env={**os.environ})
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["[ 2.  8. 18.] False", "square: torch is not installed", "check needs torch"]


def test_arguments_that_python_cannot_say_and_arguments_given_twice():
    source = """
    extern "C" __global__ void twice(const float* in, float* out, int N) {
        int i = blockIdx.x * blockDim.x + threadIdx.x;
        if (i < N) out[i] = 2 * in[i];
    }
    extern "C" __global__ void twice_bwd(const float* d_out, const float* in, float* d_in, int N) {
        int i = blockIdx.x * blockDim.x + threadIdx.x;
        if (i < N) d_in[i] = 2 * d_out[i] + 0 * in[i];
    }
    """
    op = jit.op(source, forward="twice", backward="twice_bwd", cpu=lambda x: 2 * x)
    x = np.arange(3, dtype=np.float32)
    assert op(x).tolist() == op(in_=x).tolist() == [0, 2, 4]
    with pytest.raises(InvalidValueError, match="`in` is given twice"):
        op(x, in_=x)
    torch = pytest.importorskip("torch")
    t = torch.ones(3, requires_grad=True)
    op(t).sum().backward()
    assert t.grad.tolist() == [2, 2, 2]
