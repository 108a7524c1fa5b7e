"""Random weights and random tokens, the same for the same seed."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, TypeVar

import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from ..errors import IronhorseError
from .gpt2 import GPT2

INITS = ("spread", "gpt2")
IGNORED = -100  # the target that torch's cross entropy ignores

AnyModel = TypeVar("AnyModel", bound=nn.Module)


@torch.no_grad()
def init_weights(model: GPT2, seed: int, how: str = "gpt2") -> GPT2:
    """Fills every parameter from `seed`, in parameter order.

    gpt2    as GPT-2 starts training: weights N(0, 0.02), residual projections N(0, 0.02/sqrt(2L)), biases 0,
            layernorms 1 and 0. A bug in a bias, or in a layernorm's weight, changes nothing here and stays hidden.
    spread  for answer keys: weights N(0, 1/sqrt(C)), so that at any width attention is far from uniform and the
            gradients of q and k are not lost beside those of v; biases and layernorms are random as well.
    """
    if how not in INITS:
        raise IronhorseError(f"unknown init '{how}'; choose {' or '.join(INITS)}")
    generator = torch.Generator().manual_seed(seed)
    config = model.config
    std = 0.02 if how == "gpt2" else 1 / math.sqrt(config.n_embd)
    for name, param in model.named_parameters():
        if param.dim() == 2:
            scale = std / math.sqrt(2 * config.n_layer) if name.endswith("c_proj.weight") else std
            param.normal_(0, scale, generator=generator)
        else:
            centre = 1.0 if name.endswith("weight") else 0.0  # 1-D weights are layernorms'
            if how == "gpt2":
                param.fill_(centre)
            else:
                param.normal_(centre, 0.05, generator=generator)
    return model


def filled(model: AnyModel, params: Mapping[str, NDArray[Any]]) -> AnyModel:
    """The model with these values of all parameters, which are copied."""
    model.load_state_dict({name: torch.from_numpy(value) for name, value in params.items()})
    return model


def random_batch(vocab_size: int, batch: int, seq: int, seed: int) -> tuple[Tensor, Tensor]:
    """x, y (B, T) int64 from one random stream of B*T + 1 tokens: y is x one token later, as a loader gives it."""
    generator = torch.Generator().manual_seed(seed ^ 0x7077)  # a stream apart from the weights'
    stream = torch.randint(vocab_size, (batch * seq + 1,), generator=generator)
    return stream[:-1].view(batch, seq), stream[1:].view(batch, seq)


def with_ignored(targets: Tensor, part: float, seed: int) -> Tensor:
    """The targets, a part of them ignored. At least one is left."""
    targets = targets.clone()
    generator = torch.Generator().manual_seed(seed ^ 0x69676E)  # a stream of its own
    order = torch.randperm(targets.numel(), generator=generator)
    targets.view(-1)[order[: min(round(part * targets.numel()), targets.numel() - 1)]] = IGNORED
    return targets
