"""`python -m ironhorse.export`: writes weights and answer keys.

    python -m ironhorse.export gpt2 --model d12 --batch 4 --seq 64 --seed 0 --out keys
    python -m ironhorse.export gpt2 --model n_layer=3,n_head=5,n_embd=80,vocab_size=1003,max_seq_len=37 \\
                                    --batch 3 --seq 37 --out keys
    python -m ironhorse.export gpt2 --model runs/my-checkpoint --batch 1 --seq 128 --out keys

Exit code 0 done, 2 could not run (one line on stderr, no file half-written). IRONHORSE_DEBUG=1 puts the
traceback above that line.
"""

from __future__ import annotations

import argparse
import math
import os
import re
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from .config import NAMED, GPT2Config
from .errors import IronhorseError
from .formats.staging import check_writable_file, write_json

OUT_OF_MEMORY = "out of memory; choose a smaller model or batch"


class _Parser(argparse.ArgumentParser):
    """argparse, with errors on one line."""

    def error(self, message: str) -> NoReturn:
        raise IronhorseError(f"{message}; see {self.prog} --help")


def build_parser() -> argparse.ArgumentParser:
    """The command line. One subcommand per kind of model."""
    parser = _Parser(prog="python -m ironhorse.export", description="Write weights and answer keys from PyTorch.")
    kinds = parser.add_subparsers(dest="kind", required=True, metavar="KIND", parser_class=_Parser)
    gpt2 = kinds.add_parser("gpt2", help="a GPT-2 of any size", description=__doc__.split("\n\n")[1],
                            formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    model = gpt2.add_argument_group("model")
    model.add_argument("--model", help=f"{' '.join(NAMED)} | FILE.toml | FILE.json | n_layer=3,n_head=5,n_embd=80,... "
                       "| a Hugging Face GPT-2 folder or hub name")  # fmt: skip
    model.add_argument("--hf", metavar="NAME_OR_FOLDER", help="take the weights from here (needs transformers)")
    model.add_argument("--init", choices=("spread", "gpt2"), help="random weights: spread (default) leaves no "
                       "parameter at 0 or 1, gpt2 is GPT-2's own")  # fmt: skip
    batch = gpt2.add_argument_group("batch")
    batch.add_argument("--batch", type=int, default=4, metavar="B")
    batch.add_argument("--seq", type=int, default=64, metavar="T")
    batch.add_argument("--seed", type=int, default=0, help="of weights and tokens")
    optimizer = gpt2.add_argument_group("optimizer (AdamW on the one batch)")
    optimizer.add_argument("--steps", type=int, default=10, metavar="N", help="0 leaves losses and after.* out")
    optimizer.add_argument("--lr", type=float, default=1e-4)
    optimizer.add_argument("--beta1", type=float, default=0.9)
    optimizer.add_argument("--beta2", type=float, default=0.999)
    optimizer.add_argument("--eps", type=float, default=1e-8)
    optimizer.add_argument("--weight-decay", type=float, default=0.0, help="on matrices only")
    output = gpt2.add_argument_group("output")
    output.add_argument("--out", required=True, metavar="DIR")
    output.add_argument("--stem", default="gpt2", help="first part of the file names")
    output.add_argument("--no-acts", action="store_true", help="leave act.* and dact.* out of the key")
    output.add_argument("--no-bf16", action="store_true", help="do not measure PyTorch's own error in bf16, from which "
                        "verify --dtype bf16 takes its tolerances")  # fmt: skip
    output.add_argument("--json", metavar="FILE", help="what was written, as JSON")
    return parser


def check_args(args: argparse.Namespace) -> None:
    """Everything that can be refused before torch is loaded or a file is touched."""
    for name in ("batch", "seq"):
        if getattr(args, name) < 1:
            raise IronhorseError(f"--{name} is {getattr(args, name)}; it must be at least 1")
    if args.steps < 0:
        raise IronhorseError(f"--steps is {args.steps}; it must be 0 or more")
    if not 0 <= args.seed < 2**63:
        raise IronhorseError(f"--seed is {args.seed}; it must be 0 or more and fit in 63 bits")
    for name in ("beta1", "beta2"):
        if not 0 <= getattr(args, name) < 1:
            raise IronhorseError(f"--{name} is {getattr(args, name)}; it must be at least 0 and below 1")
    for name in ("lr", "eps", "weight_decay"):
        value = getattr(args, name)
        if not (math.isfinite(value) and value >= 0):
            raise IronhorseError(f"--{name.replace('_', '-')} is {value}; it must be a number of 0 or more")
    if args.model is None and args.hf is None:
        raise IronhorseError("no --model; give d12, sizes such as n_layer=3,n_head=5,n_embd=80, or a folder")
    if not re.fullmatch(r"[\w.+-]+", args.stem):
        raise IronhorseError(f"--stem is '{args.stem}'; use letters, digits and . _ + - only")
    out = Path(args.out)
    if out.exists() and not out.is_dir():
        raise IronhorseError(f"--out {args.out} is a file; give a folder")
    if args.json is not None:
        check_writable_file(args.json, "--json", will_be_made=out)


def resolve_model(args: argparse.Namespace) -> tuple[GPT2Config | None, str | None]:
    """(sizes, None) for a model to be initialised, (sizes or None, source) when weights come from Hugging Face."""
    if args.hf is None and (Path(args.model).is_dir() or _looks_like_hub_name(args.model)):
        return None, args.model
    if args.model is not None and args.model.startswith((".", "/", "~")) and not Path(args.model).exists():
        raise IronhorseError(f"--model {args.model}: no such file or folder")
    config = GPT2Config.parse(args.model) if args.model is not None else None
    if args.hf is not None and not Path(args.hf).is_dir() and not _looks_like_hub_name(args.hf):
        raise IronhorseError(f"--hf {args.hf}: no such folder, and not a hub name such as openai-community/gpt2")
    return config, args.hf


def _looks_like_hub_name(text: str) -> bool:
    """`gpt2`, `gpt2-medium`, `distilgpt2` or `owner/name`; a path that starts with . or / is a missing folder."""
    if re.fullmatch(r"(distil)?gpt2(-[a-z]+)?", text):
        return True
    return re.fullmatch(r"\w[\w-]*/\w[\w.-]*", text) is not None and Path(text).suffix not in (".toml", ".json")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns the exit code."""
    try:
        args = build_parser().parse_args(argv)
        check_args(args)
        config, source = resolve_model(args)
        if config is not None:
            check_length(args.seq, config)
        if source is not None and args.init is not None:
            raise IronhorseError(f"--init {args.init}: {source} has weights of its own; leave --init out")
        try:
            from .export_gpt2 import export_gpt2
        except ModuleNotFoundError as error:
            raise IronhorseError(f"export needs {error.name}; pip install {error.name}") from None
        report = export_gpt2(args, config, source)
        print_table(report)
        if args.json is not None:
            write_json(args.json, report)
    except IronhorseError as error:
        return _fail(str(error))
    except OSError as error:
        return _fail(f"{error.filename or args.out}: {error.strerror or error}")
    except MemoryError:
        return _fail(OUT_OF_MEMORY)
    except RuntimeError as error:  # torch: also its way to say that an allocation failed
        first_line = (str(error).splitlines() or [type(error).__name__])[0]
        return _fail(OUT_OF_MEMORY if "alloc" in str(error) else f"{first_line}; IRONHORSE_DEBUG=1 shows where")
    return 0


def check_length(seq: int, config: GPT2Config) -> None:
    """A sequence cannot be longer than wpe."""
    if seq > config.max_seq_len:
        raise IronhorseError(
            f"--seq is {seq}, but max_seq_len of this model is {config.max_seq_len}; choose --seq at most that"
        )


def print_table(report: dict[str, Any]) -> None:
    """What was written, for a person."""
    print(f"{report['model']}: {report['parameters']:,} parameters, loss {report['loss']:.6f}", end="")
    print(f" -> {report['losses'][-1]:.6f} at step {len(report['losses'])}" if report["losses"] else "")
    for file in report["files"]:
        print(f"  {file['name']:<36} {file['bytes']:>14,} bytes  {file['what']}")


def _fail(message: str) -> int:
    """Called while the error is being handled."""
    if os.environ.get("IRONHORSE_DEBUG") == "1":
        traceback.print_exc()
    print(f"error: {' '.join(message.split())}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
