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
from .export import Options
from .reference.train import AdamW, Answers, Model, compute_answers, compute_answers_bf16, torch_errors

Arrays = dict[str, np.ndarray]
Errors = dict[str, float]


def optimizer_of(args: Options) -> AdamW:
    """The optimizer of the flags."""
    return AdamW(args.lr, args.beta1, args.beta2, args.eps, args.weight_decay)


def compute(
    model: Model, x: torch.Tensor, y: torch.Tensor, args: Options, by: Callable[..., Answers] = compute_answers
) -> tuple[Answers, Errors, Errors]:
    """The f32 answers and how far PyTorch's f32 and bf16 are from exact ones, which f64 computes when there are steps
    or a router, whose gradient cancels; else one forward and backward in f32 is exact enough to judge bf16 by. `by`
    computes the f32 answers.
    """
    job = (x, y, optimizer_of(args), args.steps, not args.no_acts)
    routed = getattr(model.config, "n_experts", 0) > 0
    exact_model = copy.deepcopy(model).double() if args.steps or routed else None
    low_model = None if args.no_bf16 else copy.deepcopy(model)
    answers = by(model, *job)
    for name in ("loss", "losses"):
        if name in answers.tensors and not answers.tensors[name].isfinite().all():
            raise IronhorseError(f"the {name} are not finite; choose a smaller --lr or other weights")
    exact = answers if exact_model is None else compute_answers(exact_model, *job)
    errors = {} if exact_model is None else torch_errors(answers, exact)
    errors_bf16 = {} if low_model is None else torch_errors(compute_answers_bf16(low_model, *job), exact)
    if not all(math.isfinite(error) for error in errors_bf16.values()):
        errors_bf16 = {}  # beyond what bf16 holds: a checker must find out by itself
    errors_bf16 = {name: error for name, error in errors_bf16.items() if name in answers.tensors}
    return answers, errors, errors_bf16


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
