"""The export of a GPT-2: build or load it, let PyTorch compute the answers, write the four files."""

from __future__ import annotations

import copy
import math
from typing import Any

import numpy as np
import torch

from .answer_key import KeyInfo, write_key
from .config import GPT2Config
from .errors import ConfigError, IronhorseError
from .export import Options, check_length
from .formats.llmc import DebugState, write_debug_state, write_model
from .formats.staging import Staging
from .reference.gpt2 import GPT2
from .reference.hf import load_hf
from .reference.init import init_weights, random_batch
from .reference.train import AdamW, Answers, compute_answers, compute_answers_bf16, torch_errors

Arrays = dict[str, np.ndarray]


def export_gpt2(args: Options, config: GPT2Config | None, source: str | None) -> dict[str, Any]:
    """Writes `STEM_NAME{.bin,_bf16.bin,_debug_state.bin,.key.safetensors}` to args.out; returns the report."""
    with Staging(args.out) as staging:  # made first: an --out that cannot be written fails before the work
        return _export(args, config, source, staging)


def _export(args: Options, config: GPT2Config | None, source: str | None, staging: Staging) -> dict[str, Any]:
    model = _build(args, config, source)
    config = model.config
    check_length(args.seq, config)
    params = {f"param.{name}": param.detach().clone().numpy() for name, param in model.named_parameters()}
    x, y = random_batch(config.vocab_size, args.batch, args.seq, args.seed)
    answers, errors, errors_bf16 = _compute(model, x, y, args)
    tensors: Arrays = {"x": x.numpy().astype(np.int32), "y": y.numpy().astype(np.int32)}
    tensors |= params | {name: value.contiguous().numpy() for name, value in answers.tensors.items()}
    info = KeyInfo(
        config=config,
        torch=torch.__version__,
        seed=args.seed,
        act_names=answers.act_names,
        optimizer=_optimizer(args).describe(args.steps),
        torch_error=errors,
        torch_error_bf16=errors_bf16,
    )
    return _write(args, info, tensors, staging)


def _build(args: Options, config: GPT2Config | None, source: str | None) -> GPT2:
    if source is None:
        assert config is not None
        return init_weights(GPT2(config), args.seed, args.init or "spread")
    model = load_hf(source)
    if config is not None and model.config != config:
        raise ConfigError(f"--model {args.model} and --hf {source} differ in size; leave --model out")
    return model


def _optimizer(args: Options) -> AdamW:
    return AdamW(args.lr, args.beta1, args.beta2, args.eps, args.weight_decay)


Errors = dict[str, float]


def _compute(model: GPT2, x: torch.Tensor, y: torch.Tensor, args: Options) -> tuple[Answers, Errors, Errors]:
    """The f32 answers and how far PyTorch's f32 and bf16 are from exact ones, which f64 computes when there are steps;
    one forward and backward in f32 is exact enough to judge bf16 by.
    """
    job = (x, y, _optimizer(args), args.steps, not args.no_acts)
    exact_model = copy.deepcopy(model).double() if args.steps else None
    low_model = None if args.no_bf16 else copy.deepcopy(model)
    answers = compute_answers(model, *job)
    for name in ("loss", "losses"):
        if name in answers.tensors and not answers.tensors[name].isfinite().all():
            raise IronhorseError(f"the {name} are not finite; choose a smaller --lr or other weights")
    exact = answers if exact_model is None else compute_answers(exact_model, *job)
    errors = {} if exact_model is None else torch_errors(answers, exact)
    errors_bf16 = {} if low_model is None else torch_errors(compute_answers_bf16(low_model, *job), exact)
    if not all(math.isfinite(error) for error in errors_bf16.values()):
        errors_bf16 = {}  # beyond what bf16 holds: a checker must find out by itself
    return answers, errors, errors_bf16


def _write(args: Options, info: KeyInfo, tensors: Arrays, staging: Staging) -> dict[str, Any]:
    config = info.config
    base = f"{args.stem}_{config.name}"
    params = _under("param.", tensors)
    state = DebugState(tensors["x"], tensors["y"], tensors["logits"], float(tensors["loss"]), _under("grad.", tensors))
    what = {
        f"{base}.bin": "weights, f32",
        f"{base}_bf16.bin": "weights, bf16",
        f"{base}_debug_state.bin": "one batch: tokens, logits, loss, gradients",
        f"{base}.key.safetensors": f"answer key: {len(tensors)} tensors",
    }
    model_file, bf16_file, state_file, key_file = what
    write_model(staging.path(model_file), config, params, "f32")
    write_model(staging.path(bf16_file), config, params, "bf16")
    write_debug_state(staging.path(state_file), config, state)
    write_key(staging.path(key_file), info, tensors)
    sizes = {name: staging.path(name).stat().st_size for name in what}
    return {
        "model": config.name,
        "config": config.to_dict(),
        "parameters": sum(value.size for value in params.values()),
        "batch": args.batch,
        "seq": args.seq,
        "seed": args.seed,
        "torch": info.torch,
        "loss": float(tensors["loss"]),
        "losses": [float(loss) for loss in tensors.get("losses", ())],
        "files": [{"name": name, "bytes": sizes[name], "what": text} for name, text in what.items()],
    }


def _under(prefix: str, tensors: Arrays) -> Arrays:
    return {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}
