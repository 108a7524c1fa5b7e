"""ironhorse.jit: what needs no GPU. Compiling is real (NVRTC, for a named architecture); launches go to a stand-in that
computes on the host what the kernels compute. test_jit_cuda.py has the real ones."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
import threading
import time
from pathlib import Path

import ironhorse
import numpy as np
import pytest
import torch
from ironhorse import jit
from ironhorse.errors import InvalidValueError, NotAvailableError
from ironhorse.jit import _op, _torch
from jit_cases import AFFINE, ROWS, SQUARE, Stand

ARCH = "sm_90a"
F32 = "__global__ void f(float* x) { x[0] = 1; }"


def can_compile() -> bool:
    try:
        jit.compile(F32, arch=ARCH)
    except NotAvailableError:
        return False
    return True


compiles = pytest.mark.skipif(not can_compile(), reason="NVRTC is not here")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("IRONHORSE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def stand(monkeypatch: pytest.MonkeyPatch) -> Stand:
    """A stand-in for the GPU; torch's CUDA implementations run on tensors of the CPU."""
    stand, define = Stand(), _torch._define
    monkeypatch.setattr(jit.Kernel, "on", lambda kernel, device=0: stand.on(kernel, device))
    monkeypatch.setattr(_op, "cuda_available", lambda: True)
    monkeypatch.setattr(_torch, "_define", lambda *a: define(*a[:4], a[3], a[5]))  # CUDA's for the CPU
    return stand


# Reading source.


def test_kernels_are_read_from_the_source():
    module = jit.source(SQUARE + ROWS)
    assert [str(k) for k in module.kernels][0] == "square<class T>(const T* x, T* y, long n, float a)"
    assert [k.name for k in module.kernels] == ["square", "square_bwd", "top"]
    assert module.kernels[0].line == 4
    kernel = module["top<double, 4>"]
    assert [p.type for p in kernel.params][:3] == ["const double*", "double*", "int*"]
    assert [p.kind for p in kernel.params] == ["P", "P", "P", "i4", "i4", "?", "u1"]


@pytest.mark.parametrize(
    ("c", "kind"),
    [("unsigned", "u4"), ("long long int", "i8"), ("unsigned long", "u8"), ("short", "i2"), ("char", "i1")]
    + [("std::uint16_t", "u2"), ("size_t", "u8"), ("__half", "f2"), ("__nv_bfloat16", "bf2"), ("int64_t", "i8")]
    + [("bool", "?"), ("Big", None)],
)
def test_types(c: str, kind: str | None):
    (read,) = jit.source(f"__global__ void f({c} x) {{}}").kernels
    assert read.params[0].kind == kind


def test_unknown_names_say_what_there_is():
    module = jit.source(SQUARE)
    with pytest.raises(InvalidValueError, match=r"no kernel `cube`; there are: square<class T>\(const T\* x"):
        module.kernel("cube")
    with pytest.raises(InvalidValueError, match=r'template argument `class T` is missing; write "square<float>"'):
        module.kernel("square")
    with pytest.raises(InvalidValueError, match="2 template arguments, expected 1"):
        module.kernel("square<float, 4>")
    with pytest.raises(InvalidValueError, match="several kernels `f`"):
        jit.source("__global__ void f(int*); __global__ void f(float*);").kernel("f")
    made = jit.source("#define MAKE(name) __global__ void name(float* x, int n) {}\nMAKE(g)")
    assert made.kernels == () and [p.kind for p in made.kernel("g", signature="float* x, int n").params] == ["P", "i4"]
    with pytest.raises(InvalidValueError, match="not a parameter list"):
        made.kernel("g", signature=") {")


def test_what_python_cannot_give_is_refused():
    with pytest.raises(InvalidValueError, match=r"argument 2 `s` is Big, which Python cannot give"):
        jit.source("struct Big { int a[4]; }; __global__ void f(float* x, Big s) {}").kernel("f")
    with pytest.raises(InvalidValueError, match=r"`p` is float\*\*"):
        jit.source("__global__ void f(float** p) {}").kernel("f")


# Compiling.


