"""The export of a GPT-2: build or load it, let PyTorch compute the answers, write the four files."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from .answer_key import KeyInfo, write_key
from .config import GPT2Config
from .errors import ConfigError
from .export import Options, check_length
from .export_answers import Arrays, compute, optimizer_of, report_of, under
from .formats.llmc import DebugState, write_debug_state, write_model
from .formats.staging import Staging
from .reference.gpt2 import GPT2
from .reference.hf import load_hf
from .reference.init import init_weights, random_batch


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
    answers, errors, errors_bf16 = compute(model, x, y, args)
    tensors: Arrays = {"x": x.numpy().astype(np.int32), "y": y.numpy().astype(np.int32)}
    tensors |= params | {name: value.contiguous().numpy() for name, value in answers.tensors.items()}
    info = KeyInfo(
        config=config,
        torch=torch.__version__,
        seed=args.seed,
        act_names=answers.act_names,
        optimizer=optimizer_of(args).describe(args.steps),
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


def _write(args: Options, info: KeyInfo, tensors: Arrays, staging: Staging) -> dict[str, Any]:
    config = info.config
    assert isinstance(config, GPT2Config)
    base = f"{args.stem}_{config.name}"
    params = under("param.", tensors)
    state = DebugState(tensors["x"], tensors["y"], tensors["logits"], float(tensors["loss"]), under("grad.", tensors))
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
    files = {name: (staging.path(name).stat().st_size, text) for name, text in what.items()}
    return report_of(args, info, tensors, files)
