"""Muon for the matrices of a model's blocks, beside AdamW for everything else, in plain PyTorch.

For each matrix, with momentum mu and a gradient g of it:

    m = mu m + (1 - mu) g                          momentum
    u = mu m + (1 - mu) g                          Nesterov's look ahead
    X = u / |u|                                    Frobenius norm 1; 0 where |u| < 1e-30
    5 times: A = X X^T, X = a X + (b A + c A A) X  singular values go to about 1; A = X^T X from the right if X is tall
    w = w - lr decay w - lr 0.2 sqrt(max(rows, columns)) X

The last factor gives X the root mean square of an AdamW step, so that learning rate and decay are those of AdamW. q, k
and v of a GPT-2 are one tensor of three matrices, each with an X of its own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from .train import AdamW

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
STEPS = 5
LEAST_NORM = 1e-30


def matrices_of(name: str, param: Tensor) -> int:
    """How many matrices Muon finds in a parameter of this name; 0 if AdamW updates it."""
    in_block = name.startswith(("h.", "model.layers."))
    if param.dim() != 2 or not in_block or name.endswith("block_sparse_moe.gate.weight"):
        return 0
    return 3 if name.endswith("attn.c_attn.weight") else 1


def as_it_is(x: Tensor) -> Tensor:
    """No rounding."""
    return x


def to_bf16(x: Tensor) -> Tensor:
    """The nearest bf16, as a wider number: products of such numbers and their sums are f32, as on a GPU."""
    return x.bfloat16().to(x.dtype)


def orthogonalized(u: Tensor, stored: Callable[[Tensor], Tensor] = as_it_is) -> Tensor:
    """The momentum of a matrix with its singular values moved to about 1; `stored` rounds every result."""
    norm = float(u.double().norm())
    x = stored(u * (0.0 if norm < LEAST_NORM else 1.0 / norm))
    a, b, c = COEFFICIENTS
    wide = x.shape[0] <= x.shape[1]
    for _ in range(STEPS):
        gram = stored(x @ x.T if wide else x.T @ x)
        poly = stored(b * gram + c * (gram @ gram))
        x = stored(a * x + (poly @ x if wide else x @ poly))
    return x


@dataclass(frozen=True)
class Muon(AdamW):
    """The optimizer of a key: Muon, with these numbers for the parameters that AdamW updates."""

    momentum: float = 0.95

    def describe(self, steps: int) -> dict[str, str | float | int]:
        """As the key's metadata has it."""
        return {**asdict(self), "name": "muon", "steps": steps, "decay": "matrices"}

    def build(self, model: torch.nn.Module, fused: bool = False) -> MuonAndAdamW:
        """In the precision of the model."""
        return MuonAndAdamW(self, model, as_it_is, fused)

    def build_bf16(self, model: torch.nn.Module) -> MuonAndAdamW:
        """On f32 master weights, with the matrices of Newton-Schulz in bf16."""
        return MuonAndAdamW(self, model, to_bf16, False)


class MuonAndAdamW:
    """Both optimizers, with the methods of one."""

    def __init__(self, settings: Muon, model: torch.nn.Module, stored: Callable[[Tensor], Tensor], fused: bool) -> None:
        self.settings, self.stored = settings, stored
        named = list(model.named_parameters())
        self.muon = [(param, matrices_of(name, param)) for name, param in named if matrices_of(name, param)]
        rest = torch.nn.Module()
        for index, param in enumerate(param for name, param in named if not matrices_of(name, param)):
            rest.register_parameter(f"p{index}", param)
        self.adamw = AdamW.build(settings, rest, fused)
        self.moments = {param: torch.zeros_like(param) for param, _ in self.muon}

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Of all parameters."""
        self.adamw.zero_grad(set_to_none)
        for param, _ in self.muon:
            if set_to_none:
                param.grad = None
            elif param.grad is not None:
                param.grad.zero_()

    @torch.no_grad()
    def step(self) -> None:
        """One step of each."""
        self.adamw.step()
        for weight, moment, grad in self._matrices():
            mu = self.settings.momentum
            moment.lerp_(grad, 1 - mu)
            step = orthogonalized(grad.lerp(moment, mu), self.stored)
            weight.mul_(1 - self.settings.lr * self.settings.weight_decay)
            weight.add_(step, alpha=-self.settings.lr * 0.2 * math.sqrt(max(weight.shape)))

    def _matrices(self) -> Iterator[tuple[Tensor, ...]]:
        """Each matrix: views of its weights, momentum and gradient."""
        for param, count in self.muon:
            if param.grad is not None:
                whole = (param.data, self.moments[param], param.grad)
                yield from zip(*(tensor.chunk(count) for tensor in whole), strict=True)
