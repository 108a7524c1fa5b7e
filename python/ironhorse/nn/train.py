"""Training: the optimizer, the learning rate, and a step."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from .. import ops
from ..errors import InvalidValueError
from .checks import check_count, check_number
from .layers import check_device, floats, token_ids
from .model import MoETransformer
from .tensor import Tensor

_NO_LIMIT = float(np.finfo(np.float32).max)  # as a limit of the norm: the norm is computed, and nothing is scaled


@dataclass
class TrainConfig:
    """Numbers of a training run."""

    lr: float = 1e-4  # the highest
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.1  # of matrices; norms and biases have none
    warmup_steps: int = 2000
    total_steps: int = 100000
    grad_clip: float = 1.0  # the most that the norm of all gradients together may be; 0 for no limit
    aux_loss_alpha: float = 0.01

    @classmethod
    def default(cls) -> TrainConfig:
        """As the class has them."""
        return cls()

    def check(self) -> TrainConfig:
        """Raises InvalidValueError unless one can train with these; returns self."""
        for name in ("lr", "eps", "weight_decay", "grad_clip", "aux_loss_alpha"):
            check_number("TrainConfig", name, getattr(self, name))
        for name in ("beta1", "beta2"):
            check_number("TrainConfig", name, getattr(self, name), below=1)
        _check_steps("TrainConfig", self.warmup_steps, self.total_steps)
        return self


def _check_steps(who: str, warmup_steps: int, total_steps: int) -> None:
    check_count(who, "warmup_steps", warmup_steps)
    check_count(who, "total_steps", total_steps)
    if total_steps < warmup_steps:
        found = f"warmup_steps is {warmup_steps} and total_steps {total_steps}"
        raise InvalidValueError(f"{who}: {found}, expected 0 to total_steps of them")


class LRScheduler:
    """From 0 to `lr` in a line over `warmup_steps`, then down to 0 along a cosine until `total_steps`."""

    def __init__(self, lr: float, warmup_steps: int, total_steps: int) -> None:
        check_number("LRScheduler", "lr", lr)
        _check_steps("LRScheduler", warmup_steps, total_steps)
        self.lr, self.warmup_steps, self.total_steps = lr, warmup_steps, total_steps

    def get_lr(self, step: int) -> float:
        """The rate of step number `step`, which count from 0."""
        check_count("LRScheduler.get_lr", "step", step)
        if step < self.warmup_steps:
            return self.lr * step / self.warmup_steps
        share = min((step - self.warmup_steps) / max(self.total_steps - self.warmup_steps, 1), 1.0)
        return self.lr * 0.5 * (1.0 + math.cos(math.pi * share))


class AdamW:
    """PyTorch's AdamW on a list of parameters; weight decay falls on those with two dimensions or more."""

    def __init__(
        self,
        parameters: Iterable[Tensor],
        lr: float = 1e-4,
        beta1: float = 0.9,
        beta2: float = 0.95,
        eps: float = 1e-8,
        weight_decay: float = 0.1,
        *,
        device: str = "auto",
    ) -> None:
        for name, value in (("lr", lr), ("eps", eps), ("weight_decay", weight_decay)):
            check_number("AdamW", name, value)
        for name, value in (("beta1", beta1), ("beta2", beta2)):
            check_number("AdamW", name, value, below=1)
        if isinstance(parameters, Tensor) or not isinstance(parameters, Iterable):
            found = type(parameters).__name__
            raise InvalidValueError(f"AdamW: parameters is of type {found}, expected a list of tensors")
        parameters = list(parameters)
        for i, parameter in enumerate(parameters):
            if not isinstance(parameter, Tensor):
                raise InvalidValueError(f"AdamW: parameter {i} is of type {type(parameter).__name__}, expected Tensor")
        self.params, self.lr, self.device = parameters, lr, check_device(device, "AdamW")
        self.beta1, self.beta2, self.eps, self.weight_decay = beta1, beta2, eps, weight_decay
        self.m = [np.zeros_like(parameter._data) for parameter in parameters]
        self.v = [np.zeros_like(parameter._data) for parameter in parameters]
        self.t = 0  # updates that m and v have seen: the bias correction follows it

    def step(self, lr: float | None = None) -> None:
        """One update of every parameter that has a gradient, with `lr` or the rate given at the start."""
        lr = check_number("AdamW.step", "lr", self.lr if lr is None else lr)
        self.t += 1
        for parameter, m, v in zip(self.params, self.m, self.v, strict=True):
            if parameter.grad is None:
                continue
            decay = self.weight_decay if parameter._data.ndim >= 2 else 0.0
            ops.adamw_step(
                parameter._data, parameter.grad._data, m, v, lr, self.beta1, self.beta2, self.eps, decay, self.t,
                device=self.device,
            )  # fmt: skip

    def zero_grad(self) -> None:
        """All gradients become 0."""
        for parameter in self.params:
            parameter.zero_grad()

    def clip(self, most: float) -> float:
        """Scales all gradients so that their norm is at most `most`, unless that is 0. Returns the norm before."""
        grads = [parameter.grad._data for parameter in self.params if parameter.grad is not None]
        norms = [float(ops.grad_clip(grad, clip=_NO_LIMIT, device=self.device)) for grad in grads]
        norm = math.hypot(*norms)
        if most > 0 and norm > most:
            factor = most / (norm + 1e-6)  # as PyTorch's clip_grad_norm_
            for grad in grads:
                ops.scale(grad, grad, factor, device=self.device)
        return norm


