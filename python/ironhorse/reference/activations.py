"""The activations of the models, in plain PyTorch: the formula, and its derivative written out."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["ACTIVATIONS", "Activation"]


@dataclass(frozen=True)
class Activation:
    """A function of one number and its derivative."""

    value: Callable[[Tensor], Tensor]
    slope: Callable[[Tensor], Tensor]
    doc: str


def _gelu_slope(x: Tensor) -> Tensor:
    a = math.sqrt(2 / math.pi)
    t = torch.tanh(a * (x + 0.044715 * x * x * x))
    return 0.5 * (1 + t) + 0.5 * x * (1 - t * t) * a * (1 + 3 * 0.044715 * x * x)


ACTIVATIONS = {
    "relu2": Activation(lambda x: F.relu(x).square(), lambda x: 2 * F.relu(x), "max(x, 0)², squared ReLU."),
    "gelu": Activation(lambda x: F.gelu(x, approximate="tanh"), _gelu_slope, "GELU in its tanh form."),
}
"""By the name that the description of a model gives them (`act=gelu`)."""
