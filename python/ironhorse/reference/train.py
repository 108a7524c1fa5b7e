"""What an answer key holds, computed by PyTorch: one batch forward and backward, then N optimizer steps on it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from .gpt2 import GPT2
from .moe import MoE

Model = GPT2 | MoE  # `loss` gives (logits, loss), a MoE's also the auxiliary loss of each layer, which is part of loss


@dataclass(frozen=True)
class AdamW:
    """The optimizer of the key. Weight decay falls on matrices only: embeddings included, and the 3-D tensors in which
    Hugging Face keeps those of all experts of a layer."""

    lr: float = 1e-4
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.0

    def describe(self, steps: int) -> dict[str, str | float | int]:
        """As the key's metadata has it."""
        return {"name": "adamw", **asdict(self), "steps": steps, "decay": "matrices"}

    def build(self, model: torch.nn.Module, fused: bool = False) -> Any:
        """torch's AdamW; the unfused loop, whose order of operations is the textbook's, unless asked otherwise."""
        groups = [
            {"params": [p for p in model.parameters() if p.dim() >= 2], "weight_decay": self.weight_decay},
            {"params": [p for p in model.parameters() if p.dim() < 2], "weight_decay": 0.0},
        ]
        kind = {"fused": True} if fused else {"foreach": False}
        return torch.optim.AdamW(groups, lr=self.lr, betas=(self.beta1, self.beta2), eps=self.eps, **kind)

    def build_bf16(self, model: torch.nn.Module) -> Stepper:
        """For f32 master weights of a model in bf16."""
        return self.build(model)


class Stepper(Protocol):
    """What a loop needs of an optimizer."""

    def step(self) -> Any:
        """Moves the parameters."""

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forgets the gradients."""


class Recorder:
    """Keeps every activation it is shown and, after backward, the gradient of the loss by it."""

    def __init__(self) -> None:
        self.kept: dict[str, Tensor] = {}

    def __call__(self, name: str, value: Tensor) -> None:
        if value.is_floating_point():  # the experts chosen for a token are numbers without a gradient
            value.retain_grad()
        self.kept[name] = value

    def acts(self) -> dict[str, Tensor]:
        """name -> value, in execution order."""
        return {name: value.detach() for name, value in self.kept.items()}

    def dacts(self) -> dict[str, Tensor]:
        """name -> gradient. For the residual stream this is the whole gradient at that point, both branches."""
        return {name: value.grad for name, value in self.kept.items() if value.grad is not None}


@dataclass
class Answers:
    """Tensors by the key's names: `act.*`, `logits`, `loss`, `aux`, `dact.*`, `grad.*`, then `losses`, `after.*`."""

    tensors: dict[str, Tensor]
    act_names: list[str]


def compute_answers(
    model: Model, x: Tensor, y: Tensor, optimizer: AdamW, steps: int, with_acts: bool = True
) -> Answers:
    """Runs `model` on (x, y); trains it for `steps` steps, so its parameters end as the `after.*` tensors.

    The first of those steps reuses the gradients of the recorded pass: `losses[0]` is `loss`.
    """
    recorder = Recorder()
    logits, loss, *aux = model.loss(x, y, recorder if with_acts else None)
    loss.backward()
    out = _answers_of_a_pass(model, recorder, logits, loss, aux)
    if steps:
        out["losses"] = run_steps(optimizer.build(model), lambda: model.loss(x, y)[1], steps, loss)
        out |= {f"after.{name}": param.detach() for name, param in model.named_parameters()}
    return Answers(out, list(recorder.kept))


def _answers_of_a_pass(
    model: Model, recorder: Recorder, logits: Tensor, loss: Tensor, aux: list[Tensor]
) -> dict[str, Tensor]:
    """After backward. No copies: AdamW only reads the gradients, and zero_grad(set_to_none=True) leaves them to us."""
    out: dict[str, Tensor] = {f"act.{name}": value for name, value in recorder.acts().items()}
    out["logits"], out["loss"] = logits.detach(), loss.detach()
    if aux and aux[0].numel():
        out["aux"] = aux[0].detach()
    out |= {f"dact.{name}": value for name, value in recorder.dacts().items()}
    return out | {f"grad.{name}": param.grad for name, param in model.named_parameters() if param.grad is not None}