@compiles
def test_compiling_and_names_of_templates():
    code = jit.compile(SQUARE, "square<float>", "square<bf16>", arch=ARCH)
    assert set(code.lowered) == {"square<float>", "square<bf16>"}
    assert code.lowered["square<float>"].startswith("_Z6square")
    assert code.cubin[:4] == b"\x7fELF" and all(name.encode() in code.cubin for name in code.lowered.values())
    assert "registers" in code.log and not code.cached
    assert jit.compile(AFFINE, arch=ARCH).lowered == {}
    assert b"_ZN1a1fEPf" in jit.compile("namespace a { __global__ void f(float* x) { *x = 1; } }", arch=ARCH).cubin


@compiles
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a", "sm_100"])
def test_every_architecture(arch: str):
    names = [f"{name}<{t}>" for name in ("square", "square_bwd") for t in ("float", "double", "f16", "bf16")]
    assert jit.compile(SQUARE, *names, arch=arch).cubin


@compiles
def test_errors_show_file_line_and_caret(tmp_path: Path):
    path = tmp_path / "wrong kernel.cu"
    path.write_text('#include "part.h"\n__global__ void f(float* x) {\n    x[0] = frob(1) + 2;\n}\n')
    (tmp_path / "part.h").write_text("int g() {\n  return nothing;\n}\n")
    with pytest.raises(jit.CompileError) as caught:
        jit.load(path).compile(arch=ARCH)
    error = caught.value
    assert isinstance(error, ironhorse.IronhorseError) and isinstance(error, ValueError)
    first, second = error.diagnostics
    assert (Path(first.file).name, first.line, first.severity) == ("part.h", 2, "error")
    assert (second.file, second.line) == (str(path), 3)
    shown = second.source.splitlines()
    assert shown[0].strip() == "x[0] = frob(1) + 2;" and shown[1].index("^") == shown[0].index("frob")
    assert f"{path}:3: error: identifier \"frob\" is undefined" in str(error) and "^" in str(error)
    assert str(pickle.loads(pickle.dumps(error))) == str(error)


@compiles
def test_other_errors():
    with pytest.raises(jit.CompileError, match="kernel square<nope>: error: identifier \"nope\""):
        jit.compile(SQUARE, "square<nope>", arch=ARCH)
    with pytest.raises(jit.CompileError, match="unrecognized option --nonsense"):
        jit.compile(F32, arch=ARCH, flags=["--nonsense"])
    with pytest.raises(jit.CompileError, match="sm_1"):
        jit.compile(F32, arch="sm_1")
    with pytest.raises(jit.CompileError, match=r'"nowhere.h".*give its folder as include='):
        jit.compile('#include "nowhere.h"\n' + F32, arch=ARCH)
    with pytest.raises(InvalidValueError, match="give the architecture as arch"):
        jit.compile(F32, arch=ARCH, flags=["-arch=sm_80"])
    with pytest.raises(InvalidValueError, match="flags is '-G'; expected a list"):
        jit.compile(F32, arch=ARCH, flags="-G")
    with pytest.raises(InvalidValueError, match="include folder /not/there"):
        jit.source(F32, include="/not/there")
    with pytest.raises(NotAvailableError, match="no such file"):
        jit.load("/not/there.cu")
    with pytest.raises(InvalidValueError, match="NUL"):
        jit.source("a\0b")


@compiles
def test_flags_defines_and_folders(tmp_path: Path):
    (tmp_path / "value.h").write_text("#define VALUE 3\n")
    text = '#include "value.h"\nstatic_assert(VALUE == 3 && N == 4 && ON == 1);\n' + F32
    assert jit.compile(text, arch=ARCH, include=tmp_path, defines={"N": 4, "ON": True}, flags=["-std=c++20"]).cubin
    (tmp_path / "k.cu").write_text(text)
    assert jit.compile(tmp_path / "k.cu", arch=ARCH, defines={"N": 4, "ON": 1}).cubin, "the file's own folder"


# The cache.