class Trainer:
    """Trains a model: cross-entropy and the load-balancing losses, all gradients, clipping, AdamW.

    `step` counts the steps done and may be set, to go on where another run ended: the learning rate follows it. The
    bias correction of AdamW follows `optimizer.t`, the number of updates that its moments have seen: whoever loads
    `optimizer.m` and `optimizer.v` of that run sets `optimizer.t` with them. `device` is the model's unless given.
    """

    def __init__(self, model: MoETransformer, config: TrainConfig, *, device: str | None = None) -> None:
        for name, value, kind in (("model", model, MoETransformer), ("config", config, TrainConfig)):
            if not isinstance(value, kind):
                found = f"{name} is of type {type(value).__name__}"
                raise InvalidValueError(f"Trainer: {found}, expected {kind.__name__}")
        self.model, self.config = model, config.check()
        if device is not None:
            model.to(device)
        self.device = model.device
        self._step = 0
        self.grad_norm = 0.0  # of the last step, before clipping
        self.scheduler = LRScheduler(config.lr, config.warmup_steps, config.total_steps)
        self.optimizer = AdamW(
            model.parameters(), config.lr, config.beta1, config.beta2, config.eps, config.weight_decay,
            device=self.device,
        )  # fmt: skip

    @property
    def step(self) -> int:
        """Steps done."""
        return self._step

    @step.setter
    def step(self, done: int) -> None:
        # not the optimizer's count: moments that are still 0 would be scaled as if they had seen so many updates
        self._step = check_count("Trainer", "step", done)

    def get_lr(self) -> float:
        """The learning rate of the next step."""
        return self.scheduler.get_lr(self.step)

    def get_step(self) -> int:
        """Steps done."""
        return self.step

    def train_step(self, input_ids: Any, targets: Any) -> float:
        """One step on tokens (batch, seq) and those that follow them. Returns the loss, load-balancing included."""
        alpha = self.config.aux_loss_alpha
        logits = self.model.forward(input_ids)
        loss, d_logits = self._compute_loss(logits, targets)
        loss += self.model.total_aux_loss(alpha)
        self.optimizer.zero_grad()
        self.model.backward(d_logits, aux_loss_alpha=alpha)
        self.grad_norm = self.optimizer.clip(self.config.grad_clip)
        if not (math.isfinite(loss) and math.isfinite(self.grad_norm)):
            found = f"the loss is {loss} and the norm of the gradients {self.grad_norm}"
            raise InvalidValueError(f"train_step: step {self.step} diverged: {found}; lower lr, raise warmup_steps")
        self.optimizer.step(self.get_lr())
        self._step += 1
        return loss

    def _compute_loss(self, logits: Any, targets: Any) -> tuple[float, Tensor]:
        """The mean cross-entropy and its gradient."""
        array = floats(logits, "Trainer", "logits", self.model.config.vocab_size)
        ids = token_ids(targets, "Trainer", "targets", array.shape[-1])
        if ids.shape != array.shape[:-1]:
            raise InvalidValueError(f"Trainer: `targets` is {list(ids.shape)}, expected {list(array.shape[:-1])}")
        loss, log_probs = ops.cross_entropy_forward(array, ids.reshape(-1), device=self.device)
        grad = ops.cross_entropy_backward(log_probs, ids.reshape(-1), device=self.device)
        return float(loss), Tensor._wrap(grad.reshape(array.shape))
