"""Launches of ironhorse.jit down to the driver's functions, on a stand-in for the driver (jit_driver.py)."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from jit_driver import build
from jit_fixtures import compiles

START = r"""
import ctypes, sys, threading
import numpy as np
from ironhorse import jit, ops
assert ops.cuda_available(), "the driver and NVRTC are here; nothing else is needed"
driver = ctypes.CDLL(sys.argv[1])
module = jit.source('''
extern "C" __global__ void scale(const float* x, float* y, long n, float a) { }
extern "C" __global__ void heavy(float* y) { }
extern "C" __global__ void wild(float* y) { }
''')
scale, x, y = module["scale"], np.arange(1000, dtype=np.float32), np.zeros(1000, np.float32)
def refused(words, call):
    try: call()
    except jit._module.InvalidValueError as error: assert words in str(error), error
    else: raise AssertionError("not refused: " + words)
"""

LAUNCHES = r"""
op = jit.op(module, forward="scale")
assert (op(x, 2.0) == 2 * x).all() and (op(x[::2], 3.0) == 3 * x[::2]).all() and op(x[:0], 1.0).shape == (0,)
scale[4, 256](x, y, 1000, 2.0); assert (y == 2 * x).all()
scale[4, 256](y, y, 1000, 0.5); assert (y == x).all()
scale[4, 256](x, y, 10, 0); assert not y[:10].any() and (y[10:] == x[10:]).all(), "the rest comes back as it was"
scale[0, 32](x, y, 4, 1.0)
scale[1, 32, 100 << 10](x, y, 4, 1.0)
def work(i):
    a = np.full(1000 + i, i, np.float32)
    for _ in range(50): good.append((op(a, 2.0) == 2 * a).all())
good = []
threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
[t.start() for t in threads]; [t.join() for t in threads]
assert len(good) == 400 and all(good)
assert driver.held_now() == 0 and driver.loads_now() == 1
"""

REFUSED = r"""
refused("a block of [2048, 1, 1] has 2048 threads; 1024 is the most", lambda: scale[1, 2048](x, y, 4, 1.0))
refused("has no threads", lambda: scale[1, 0](x, y, 4, 1.0))
refused("64 in z", lambda: scale[1, (1, 1, 65)](x, y, 4, 1.0))
refused("512 is the most with its 40 registers", lambda: module["heavy"][1, 1024](y))
refused("1048576 bytes of dynamic shared memory; 232448 is the most", lambda: scale[1, 32, 1 << 20](x, y, 4, 1.0))
refused("too many blocks in y; 65535 is the most", lambda: scale[(1, 70000), 32](x, y, 4, 1.0))
refused("two arrays overlap", lambda: scale[1, 32](y[:100], y[50:150], 100, 1.0))
assert driver.held_now() == 0
"""

NUMBERS = r"""
text = '''
#include "ironhorse.cuh"
KERNEL numbers(double* y, bool a, signed char b, unsigned char c, short d, unsigned short e, int f, unsigned g, long h,
    u64 i, float j, double k, f16 l, bf16 m) { }'''
kernel, y = jit.source(text)["numbers"], np.zeros(13)
values = [True, -128, 255, -32768, 65535, -(2**31), 2**32 - 1, -(2**52), 2**52, 0.1, 0.1, 1.0, 1.0]
kernel[1, 1](y, *values)
assert y[:11].tolist() == [*map(float, values[:9]), float(np.float32(0.1)), 0.1] and y[11:].tolist() == [0x3C00, 0x3F80]
random = np.random.default_rng(0)
more = random.normal(size=2000) * 10.0 ** random.integers(-9, 5, 2000)
edges = [0.0, -0.0, 6.1e-5, 65504.0, 65519.9, 65520.0, 1e9, np.inf, -np.inf, 2.0**-24, 2.0**-25, 1.5 * 2.0**-25]
for v in [*edges, *more]:
    values[11:] = [v, v]
    kernel[1, 1](y, *values)
    single = np.float32(v)
    with np.errstate(over="ignore"): half = np.float16(single)
    bits = int(single.view(np.uint32))
    assert y[11] == half.view(np.uint16), v
    assert y[12] == (bits + 0x7FFF + (bits >> 16 & 1)) >> 16, v
for at, bad in ((1, 128), (2, -1), (5, 2**31), (5, 1.5), (8, -1), (8, 2**64), (6, 2**32), (9, "x")):
    changed = list(values); changed[at] = bad
    refused("argument %d " % (at + 2), lambda: kernel[1, 1](y, *changed))
"""

LOST = r"""
try: module["wild"][1, 1](y)
except Exception as error: print(type(error).__name__, error)
assert driver.held_now() == 0
print("alive")
"""


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    library = build(tmp_path_factory.mktemp("driver"))
    if library is None:
        pytest.skip("no C compiler, or not in the repository")
    return library


@compiles
@pytest.mark.parametrize("part", ["LAUNCHES", "REFUSED", "NUMBERS", "LOST"])
def test_on_the_stand_in(driver: Path, tmp_path: Path, part: str):
    env = {**os.environ, "IRONHORSE_CUDA_PATH": str(driver.parent), "IRONHORSE_CACHE": str(tmp_path)}
    command = [sys.executable, "-c", START + globals()[part], str(driver)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=env)
    assert done.returncode == 0, done.stdout + done.stderr
    if part == "LOST":
        assert done.stdout.startswith("LaunchFailedError") and "kernel wild: CUDA_ERROR_ILLEGAL_ADDRESS" in done.stdout
        assert "compute-sanitizer" in done.stdout and done.stdout.endswith("alive\n")


@compiles
@pytest.mark.parametrize("nvrtc", [True, False])
def test_ops_need_the_compiler_and_no_other_library(driver: Path, nvrtc: bool, tmp_path: Path):
    """In a world where nothing is found but the driver and, or not, NVRTC: no cuBLASLt."""
    folder = tmp_path / "cuda"
    folder.mkdir()
    (folder / driver.name).symlink_to(driver)
    found = [path for root in sys.path for path in Path(root).glob("nvidia/*/lib/libnvrtc*.so*")]
    if not found:
        pytest.skip("NVRTC is not that of a wheel")
    for path in found if nvrtc else ():
        (folder / path.name).symlink_to(path)
    places = ("CUDA_HOME", "CUDA_PATH", "VIRTUAL_ENV", "CONDA_PREFIX")
    env = {name: value for name, value in os.environ.items() if name not in places}
    env |= {"IRONHORSE_CUDA_PATH": str(folder), "IRONHORSE_PYTHON_PREFIX": str(tmp_path)}
    env |= {"LD_LIBRARY_PATH": "", "PATH": str(folder)}
    program = [sys.executable, "-c", "import ironhorse; print(ironhorse.ops.cuda_available())"]
    done = subprocess.run(program, capture_output=True, text=True, timeout=120, env=env, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (0, f"{nvrtc}\n"), done.stdout + done.stderr
