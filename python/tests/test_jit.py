"""ironhorse.jit: source, compiling, the cache and bare kernels, without a GPU. Compiling is real (NVRTC, for a named
architecture); launches go to a stand-in that computes on the host what the kernels compute. test_jit_cuda.py has the
real ones."""

from __future__ import annotations

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
from jit_cases import AFFINE, ROWS, SQUARE, Stand
from jit_fixtures import ARCH, F32, compiles

pytestmark = pytest.mark.usefixtures("cache")

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
    assert f'{path}:3: error: identifier "frob" is undefined' in str(error) and "^" in str(error)
    assert str(pickle.loads(pickle.dumps(error))) == str(error)


@compiles
def test_other_errors():
    with pytest.raises(jit.CompileError, match='kernel square<nope>: error: identifier "nope"'):
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
    assert sorted(file.name for file in cache.iterdir()) == ["key", entry.name], "nothing is left aside"


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
    cache.mkdir(mode=0o700)
    (cache / f".{'0' * 32}.new").write_bytes(b"half")  # what a killed process leaves
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
        ((x, y[::2], 4, 1.0), r"`y` is float\*, and the array is not contiguous: an output is used in place"),
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


@compiles
def test_a_file_may_be_called_like_one_of_ours(tmp_path: Path):
    """`ironhorse.cuh` is whole in itself: it takes no file of that folder for a part of it."""
    (tmp_path / "floats.cuh").write_text("#define MINE 5\n")
    text = '#include "ironhorse.cuh"\n#include "floats.cuh"\n'
    text += "KERNEL f(f16* x) { x[0] = from_float<f16>(sqrt_of(float(MINE))); }"
    assert jit.compile(text, arch=ARCH, include=tmp_path).cubin
