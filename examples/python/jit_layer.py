"""From a .cu file to a trained layer: a fused bias + squared ReLU as an op, checked, trained, timed.

Usage:
    python examples/python/jit_layer.py          # on a GPU if there is one, else on the CPU
    python examples/python/jit_layer.py --json numbers.json
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import torch
from ironhorse import jit
from torch import nn


def plain(x: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """The same in torch operations: the CPU implementation, and the reference for the kernel."""
    return torch.relu(x + bias).square()


bias_relu2 = jit.op(
    Path(__file__).with_name("bias_relu2.cu"),
    forward="bias_relu2",
    backward=["bias_relu2_bwd", "bias_relu2_bwd_bias"],
    grid={
        "bias_relu2": lambda rows: rows,
        "bias_relu2_bwd": lambda rows: rows,
        "bias_relu2_bwd_bias": lambda cols: (cols + 31) // 32,
    },
    block={"bias_relu2_bwd_bias": (32, 32)},
    cpu=plain,
)


class Layer(nn.Module):
    """Linear, bias and squared ReLU in one op, Linear."""

    def __init__(self, inputs: int, hidden: int, outputs: int, op) -> None:
        super().__init__()
        self.up = nn.Linear(inputs, hidden, bias=False)
        self.bias = nn.Parameter(torch.zeros(hidden))
        self.down = nn.Linear(hidden, outputs)
        self.op = op

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.op(self.up(x), self.bias))


def train(op, device: str, steps: int) -> tuple[list[float], float]:
    """Learns a function of 8 numbers; returns the losses and the seconds."""
    torch.manual_seed(0)
    model = Layer(8, 256, 1, op).to(device)
    x = torch.rand(4096 if device == "cuda" else 512, 8, device=device) * 2 - 1
    y = torch.sin(3 * x[:, :1]) * x[:, 1:2] + x[:, 2:3].square()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses, start = [], time.perf_counter()
    for _ in range(steps):
        loss = nn.functional.mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    losses = [loss.item() for loss in losses]
    return losses, time.perf_counter() - start


def milliseconds(op, rows: int = 16384, cols: int = 4096, runs: int = 30) -> float:
    """Median time of forward and backward on the GPU."""
    x = torch.randn(rows, cols, device="cuda", requires_grad=True)
    bias = torch.randn(cols, device="cuda", requires_grad=True)
    d_y = torch.randn(rows, cols, device="cuda")
    times = []
    for _ in range(runs):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        torch.autograd.grad(op(x, bias), (x, bias), d_y)
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return sorted(times)[len(times) // 2]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--json", type=Path, help="write the numbers there")
    args = parser.parse_args()
    device = args.device
    numbers: dict[str, object] = {"device": torch.cuda.get_device_name() if device == "cuda" else "cpu"}

    start = time.perf_counter()
    bias_relu2(torch.randn(4, 5, device=device), torch.zeros(5, device=device))
    numbers["first_call_s"] = time.perf_counter() - start
    examples = torch.randn(6, 5, device=device), torch.randn(5, device=device)
    report = jit.check(bias_relu2, *examples, reference=plain)
    numbers["checks_passed"] = report.passed

    ours, seconds = train(bias_relu2, device, args.steps)
    theirs, torch_seconds = train(plain, device, args.steps)
    numbers |= {"first_loss": ours[0], "last_loss": ours[-1], "torch_last_loss": theirs[-1]}
    numbers["largest_difference_in_loss"] = max(abs(a - b) for a, b in zip(ours, theirs, strict=True))
    numbers |= {"train_s": seconds, "torch_train_s": torch_seconds}
    if device == "cuda":
        numbers["ours_ms"] = milliseconds(bias_relu2)
        numbers["eager_ms"] = milliseconds(plain)
        numbers["compile_ms"] = milliseconds(torch.compile(plain))

    print(f"\n{'first call':<28}{numbers['first_call_s']:.3f} s")
    print(f"{f'loss, {args.steps} steps':<28}{ours[0]:.5f} -> {ours[-1]:.5f} (torch's operations: {theirs[-1]:.5f})")
    print(f"{'training':<28}{seconds:.2f} s (torch's operations: {torch_seconds:.2f} s)")
    for name, words in (("ours_ms", "this op"), ("eager_ms", "torch eager"), ("compile_ms", "torch.compile")):
        if name in numbers:
            print(f"{'16384 x 4096 f32, ' + words:<36}{numbers[name]:.3f} ms forward + backward")
    if args.json:
        args.json.write_text(json.dumps(numbers, indent=1) + "\n")
    if not report.passed:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
