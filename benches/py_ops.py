"""ironhorse.ops against numpy: the cost of a call on 16 elements, and speed on a million. Prints JSON.

    python benches/py_ops.py [--json FILE] [--repeat N]
"""

from __future__ import annotations

import argparse
import ctypes
import ctypes.util
import json
import platform
import sys
import timeit
from pathlib import Path

import numpy as np
from ironhorse import _native, ops

MILLION = 1_000_000


def best(call, repeat: int) -> float:
    """Seconds of one call: the best of several batches, the batch long enough for the clock."""
    timer = timeit.Timer(call)
    loops, _ = timer.autorange()
    return min(timer.repeat(repeat, loops)) / loops


def ctypes_call(x: np.ndarray, out: np.ndarray):
    """A ctypes call in the manner of hand-written bindings: pointers from arrays, a C function that does nothing."""
    pointer = ctypes.POINTER(ctypes.c_float)
    # Any C function that takes two pointers and a size does: what is measured is the way there.
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
        "_native.silu(x, out)": lambda: _native.silu(x, out),
        "add(x, x, out)": lambda: ops.add(x, x, out),
        "softmax(x, out)": lambda: ops.softmax(x, out),
        "rmsnorm(x, weight, out)": lambda: ops.rmsnorm(x, weight, out),
        "ctypes, empty function": ctypes_call(x, out),
        "numpy x / (1 + exp(-x))": lambda: x / (1 + np.exp(-x)),
        "numpy add(x, x, out)": lambda: np.add(x, x, out),
    }
    return {name: round(best(call, repeat) * 1e6, 3) for name, call in cases.items()}


def softmax(x: np.ndarray) -> np.ndarray:
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def speeds(repeat: int) -> list[dict]:
    """Milliseconds on a million elements, ours and numpy's; both make their results, except where marked in place."""
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
        "adamw_step, in place": (
            lambda: ops.adamw_step(p, y, p1, p2, 1e-3, 0.9, 0.999, 1e-8, 0.1, 5),
            adamw,
        ),
        "argmax": (lambda: ops.argmax(x), lambda: x.argmax(-1)),
        "gemm 1000x1000x1000": (lambda: ops.gemm(x, y), lambda: x @ y),
    }
    results = []
    for name, (ours, theirs) in cases.items():
        a, b = best(ours, repeat) * 1e3, best(theirs, repeat) * 1e3
        results.append({"op": name, "ironhorse_ms": round(a, 4), "numpy_ms": round(b, 4), "times": round(b / a, 2)})
    return results


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="write the result there too")
    parser.add_argument("--repeat", type=int, default=7, help="batches, of which the best counts (default 7)")
    args = parser.parse_args()
    versions = {"python": platform.python_version(), "numpy": np.__version__, "ironhorse": _native.__version__}
    record = {
        "versions": versions,
        "machine": platform.machine(),
        "call_us": calls(args.repeat),
        "million": speeds(args.repeat),
    }
    text = json.dumps(record, indent=2)
    print(text)
    if args.json:
        args.json.write_text(text + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
