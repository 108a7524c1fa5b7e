"""A call like an earlier one: launched at once, without torch's dispatcher.

The first call of an op with tensors of given types and shapes goes the whole way, which checks everything. What was
found there, the shapes of the outputs, the kernels and their grids, is kept; the next such call makes the outputs and
launches. Whatever gives an operator of torch another meaning (a gradient, a transform, a mode, tracing, the profiler)
takes the whole way.
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.autograd import forward_ad

from ._arrays import alignment
from ._types import DTYPES

if TYPE_CHECKING:
    from .._native import JitKernel
    from ._op import Op

_TYPES = (torch.Tensor, torch.nn.Parameter)
_MOST = 256  # calls that are kept for an op
_FUNCTIONS = ("abs", "divmod", "int", "max", "min", "round")  # of Python, that a launch may use
# Python's types that a number of a kernel's type takes without a change of value or an error of its own.
_NUMBERS: dict[str, tuple[type, ...]] = {"?": (bool,), "f": (int, float), "i": (int,), "u": (int,), "b": (int, float)}


def _functions() -> tuple[Callable[[], Any], ...] | None:
    """Functions of torch that give something true where an operator is more than its kernel; None if one is missing."""
    names = (
        "_C._len_torch_dispatch_stack", "_C._is_torch_function_mode_enabled",
        "_C._functorch.peek_interpreter_stack", "_C._get_tracing_state", "autograd._profiler_enabled",
    )  # fmt: skip
    found: list[Callable[[], Any]] = []
    for name in names:
        at: Any = torch
        for part in name.split("."):
            at = getattr(at, part, None)
        if at is None:
            return None
        found.append(at)
    return tuple(found)


_MODES = _functions()
_STREAM: Callable[[int], int] | None = getattr(torch._C, "_cuda_getCurrentRawStream", None)


def dtype_of(code: str) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, DTYPES[code])
    return dtype


class _Launch(NamedTuple):
    kernel: JitKernel
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    shared: int
    pick: Callable[[Sequence[Any]], tuple[Any, ...]]  # the kernel's arguments out of all values of the call


class _Call(NamedTuple):
    make: tuple[Callable[[], Any], ...]  # the outputs
    launches: tuple[_Launch, ...]
    aligned: tuple[tuple[int, int], ...]  # arguments whose address is a multiple of some bytes
    rest: tuple[int, ...]  # sizes that kernels ask for


class Calls:
    """The calls of an op that are known."""

    def __init__(self, op: Op) -> None:
        self.op = op
        given = [*op.shapes.values(), *op.sizes.values(), *(g for s in op.forward for g in (s.grid, s.block, s.shared))]
        functions = [each for each in given if callable(each)]
        numbers = [(at, p) for at, p in enumerate(op.params) if not p.is_array]
        self._usable = _MODES is not None and _STREAM is not None and all(_of_numbers_only(op, f) for f in functions)
        self._by_value = tuple(at for at, _ in numbers) if functions else ()
        self._numbers = tuple((at, _NUMBERS[(p.kind or "f8")[0]]) for at, p in numbers)
        self._known: dict[tuple[Any, ...], _Call] = {}

    def __call__(self, args: Sequence[Any]) -> Any:
        """The op's result; None if the call has to go the whole way."""
        if not self._usable or torch.compiler.is_compiling():
            return None
        key: list[Any] = []
        device = None
        for at in self.op._array_at:
            x = args[at]
            if type(x) not in _TYPES or not x.is_cuda or not x.is_contiguous() or x.is_neg():
                return None
            if x.requires_grad and torch.is_grad_enabled():
                return None
            if device is None:
                device = x.get_device()
                key.append(device)
            elif x.get_device() != device:
                return None
            key += (x.dtype, x.shape)
        for at, kinds in self._numbers:
            if type(args[at]) not in kinds:
                return None
        key += [args[at] for at in self._by_value]
        assert _MODES is not None
        for mode in _MODES:
            if mode():
                return None
        if forward_ad._current_level >= 0:  # a tensor may carry a tangent
            return None
        known = self._known.get(tuple(key))
        if known is None:
            result = self.op._overload(*args)
            if len(self._known) >= _MOST:
                self._known.clear()
            self._known[tuple(key)] = self._learn(args, device or 0)
            return result
        return self._run(known, args, device or 0)

    def _run(self, known: _Call, args: Sequence[Any], device: int) -> Any:
        values = list(args)
        for at in self.op._array_at:
            values[at] = args[at].data_ptr()
        for at, size in known.aligned:
            if values[at] % size:
                return None
        made = [make() for make in known.make]
        values += [out.data_ptr() for out in made]
        values += known.rest
        assert _STREAM is not None
        stream = _STREAM(device)
        for kernel, grid, block, shared, pick in known.launches:
            kernel.launch(grid, block, shared, stream, pick(values))
        return made[0] if len(made) == 1 else tuple(made)

    def _learn(self, args: Sequence[Any], device: int) -> _Call:
        """What a call with such arguments does; one has just succeeded."""
        op, on = self.op, torch.device("cuda", device)
        make: dict[str, Callable[[], Any]] = {}

        def stand_in(shape: tuple[int, ...], code: str, zero: bool) -> Any:
            made.append((shape, dtype_of(code), zero))
            return torch.empty(shape, dtype=dtype_of(code), device="meta")

        made: list[tuple[tuple[int, ...], torch.dtype, bool]] = []
        names = [p.name for p in op.params]
        values = dict(zip(names, args, strict=True))
        steps = list(op.steps(values, stand_in))
        outputs = [name for name in values if name not in names and isinstance(values[name], torch.Tensor)]
        for name, (shape, dtype, zero) in zip(outputs, made, strict=True):
            make[name] = _maker(shape, dtype, on, zero)
        order = [p.name for p in op.outputs]
        sizes = [name for name in values if name not in names and name not in make]
        places = {name: at for at, name in enumerate([*names, *order, *sizes])}
        launches, aligned = [], set()
        for step, bound in steps:
            kernel = op.kernel(step, bound)
            aligned |= {(places[p.name], alignment(p)) for p in kernel.params if p.is_array and p.name in names}
            at = [places[p.name] for p in step.signature.params]
            pick = itemgetter(*at) if len(at) > 1 else lambda all, only=at[0]: (all[only],)
            launches.append(_Launch(kernel.on(device), *op.launch_of(step, values), pick))
        rest = tuple(values[name] for name in sizes)
        return _Call(tuple(make[name] for name in order), tuple(launches), tuple(a for a in aligned if a[1] > 1), rest)


def _of_numbers_only(op: Op, function: Any) -> bool:
    """Whether a function of the launch depends on numbers and sizes alone, and not on arrays, globals or a closure."""
    if not isinstance(function, types.FunctionType):
        return False
    code = function.__code__
    taken = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    arrays = {p.name for p in (*op.inputs, *op.outputs)}
    nested = any(isinstance(each, types.CodeType) for each in code.co_consts)
    varies = code.co_flags & (inspect.CO_VARARGS | inspect.CO_VARKEYWORDS)
    others = [name for name in code.co_names if name not in _FUNCTIONS or name in function.__globals__]
    return not (others or code.co_freevars or varies or nested or arrays & set(taken))


def _maker(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, zero: bool) -> Callable[[], Any]:
    new = torch.zeros if zero else torch.empty
    return lambda: new(shape, dtype=dtype, device=device)
