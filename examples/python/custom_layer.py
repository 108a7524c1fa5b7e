"""Trains a layer that uses a fused op of ironhorse, on the GPU if there is one, else on the CPU.

Usage:
    python examples/python/custom_layer.py [--steps N] [--compile]
"""

from __future__ import annotations

import argparse

import ironhorse.torch as custom_ops
import torch
import torch.nn as nn


class CustomLayer(nn.Module):
    """relu(x W · scale + bias); everything after the product is one kernel."""

    def __init__(self, features: int, scale: float = 1.0):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(features, features) / features**0.5)
        self.bias = nn.Parameter(torch.zeros(features))
        self.scale = scale

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return custom_ops.fused_op_forward(torch.matmul(x, self.weight), self.bias, scale=self.scale)


def main(arguments: list[str] | None = None) -> tuple[float, float]:
    """Learns a function of random points. Returns the loss before and after."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--compile", action="store_true", help="train through torch.compile")
    options = parser.parse_args(arguments)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(nn.Linear(16, 64), CustomLayer(64), nn.Linear(64, 4)).to(device)
    x = torch.randn(512, 16, device=device)
    classes = (x @ torch.randn(16, 4, device=device)).argmax(-1)
    run = torch.compile(model, fullgraph=True) if options.compile else model
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    first = last = 0.0
    for step in range(options.steps):
        loss = custom_ops.cross_entropy(run(x), classes)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step == 0:
            first = loss.item()
        if step % 50 == 0 or step == options.steps - 1:
            last = loss.item()
            print(f"step {step:4}  loss {last:.4f}")
    return first, last


if __name__ == "__main__":
    main()