def run_steps(optimizer: Stepper, loss_of_batch: Callable[[], Tensor], steps: int, loss: Tensor) -> Tensor:
    """(steps,) losses, each before its update; `loss` is the first, whose gradients are in place."""
    losses = [loss.detach()]
    optimizer.step()
    for _ in range(steps - 1):
        optimizer.zero_grad(set_to_none=True)
        loss = loss_of_batch()
        losses.append(loss.detach())
        loss.backward()
        optimizer.step()
    return torch.stack(losses)


def compute_answers_bf16(
    model: Model, x: Tensor, y: Tensor, optimizer: AdamW, steps: int, with_acts: bool = True
) -> Answers:
    """The same answers by PyTorch in mixed precision: weights, activations and gradients in bf16, the loss from f32
    logits, the optimizer on f32 master weights, which `after.*` are. `model` (f32) stays as it is.
    """
    low = model.bf16_copy()
    master = copy.deepcopy(model)
    stepper = optimizer.build_bf16(master)
    recorder = Recorder()
    out: dict[str, Tensor] = {}
    losses = []
    for step in range(max(steps, 1)):
        low.zero_grad(set_to_none=True)
        logits, loss, *aux = low.loss_f32(x, y, recorder if with_acts and step == 0 else None)
        loss.backward()
        losses.append(loss.detach())
        if step == 0:
            out = _answers_of_a_pass(low, recorder, logits, loss, aux)
        if steps:
            _step_master(master, low, stepper)
    if steps:
        out["losses"] = torch.stack(losses)
        out |= {f"after.{name}": param.detach() for name, param in master.named_parameters()}
    return Answers(out, list(recorder.kept))


@torch.no_grad()
def _step_master(master: Model, low: Model, optimizer: Stepper) -> None:
    """One step on the f32 weights with the bf16 gradients; the bf16 weights become them, rounded."""
    for exact, rounded in zip(master.parameters(), low.parameters(), strict=True):
        exact.grad = None if rounded.grad is None else rounded.grad.float()
    optimizer.step()
    for exact, rounded in zip(master.parameters(), low.parameters(), strict=True):
        rounded.copy_(exact)


@torch.no_grad()
def nearby(model: Model, seed: int) -> Model:
    """A copy with weights up to 2⁻⁹ of themselves away, as far as bf16 would move them: all is rounded another way."""
    generator = torch.Generator().manual_seed(seed)
    moved = copy.deepcopy(model)
    for param in moved.parameters():
        param.mul_(1 + 2**-9 * (2 * torch.rand(param.shape, generator=generator) - 1))
    return moved


def torch_errors(got: Answers, exact: Answers, beside: Answers | None = None) -> dict[str, float]:
    """How far PyTorch's answers in f32 or bf16 are from exact ones, per tensor of the key: what a checker derives its
    tolerance from.

    ‖got − exact‖ / ‖beside‖, which is `exact` unless given; for `losses` the largest |Δ| / |beside| over the steps; for
    whole numbers (chosen experts) the share of those that differ. Without this no fixed tolerance is right: the bias of
    k has gradient zero in exact arithmetic, so Adam steps along its rounding noise. Tensors that only one of them has
    are left out.
    """
    errors: dict[str, float] = {}
    for name, reference in exact.tensors.items():
        if name not in got.tensors:
            continue
        if not reference.is_floating_point():
            errors[name] = float((got.tensors[name] != reference).double().mean())
            continue
        delta = got.tensors[name].double() - reference.double()
        size = (exact if beside is None else beside).tensors[name].double()
        if name == "losses":
            errors[name] = float((delta.abs() / size.abs().clamp_min(1e-300)).max())
        else:
            norm, off = float(size.norm()), float(delta.norm())
            errors[name] = off / norm if norm > 0 else off
    return errors
