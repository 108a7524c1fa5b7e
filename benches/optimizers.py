"""Steps to a given loss with AdamW and with Muon, each with its learning rate chosen from the same grid.

    python benches/optimizers.py --json optimizers.json                            # built-in corpus, CPU, minutes
    python benches/optimizers.py --model d12 --data shakespeare_train.bin --val-data shakespeare_val.bin \\
        --device cuda --batch 16 --seq 1024 --steps 300 --warmup 30 --lrs 3e-4,1e-3,2e-3,4e-3 --json optimizers.json

Every run is `ironhorse train` with the same model, data, batches, schedule, decay and clipping. Each optimizer takes
every learning rate of the grid with the first seed; the rate with the lowest last validation loss is its best, and the
other seeds run with that one. The target is the last validation loss of AdamW's best rate, the mean of all seeds; a run
has reached it at the first validation at or below it.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
sys.path[:0] = [str(HERE), str(ROOT / "python")]

from compare_torch import provenance, say  # noqa: E402
from ironhorse.errors import IronhorseError  # noqa: E402
from ironhorse.formats.staging import check_writable_file, write_json  # noqa: E402

OPTIMIZERS = ("adamw", "muon")
MODEL = "n_layer=4,n_head=4,n_embd=128,vocab_size=256,max_seq_len=128"


def train(args: argparse.Namespace, optimizer: str, lr: float, seed: int) -> dict[str, Any]:
    """A run: its validation losses by steps made, and its median step time."""
    with tempfile.TemporaryDirectory() as name:
        run = Path(name) / "run"
        options = {
            "model": args.model, "optimizer": optimizer, "lr": lr, "seed": seed, "steps": args.steps, "out": run,
            "batch": args.batch, "seq": args.seq, "warmup": args.warmup, "final-fraction": 0.1, "beta2": 0.95,
            "weight-decay": 0.1, "grad-clip": 1.0, "val-every": args.val_every, "val-batches": args.val_batches,
            "sample-tokens": 0, "sample-every": 0, "save-minutes": 0, "keep": 1, "device": args.device,
            "threads": args.threads,
        }  # fmt: skip
        command = [str(args.bin), "train"]
        command += [str(part) for key, value in options.items() for part in (f"--{key}", value)]
        for key, value in (("--data", args.data), ("--val-data", args.val_data)):
            command += [key, value] if value else []
        try:
            done = subprocess.run(command, capture_output=True, text=True)
        except OSError as error:
            raise IronhorseError(f"cannot run {args.bin.name}: {error.strerror}") from None
        log = run / "metrics.jsonl"
        if done.returncode not in (0, 1) or not log.exists():  # 1: it diverged, which is a result
            last = (done.stderr.strip().splitlines() or ["no message"])[-1]
            raise IronhorseError(f"`ironhorse train` ended with {done.returncode}: {last}")
        metrics = [json.loads(line) for line in log.read_text().splitlines()]
    # the loss before step 0 is in the line of step 0; the last one is measured after the last step
    losses = {m["step"]: m["val_loss"] for m in metrics[:-1] if m.get("val_loss") is not None}
    diverged = done.returncode == 1 or metrics[-1].get("val_loss") is None
    if not diverged:
        losses[metrics[-1]["step"] + 1] = metrics[-1]["val_loss"]
    last = float("inf") if diverged else metrics[-1]["val_loss"]
    times = [m["ms"] for m in metrics[2:]]
    say(f"{optimizer} lr {lr:g} seed {seed}: {'diverged' if diverged else f'{last:.4f}'}")
    return {"optimizer": optimizer, "lr": lr, "seed": seed, "diverged": diverged, "val_losses": losses,
            "last": None if diverged else last, "step_ms": statistics.median(times) if times else None}  # fmt: skip


def reached(run: dict[str, Any], target: float) -> int | None:
    """The first step at which the validation loss is at most the target."""
    return next((step for step, loss in run["val_losses"].items() if loss <= target), None)


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """All runs, and what they say."""
    runs = [train(args, optimizer, lr, args.seeds[0]) for optimizer in OPTIMIZERS for lr in args.lrs]

    def last(run: dict[str, Any]) -> float:
        return float("inf") if run["diverged"] else run["last"]

    best = {name: min((run for run in runs if run["optimizer"] == name), key=last)["lr"] for name in OPTIMIZERS}
    for name in OPTIMIZERS:
        runs += [train(args, name, best[name], seed) for seed in args.seeds[1:]]
    of = {name: [run for run in runs if run["optimizer"] == name and run["lr"] == best[name]] for name in OPTIMIZERS}
    target = statistics.fmean(map(last, of["adamw"]))
    summary = {}
    for name in OPTIMIZERS:
        steps = [reached(run, target) for run in of[name]]
        summary[name] = {
            "best_lr": best[name],
            "last_val_loss": [run["last"] for run in of[name]],
            "steps_to_target": steps,
            "step_ms": statistics.median(run["step_ms"] or 0.0 for run in of[name]),
        }
    keys = ("model", "data", "steps", "batch", "seq", "warmup", "lrs", "seeds", "threads", "device")
    return {"kind": "optimizers", **provenance(), **{key: getattr(args, key) for key in keys}, "target": target,
            "summary": summary, "runs": runs}  # fmt: skip


def show(report: dict[str, Any]) -> None:
    print(f"last validation loss after {report['steps']} steps, seed {report['seeds'][0]}")
    print(f"{'lr':<10}" + "".join(f"{name:>10}" for name in OPTIMIZERS))
    first = {(run["optimizer"], run["lr"]): run["last"] for run in report["runs"] if run["seed"] == report["seeds"][0]}
    for lr in report["lrs"]:
        cells = [first[name, lr] for name in OPTIMIZERS]
        print(f"{lr:<10g}" + "".join(f"{'diverged' if cell is None else f'{cell:.4f}':>10}" for cell in cells))
    print(f"steps to {report['target']:.4f}, the last loss of AdamW's best rate:")
    for name, row in report["summary"].items():
        losses = " ".join("diverged" if loss is None else f"{loss:.4f}" for loss in row["last_val_loss"])
        print(f"{name}: lr {row['best_lr']:g}, steps {row['steps_to_target']}, last losses {losses}, "
              f"{row['step_ms']:.1f} ms a step")  # fmt: skip


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=MODEL)
    parser.add_argument("--data", help="token shards or text [default: the built-in corpus]")
    parser.add_argument("--val-data")
    for name, value in (("steps", 300), ("batch", 8), ("seq", 64), ("warmup", 30), ("threads", 2), ("val-every", 10),
                        ("val-batches", 16)):  # fmt: skip
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--lrs", default="1e-3,2e-3,4e-3,8e-3,1.6e-2", help="the grid, the same for both")
    parser.add_argument("--seeds", default="1,2,3")
    parser.add_argument("--device", default="cpu")
    binary = os.environ.get("IRONHORSE_BIN") or ROOT / "target/release/ironhorse"
    parser.add_argument("--bin", default=binary, type=Path)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args(argv)
    try:
        args.lrs = [float(text) for text in args.lrs.split(",")]
        args.seeds = [int(text) for text in args.seeds.split(",")]
    except ValueError as error:
        raise IronhorseError(f"--lrs and --seeds are numbers with commas between them ({error})") from None
    if args.json is not None:
        check_writable_file(args.json, "--json")
    return args


def main(argv: list[str] | None = None) -> int:
    try:
        args = parse(argv)
        report = measure(args)
    except IronhorseError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    show(report)
    if args.json is not None:
        write_json(args.json, report)
    return 0


if __name__ == "__main__":
    sys.exit(main())
