"""The export of a mixture of experts or a Llama: build or load it, let PyTorch compute the answers, write the files."""

from __future__ import annotations

import math
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch

from .answer_key import KeyInfo, write_key
from .config_moe import MoEConfig
from .errors import ConfigError, IronhorseError
from .export import Options, check_length
from .export_answers import Arrays, compute, optimizer_of, report_of, under
from .formats.hf import config_json
from .formats.hf_moe import read_hf_moe
from .formats.safetensors import write_safetensors
from .formats.staging import Staging
from .params_moe import active_params
from .reference.hf_moe import compute_by_transformers
from .reference.init_moe import check_routing, init_weights, routed_batch
from .reference.moe import MoE
from .reference.train import compute_answers


def export_moe(args: Options, config: MoEConfig | None, source: str | None) -> dict[str, Any]:
    """Writes NAME/config.json, NAME/model.safetensors and NAME.key.safetensors to args.out; returns the report."""
    with Staging(args.out) as staging:  # made first: an --out that cannot be written fails before the work
        return _export(args, config, source, staging)


def _export(args: Options, config: MoEConfig | None, source: str | None, staging: Staging) -> dict[str, Any]:
    model = _build(args, config, source)
    config = model.config
    check_length(args.seq, config)
    if args.reference == "transformers" and args.init == "tied" and config.top_k < config.n_experts:
        raise IronhorseError("--init tied: transformers has no rule for ties; use --reference ironhorse")
    params = {f"param.{name}": param.detach().clone().numpy() for name, param in model.named_parameters()}
    x, y, margin = routed_batch(model, args.batch, args.seq, args.seed)
    if source is None:
        check_routing(model, x, args.init or "spread")
    by = compute_by_transformers if args.reference == "transformers" else compute_answers
    answers, errors, errors_bf16 = compute(model, x, y, args, by)
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
        model=config.kind,
        router={"margin": margin} if math.isfinite(margin) else {},
        reference=f"transformers {version('transformers')}" if args.reference == "transformers" else "",
    )
    return _write(args, info, tensors, staging)


def _build(args: Options, config: MoEConfig | None, source: str | None) -> MoE:
    if source is None:
        assert config is not None
        return init_weights(MoE(config), args.seed, args.init or "spread")
    found, params = read_hf_moe(Path(source))
    if config is not None and config != found:
        raise ConfigError(f"--model {args.model} and --hf {source} differ in size; leave --model out")
    model = MoE(found)
    model.load_state_dict({name: torch.from_numpy(value) for name, value in params.items()})
    return model


def _write(args: Options, info: KeyInfo, tensors: Arrays, staging: Staging) -> dict[str, Any]:
    config = info.config
    assert isinstance(config, MoEConfig)
    base = config.name if config.name.startswith(f"{args.stem}-") else f"{args.stem}_{config.name}"
    what = {
        f"{base}/config.json": "sizes, for transformers",
        f"{base}/model.safetensors": "weights, f32",
        f"{base}.key.safetensors": f"answer key: {len(tensors)} tensors",
    }
    config_file, model_file, key_file = what
    staging.path(config_file).write_bytes(config_json(config, {"F32"}))
    write_safetensors(staging.path(model_file), under("param.", tensors), {"format": "pt"})
    write_key(staging.path(key_file), info, tensors)
    files = {name: (staging.path(name).stat().st_size, text) for name, text in what.items()}
    aux = [float(value) for value in tensors.get("aux", ())]
    return report_of(args, info, tensors, files) | {"active_parameters": active_params(config), "aux": aux}
