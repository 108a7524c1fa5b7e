"""Times how long it takes to make an op from a user's kernel: a new one, and from the cache in a new process.

    python benches/jit.py --json jit.json
    python benches/jit.py --torch        # also torch.utils.cpp_extension.load_inline; needs nvcc and a C++ compiler

Without a GPU only compiling (for --arch) is timed. A new op is ready when its first result is on the GPU; starting CUDA
and importing torch are not counted.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

SOURCE = """
extern "C" __global__ void scale(const float* x, float* y, long n, float a) {
    long i = blockIdx.x * (long)blockDim.x + threadIdx.x;
    if (i < n) y[i] = a * x[i];
}
"""

ONE = """
import json, sys, time
start = time.perf_counter()
from ironhorse import jit
imported = time.perf_counter() - start
text, arch, gpu = sys.argv[1], sys.argv[2], sys.argv[3] == "1"
if gpu:
    import torch
    x = torch.ones(1000, device="cuda")
    torch.cuda.synchronize()
start = time.perf_counter()
if gpu:
    op = jit.op(text, forward="scale")
    y = op(x, 2.0)
    torch.cuda.synchronize()
    ready = time.perf_counter() - start
    assert bool((y == 2).all())
    code = op.module.compile()
else:
    code = jit.compile(text, arch=arch)
    ready = time.perf_counter() - start
print(json.dumps({"ready_s": ready, "compile_s": code.seconds, "cached": code.cached, "import_s": imported}))
"""

TORCH = """
import time, torch
from torch.utils.cpp_extension import load_inline
x = torch.ones(1000, device="cuda"); torch.cuda.synchronize()
start = time.perf_counter()
cuda = '''
__global__ void scale_kernel(const float* x, float* y, long n, float a) {
    long i = blockIdx.x * (long)blockDim.x + threadIdx.x;
    if (i < n) y[i] = a * x[i];
}
torch::Tensor scale(torch::Tensor x, double a) {
    auto y = torch::empty_like(x);
    scale_kernel<<<(x.numel() + 255) / 256, 256>>>(x.data_ptr<float>(), y.data_ptr<float>(), x.numel(), a);
    return y;
}
'''
declared = "torch::Tensor scale(torch::Tensor x, double a);"
made = load_inline("jit_bench_%d" % time.time(), declared, cuda, functions=["scale"])
y = made.scale(x, 2.0); torch.cuda.synchronize()
print(time.perf_counter() - start)
"""


def one(text: str, arch: str, gpu: bool, cache: str) -> dict:
    """A new process that makes the op."""
    command = [sys.executable, "-c", ONE, text, arch, "1" if gpu else "0"]
    env = {**os.environ, "IRONHORSE_CACHE": cache}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=600)
    if done.returncode:
        raise SystemExit(done.stderr)
    return json.loads(done.stdout.splitlines()[-1])


def in_process(gpu: bool, arch: str, runs: int) -> list[float]:
    """Makes new ops one after another in one process, as when editing and rerunning a kernel."""
    from ironhorse import jit

    times = []
    if gpu:
        import torch

        x = torch.ones(1000, device="cuda")
        torch.cuda.synchronize()
    for i in range(runs):
        text = f"{SOURCE}// {time.time_ns()} {i}"
        start = time.perf_counter()
        if gpu:
            jit.op(text, forward="scale")(x, 2.0)
            torch.cuda.synchronize()
        else:
            jit.compile(text, arch=arch)
        times.append(time.perf_counter() - start)
    return times


def call_cost(runs: int = 20000) -> dict[str, float]:
    """Microseconds of a call on 16 elements, without waiting for the GPU."""
    import torch
    from ironhorse import jit

    x = torch.ones(16, device="cuda")
    op = jit.op(SOURCE, forward="scale")
    kernel = op.module["scale"][1, 32]
    y = torch.empty_like(x)
    calls = {
        "op_us": lambda: op(x, 2.0),
        "kernel_us": lambda: kernel(x, y, 16, 2.0),
        "torch_mul_us": lambda: torch.mul(x, 2.0),
    }
    found = {}
    for name, call in calls.items():
        for _ in range(100):
            call()
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(runs):
            call()
        found[name] = (time.perf_counter() - start) / runs * 1e6
        torch.cuda.synchronize()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--arch", default="sm_90a", help="what to compile for without a GPU")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--torch", action="store_true", help="also time torch's load_inline")
    parser.add_argument("--json", type=Path, help="write the numbers there")
    args = parser.parse_args()
    from ironhorse.ops import cuda_available

    gpu = cuda_available()
    results: dict[str, object] = {"gpu": gpu, "arch": None if gpu else args.arch}
    middle = statistics.median
    with tempfile.TemporaryDirectory() as cache:
        texts = [f"{SOURCE}// {time.time_ns()} {i}" for i in range(args.runs)]
        new = [one(text, args.arch, gpu, cache) for text in texts]
        cached = [one(text, args.arch, gpu, cache) for text in texts]
        assert not any(r["cached"] for r in new) and all(r["cached"] for r in cached)
        os.environ["IRONHORSE_CACHE"] = cache
        again = in_process(gpu, args.arch, args.runs)
    results["new_process_new_op_s"] = middle(r["ready_s"] for r in new)
    results["new_process_new_op_worst_s"] = max(r["ready_s"] for r in new)
    results["new_process_cached_op_s"] = middle(r["ready_s"] for r in cached)
    results["new_process_cached_op_worst_s"] = max(r["ready_s"] for r in cached)
    results["same_process_new_op_s"] = middle(again[1:] or again)
    results["import_s"] = middle(r["import_s"] for r in cached)
    if gpu:
        results |= call_cost()
    if args.torch and gpu:
        done = subprocess.run([sys.executable, "-c", TORCH], capture_output=True, text=True, timeout=900)
        results["torch_load_inline_s"] = float(done.stdout.split()[-1]) if done.returncode == 0 else None
    for name, value in results.items():
        print(f"{name:<34}{value:.4f}" if isinstance(value, float) else f"{name:<34}{value}")
    goals = {"new_process_new_op_s": 1.5, "new_process_cached_op_s": 0.05}
    results["goals_met"] = {name: results[name] < goal for name, goal in goals.items()}  # type: ignore[operator]
    print("goals", results["goals_met"])
    if args.json:
        args.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
