"""One timed PyTorch training run on the CPU, in a process of its own; the other side of `ironhorse bench`.

    python -m ironhorse.reference.bench prepare --model d12 --batch 4 --seq 64 --out DIR
    python -m ironhorse.reference.bench run --files DIR --dtype f32 --threads 2 --steps 10 --json FILE

A step is: forward, cross-entropy, backward, clip_grad_norm_(1.0), AdamW, zero_grad(set_to_none=True), always on
the one batch, from the weights `prepare` wrote. `benches/compare_torch.py` runs this alternately with ironhorse.
GPT-2 is written as llm.c's .bin files, a mixture of experts as a Hugging Face folder with its tokens beside it.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..config import GPT2Config, MoEConfig, parse_config
from ..formats.folders import read_hf_moe
from ..formats.hf import config_json
from ..formats.llmc import DebugState, map_debug_state, read_model, write_debug_state, write_model
from ..formats.safetensors import read_safetensors, write_safetensors
from . import init_moe
from .gpt2 import GPT2, fused_attention
from .init import filled, init_weights, random_batch
from .moe import MoE
from .train import AdamW, Model, compute_answers

MODEL_FILE, STATE_FILE = "model.bin", "state.bin"
MOE_FOLDER, TOKENS_FILE = "moe", "tokens.safetensors"


def prepare(model_text: str, batch: int, seq: int, seed: int, folder: Path) -> None:
    """Writes the weights and the batch both sides start from."""
    folder.mkdir(parents=True, exist_ok=True)
    config = parse_config(model_text)
    if isinstance(config, MoEConfig):
        prepare_moe(config, batch, seq, seed, folder)
    else:
        prepare_gpt2(config, batch, seq, seed, folder)


def prepare_moe(config: MoEConfig, batch: int, seq: int, seed: int, folder: Path) -> None:
    """Random tokens as they come: a near tie between experts may be decided differently, which shows in the loss."""
    write_moe(init_moe.init_weights(MoE(config), seed), folder / MOE_FOLDER)
    x, y = random_batch(config.vocab_size, batch, seq, seed)
    write_safetensors(folder / TOKENS_FILE, {"x": x.int().numpy(), "y": y.int().numpy()})


def write_moe(model: MoE, folder: Path) -> None:
    """The weights as a Hugging Face folder."""
    folder.mkdir()
    (folder / "config.json").write_bytes(config_json(model.config, {"F32"}))
    params = {name: param.detach().numpy() for name, param in model.named_parameters()}
    write_safetensors(folder / "model.safetensors", params, {"format": "pt"})


def prepare_gpt2(config: GPT2Config, batch: int, seq: int, seed: int, folder: Path) -> None:
    """The batch in a debug state, whose answers are PyTorch's."""
    model = init_weights(GPT2(config, fused_attention), seed, "gpt2")
    x, y = random_batch(model.config.vocab_size, batch, seq, seed)
    answers = compute_answers(model, x, y, AdamW(), steps=0, with_acts=False).tensors
    grads = {name: answers[f"grad.{name}"].numpy() for name, _ in model.named_parameters()}
    state = DebugState(x.numpy(), y.numpy(), answers["logits"].numpy(), answers["loss"].item(), grads)
    params = {name: param.detach().numpy() for name, param in model.named_parameters()}
    write_model(folder / MODEL_FILE, model.config, params)
    write_debug_state(folder / STATE_FILE, model.config, state)


def load(folder: Path) -> tuple[Model, Tensor, Tensor]:
    """The model and the batch of `prepare`."""
    if (folder / MOE_FOLDER).is_dir():
        return load_moe(folder)
    file = read_model(folder / MODEL_FILE)
    model = filled(GPT2(file.config, fused_attention), file.params)
    state = map_debug_state(folder / STATE_FILE, file.config)
    return model, torch.from_numpy(state.x).long(), torch.from_numpy(state.y).long()


def load_moe(folder: Path) -> tuple[MoE, Tensor, Tensor]:
    config, params = read_hf_moe(folder / MOE_FOLDER)
    model = filled(MoE(config, fused_attention), params)
    tokens = read_safetensors(folder / TOKENS_FILE).tensors
    x, y = (torch.from_numpy(tokens[name]).long() for name in ("x", "y"))
    return model, x, y


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Warm-up steps, then timed ones. `losses` has all of them, from the very first."""
    torch.set_num_threads(args.threads)
    at_start = resident_bytes()
    model, x, y = load(args.files)
    optimizer = AdamW(lr=args.lr).build(model, fused=args.fused)
    autocast = torch.autocast("cpu", torch.bfloat16) if args.dtype == "bf16" else contextlib.nullcontext()
    losses: list[Tensor] = []
    step_ms: list[float] = []
    for _ in range(args.warmup + args.steps):
        start = time.perf_counter()
        with autocast:
            loss = model.loss(x, y)[1]
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        step_ms.append(1e3 * (time.perf_counter() - start))
        losses.append(loss.detach())
    timed = step_ms[args.warmup :]
    return {
        "dtype": args.dtype,
        "fused": args.fused,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "ms_per_step": statistics.median(timed),
        "step_ms": timed,
        "losses": [value.item() for value in losses],
        "rss_at_start_bytes": at_start,
    }


def resident_bytes() -> int | None:
    """Memory this process holds now: what importing torch takes, before there is a model. None off Linux."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except OSError:
        return None
    return pages * os.sysconf("SC_PAGE_SIZE")


def main() -> int:
    """Two commands for one caller: errors are tracebacks here, the caller puts them on one line."""
    parser = argparse.ArgumentParser(prog="python -m ironhorse.reference.bench", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    prepare_args = commands.add_parser("prepare")
    prepare_args.add_argument("--model", required=True)
    prepare_args.add_argument("--batch", type=int, required=True)
    prepare_args.add_argument("--seq", type=int, required=True)
    prepare_args.add_argument("--seed", type=int, default=0)
    prepare_args.add_argument("--out", type=Path, required=True)
    run_args = commands.add_parser("run")
    run_args.add_argument("--files", type=Path, required=True)
    run_args.add_argument("--dtype", choices=("f32", "bf16"), default="f32")
    run_args.add_argument("--fused", action="store_true", help="AdamW(fused=True)")
    run_args.add_argument("--lr", type=float, default=1e-4)
    run_args.add_argument("--threads", type=int, default=1)
    run_args.add_argument("--warmup", type=int, default=2)
    run_args.add_argument("--steps", type=int, default=10)
    run_args.add_argument("--json", type=Path, required=True)
    args = parser.parse_args()
    if args.command == "prepare":
        prepare(args.model, args.batch, args.seq, args.seed, args.out)
    else:
        args.json.write_text(json.dumps(run(args)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
