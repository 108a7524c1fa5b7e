"""`check(op, *examples)`: runs torch's own checks of an op, and awkward sizes and layouts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from .._native import cuda_available
from ..errors import InvalidValueError, IronhorseError, NotAvailableError
from . import _given
from ._errors import CompileError
from ._op import Op

ODD = (0, 1, 31, 33, 1000003)

# The architecture to compile for where there is no GPU.
ARCH = "sm_90"


@dataclass(frozen=True)
class Check:
    """One check."""

    name: str
    passed: bool | None  # None: not run
    detail: str = ""


@dataclass(frozen=True)
class Report:
    """What `check` found; prints as a table."""

    op: str
    checks: list[Check] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        return all(check.passed is not False for check in self.checks)

    def __bool__(self) -> bool:
        return self.passed

    def raise_if_failed(self) -> None:
        if not self.passed:
            failed = (f"{check.name}: {check.detail}" for check in self.checks if check.passed is False)
            raise InvalidValueError(f"{self.op}: {'; '.join(failed)}")

    def __str__(self) -> str:
        words = {True: "pass", False: "FAIL", None: "skip"}
        wide = max((len(check.name) for check in self.checks), default=0)
        lines = [f"check {self.op}"]
        for check in self.checks:
            lines.append(f"  {check.name:<{wide}}  {words[check.passed]}  {check.detail}".rstrip())
        return "\n".join(lines)


def check(
    op: Op,
    *examples: Any,
    reference: Callable[..., Any] | None = None,
    sizes: Iterable[int] = ODD,
    fixed: Iterable[int] = (),
    tolerance: float | None = None,
    strict: bool = False,
    show: bool = True,
) -> Report:
    """Runs torch's opcheck and gradcheck, awkward shapes and layouts, on examples of the op's arguments.

    Equal sizes in the examples mean the same dimension: each is set to 0, 1, 31, 33 and 1000003 in turn, except those
    in `fixed`. Results are compared with `reference`, or with the op's cpu= version, both called with tensors; without
    one, only layouts are compared. Failures are in the report; they raise where `strict`.

    On examples in CPU memory an op with cpu= runs that, not its kernels: they are then only compiled, where NVRTC is
    found, and what could only compare cpu= with itself is skipped.
    """
    try:
        import torch
    except ImportError:
        raise NotAvailableError("check needs torch") from None
    if not isinstance(op, Op):
        raise InvalidValueError(f"check: op is of type {type(op).__name__}; expected what jit.op made")
    sizes = _given.sizes("check: sizes", sizes)
    given = op._complete(examples, {})
    try:
        args: list[Any] = [torch.as_tensor(a) if i in op._array_at else a for i, a in enumerate(given)]
    except (TypeError, ValueError, RuntimeError) as error:
        raise InvalidValueError(f"check: an example is not an array ({str(error).splitlines()[0]})") from None
    report = Report(op.name)

    def note(name: str, work: Callable[[], str | None]) -> None:
        try:
            report.checks.append(Check(name, True, work() or ""))
        except _Skip as why:
            report.checks.append(Check(name, None, str(why)))
        except Exception as error:  # noqa: BLE001 - any error belongs in the report
            text = str(error).strip().splitlines() or [type(error).__name__]
            report.checks.append(Check(name, False, next((line for line in text if line.strip()), "")[:300]))

    floats = [i for i in op._array_at if args[i].is_floating_point()]
    on_cpu = all(args[i].device.type == "cpu" for i in op._array_at)
    runs = not on_cpu or op.cpu is None
    compared = reference or (op.cpu if runs else None)
    differentiable = bool(op.backward) or not runs
    if not runs:
        note("kernel", lambda: _compiled(op, args))
    leaves = [a.detach().clone().requires_grad_(differentiable) if i in floats else a for i, a in enumerate(args)]
    for test in ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic"):

        def opcheck(test: str = test) -> None:
            if test == "test_autograd_registration" and not (differentiable and floats):
                raise _Skip("no gradient")
            torch.library.opcheck(op.torch, tuple(leaves), test_utils=test)

        note(f"opcheck {test.removeprefix('test_')}", opcheck)
    note("gradcheck", lambda: _gradcheck(op, args, floats, differentiable))
    note("gradient of sum()", lambda: _sum_gradient(op, leaves, floats, differentiable, compared, tolerance))
    symbols = sorted({size for i in op._array_at for size in args[i].shape} - set(fixed))
    for size in sizes:
        for symbol in symbols:
            name = f"size {symbol} -> {size}" if len(symbols) > 1 else f"size {size}"
            note(name, partial(_resized, op, args, symbol, size, symbols, compared, tolerance))
    note("not contiguous", lambda: _layouts(op, args, runs, tolerance))
    note("offset by one element", lambda: _layouts(op, args, runs, tolerance, shift=True))
    if show:
        print(report)
    if strict:
        report.raise_if_failed()
    return report


class _Skip(Exception):
    pass


def _compiled(op: Op, args: Sequence[Any]) -> None:
    """Compiles the kernels that the examples would run."""
    why = "kernel not run: the examples are in CPU memory, where cpu= computes"
    try:
        op.compile(args, None if cuda_available() else ARCH)
    except NotAvailableError as error:
        raise _Skip(f"{why}; not compiled either: {str(error).splitlines()[0]}") from None
    except CompileError as error:
        what, *errors = str(error).splitlines()
        raise AssertionError(f"{what}: {errors[0]}" if errors else what) from None
    raise _Skip(f"{why}; it compiles")


def _against(reference: Any, changed: Sequence[Any], found: Any, tolerance: float | None, op: Op) -> str:
    """Compares results with the reference."""
    if reference is None:
        if op.cpu is not None:
            raise _Skip("kernel not run")
        return "no reference"
    return f"error {_compare('result', found, reference(*changed), tolerance):.1e}"


def _tuple(result: Any) -> tuple[Any, ...]:
    return tuple(result) if isinstance(result, (tuple, list)) else (result,)


def _compare(what: str, found: Any, wanted: Any, tolerance: float | None) -> float:
    """The largest difference, relative to the largest value. Raises AssertionError if the number of results, a shape or
    the places of NaN differ, or if the difference is above the tolerance."""
    import torch

    worst = 0.0
    if len(_tuple(found)) != len(_tuple(wanted)):
        raise AssertionError(f"{what}: {len(_tuple(found))} results, expected {len(_tuple(wanted))}")
    for got, want in zip(_tuple(found), _tuple(wanted), strict=True):
        if tuple(got.shape) != tuple(want.shape):
            raise AssertionError(f"{what}: {list(got.shape)}, expected {list(want.shape)}")
        if got.numel() == 0:
            continue
        exact = not got.is_floating_point()
        a, b = got.detach().double(), want.detach().to(got.device).double()
        if not torch.equal(a.isnan(), b.isnan()):
            raise AssertionError(f"{what}: NaN in different places")
        a, b = a.nan_to_num(), b.nan_to_num()
        least = torch.finfo(got.dtype).eps * 16 if not exact else 0.0
        error = ((a - b).abs().max() / b.abs().max().clamp_min(1e-30)).item()
        worst = max(worst, error)
        if error > (least if tolerance is None else tolerance):
            at = (a - b).abs().reshape(-1).argmax().item()
            first, second = a.reshape(-1)[at].item(), b.reshape(-1)[at].item()
            raise AssertionError(f"{what}: element {at} is {first:g}, expected {second:g}")
    return worst


def _gradcheck(op: Op, args: Sequence[Any], floats: list[int], differentiable: bool) -> str:
    import torch

    if not (differentiable and floats):
        raise _Skip("no gradient")
    if any(args[i].numel() > 4096 for i in floats):
        raise _Skip("the examples have more than 4096 elements")
    doubles = [a.detach().double() if i in floats else a for i, a in enumerate(args)]
    try:
        op(*doubles)
        options: dict[str, Any] = {}
        words = "in float64"
    except (IronhorseError, RuntimeError):
        doubles = [a.detach().float() if i in floats else a for i, a in enumerate(args)]
        options = {"eps": 1e-2, "atol": 2e-2, "rtol": 2e-2}
        words = "in float32, to 2%"
    wanted = [a.clone().requires_grad_(i in floats) if i in op._array_at else a for i, a in enumerate(doubles)]
    torch.autograd.gradcheck(lambda *a: op(*a), tuple(wanted), nondet_tol=0.0, **options)
    return words


def _sum_gradient(
    op: Op, leaves: Sequence[Any], floats: list[int], differentiable: bool, reference: Any, tolerance: float | None
) -> str:
    """The gradient of sum(), which torch passes to the backward as a tensor of stride 0."""
    import torch

    if not (differentiable and floats):
        raise _Skip("no gradient")
    total = sum(each.sum() for each in _tuple(op(*leaves)) if each.is_floating_point())
    found = torch.autograd.grad(total, [leaves[i] for i in floats], allow_unused=True, materialize_grads=True)
    if reference is None:
        return "no reference" if op.cpu is None else "of cpu=, kernel not run"
    total = sum(each.sum() for each in _tuple(reference(*leaves)) if each.is_floating_point())
    wanted = torch.autograd.grad(total, [leaves[i] for i in floats], allow_unused=True, materialize_grads=True)
    return f"error {_compare('gradient', found, wanted, tolerance):.1e}"


def _resized(
    op: Op, args: Sequence[Any], symbol: int, size: int, symbols: list[int], reference: Any, tolerance: float | None
) -> str:
    import torch

    rest = 1
    large = size * max((args[i].numel() for i in op._array_at), default=1) // max(symbol, 1) > 1 << 25
    changed = []
    for i, a in enumerate(args):
        if i not in op._array_at:
            changed.append(a)
            continue
        shape = [size if s == symbol else min(s, 2) if large and s in symbols else s for s in a.shape]
        rest = max(rest, torch.Size(shape).numel())
        if rest > 1 << 27:
            raise _Skip("too large with the other sizes")
        changed.append(_filled(a, shape))
    return _against(reference, changed, op(*changed), tolerance, op)


def _filled(example: Any, shape: list[int]) -> Any:
    """Values of an example, repeated into another shape."""
    import torch

    count = torch.Size(shape).numel()
    flat = example.detach().reshape(-1)
    if flat.numel() == 0:
        return torch.zeros(shape, dtype=example.dtype, device=example.device)
    return flat.repeat(-(-count // flat.numel()) if count else 1)[:count].reshape(shape).clone()


def _layouts(op: Op, args: Sequence[Any], runs: bool, tolerance: float | None, shift: bool = False) -> str:
    import torch

    if not runs:
        raise _Skip("kernel not run")
    changed = list(args)
    for i in op._array_at:
        a = args[i]
        if shift:
            room = torch.empty(a.numel() + 1, dtype=a.dtype, device=a.device)
            changed[i] = room[1:].view(a.shape)
        else:
            room = torch.empty((*a.shape, 2), dtype=a.dtype, device=a.device)
            changed[i] = room[..., 0]
        changed[i].copy_(a)
    return f"error {_compare('result', op(*changed), op(*args), tolerance):.1e}"
