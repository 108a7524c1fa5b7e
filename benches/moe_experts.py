"""Measures the cost of more experts at a fixed top-k: the work should grow with tokens x k, not with the experts.

    python benches/moe_experts.py --json experts.json                                    # CPU: E = 4 to 64 of moe-tiny
    python benches/moe_experts.py --device cuda --dtype bf16 --hidden 768 --ffn 2048 --layers 4 --batch 16 --seq 1024

Measures ironhorse only. Each E is profiled op by op (`ironhorse profile --json`), alternating over the rounds, and each
op counts with its smallest median over the rounds. A step has three parts: ops on tokens, which should not grow; the
gradient norm and AdamW, which process every parameter once and grow with E; and the memory traffic of the weights
within the matrix products, which all rows of an expert share and which matters if each expert has few rows.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "python")]

from compare_torch import cores, figure, provenance, run_child, say  # noqa: E402
from ironhorse.errors import IronhorseError  # noqa: E402
from ironhorse.formats.staging import check_writable_file, write_json  # noqa: E402

UPDATE = ("grad_norm", "adamw")  # ops over parameters, not tokens
PRODUCTS = "grouped_linear"  # the experts' matrix products; that of w1 and w3 includes the forward of SwiGLU


def model_of(args: argparse.Namespace, experts: int) -> str:
    sizes = {"hidden": args.hidden, "layers": args.layers, "heads": args.heads, "kv_heads": 1, "experts": experts,
             "top_k": args.top_k, "ffn": args.ffn, "vocab": args.vocab, "context": args.seq}  # fmt: skip
    return ",".join(f"{name}={value}" for name, value in sizes.items())


def profile(args: argparse.Namespace, experts: int, folder: Path) -> dict[str, Any]:
    """One process of `ironhorse profile`."""
    report = folder / "profile.json"
    command = [str(args.bin), "profile", "--model", model_of(args, experts), "--json", str(report)]
    for name in ("batch", "seq", "steps", "device", "dtype", "threads"):
        command += [f"--{name}", str(getattr(args, name))]
    run_child(command, args.threads)
    return json.loads(report.read_text())


def split(profiles: list[dict[str, Any]]) -> dict[str, float]:
    """Milliseconds of the three parts; each op counts with the smallest of its medians."""
    times = [min(op) for op in zip(*([op["ms"] for op in p["ops"]] for p in profiles), strict=True)]
    names = [op["op"] for op in profiles[0]["ops"]]
    update = sum(ms for name, ms in zip(names, times, strict=True) if name in UPDATE)
    products = sum(ms for name, ms in zip(names, times, strict=True) if name.startswith(PRODUCTS))
    return {"tokens_ms": sum(times) - update, "products_ms": products, "update_ms": update}


def measure(args: argparse.Namespace) -> dict[str, Any]:
    profiles: dict[int, list[dict[str, Any]]] = {experts: [] for experts in args.experts}
    with tempfile.TemporaryDirectory(prefix="ironhorse-experts-") as name:
        for number in range(args.rounds):
            for experts in args.experts:
                profiles[experts].append(profile(args, experts, Path(name)))
                say(f"round {number + 1}  E={experts}: {figure(profiles[experts][-1]['ms'])} ms")
    rows = []
    for experts, found in profiles.items():
        routes = args.batch * args.seq * args.top_k
        rows.append({"experts": experts, "rows_per_expert": routes / experts, **split(found)})
    for row in rows:
        row["tokens_ratio"] = row["tokens_ms"] / rows[0]["tokens_ms"]
        row["products_ratio"] = row["products_ms"] / rows[0]["products_ms"]
    keys = "hidden layers heads top_k ffn vocab batch seq device dtype threads rounds".split()
    return {"kind": "moe_experts", **provenance(), "gpu": profiles[args.experts[0]][0].get("gpu"),
            **{key: getattr(args, key) for key in keys}, "rows": rows}  # fmt: skip


def show(report: dict[str, Any]) -> None:
    print(f"\nhidden {report['hidden']}, ffn {report['ffn']}, {report['layers']} layers, top-{report['top_k']}, "
          f"{report['batch']} x {report['seq']} tokens, {report['gpu'] or str(report['threads']) + ' threads'}, "
          f"{report['dtype']}\n")  # fmt: skip
    print(f"{'E':>4}{'rows each':>11}{'token ops ms':>14}{'ratio':>8}"
          f"{'of it products':>16}{'ratio':>8}{'update ms':>11}")  # fmt: skip
    for row in report["rows"]:
        print(f"{row['experts']:>4}{row['rows_per_expert']:>11.0f}{figure(row['tokens_ms']):>14}"
              f"{row['tokens_ratio']:>8.2f}{figure(row['products_ms']):>16}{row['products_ratio']:>8.2f}"
              f"{figure(row['update_ms']):>11}")  # fmt: skip


def numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--experts", type=numbers, default=[4, 8, 16, 32, 64])
    sizes = {"hidden": 64, "layers": 2, "heads": 4, "top_k": 2, "ffn": 256, "vocab": 1000, "batch": 8, "seq": 512}
    for name, value in (sizes | {"steps": 20, "rounds": 3, "threads": cores()}).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=value)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="f32")
    binary = os.environ.get("IRONHORSE_BIN") or HERE.parent / "target/release/ironhorse"
    parser.add_argument("--bin", default=binary, type=Path)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args(argv)
    if min(args.experts) < args.top_k:
        raise IronhorseError(f"--experts {min(args.experts)} is fewer than --top-k {args.top_k}")
    if not args.bin.is_file():
        raise IronhorseError("no ironhorse binary; `cargo build --release`, then give --bin or IRONHORSE_BIN")
    if args.json is not None:
        check_writable_file(args.json, "--json")
    return args


def main(argv: list[str] | None = None) -> int:
    try:
        args = parse(argv)
        report = measure(args)
    except (IronhorseError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    show(report)
    if args.json is not None:
        write_json(args.json, report)
    return 0


if __name__ == "__main__":
    sys.exit(main())
