"""`python -m ironhorse.export` and `ironhorse.export(...)`: writes weights and answer keys.

    python -m ironhorse.export gpt2 --model d12 --batch 4 --seq 64 --seed 0 --out keys
    python -m ironhorse.export gpt2 --model n_layer=3,n_head=5,n_embd=80,vocab_size=1003,max_seq_len=37 \\
                                    --batch 3 --seq 37 --out keys
    python -m ironhorse.export gpt2 --model d12 --optimizer muon --lr 1e-3 --weight-decay 0.1 --stem muon --out keys
    python -m ironhorse.export gpt2 --model runs/my-run --batch 1 --seq 128 --out keys
    python -m ironhorse.export gpt2 --model d12 --dropout 0.1 --out keys
    python -m ironhorse.export gpt2 --model d12 --ignored 0.7 --out keys

    python -m ironhorse.export moe --model moe-tiny --batch 2 --seq 32 --out keys
    python -m ironhorse.export moe --model C=24,L=2,NH=6,NKV=3,E=3,K=1,F=40,V=99 \\
                                   --batch 3 --seq 11 --init idle --out keys
    python -m ironhorse.export moe --model a-mixtral-or-llama-folder --batch 1 --seq 128 --out keys
    python -m ironhorse.export moe --model moe-tiny --reference transformers --out keys
    python -m ironhorse.export moe --model kind=qwen3,C=24,L=2,NH=6,NKV=2,HD=8,F=20,V=99 \\
                                   --batch 2 --seq 11 --reference transformers --out keys

Exit code 0 done, 2 could not run (one line on stderr, no file half-written). IRONHORSE_DEBUG=1 puts the
traceback above that line.

From Python, this module is also the function `export` in it: `ironhorse.export("gpt2", model="d12", out="keys")`.
"""

from __future__ import annotations

import argparse
import inspect
import math
import os
import re
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, is_dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

from .bridge.tables import Printed, without_dashes
from .config import NAMED, GPT2Config, ModelConfig, MoEConfig
from .errors import InvalidValueError, IronhorseError, LaunchFailedError, NotAvailableError, OutOfMemoryError
from .export_options import Options, check_length
from .formats.staging import check_writable_file, write_json

OPTIMIZERS = ("adamw", "muon")
OUT_OF_MEMORY = "out of memory; choose a smaller model or batch"


@dataclass(frozen=True)
class Kind:
    """A kind of model that can be exported."""

    help: str
    names: Sequence[str]  # of known sizes
    sizes: str  # an example
    weights: str  # whose weights are taken
    inits: Mapping[str, str]  # kinds of random weights; the first is the default
    references: Mapping[str, str]  # whose forward and backward; the first is the default
    parse: Callable[[str], ModelConfig]


KINDS: dict[str, Kind] = {
    "gpt2": Kind(
        help="a GPT-2 of any size",
        names=tuple(name for name, config in NAMED.items() if isinstance(config, GPT2Config)),
        sizes="n_layer=3,n_head=5,n_embd=80",
        weights="a run, a checkpoint, a Hugging Face GPT-2 folder or hub name",
        inits={"spread": "leaves no parameter at 0 or 1", "gpt2": "is GPT-2's own"},
        references={"ironhorse": "is the model in ironhorse.reference"},
        parse=GPT2Config.parse,
    ),
    "moe": Kind(
        help="a Llama, Mistral, Qwen 2 or 3, or a mixture of experts",
        names=tuple(name for name, config in NAMED.items() if isinstance(config, MoEConfig)),
        sizes="hidden=64,n_layer=2,n_head=4,n_experts=4,top_k=2,ffn=256",
        weights="a run, a checkpoint, a Hugging Face folder of these families",
        inits={
            "spread": "leaves no parameter at 0 or 1",
            "mixtral": "is Mixtral's own",
            "idle": "leaves expert 1 without tokens",
            "single": "sends every token to the last expert first",
            "tied": "makes all router logits equal",
        },
        references={
            "ironhorse": "is the model in ironhorse.reference",
            "transformers": "is Hugging Face's model of the same family",
        },
        parse=MoEConfig.parse,
    ),
}


