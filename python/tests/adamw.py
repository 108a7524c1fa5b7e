"""AdamW written out in plain PyTorch, beside the steps that an answer key holds."""

from __future__ import annotations

import numpy as np
import pytest
import torch


def ten_steps(model: torch.nn.Module, key: dict[str, np.ndarray]) -> None:
    """Moves the weights of a model in f64 by the steps of a key, whose losses must be those of the model."""
    x, y = (torch.from_numpy(key[name]).long() for name in "xy")
    moments = {name: (torch.zeros_like(p), torch.zeros_like(p)) for name, p in model.named_parameters()}
    for step in range(1, 11):
        model.zero_grad()
        loss = model.loss(x, y)[1]
        assert loss.item() == pytest.approx(float(key["losses"][step - 1]), rel=1e-6)
        loss.backward()
        with torch.no_grad():
            for name, p in model.named_parameters():
                m, v = moments[name]
                m.mul_(0.9).add_(p.grad, alpha=0.1)
                v.mul_(0.999).add_(p.grad**2, alpha=0.001)
                decay = 0.1 if p.dim() == 2 else 0.0
                p.sub_((m / (1 - 0.9**step)) / ((v / (1 - 0.999**step)).sqrt() + 1e-8) + decay * p, alpha=1e-4)
