"""Trains a small mixture of experts with ironhorse and with PyTorch: the loss curves must coincide.

    python benches/moe_curve.py --steps 1000 --json curve.json --svg curve.svg      # --device cuda for a GPU

Both start from the same weights (written by PyTorch), train on the same batches of the built-in corpus in the same
order (`ironhorse train --save-batches`), in f32, with the same learning rates, clipping and AdamW. Rounding differs,
and at some step it sends a token to another expert: from then on two correct programs differ by far more than rounding
error. So the report says for each pair of runs in which step an expert first got a different number of tokens, and how
much the losses differ before and after it. PyTorch is also compared with itself: in f64, in f32 with plain attention
instead of the fused one, and from weights perturbed by a rounding error.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
sys.path[:0] = [str(HERE), str(ROOT / "python")]

import torch  # noqa: E402
from compare_torch import provenance, say  # noqa: E402
from curve_svg import gaps, picture  # noqa: E402
from ironhorse.config import MoEConfig  # noqa: E402
from ironhorse.errors import IronhorseError  # noqa: E402
from ironhorse.formats.folders import read_hf_moe  # noqa: E402
from ironhorse.formats.safetensors import read_safetensors  # noqa: E402
from ironhorse.formats.staging import check_writable_file, write_json  # noqa: E402
from ironhorse.reference.bench import write_moe  # noqa: E402
from ironhorse.reference.gpt2 import causal_attention, fused_attention  # noqa: E402
from ironhorse.reference.init_moe import init_weights  # noqa: E402
from ironhorse.reference.moe import MoE  # noqa: E402
from ironhorse.reference.train import AdamW  # noqa: E402
from torch import Tensor  # noqa: E402

# moe-tiny with bytes as tokens
MODEL = (
    "hidden=64,n_layer=2,n_head=4,n_kv_head=1,head_dim=16,n_experts=4,top_k=2,ffn=256,vocab_size=256,max_seq_len=512"
)
OPTIMIZER = AdamW(beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1)
CLIP = 1.0


def train_ironhorse(args: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    """Trains with ironhorse and returns the metrics of every step; writes the batches to the folder."""
    options = {
        "init": folder / "moe", "out": folder / "run", "save-batches": folder / "batches.safetensors",
        "steps": args.steps, "batch": args.batch, "seq": args.seq, "lr": args.lr, "warmup": args.warmup,
        "final-fraction": 0.1, "beta1": OPTIMIZER.beta1, "beta2": OPTIMIZER.beta2, "eps": OPTIMIZER.eps,
        "weight-decay": OPTIMIZER.weight_decay, "grad-clip": CLIP, "val-batches": 0, "sample-tokens": 0,
        "sample-every": 0, "seed": args.seed, "device": args.device, "threads": args.threads,
    }  # fmt: skip
    command = [str(args.bin), "train", *(str(part) for name, value in options.items() for part in (f"--{name}", value))]
    try:
        run = subprocess.run(command, capture_output=True, text=True)
    except OSError as error:
        raise IronhorseError(f"cannot run {args.bin.name}: {error.strerror}") from None
    if run.returncode:
        last = (run.stderr.strip().splitlines() or ["no message"])[-1]
        raise IronhorseError(f"`ironhorse train` ended with {run.returncode}: {last}")
    return [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]


@dataclass
class Run:
    """One training run, step by step: the loss, and how many tokens each expert of each layer got."""

    losses: list[float]
    loads: list[list[int]]


class Loads:
    """A recorder that counts the tokens of each expert."""

    def __init__(self, experts: int) -> None:
        self.experts, self.counts = experts, []

    def __call__(self, name: str, value: Tensor) -> None:
        if name.endswith(".experts"):
            self.counts += value.flatten().bincount(minlength=self.experts).tolist()


def of_metrics(metrics: list[dict[str, Any]], tokens: int) -> Run:
    """A run of ironhorse, whose loads are fractions of the tokens; on a GPU not every step reports them."""
    loads = [[round(share * tokens) for layer in m.get("router", ()) for share in layer["load"]] for m in metrics]
    return Run([m["loss"] for m in metrics], loads)


def train_torch(
    folder: Path, rates: list[float], dtype: torch.dtype, attention: Any, device: str, nudge: int = 0
) -> Run:
    """Trains on these batches with these learning rates; `nudge` is the seed of a perturbation of the weights."""
    config, params = read_hf_moe(folder / "moe")
    model = MoE(config, attention)
    model.load_state_dict({name: torch.from_numpy(value) for name, value in params.items()})
    if nudge:
        generator = torch.Generator().manual_seed(nudge)
        for param in model.parameters():
            signs = torch.randint(-1, 2, param.shape, generator=generator)
            param.data *= 1 + signs * 2.0**-24  # rounds to a neighbouring float or to itself
    model = model.to(device, dtype)
    loads: list[list[int]] = []
    batches = read_safetensors(folder / "batches.safetensors").tensors
    optimizer = OPTIMIZER.build(model)
    losses: list[Tensor] = []
    for x, y, rate in zip(batches["x"], batches["y"], rates, strict=True):
        for group in optimizer.param_groups:
            group["lr"] = rate
        tokens, targets = (torch.from_numpy(part.copy()).long().to(device) for part in (x, y))
        log = Loads(config.n_experts)
        loss = model.loss(tokens, targets, log)[1]
        loads.append(log.counts)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.detach())
    return Run([loss.item() for loss in losses], loads)


def compare(a: Run, b: Run) -> dict[str, Any]:
    """The difference of two runs: overall, and before and after the first step that sent a token to another expert."""
    apart = gaps(a.losses, b.losses)
    elsewhere = (step for step, (x, y) in enumerate(zip(a.loads, b.loads, strict=True)) if x and y and x != y)
    first = next(elsewhere, None)
    before, after = apart[:first], [] if first is None else apart[first:]
    return {
        "max": max(apart),
        "mean": statistics.fmean(apart),
        "first_step_with_other_experts": first,
        "max_before": max(before, default=None),
        "max_after": max(after, default=None),
        "mean_after": statistics.fmean(after) if after else None,
    }


def curves(args: argparse.Namespace) -> dict[str, Any]:
    """Trains all runs and compares them."""
    torch.set_num_threads(args.threads)
    with tempfile.TemporaryDirectory(prefix="ironhorse-curve-") as name:
        folder = Path(name)
        config = MoEConfig.parse(args.model)
        write_moe(init_weights(MoE(config), args.seed), folder / "moe")
        say(f"ironhorse, {args.steps} steps")
        metrics = train_ironhorse(args, folder)
        rates = [m["lr"] for m in metrics]
        runs = {"ironhorse f32": of_metrics(metrics, args.batch * args.seq)}
        sides = {"torch f32": (torch.float32, fused_attention, 0), "torch f64": (torch.float64, causal_attention, 0),
                 "torch f32, other order": (torch.float32, causal_attention, 0)}  # fmt: skip
        nudged = {f"torch f32, nudged {n}": (torch.float32, fused_attention, n) for n in range(1, args.nudges + 1)}
        for side, (dtype, attention, nudge) in (sides | nudged).items():
            say(side)
            runs[side] = train_torch(folder, rates, dtype, attention, args.device, nudge)
    pairs = [("ironhorse f32", "torch f32"), ("ironhorse f32", "torch f64"), ("torch f32", "torch f64"),
             ("torch f32, other order", "torch f64"), *((side, "torch f64") for side in nudged)]  # fmt: skip
    keys = ("model", "steps", "batch", "seq", "lr", "warmup", "seed", "threads", "device")
    return {
        "kind": "moe_curve",
        **provenance(),
        "torch": torch.__version__,
        **{key: getattr(args, key) for key in keys},
        "difference": {f"{a} - {b}": compare(runs[a], runs[b]) for a, b in pairs},
        "last_50_mean": {side: statistics.fmean(run.losses[-50:]) for side, run in runs.items()},
        "losses": {side: [round(loss, 7) for loss in run.losses] for side, run in runs.items()},
    }


def show(report: dict[str, Any]) -> None:
    print(f"{'':<36}{'max':>10}{'mean':>10}{'other experts from':>20}{'max before':>12}{'max after':>11}")
    for name, row in report["difference"].items():
        first, after = row["first_step_with_other_experts"], row["max_after"]
        print(f"{name:<36}{row['max']:>10.1e}{row['mean']:>10.1e}{'never' if first is None else first:>20}"
              f"{row['max_before'] or 0:>12.1e}{after or 0:>11.1e}")  # fmt: skip
    print("mean loss of the last 50 steps: "
          + ", ".join(f"{side} {loss:.4f}" for side, loss in report["last_50_mean"].items()))  # fmt: skip


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=MODEL, help="sizes of a mixture of experts with at least 256 tokens")
    for name, value in (("steps", 1000), ("batch", 8), ("seq", 64), ("warmup", 50), ("seed", 1), ("threads", 2)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--nudges", type=int, default=2, metavar="N", help="runs of PyTorch from perturbed weights")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--device", default="cpu", help="cpu or cuda, for both sides")
    binary = os.environ.get("IRONHORSE_BIN") or ROOT / "target/release/ironhorse"
    parser.add_argument("--bin", default=binary, type=Path)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--svg", type=Path)
    args = parser.parse_args(argv)
    for path, name in ((args.json, "--json"), (args.svg, "--svg")):
        if path is not None:
            check_writable_file(path, name)
    return args


def main(argv: list[str] | None = None) -> int:
    try:
        args = parse(argv)
        report = curves(args)
    except IronhorseError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    show(report)
    if args.json is not None:
        write_json(args.json, report)
    if args.svg is not None:
        args.svg.write_text(picture(report), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