class _Parser(argparse.ArgumentParser):
    """argparse, with errors on one line."""

    def error(self, message: str) -> NoReturn:
        raise IronhorseError(f"{message}; see {self.prog} --help")


def build_parser() -> argparse.ArgumentParser:
    """The command line. One subcommand per kind of model."""
    parser = _Parser(prog="python -m ironhorse.export", description="Write weights and answer keys from PyTorch.")
    commands = parser.add_subparsers(dest="kind", required=True, metavar="KIND", parser_class=_Parser)
    examples = dict(zip(KINDS, (__doc__ or "").split("\n\n")[1:], strict=False))  # -OO leaves no docstring
    for name, kind in KINDS.items():
        command = commands.add_parser(name, help=kind.help, description=examples.get(name),
                                      formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
        _add_flags(command, name, kind)
    return parser


def _add_flags(command: argparse.ArgumentParser, name: str, kind: Kind) -> None:
    model = command.add_argument_group("model")
    model.add_argument("--model", help=f"{' '.join(kind.names)} | FILE.toml | FILE.json | "
                       f"{kind.sizes},... | {kind.weights}")  # fmt: skip
    model.add_argument("--hf", metavar="NAME_OR_FOLDER", help=f"take the weights from here: {kind.weights}")
    first = next(iter(kind.inits))
    inits = ", ".join(f"{init}{' (default)' if init == first else ''} {what}" for init, what in kind.inits.items())
    default, *others = kind.references
    if others:
        marks = {one: " (default)" if one == default else "" for one in kind.references}
        whose = ", ".join(f"{one}{marks[one]} {what}" for one, what in kind.references.items())
        model.add_argument("--reference", choices=tuple(kind.references), default=default,
                           help=f"whose code computes the answers: {whose}")  # fmt: skip
    model.add_argument("--init", choices=tuple(kind.inits), help=f"random weights: {inits}")
    batch = command.add_argument_group("batch")
    batch.add_argument("--batch", type=int, default=4, metavar="B")
    batch.add_argument("--seq", type=int, default=64, metavar="T")
    batch.add_argument("--seed", type=int, default=0, help="of weights, tokens, dropout and ignored targets")
    batch.add_argument("--ignored", type=float, default=0.0, metavar="P",
                       help="the part of the targets that is -100, which count neither in the loss nor in gradients; "
                       "of a gpt2 writes the key only")  # fmt: skip
    if name == "gpt2":
        batch.add_argument("--dropout", type=float, default=0.0, metavar="P",
                           help="how often elements are dropped, with the masks of `ironhorse train --dropout P`; "
                           "writes the key only")  # fmt: skip
    optimizer = command.add_argument_group("optimizer (on the one batch)")
    optimizer.add_argument("--optimizer", choices=OPTIMIZERS, default="adamw", help="muon updates the matrices of the "
                           "blocks, and AdamW everything else")  # fmt: skip
    optimizer.add_argument("--steps", type=int, default=10, metavar="N", help="0 leaves losses and after.* out")
    optimizer.add_argument("--lr", type=float, default=1e-4)
    optimizer.add_argument("--beta1", type=float, default=0.9)
    optimizer.add_argument("--beta2", type=float, default=0.999)
    optimizer.add_argument("--eps", type=float, default=1e-8)
    optimizer.add_argument("--weight-decay", type=float, default=0.0, help="on matrices only")
    output = command.add_argument_group("output")
    output.add_argument("--out", required=True, metavar="DIR")
    output.add_argument("--stem", default=name, help="first part of the file names")
    output.add_argument("--no-acts", action="store_true", help="leave act.* and dact.* out of the key")
    output.add_argument("--no-bf16", action="store_true", help="do not measure PyTorch's own error in bf16, from which "
                        "verify --dtype bf16 takes its tolerances")  # fmt: skip
    output.add_argument("--json", metavar="FILE", help="what was written, as JSON")


def check_args(args: Options) -> None:
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
    if not 0 <= args.dropout < 1:
        raise IronhorseError(f"--dropout is {args.dropout}; it must be at least 0 and below 1")
    if not 0 <= args.ignored < 1:
        raise IronhorseError(f"--ignored is {args.ignored}; it must be at least 0 and below 1")
    if args.dropout > 0 and args.kind != "gpt2":
        raise IronhorseError(f"--dropout is {args.dropout} for a {args.kind}; only gpt2 has dropout")
    for name in ("lr", "eps", "weight_decay"):
        value = getattr(args, name)
        if not (math.isfinite(value) and value >= 0):
            raise IronhorseError(f"--{name.replace('_', '-')} is {value}; it must be a number of 0 or more")
    if args.optimizer == "muon" and args.reference == "transformers":  # whose experts are one tensor
        raise IronhorseError("--optimizer muon goes with --reference ironhorse; leave one of them out")
    if args.model is None and args.hf is None:
        kind = KINDS[args.kind]
        raise IronhorseError(f"no --model; give {kind.names[0]}, sizes such as {kind.sizes}, or a folder")
    if not re.fullmatch(r"[\w.+-]+", args.stem):
        raise IronhorseError(f"--stem is '{args.stem}'; use letters, digits and . _ + - only")
    out = Path(args.out)
    if out.exists() and not out.is_dir():
        raise IronhorseError(f"--out {args.out} is a file; give a folder")
    if args.json is not None:
        check_writable_file(args.json, "--json", will_be_made=out)


def resolve_model(args: Options) -> tuple[ModelConfig | None, str | None]:
    """(sizes, None) for a model to be initialised, (sizes or None, source) when weights come from Hugging Face."""
    if args.hf is None and args.model is not None and _holds_weights(args.model, args.kind):
        return None, args.model
    if args.model is not None and args.model.startswith((".", "/", "~")) and not os.path.exists(args.model):
        raise IronhorseError(f"--model {args.model}: no such file or folder")
    config = KINDS[args.kind].parse(args.model) if args.model is not None else None
    if args.hf is not None and not _holds_weights(args.hf, args.kind):
        hub = ", and not a hub name such as openai-community/gpt2" if args.kind == "gpt2" else ""
        raise IronhorseError(f"--hf {args.hf}: no such folder{hub}")
    return config, args.hf


def _holds_weights(model: str, kind: str) -> bool:
    # sizes may be longer than a file name can be, which os.path takes as not there
    return os.path.isdir(model) or (kind == "gpt2" and _looks_like_hub_name(model))


def _looks_like_hub_name(text: str) -> bool:
    """`gpt2`, `gpt2-medium`, `distilgpt2` or `owner/name`; a path that starts with . or / is a missing folder."""
    if re.fullmatch(r"(distil)?gpt2(-[a-z]+)?", text):
        return True
    return re.fullmatch(r"\w[\w-]*/\w[\w.-]*", text) is not None and Path(text).suffix not in (".toml", ".json")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns the exit code."""
    out = "."
    try:
        args = Options(**vars(build_parser().parse_args(argv)))
        out = args.out
        report = run(args)
        print_table(report)
        if args.json is not None:
            write_json(args.json, report)
    except IronhorseError as error:
        return _fail(str(error))
    except OSError as error:
        return _fail(f"{error.filename or out}: {error.strerror or error}")
    except MemoryError:
        return _fail(OUT_OF_MEMORY)
    except RuntimeError as error:  # torch: also its way to say that an allocation failed
        return _fail(OUT_OF_MEMORY if "alloc" in str(error) else f"{_first_line(error)}; IRONHORSE_DEBUG=1 shows where")
    return 0


def run(args: Options) -> dict[str, Any]:
    """Checks, computes and writes; returns the report of `--json`."""
    check_args(args)
    config, source = resolve_model(args)
    if config is not None:
        check_length(args.seq, config)
    if source is not None and args.init is not None:
        raise IronhorseError(f"--init {args.init}: {source} has weights of its own; leave --init out")
    try:
        from .export_model import export_model  # not before: it needs torch
    except ModuleNotFoundError as error:
        raise NotAvailableError(f"export needs {error.name}; pip install {error.name}") from None
    return export_model(args, config, source)


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


@dataclass(frozen=True)
class ExportedFile:
    """A file that was written."""

    path: Path
    bytes: int
    what: str


@dataclass(frozen=True, repr=False)
class Exported(Printed):
    """What `export` wrote. `print` shows the table of the command."""

    kind: str
    name: str  # d12, ..., custom
    config: Mapping[str, int | float]
    parameters: int
    batch: int
    seq: int
    seed: int
    torch: str  # version
    loss: float
    losses: tuple[float, ...]
    files: tuple[ExportedFile, ...]

    def _ending(self, ending: str) -> Path:
        return next(file.path for file in self.files if file.path.name.endswith(ending))

    @property
    def key(self) -> Path:
        """The answer key, for `ironhorse.verify(key=...)`."""
        return self._ending(".key.safetensors")

    @property
    def state(self) -> Path:
        """The debug state of a GPT-2, for `ironhorse.verify(model=..., state=...)`."""
        return self._ending("_debug_state.bin")

    @property
    def model(self) -> Path:
        """The weights in f32: a .bin file of a GPT-2, a Hugging Face folder of others."""
        if self.kind != "gpt2":
            return self._ending("model.safetensors").parent
        return self.state.with_name(self.state.name.replace("_debug_state.bin", ".bin"))

    @property
    def model_bf16(self) -> Path:
        """The weights of a GPT-2 in bf16."""
        return self._ending("_bf16.bin")

    def to_dict(self) -> dict[str, Any]:
        """Plain dictionaries, lists and numbers; paths as text."""
        files = [asdict(file) | {"path": str(file.path)} for file in self.files]
        return asdict(self) | {"files": files, "losses": list(self.losses)}

    def __str__(self) -> str:
        files = [{"name": str(file.path), "bytes": file.bytes, "what": file.what} for file in self.files]
        return table_text({"model": self.name, "parameters": self.parameters, "loss": self.loss,
                           "losses": self.losses, "files": files})  # fmt: skip

    def __repr__(self) -> str:
        return f"<Exported {self.kind} {self.name}: {len(self.files)} files, {self.key}>"


def export(
    kind: str = "gpt2",
    *,
    model: str | os.PathLike[str] | ModelConfig | None = None,
    out: str | os.PathLike[str],
    hf: str | os.PathLike[str] | None = None,
    init: str | None = None,
    batch: int = 4,
    seq: int = 64,
    seed: int = 0,
    dropout: float = 0.0,
    ignored: float = 0.0,
    steps: int = 10,
    optimizer: str = "adamw",
    lr: float = 1e-4,
    beta1: float = 0.9,
    beta2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    stem: str | None = None,
    acts: bool = True,
    bf16: bool = True,
    reference: str = "ironhorse",
) -> Exported:
    """Builds a model, lets PyTorch compute its answers on one batch, and writes weights and answer key.

    `kind` is gpt2 or moe. `model` is a name (d12, moe-tiny), sizes (text, a GPT2Config or a MoEConfig), or a folder or
    hub name with weights; the others are the flags of `python -m ironhorse.export`, with `acts` and `bf16` for
    `--no-acts` and `--no-bf16`. Needs torch.
    """
    if kind not in KINDS:
        raise InvalidValueError(f"export: kind is {kind!r}; expected one of {', '.join(KINDS)}")
    for name, value, types in (
        ("batch", batch, int), ("seq", seq, int), ("seed", seed, int), ("steps", steps, int), ("lr", lr, (int, float)),
        ("beta1", beta1, (int, float)), ("beta2", beta2, (int, float)), ("eps", eps, (int, float)),
        ("weight_decay", weight_decay, (int, float)), ("dropout", dropout, (int, float)),
        ("ignored", ignored, (int, float)),
    ):  # fmt: skip
        if isinstance(value, bool) or not isinstance(value, types):
            raise InvalidValueError(f"export: {name} is {value!r}, expected a number")
    inits = KINDS[kind].inits
    if init is not None and init not in inits:
        raise InvalidValueError(f"export: init is {init!r}; expected one of {', '.join(inits)}")
    if optimizer not in OPTIMIZERS:
        raise InvalidValueError(f"export: optimizer is {optimizer!r}; expected one of {', '.join(OPTIMIZERS)}")
    if reference not in KINDS[kind].references:
        raise InvalidValueError(
            f"export: reference is {reference!r}; expected one of {', '.join(KINDS[kind].references)}"
        )
    text: str | os.PathLike[str] | None
    if model is None or isinstance(model, (str, os.PathLike)):
        text = model
    elif is_dataclass(model) and not isinstance(model, type):
        words = {
            name: str(value).lower() if isinstance(value, bool) else value for name, value in asdict(model).items()
        }
        text = ",".join(f"{name}={value}" for name, value in words.items())
    else:
        raise InvalidValueError(f"export: model is of type {type(model).__name__}, expected a name, sizes or a path")
    options = Options(
        kind=kind, out=os.fspath(out), model=None if text is None else os.fspath(text),
        hf=None if hf is None else os.fspath(hf), init=init, batch=batch, seq=seq, seed=seed, dropout=dropout,
        ignored=ignored, steps=steps, optimizer=optimizer, lr=lr, beta1=beta1, beta2=beta2, eps=eps,
        weight_decay=weight_decay, stem=stem if stem is not None else kind,
        no_acts=not acts, no_bf16=not bf16, reference=reference,
    )  # fmt: skip
    names = [field.name for field in fields(Options)]
    try:
        report = run(options)
    except IronhorseError as error:
        raise type(error)(f"export: {without_dashes(str(error), names)}") from None
    except OSError as error:
        raise InvalidValueError(f"export: {error.filename or out}: {error.strerror or error}") from None
    except MemoryError:
        raise OutOfMemoryError(f"export: {OUT_OF_MEMORY}") from None
    except RuntimeError as error:
        if "alloc" in str(error):
            raise OutOfMemoryError(f"export: {OUT_OF_MEMORY}") from None
        raise LaunchFailedError(f"export: {_first_line(error)}") from error
    folder = Path(out)
    files = tuple(ExportedFile(folder / file["name"], file["bytes"], file["what"]) for file in report["files"])
    same = {name: report[name] for name in ("config", "parameters", "batch", "seq", "seed", "torch", "loss")}
    return Exported(kind=kind, name=report["model"], losses=tuple(report["losses"]), files=files, **same)


def print_table(report: Mapping[str, Any]) -> None:
    """What was written, for a person."""
    print(table_text(report))


def table_text(report: Mapping[str, Any]) -> str:
    """What was written, in lines."""
    head = f"{report['model']}: {report['parameters']:,} parameters, loss {report['loss']:.6f}"
    if report["losses"]:
        head += f" -> {report['losses'][-1]:.6f} at step {len(report['losses'])}"
    width = max(36, *(len(file["name"]) for file in report["files"]))
    files = [f"  {file['name']:<{width}} {file['bytes']:>14,} bytes  {file['what']}" for file in report["files"]]
    return "\n".join([head, *files])


def _fail(message: str) -> int:
    """Called while the error is being handled."""
    if os.environ.get("IRONHORSE_DEBUG") == "1":
        traceback.print_exc()
    print(f"error: {' '.join(message.split())}", file=sys.stderr)
    return 2


class _CallableModule(ModuleType):
    """`ironhorse.export` is this module, for `python -m`, and the function in it, for `ironhorse.export(...)`."""

    def __call__(self, *args: Any, **options: Any) -> Exported:
        return export(*args, **options)


__signature__ = inspect.signature(export)  # what help() and editors show of the call

if __name__ == "__main__":
    sys.exit(main())
sys.modules[__name__].__class__ = _CallableModule
