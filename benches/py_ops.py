"""ironhorse.ops against numpy: the cost of a call on 16 elements, and speed on a million. Prints JSON.

    python benches/py_ops.py [--json FILE] [--repeat N] [--threads N]

ironhorse and numpy alternate in batches of 10 ms; the best batch counts. Takes less than a minute.
"""

from __future__ import annotations

import argparse
import ctypes
import ctypes.util
import json
import os
import platform
import sys
import time
import timeit
from pathlib import Path

import numpy as np
from ironhorse import _native, ops

BATCH_S = 0.01
BLAS_THREADS = "OPENBLAS_NUM_THREADS"


def best(repeat: int, *calls) -> list[float]:
    """Seconds per call of each function: the best of several alternating batches."""
    timers = [timeit.Timer(call) for call in calls]
    loops = []
    for timer in timers:
        timer.timeit(1)  # the first call creates threads and allocates memory
        once = min(timer.repeat(3, 1))
        loops.append(max(1, int(BATCH_S / max(once, 1e-7))))
    rounds = [[timer.timeit(n) / n for timer, n in zip(timers, loops, strict=True)] for _ in range(repeat)]
    return [min(times) for times in zip(*rounds, strict=True)]


def ctypes_call(x: np.ndarray, out: np.ndarray):
    """A ctypes call like that of hand-written bindings: pointers from arrays, and a C function that does nothing."""
    pointer = ctypes.POINTER(ctypes.c_float)
    # Any C function with two pointers and a size will do, because only the overhead of the call is measured.
    function = ctypes.CDLL(None).memcmp
    function.argtypes, function.restype = [pointer, pointer, ctypes.c_size_t], ctypes.c_int
    return lambda: function(x.ctypes.data_as(pointer), out.ctypes.data_as(pointer), ctypes.c_size_t(0))


def calls(repeat: int) -> dict[str, float]:
    """Microseconds per call on 16 elements."""
    x, out = np.linspace(-2, 2, 16, dtype=np.float32), np.zeros(16, np.float32)
    weight = np.ones(16, np.float32)
    cases = {
        "silu(x, out)": lambda: ops.silu(x, out),
        "silu(x)": lambda: ops.silu(x),
        "add(x, x, out)": lambda: ops.add(x, x, out),
        "softmax(x, out)": lambda: ops.softmax(x, out),
        "rmsnorm(x, weight, out)": lambda: ops.rmsnorm(x, weight, out),
        "ctypes, empty function": ctypes_call(x, out),
        "numpy x / (1 + exp(-x))": lambda: x / (1 + np.exp(-x)),
        "numpy add(x, x, out)": lambda: np.add(x, x, out),
    }
    times = best(repeat, *cases.values())
    return {name: round(seconds * 1e6, 3) for name, seconds in zip(cases, times, strict=True)}


