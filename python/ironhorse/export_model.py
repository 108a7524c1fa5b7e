"""The export of a model: build or load it, let PyTorch compute the answers, write the files."""

from __future__ import annotations

import math
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch

from .answer_key import KeyInfo, write_key
from .config import GPT2Config, ModelConfig, MoEConfig
from .errors import ConfigError, IronhorseError
from .export_answers import Arrays, compute, optimizer_of, report_of, under
from .export_options import Options, check_length
from .formats.folders import read_hf_moe
from .formats.hf import config_json
from .formats.llmc import DebugState, write_debug_state, write_model
from .formats.safetensors import write_safetensors
from .formats.staging import Staging
from .params import active_params
from .reference import init, init_moe
from .reference.dropout import Dropout
from .reference.gpt2 import GPT2
from .reference.hf import load_hf
from .reference.hf_moe import compute_by_transformers
from .reference.moe import MoE
from .reference.train import compute_answers


def export_model(args: Options, config: ModelConfig | None, source: str | None) -> dict[str, Any]:
    """Writes the answer key STEM_NAME.key.safetensors and the weights to args.out; returns the report.

    The weights of a GPT-2 are `STEM_NAME{.bin,_bf16.bin}`, with a debug state `STEM_NAME_debug_state.bin`; those of
    others are the Hugging Face folder STEM_NAME.
    """
    with Staging(args.out) as staging:  # made first: an --out that cannot be written fails before the work
        return _export(args, config, source, staging)


def _export(args: Options, config: ModelConfig | None, source: str | None, staging: Staging) -> dict[str, Any]:
    model = _build(args, config, source)
    check_length(args.seq, model.config)
    params = {f"param.{name}": param.detach().clone().numpy() for name, param in model.named_parameters()}
    x, y, margin = _batch(model, args, source)
    y = init.with_ignored(y, args.ignored, args.seed)
    if args.dropout > 0:
        assert isinstance(model, GPT2)  # check_args
        model.dropout = Dropout(args.dropout, args.seed)
    by = compute_by_transformers if args.reference == "transformers" else compute_answers
    answers, errors, errors_bf16 = compute(model, x, y, args, by)
    tensors: Arrays = {"x": x.numpy().astype(np.int32), "y": y.numpy().astype(np.int32)}
    tensors |= params | {name: value.contiguous().numpy() for name, value in answers.tensors.items()}
    info = KeyInfo(
        config=model.config,
        torch=torch.__version__,
        seed=args.seed,
        dropout=args.dropout,
        act_names=answers.act_names,
        optimizer=optimizer_of(args).describe(args.steps),
        torch_error=errors,
        torch_error_bf16=errors_bf16,
        model=model.config.kind,
        router={"margin": margin} if math.isfinite(margin) else {},
        reference=f"transformers {version('transformers')}" if args.reference == "transformers" else "",
    )
    write = _write_gpt2 if isinstance(model.config, GPT2Config) else _write_moe
    return write(args, info, tensors, staging)


def _build(args: Options, config: ModelConfig | None, source: str | None) -> GPT2 | MoE:
    kind = args.init or "spread"
    if source is None:
        assert config is not None
        if isinstance(config, MoEConfig):
            return init_moe.init_weights(MoE(config), args.seed, kind)
        return init.init_weights(GPT2(config), args.seed, kind)
    model = _load_moe(source) if args.kind == "moe" else load_hf(source)
    if config is not None and model.config != config:
        raise ConfigError(f"--model {args.model} and --hf {source} differ in size; leave --model out")
    return model


def _load_moe(source: str) -> MoE:
    config, params = read_hf_moe(Path(source))
    return init.filled(MoE(config), params)


def _batch(model: GPT2 | MoE, args: Options, source: str | None) -> tuple[torch.Tensor, torch.Tensor, float]:
    """Tokens, targets, and the smallest margin by which an expert was chosen over another."""
    if isinstance(model, GPT2):
        return *init.random_batch(model.config.vocab_size, args.batch, args.seq, args.seed), math.inf
    if args.reference == "transformers" and args.init == "tied" and model.config.top_k < model.config.n_experts:
        raise IronhorseError("--init tied: transformers has no rule for ties; use --reference ironhorse")
    x, y, margin = init_moe.routed_batch(model, args.batch, args.seq, args.seed)
    if source is None:
        init_moe.check_routing(model, x, args.init or "spread")
    return x, y, margin


def _write_gpt2(args: Options, info: KeyInfo, tensors: Arrays, staging: Staging) -> dict[str, Any]:
    config = info.config
    assert isinstance(config, GPT2Config)
    base = f"{args.stem}_{config.name}"
    # the .bin files have no place for it, or its readers none for targets below 0; the key holds the weights
    if config.act != "gelu" or args.dropout > 0 or args.ignored > 0:
        return _report(args, info, tensors, staging, {}, base)
    params = under("param.", tensors)
    state = DebugState(tensors["x"], tensors["y"], tensors["logits"], float(tensors["loss"]), under("grad.", tensors))
    write_model(staging.path(f"{base}.bin"), config, params, "f32")
    write_model(staging.path(f"{base}_bf16.bin"), config, params, "bf16")
    write_debug_state(staging.path(f"{base}_debug_state.bin"), config, state)
    what = {
        f"{base}.bin": "weights, f32",
        f"{base}_bf16.bin": "weights, bf16",
        f"{base}_debug_state.bin": "one batch: tokens, logits, loss, gradients",
    }
    return _report(args, info, tensors, staging, what, base)


def _write_moe(args: Options, info: KeyInfo, tensors: Arrays, staging: Staging) -> dict[str, Any]:
    config = info.config
    base = config.name if config.name.startswith(f"{args.stem}-") else f"{args.stem}_{config.name}"
    staging.path(f"{base}/config.json").write_bytes(config_json(config, {"F32"}))
    write_safetensors(staging.path(f"{base}/model.safetensors"), under("param.", tensors), {"format": "pt"})
    what = {f"{base}/config.json": "sizes, for transformers", f"{base}/model.safetensors": "weights, f32"}
    aux = [float(value) for value in tensors.get("aux", ())]
    report = _report(args, info, tensors, staging, what, base)
    return report | {"active_parameters": active_params(config), "aux": aux}


def _report(
    args: Options, info: KeyInfo, tensors: Arrays, staging: Staging, what: dict[str, str], base: str
) -> dict[str, Any]:
    """Writes the key, and tells of all files."""
    key = f"{base}.key.safetensors"
    write_key(staging.path(key), info, tensors)
    what[key] = f"answer key: {len(tensors)} tensors"
    files = {name: (staging.path(name).stat().st_size, text) for name, text in what.items()}
    return report_of(args, info, tensors, files)
