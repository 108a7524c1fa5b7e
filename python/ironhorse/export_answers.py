"""What the exports of all kinds of models share: the answers, how exact they are, and the report."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from .answer_key import KeyInfo
from .errors import IronhorseError
from .export_options import Options
from .reference.muon import Muon
from .reference.train import AdamW, Answers, Model, compute_answers, compute_answers_bf16, nearby, torch_errors

Arrays = dict[str, np.ndarray]
Errors = dict[str, float]
Job = tuple[torch.Tensor, torch.Tensor, AdamW, int, bool]  # x, y, optimizer, steps, whether with activations

# PyTorch's bf16 error is a random sample. For a tensor of many independent numbers every sample is about the same;
# where one number or direction dominates, it varies: 0.16 to 8.2 % over ten seeds of a key (ADR 0009). For models that
# are small enough the largest of several samples is recorded, for larger ones a single sample.
SAMPLES = 8
SAMPLES_UP_TO = 2_000_000  # parameters

# If an f32 result is further than this from f64, the f64 result is recorded instead: a fifth of verify's tolerance.
LOST = 2e-6


def optimizer_of(args: Options) -> AdamW:
    """The optimizer of the flags."""
    kind = Muon if args.optimizer == "muon" else AdamW
    return kind(args.lr, args.beta1, args.beta2, args.eps, args.weight_decay)


def compute(
    model: Model, x: torch.Tensor, y: torch.Tensor, args: Options, by: Callable[..., Answers] = compute_answers
) -> tuple[Answers, Errors, Errors]:
    """The f32 answers and how far PyTorch's f32 and bf16 are from exact ones, which f64 computes when there are steps
    or a router, whose gradient cancels; else one forward and backward in f32 is exact enough to judge bf16 by. `by`
    computes the f32 answers.
    """
    routed = getattr(model.config, "n_experts", 0) > 0
    # the experts chosen are among the activations
    job: Job = (x, y, optimizer_of(args), args.steps, routed or not args.no_acts)
    in_f64 = bool(args.steps) or routed
    start = copy.deepcopy(model)
    answers = by(model, *job)
    for name in ("loss", "losses"):
        if name in answers.tensors and not answers.tensors[name].isfinite().all():
            raise IronhorseError(f"the {name} are not finite; choose a smaller --lr or other weights")

    def exact_of(some: Model) -> Answers:
        return compute_answers(copy.deepcopy(some).double() if in_f64 else copy.deepcopy(some), *job)

    exact = exact_of(start) if in_f64 else answers
    errors = torch_errors(answers, exact) if in_f64 else {}
    if routed:
        _mend(answers, exact, errors)
    errors_bf16 = {} if args.no_bf16 else _errors_bf16(start, exact, exact_of, job)
    if not all(math.isfinite(error) for error in errors_bf16.values()):
        errors_bf16 = {}  # beyond what bf16 holds: a checker must find out by itself
    if args.no_acts:
        kept = {name: value for name, value in answers.tensors.items() if not name.startswith(("act.", "dact."))}
        answers = Answers(kept, [])
    here = answers.tensors
    errors, errors_bf16 = ({name: e for name, e in all_of.items() if name in here} for all_of in (errors, errors_bf16))
    return answers, errors, errors_bf16


def _mend(answers: Answers, exact: Answers, errors: Errors) -> None:
    """Replaces results of the single pass by those of f64 where f32 loses too many digits: where a router is confident
    or all tokens are alike, gradients are small differences of large terms. The weights of chosen experts sum to 1, so
    their router learns from p/Σp, whose derivative is 1/Σp - p/(Σp)²; with one expert per token only rounding errors
    are left of that, and PyTorch's f32 may have no correct digit. Where f64 chooses other experts than f32, it computes
    something else, and the f32 results stay.
    """
    if any(errors[name] > 0 for name, value in answers.tensors.items() if not value.is_floating_point()):
        return
    for name, value in answers.tensors.items():
        if name.startswith(("act.", "dact.", "grad.")) and value.is_floating_point() and errors[name] > LOST:
            answers.tensors[name] = exact.tensors[name].to(value.dtype)


def _errors_bf16(model: Model, exact: Answers, exact_of: Callable[[Model], Answers], job: Job) -> Errors:
    """How far PyTorch in bf16 is off, at the model's weights and at perturbed copies. Copies that send a token to
    another expert are left out.
    """
    errors = torch_errors(compute_answers_bf16(model, *job), exact)
    if sum(param.numel() for param in model.parameters()) > SAMPLES_UP_TO:
        return errors
    whole = [name for name, value in exact.tensors.items() if not value.is_floating_point()]
    for seed in range(1, SAMPLES):
        moved = nearby(model, seed)
        there, low = exact_of(moved), compute_answers_bf16(moved, *job)
        if all(torch.equal(exact.tensors[name], other.tensors[name]) for name in whole for other in (there, low)):
            sample = torch_errors(low, there, beside=exact)
            errors = {name: max(error, sample[name]) for name, error in errors.items()}
    return errors


def report_of(args: Options, info: KeyInfo, tensors: Arrays, files: Mapping[str, tuple[int, str]]) -> dict[str, Any]:
    """What `--json` says; `files` are name -> (bytes, what it is)."""
    return {
        "model": info.config.name,
        "config": info.config.to_dict(),
        "parameters": sum(value.size for value in under("param.", tensors).values()),
        "batch": args.batch,
        "seq": args.seq,
        "seed": args.seed,
        "torch": info.torch,
        "loss": float(tensors["loss"]),
        "losses": [float(loss) for loss in tensors.get("losses", ())],
        "files": [{"name": name, "bytes": size, "what": text} for name, (size, text) in files.items()],
    }


def under(prefix: str, tensors: Arrays) -> Arrays:
    """The tensors with this prefix, without it."""
    return {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}