def softmax(x: np.ndarray) -> np.ndarray:
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def speeds(repeat: int) -> list[dict]:
    """Milliseconds on a million elements; both sides allocate their results unless the name says otherwise."""
    rng = np.random.default_rng(0)
    x, y = (rng.standard_normal((1000, 1000)).astype(np.float32) for _ in range(2))
    out, weight, bias = np.empty_like(x), np.ones(1000, np.float32), np.zeros(1000, np.float32)
    param, m, v = x.copy(), np.zeros_like(x), np.zeros_like(x)
    targets = rng.integers(0, 1000, 1000, dtype=np.int32)
    rows = np.arange(1000)
    c = np.float32(np.sqrt(2 / np.pi))

    def adamw():
        nonlocal param, m, v
        param *= 1 - 1e-3 * 0.1
        m = 0.9 * m + 0.1 * y
        v = 0.999 * v + 0.001 * y**2
        param -= 1e-3 * (m / 0.5) / (np.sqrt(v / 0.5) + 1e-8)

    def entropy():
        shifted = x - x.max(-1, keepdims=True)
        log_probs = shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
        return -log_probs[rows, targets].mean(), log_probs

    log_probs = entropy()[1]

    def entropy_backward():
        d = np.exp(log_probs)
        d[rows, targets] -= 1
        d /= 1000
        return d

    def layernorm():
        return (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-5) * weight + bias

    p, p1, p2 = x.copy(), np.zeros_like(x), np.zeros_like(x)
    cases = {
        "add, into out": (lambda: ops.add(x, y, out), lambda: np.add(x, y, out)),
        "mul, into out": (lambda: ops.mul(x, y, out), lambda: np.multiply(x, y, out)),
        "scale, into out": (lambda: ops.scale(x, out, 1.5), lambda: np.multiply(x, np.float32(1.5), out)),
        "add": (lambda: ops.add(x, y), lambda: x + y),
        "silu": (lambda: ops.silu(x), lambda: x / (1 + np.exp(-x))),
        "gelu": (lambda: ops.gelu(x), lambda: 0.5 * x * (1 + np.tanh(c * (x + np.float32(0.044715) * x * x * x)))),
        "swiglu": (lambda: ops.swiglu(x, y), lambda: x / (1 + np.exp(-x)) * y),
        "softmax": (lambda: ops.softmax(x), lambda: softmax(x)),
        "rmsnorm": (
            lambda: ops.rmsnorm(x, weight),
            lambda: x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6) * weight,
        ),
        "layernorm": (lambda: ops.layernorm(x, weight, bias), layernorm),
        "cross_entropy_forward": (lambda: ops.cross_entropy_forward(x, targets), entropy),
        "cross_entropy_backward": (lambda: ops.cross_entropy_backward(log_probs, targets), entropy_backward),
        "adamw_step, in place": (
            lambda: ops.adamw_step(p, y, p1, p2, 1e-3, 0.9, 0.999, 1e-8, 0.1, 5),
            adamw,
        ),
        "argmax": (lambda: ops.argmax(x), lambda: x.argmax(-1)),
        "gemm 1000x1000x1000": (lambda: ops.gemm(x, y), lambda: x @ y),
    }
    results = []
    for name, (ours, theirs) in cases.items():
        a, b = (seconds * 1e3 for seconds in best(repeat, ours, theirs))
        results.append({"op": name, "ironhorse_ms": round(a, 4), "numpy_ms": round(b, 4), "times": round(b / a, 2)})
    return results


def keep_to(threads: int) -> None:
    """Starts this program again on this many cores, because numpy's BLAS starts its threads when it is loaded."""
    cores = sorted(os.sched_getaffinity(0))
    if not 1 <= threads <= len(cores):
        raise SystemExit(f"error: --threads is {threads}; this process may use 1 to {len(cores)} cores")
    if os.environ.get(BLAS_THREADS) != str(threads):
        os.sched_setaffinity(0, cores[:threads])
        os.environ[BLAS_THREADS] = str(threads)
        os.execv(sys.executable, [sys.executable, *sys.argv])
    os.sched_setaffinity(0, cores[:threads])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="write the result there too")
    parser.add_argument("--repeat", type=int, default=25, help="batches, of which the best counts (default 25)")
    parser.add_argument("--threads", type=int, help="cores to use (default all)")
    args = parser.parse_args()
    if args.threads is not None:
        keep_to(args.threads)
    from compare_torch import provenance  # after ironhorse, because it changes sys.path

    start = time.perf_counter()
    versions = {"python": platform.python_version(), "numpy": np.__version__, "ironhorse": _native.__version__}
    record = {
        **provenance(),
        "versions": versions,
        "machine": platform.machine(),
        "threads": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "call_us": calls(args.repeat),
        "million": speeds(args.repeat),
    }
    record["seconds"] = round(time.perf_counter() - start, 1)
    text = json.dumps(record, indent=2)
    print(text)
    if args.json:
        args.json.write_text(text + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
