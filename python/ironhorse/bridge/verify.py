"""`ironhorse.verify`: the code of the command `ironhorse verify`, in this process, with its report as an object."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from ..errors import InvalidValueError, IronhorseError
from .tables import Printed, without_dashes

PathLike = str | os.PathLike[str]


@dataclass(frozen=True)
class Element:
    """One number of a tensor."""

    index: tuple[int, ...]
    expected: float  # the reference's
    got: float  # ours
    ulps: int | None = None  # how many f32 numbers lie between them; None where one is NaN


@dataclass(frozen=True)
class TensorCheck:
    """One tensor compared with the reference's."""

    name: str  # act.h.0.ln_1, grad.wte.weight, logits, ...
    kind: str  # act, dact, logits, loss, grad, losses, after, param, other
    shape: tuple[int, ...]
    error: float  # |got - expected| / |expected| by norm; NaN where there is none to tell
    allowed: float
    ratio: float  # error / allowed
    ok: bool
    op: str  # that completes it
    origin: str  # where in the model
    section: str  # forward, backward, update; file when a file contradicts itself
    worst: Element | None = None
    first_wrong: Element | None = None
    note: str | None = None


@dataclass(frozen=True)
class OpCheck:
    """With `lockstep`: all ops of one kind, compared with the CPU engine's from the same inputs."""

    op: str
    count: int
    wrong: int
    error: float  # the one closest to what is allowed
    allowed: float
    ratio: float
    where: str

    @property
    def ok(self) -> bool:
        """Whether all of them agree."""
        return self.wrong == 0


@dataclass(frozen=True)
class FirstWrong:
    """The first thing that is wrong, in the order of execution."""

    op: str  # `file` when a file contradicts itself or another
    tensor: str  # with lockstep the argument that the op wrote
    origin: str
    section: str
    element: Element | None = None
    note: str | None = None


@dataclass(frozen=True, repr=False)
class VerifyReport(Printed):
    """What `verify` found. True where everything agrees; `print` shows the table of the command."""

    passed: bool
    compared_with: Literal["answers", "cpu"]
    device: str  # the engine that was checked
    dtype: str
    seconds: float
    first_wrong: FirstWrong | None
    tensors: tuple[TensorCheck, ...]
    ops: tuple[OpCheck, ...]  # with lockstep
    losses: tuple[float, ...]  # ours at each optimizer step
    tolerances: str  # where they come from: fixed, pytorch, simulation
    hints: tuple[str, ...]
    text: str = field(compare=False)

    def __bool__(self) -> bool:
        return self.passed

    def __str__(self) -> str:
        return "\n".join((self.text, *self.hints))

    def __repr__(self) -> str:
        what = f"{len(self.ops)} kinds of ops" if self.compared_with == "cpu" else f"{len(self.tensors)} tensors"
        first = f", first wrong: {self.first_wrong.tensor} ({self.first_wrong.op})" if self.first_wrong else ""
        verdict = "passed" if self.passed else "FAILED"
        return f"<VerifyReport {verdict}: {what} on {self.device} in {self.dtype}, {self.seconds:.2f} s{first}>"

    @property
    def wrong(self) -> tuple[TensorCheck, ...]:
        """The tensors that do not agree, in the order of the table."""
        return tuple(tensor for tensor in self.tensors if not tensor.ok)

    def to_dict(self) -> dict[str, Any]:
        """Everything but the text, as plain dictionaries, lists and numbers."""
        plain = asdict(self)
        del plain["text"]
        return plain


