"""Times ironhorse.torch and torch itself, eager and compiled, in one run. Prints tables; --json saves the numbers.

    python benches/torch_ops.py [--json FILE] [--repeat N] [--only NAME ...] [--size N] [--no-compile]

On every device: the cost of a call on 16 elements. On CUDA: forward and forward + backward of each op on a large
tensor; times are medians of CUDA events. The three variants alternate, so that clock rate and other load affect all
of them. "limit" is the minimum memory traffic divided by the copy bandwidth measured in the same run.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import timeit
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ironhorse.torch as ops
import torch
import torch.nn.functional as F
from torch import Tensor

Times = dict[str, float]


@dataclass(frozen=True)
class Op:
    """An op: its two implementations, its inputs, and the minimum bytes moved by the forward and by both directions."""

    ours: Callable[..., Tensor]
    torchs: Callable[..., Tensor]
    inputs: tuple[Any, ...]
    forward_bytes: int
    both_bytes: int


def size(*tensors: Any) -> int:
    return sum(t.numel() * t.element_size() for t in tensors)


def elementwise(n: int, dtype: torch.dtype) -> dict[str, Op]:
    def normal(*sizes: int) -> Tensor:
        return torch.randn(*sizes, device="cuda", dtype=dtype, requires_grad=True)

    x, up, row, bias = normal(n, n), normal(n, n), normal(n), normal(n)
    b, s = size(x), size(row)
    kind = str(dtype).removeprefix("torch.")
    return {
        f"fused_scale_bias_relu {kind}": Op(
            lambda x, c: ops.fused_scale_bias_relu(x, c, 2.0),
            lambda x, c: torch.relu(x * 2.0 + c),
            (x, bias),
            2 * b + s,
            5 * b + 2 * s,
        ),
        f"gelu {kind}": Op(ops.gelu, F.gelu, (x,), 2 * b, 5 * b),
        f"swiglu {kind}": Op(ops.swiglu, lambda g, u: F.silu(g) * u, (x, up), 3 * b, 8 * b),
        f"softmax {kind}": Op(ops.softmax, lambda x: F.softmax(x, -1), (x,), 2 * b, 5 * b),
        f"rmsnorm {kind}": Op(
            ops.rmsnorm, lambda x, w: F.rms_norm(x, (n,), w, 1e-6), (x, row), 2 * b + s, 5 * b + 3 * s
        ),
        f"layernorm {kind}": Op(
            ops.layernorm, lambda x, w, c: F.layer_norm(x, (n,), w, c), (x, row, bias), 2 * b + 2 * s, 5 * b + 5 * s
        ),
    }


def loss(rows: int, classes: int) -> dict[str, Op]:
    logits = torch.randn(rows, classes, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    targets = torch.randint(0, classes, (rows,), device="cuda")
    b = size(logits)
    return {"cross_entropy bfloat16": Op(ops.cross_entropy, F.cross_entropy, (logits, targets), b, 3 * b)}


def heads(dim: int) -> dict[str, Op]:
    def normal() -> Tensor:
        return torch.randn(8, 16, 2048, dim, device="cuda", dtype=torch.bfloat16, requires_grad=True)

    q, k, v = normal(), normal(), normal()
    b = size(q)
    torchs = lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True)  # noqa: E731
    return {f"attention D={dim} bfloat16": Op(ops.attention, torchs, (q, k, v), 4 * b, 12 * b)}


def in_turn(calls: dict[str, Callable[[], object]], repeat: int) -> Times:
    """Median milliseconds of each call; every round runs all calls once."""
    for call in calls.values():
        for _ in range(3):
            call()
    torch.cuda.synchronize()
    # More than the L2 cache, so that dirty lines of the previous call are not written back during the next one.
    other = torch.empty(64 << 20, device="cuda")
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(repeat):
        for name, call in calls.items():
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            other.zero_()
            # Keeps the GPU busy, so that all launches of a short call are queued before it starts.
            torch.cuda._sleep(1_000_000)
            start.record()
            call()
            end.record()
            end.synchronize()
            times[name].append(start.elapsed_time(end))
    return {name: statistics.median(all_of_it) for name, all_of_it in times.items()}


def copy_bandwidth(repeat: int) -> float:
    """Bytes read and written per second when copying 1 GiB."""
    source = torch.empty(1 << 28, device="cuda")
    target = torch.empty_like(source)
    milliseconds = in_turn({"copy": lambda: target.copy_(source)}, repeat)["copy"]
    return 2 * size(source) / milliseconds * 1e3


def directions(op: Op, compile_too: bool) -> tuple[dict[str, Callable[[], object]], dict[str, Callable[[], object]]]:
    ways: dict[str, Callable[..., Tensor]] = {"ironhorse": op.ours, "eager": op.torchs}
    if compile_too:
        torch._dynamo.reset()
        ways["compile"] = torch.compile(op.torchs, fullgraph=True)
    wants = [t for t in op.inputs if t.requires_grad]
    with torch.no_grad():
        d_y = torch.randn_like(op.torchs(*op.inputs))

    def forward(way: Callable[..., Tensor]) -> Callable[[], object]:
        def call() -> object:
            with torch.no_grad():
                return way(*op.inputs)

        return call

    def both(way: Callable[..., Tensor]) -> Callable[[], object]:
        return lambda: torch.autograd.grad(way(*op.inputs), wants, d_y)

    return {name: forward(way) for name, way in ways.items()}, {name: both(way) for name, way in ways.items()}


def large(options: argparse.Namespace) -> dict[str, Any]:
    bandwidth = copy_bandwidth(options.repeat)
    print(f"{torch.cuda.get_device_name()}, copies {bandwidth / 1e9:.0f} GB/s\n")
    columns = ("ironhorse", 10), ("eager", 9), ("compile", 9), ("limit", 9), ("GB/s", 7), ("of limit", 10)
    columns += ("x eager", 9), ("x compile", 10)
    print(f"{'milliseconds':<43}" + "".join(f"{name:>{width}}" for name, width in columns))
    rows: dict[str, Any] = {}
    groups: list[Callable[[], dict[str, Op]]] = [
        lambda: elementwise(options.size, torch.float32),
        lambda: elementwise(options.size, torch.bfloat16),
        lambda: loss(8192, 50304),
        lambda: heads(64),
        lambda: heads(128),
    ]
    for group in groups:
        for name, op in group().items():
            if options.only and not any(word in name for word in options.only):
                continue
            forward, both = directions(op, not options.no_compile)
            for direction, calls, moved in (("forward", forward, op.forward_bytes), ("fwd+bwd", both, op.both_bytes)):
                times = in_turn(calls, options.repeat)
                mine, limit = times["ironhorse"], moved / bandwidth * 1e3
                row: dict[str, float] = {
                    **{f"{way}_ms": round(t, 4) for way, t in times.items()},
                    "limit_ms": round(limit, 4),
                    "gb_per_s": round(moved / mine / 1e6, 1),
                    "of_limit": round(limit / mine, 3),
                    "x_eager": round(times["eager"] / mine, 2),
                    "x_compile": round(times.get("compile", float("nan")) / mine, 2),
                }
                rows[f"{name} {direction}"] = row
                print(
                    f"{name:<34}{direction:<9}{mine:>10.4f}{times['eager']:>9.4f}"
                    f"{times.get('compile', float('nan')):>9.4f}{limit:>9.4f}{row['gb_per_s']:>7.0f}"
                    f"{row['of_limit']:>10.1%}{row['x_eager']:>9.2f}{row['x_compile']:>10.2f}",
                    flush=True,
                )
        torch.cuda.empty_cache()
    return {"device": torch.cuda.get_device_name(), "copy_gb_per_s": round(bandwidth / 1e9, 1), "ops": rows}


def attention_calls(device: str) -> dict[str, Callable[[], object]]:
    """Attention of two sizes: one for our own kernels, and the smallest one that cuDNN is asked for."""
    calls: dict[str, Callable[[], object]] = {}
    ways: dict[str, Callable[..., Tensor]] = {
        "F.scaled_dot_product_attention": lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True),
        "attention": ops.attention,
    }
    for shape in ((1, 8, 64, 64), (2, 8, 256, 64)):
        inputs = [torch.randn(shape, device=device, dtype=torch.bfloat16, requires_grad=True) for _ in range(3)]
        plain, d_out = [t.detach() for t in inputs], torch.ones(shape, device=device, dtype=torch.bfloat16)
        for name, way in ways.items():
            label = f"{name} {'x'.join(map(str, shape))}"
            calls[label] = lambda way=way, plain=plain: way(*plain)
            calls[f"{label}, fwd+bwd"] = lambda way=way, inputs=inputs, d_out=d_out: torch.autograd.grad(
                way(*inputs), inputs, d_out
            )
    return calls


def call_cost(device: str, repeat: int) -> Times:
    """Microseconds per call on 16 elements, best of several batches; on CUDA the time to enqueue, also of small
    attentions."""
    x = torch.randn(16, device=device)
    leaf, w = x.clone().requires_grad_(), torch.ones(16, device=device)
    seed = torch.ones(16, device=device)
    calls: dict[str, Callable[[], object]] = {
        "torch.square": lambda: torch.square(x),
        "ironhorse.torch.square": lambda: ops.square(x),
        "relu(x * 2 + b)": lambda: torch.relu(x * 2.0 + w),
        "fused_scale_bias_relu": lambda: ops.fused_scale_bias_relu(x, w, 2.0),
        "F.rms_norm": lambda: F.rms_norm(x, (16,), w, 1e-6),
        "rmsnorm": lambda: ops.rmsnorm(x, w),
        "torch.square, fwd+bwd": lambda: torch.autograd.grad(torch.square(leaf), leaf, seed),
        "ironhorse.torch.square, fwd+bwd": lambda: torch.autograd.grad(ops.square(leaf), leaf, seed),
        "torch.ops.ironhorse.square": lambda: torch.ops.ironhorse.square(x),
    }
    if device == "cuda":
        calls.update(attention_calls(device))
    best = dict.fromkeys(calls, float("inf"))
    # Many short batches: the best are those that no other load on the machine disturbed.
    loops = 100
    for _ in range(20 * repeat):
        for name, call in calls.items():
            best[name] = min(best[name], timeit.timeit(call, number=loops) / loops * 1e6)
            if device == "cuda":
                torch.cuda.synchronize()
    return {name: round(time, 3) for name, time in best.items()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="file for the numbers")
    parser.add_argument("--repeat", type=int, default=30)
    parser.add_argument("--only", nargs="*", default=[], help="ops whose name contains one of these")
    parser.add_argument("--size", type=int, default=8192, help="sides of the square matrices")
    parser.add_argument("--no-compile", action="store_true")
    options = parser.parse_args()
    report: dict[str, Any] = {"torch": torch.__version__, "calls_us": {}}
    for device in ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]:
        costs = call_cost(device, options.repeat)
        report["calls_us"][device] = costs
        print(f"microseconds per call on 16 elements, {device}")
        for name, time in costs.items():
            print(f"  {name:<52}{time:>8.3f}")
        ratio = costs["ironhorse.torch.square"] / costs["torch.square"]
        report["calls_us"][f"{device} ratio"] = round(ratio, 3)
        print(f"  square, ours over torch's: {ratio:.2f}\n")
    if torch.cuda.is_available():
        report["large"] = large(options)
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(report, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