AGAIN = """
import sys, time
from ironhorse import jit
code = jit.compile(open(sys.argv[1]).read(), "square<float>", arch="sm_90a")
print(code.cached, code.seconds)
"""


def again(source: Path) -> tuple[bool, float]:
    done = subprocess.run([sys.executable, "-c", AGAIN, str(source)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    cached, seconds = done.stdout.split()
    return cached == "True", float(seconds)


@compiles
def test_a_new_process_reads_the_cache(tmp_path: Path, cache: Path):
    source = tmp_path / "square.cu"
    source.write_text(SQUARE)
    assert again(source)[0] is False
    cached, seconds = again(source)
    assert cached and seconds < 0.5
    (entry,) = cache.glob("user-*.cubin")
    whole = entry.read_bytes()
    for damage in (b"", whole[: len(whole) // 2], whole[:-1] + bytes([whole[-1] ^ 1]), b"x" * 200):
        entry.write_bytes(damage)
        assert again(source)[0] is False, "a damaged entry is made again"
        assert again(source)[0] is True
    assert [file.name for file in cache.iterdir()] == [entry.name], "nothing is left aside"


@compiles
def test_everything_that_decides_the_code_is_in_the_key(tmp_path: Path):
    (tmp_path / "deep").mkdir()
    (tmp_path / "a.h").write_text('#include "deep/b.h"\n')
    (tmp_path / "deep" / "b.h").write_text("#define V 1\n")
    text = '#include "a.h"\n' + F32

    def key(**options):
        arguments = {"arch": ARCH, "include": tmp_path, **options}
        return jit.compile(arguments.pop("text", text), *arguments.pop("names", ()), **arguments).key

    first = key()
    assert key() == first
    others = [key(text=text + "\n"), key(arch="sm_80"), key(flags=["-DX=1"]), key(name="other.cu")]
    (tmp_path / "deep" / "b.h").write_text("#define V 2\n")
    others.append(key())
    assert len({first, *others}) == 6
    assert len({jit.compile(SQUARE, f"square<{t}>", arch=ARCH).key for t in ("float", "double")}) == 2


@compiles
def test_a_killed_build_blocks_nobody(cache: Path):
    cache.mkdir()
    (cache / ".user-0123.cubin.4711.a").write_bytes(b"half")  # what a killed process leaves
    assert jit.compile(F32, arch=ARCH).cubin


@compiles
def test_without_a_cache_folder_it_compiles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("IRONHORSE_CACHE", str(tmp_path / "file" / "below"))
    assert jit.compile(F32, arch=ARCH).cubin


@compiles
def test_threads_and_processes_at_once(tmp_path: Path, cache: Path):
    codes, errors = [], []

    def work(i: int) -> None:
        try:
            codes.append(jit.compile(SQUARE, "square<float>", arch=ARCH).cubin)
            codes.append(jit.compile(SQUARE + f"// {i}", "square<float>", arch=ARCH).cubin)
        except Exception as error:  # noqa: BLE001
            errors.append(error)

    source = tmp_path / "square.cu"
    source.write_text(SQUARE)
    command = [sys.executable, "-c", AGAIN, str(source)]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    threads = [threading.Thread(target=work, args=(i,)) for i in range(6)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    assert all(process.wait(timeout=120) == 0 for process in processes)
    assert not errors and len(codes) == 12
    assert again(source)[0]
    assert not [file for file in cache.iterdir() if file.name.startswith(".")]


@compiles
def test_the_lock_is_released_while_compiling():
    ticks, done = 0, threading.Event()

    def work() -> None:
        for i in range(4):
            jit.compile(SQUARE + f"// {i} {time.time()}", "square<float>", "square<double>", arch=ARCH)
        done.set()

    threading.Thread(target=work).start()
    while not done.is_set():
        ticks += 1
        time.sleep(0.001)
    assert ticks > 10


# Launches, on the stand-in.


def test_a_raw_launch_on_numpy_arrays(stand: Stand):
    kernel = jit.source(SQUARE)["square<float>"]
    x, y = np.arange(5, dtype=np.float32), np.zeros(5, np.float32)
    kernel[1, 256](x, y, 5, 2.0)
    np.testing.assert_array_equal(y, 2 * x * x)
    kernel[(1, 1), (32, 1, 1), 64](np.arange(10, dtype=np.float32)[::2], y, 5, 1)
    np.testing.assert_array_equal(y, np.arange(0, 10, 2, dtype=np.float32) ** 2)
    kernel[1, 32](torch.ones(5), torch.from_numpy(y), 5, 3.0)
    np.testing.assert_array_equal(y, 3)
    assert stand.launches[1] == ("square<float>", (1, 1, 1), (32, 1, 1), 64)


def test_wrong_arguments_of_a_launch(stand: Stand):
    kernel = jit.source(SQUARE)["square<float>"]
    x, y = np.zeros(4, np.float32), np.zeros(4, np.float32)
    for args, words in [
        ((x.astype(np.int32), y, 4, 1.0), r"kernel square<float>: argument 1 `x` is const float\*, got an int32 array"),
        ((x.astype(">f4"), y, 4, 1.0), r"got a >f4 array"),
        ((x, y.astype(np.float64), 4, 1.0), r"argument 2 `y` is float\*, got a float64 array"),
        ((x, y[::2], 4, 1.0), r"`y` is float\*, and the array is not contiguous: what is written cannot be a copy"),
        ((x, y, x, 1.0), r"argument 3 `n` is long, got a float32 array"),
        ((x, y, 4, None), r"argument 4 `a` is float, got None"),
        ((x, 3, 4, 1.0), r"argument 2 `y` is float\*, got 3"),
        ((x, y, 4), r"3 arguments, expected 4: const float\* x, float\* y, long n, float a"),
    ]:
        with pytest.raises(InvalidValueError, match=words):
            kernel[1, 32](*args)
    y.flags.writeable = False
    with pytest.raises(InvalidValueError, match="read-only"):
        kernel[1, 32](x, y, 4, 1.0)
    for shape in (1, (1,), (1, 2, 3, 4)):
        with pytest.raises(InvalidValueError, match=r"expected kernel\[grid, block\]"):
            kernel[shape]
    for grid in (-1, 1.5, (1, 2, 3, 4), "x", 1 << 32):
        with pytest.raises(InvalidValueError, match="grid is .*, expected one to three sizes"):
            kernel[grid, 32](x, x.copy(), 4, 1.0)
    with pytest.raises(InvalidValueError, match=r"give grid and block"):
        kernel(x, y, 4, 1.0)


def test_without_a_gpu_it_says_so():
    if ironhorse.ops.cuda_available():
        pytest.skip("there is one")
    x = np.zeros(4, np.float32)
    with pytest.raises(NotAvailableError):
        jit.source(SQUARE)["square<float>"][1, 32](x, x.copy(), 4, 1.0)
    op = jit.op(SQUARE, forward="square", backward="square_bwd")
    with pytest.raises(NotAvailableError, match="square: there is no CUDA device here, and the op has no cpu= version"):
        op(x, 1.0)
    with pytest.raises(NotAvailableError, match="tensors on the CPU, and the op has no cpu= version"):
        op(torch.zeros(4), 1.0)


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
        ({"forward": "square", "name": "a b"}, "not a name"),
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
    with pytest.raises(InvalidValueError, match="grid asks for `nothing`; there are x, a, y, n, N, rows, cols"):
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
    report = jit.check(good, torch.randn(4, 5), 0.5, sizes=(0, 1, 33))
    assert report and report.passed and all(c.passed for c in report.checks), str(report)
    shown = capsys.readouterr().out
    assert "gradcheck" in shown and "size 5 -> 33" in shown and shown.count("pass") == len(report.checks)
    report = jit.check(good, np.ones(6, np.float32), 0.5, reference=lambda x, a: 3 * x, sizes=(31,), show=False)
    assert not report.passed and [c.name for c in report.checks if not c.passed] == ["gradient of sum()", "size 31"]
    assert "element 0 is 0.5, expected 3" in str(report)
    with pytest.raises(InvalidValueError, match="size 31"):
        report.raise_if_failed()


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