def verify(
    key: PathLike | None = None,
    *,
    model: PathLike | None = None,
    state: PathLike | None = None,
    device: str = "cpu",
    dtype: Literal["f32", "tf32", "bf16", "fp8", "fp8-head"] = "f32",
    steps: int | None = None,
    tolerance: float = 1e-5,
    loss_tolerance: float = 1e-6,
    lockstep: bool = False,
    batch: int | None = None,
    seq: int | None = None,
    recompute: Literal["none", "gelu", "full", "experts"] = "none",
    attention: Literal["auto", "cudnn", "own"] = "auto",
    fast: bool = False,
    threads: int = 0,
) -> VerifyReport:
    """Runs the training step of an answer key and compares every tensor with PyTorch's.

    Give `key`; or `model` and `state`, a debug state made from it. With `lockstep` the device is compared with the CPU
    engine instead, op by op from the same inputs: give `key`, or `model` (a file, `d12`, `moe-tiny`, or sizes) with
    `batch` and `seq`. `tolerance` and `loss_tolerance` are relative errors; tf32 and bf16 are allowed more, derived
    from what they cost. `steps` is how many optimizer steps of the key to check (all if not given).

    A comparison that fails is a report with `passed` False. Files that cannot be read and arguments that make no sense
    raise IronhorseError. Nothing is printed. The interpreter lock is not held.
    """
    given: dict[str, object] = {
        "key": key, "model": model, "state": state, "device": device, "dtype": dtype, "steps": steps,
        "tolerance": tolerance, "loss_tolerance": loss_tolerance, "lockstep": lockstep, "batch": batch, "seq": seq,
        "recompute": recompute, "attention": attention, "fast": fast, "threads": threads,
    }  # fmt: skip
    from .. import _native

    try:
        found = json.loads(_native.verify(_flags(given)))
    except IronhorseError as error:
        raise type(error)(f"verify: {without_dashes(str(error), given)}") from None
    return _report(found)


def _flags(given: Mapping[str, object]) -> list[str]:
    """The arguments as the command has them. What is None or False is not said."""
    flags: list[str] = []
    for name, value in given.items():
        flag = "--" + name.replace("_", "-")
        if value is None or value is False:
            continue
        if value is True:
            flags.append(flag)
            continue
        if name in ("key", "model", "state"):
            if not isinstance(value, (str, os.PathLike)):
                raise InvalidValueError(f"verify: {name} is of type {type(value).__name__}, expected a path")
            value = os.fsdecode(value)
        text = str(value)
        if "\0" in text:
            raise InvalidValueError(f"verify: {name} holds a NUL byte")
        flags.append(f"{flag}={text}")
    return flags


def _report(found: Mapping[str, Any]) -> VerifyReport:
    report = found["report"]
    in_lockstep = report["compared_with"] == "cpu"
    return VerifyReport(
        passed=report["verdict"] == "pass",
        compared_with=report["compared_with"],
        device=found["engine"],
        dtype=found["dtype"],
        seconds=found["seconds"],
        first_wrong=_first_wrong(report["first_wrong"], in_lockstep),
        tensors=() if in_lockstep else tuple(_tensor(row) for row in report["tensors"]),
        ops=tuple(_op(row) for row in report["kinds"]) if in_lockstep else (),
        losses=() if in_lockstep else tuple(_number(loss) for loss in report["losses"]),
        tolerances="fixed" if in_lockstep else report["tolerances"],
        hints=(*found["hints"], *found["warnings"]),
        text=found["text"],
    )


def _number(value: float | None) -> float:
    """JSON has no NaN and no infinity; the report says null."""
    return float("nan") if value is None else float(value)


def _element(row: Mapping[str, Any] | None) -> Element | None:
    if row is None or row.get("index") is None:
        return None
    ulps = row.get("ulps")
    ulps = None if ulps is None or ulps >= 2**64 - 1 else int(ulps)
    return Element(tuple(row["index"]), _number(row["expected"]), _number(row["got"]), ulps)


def _tensor(row: Mapping[str, Any]) -> TensorCheck:
    return TensorCheck(
        name=row["name"],
        kind=row["kind"],
        shape=tuple(row["shape"]),
        error=_number(row["rel_error"]),
        allowed=_number(row["tolerance"]),
        ratio=_number(row["ratio"]),
        ok=row["pass"],
        op=row["op"],
        origin=row["origin"],
        section=row["section"],
        worst=_element(row["worst"]),
        first_wrong=_element(row["first_wrong"]),
        note=row.get("note"),
    )


def _op(row: Mapping[str, Any]) -> OpCheck:
    error, allowed, ratio = (_number(row[name]) for name in ("worst", "allowed", "ratio"))
    return OpCheck(row["op"], row["count"], row["wrong"], error, allowed, ratio, row["place"])


def _first_wrong(row: Mapping[str, Any] | None, in_lockstep: bool) -> FirstWrong | None:
    if row is None:
        return None
    tensor, element = (row["argument"], row["element"]) if in_lockstep else (row["tensor"], row)
    return FirstWrong(row["op"], tensor, row["origin"], row["section"], _element(element), row.get("note"))
