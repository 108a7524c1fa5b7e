"""Prints the error of PyTorch on this GPU against an answer key after its optimizer steps, next to that of verify.

    python torch_error.py KEY --dtype tf32 [--verify verify.json]... [--json FILE]

PyTorch runs twice: with its fused attention, which computes an f32 product as three tf32 products in either precision,
and with the unfused one, whose products have the given precision. Errors are those of verify, ‖got − key‖ / ‖key‖, of
`after.*`.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import fields
from pathlib import Path

import torch
from ironhorse.config import GPT2Config
from ironhorse.formats.safetensors import read_safetensors
from ironhorse.reference.gpt2 import GPT2, causal_attention, fused_attention
from ironhorse.reference.train import AdamW, Answers, compute_answers, torch_errors

USED = ("param.", "after.")


def main() -> None:
    """Prints the tensors in which PyTorch or ironhorse has the largest error."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("key", type=Path)
    parser.add_argument("--dtype", choices=["f32", "tf32"], default="tf32")
    parser.add_argument("--verify", type=Path, action="append", default=[], help="a report of verify --json")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.set_float32_matmul_precision("high" if args.dtype == "tf32" else "highest")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    file = read_safetensors(args.key)
    meta = file.metadata
    tensors = {
        name: torch.from_numpy(x).to(device)
        for name, x in file.tensors.items()
        if name.startswith(USED) or len(name) == 1
    }
    sizes = json.loads(meta["config"])
    config = GPT2Config(**{field.name: sizes[field.name] for field in fields(GPT2Config)})
    optimizer = json.loads(meta["optimizer"])
    adamw = AdamW(**{name: optimizer[name] for name in ("lr", "beta1", "beta2", "eps", "weight_decay")})
    key = Answers({name: value for name, value in tensors.items() if name.startswith("after.")}, [])
    columns = {}
    for label, attention in [("torch", fused_attention), ("torch-unfused", causal_attention)]:
        model = GPT2(config, attention)
        model.load_state_dict(
            {name.removeprefix("param."): x for name, x in tensors.items() if name.startswith("param.")}
        )
        x, y = (tensors[name].long() for name in ("x", "y"))
        columns[label] = torch_errors(compute_answers(model.to(device), x, y, adamw, optimizer["steps"], False), key)
    for path in args.verify:
        rows = json.loads(path.read_text())["tensors"] if path.exists() else []
        columns[path.stem] = {row["name"]: row["rel_error"] for row in rows}
        columns["allowed"] = {row["name"]: row["tolerance"] for row in rows}
    names = sorted(key.tensors, key=lambda name: -max(column.get(name, 0.0) for column in columns.values()))
    print(f"{args.dtype:36}" + "".join(f"{label:>24}" for label in columns))
    for name in names[:30]:
        print(f"{name:36}" + "".join(f"{column.get(name, float('nan')):24.2e}" for column in columns.values()))
    if args.json:
        args.json.write_text(json.dumps(columns))


if __name__ == "__main__":
    main()
