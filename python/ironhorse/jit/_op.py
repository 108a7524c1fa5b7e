"""Ops: kernels that take arrays and make arrays, with a gradient."""

from __future__ import annotations

import inspect
import keyword
import math
import os
import uuid
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from .._native import cuda_available
from ..errors import InvalidValueError, NotAvailableError
from . import _given
from ._arrays import place, shown, torch_module
from ._module import Kernel, Module, dims, module_of
from ._step import Step, by_name, elements
from ._types import DTYPES, Param, element

# Integers that kernels may ask for by name: elements of the first output, and the first input as rows.
SIZES = ("n", "N", "rows", "cols")

# A step by its id, element types of its arrays, and template parameters known before.
_PlanKey = tuple[int, tuple[tuple[str, str | None], ...], tuple[tuple[str, str], ...]]
_ShapeAndType = tuple[tuple[int, ...], str]
_Sizes = tuple[int, int, int]
_Make = Callable[[tuple[int, ...], str, bool], Any]  # an array by its shape, element type, and whether it is zero


# Ops of this process by an identifier that pickles carry: unpickled in the process that made it, an op is the same one.
_LIVE: weakref.WeakValueDictionary[str, Op] = weakref.WeakValueDictionary()


def like(name: str) -> str:
    """The shape of the array of this name, for `out=`."""
    return _given.text("like", name)


class Op:
    """An op made of kernels. Call it with numpy arrays, or with tensors of torch, where it has a gradient."""

    def __init__(
        self,
        module: Module,
        forward: Sequence[str],
        backward: Sequence[str],
        *,
        out: Any,
        sizes: Mapping[str, Any],
        grid: Any,
        block: Any,
        shared: Any,
        zero: Iterable[str],
        defaults: Mapping[str, Any],
        cpu: Callable[..., Any] | None,
        name: str | None,
        mark: str | None = None,
    ) -> None:
        self.module, self.cpu = module, cpu
        self._made_from = (module, forward, backward, dict(out=out, sizes=sizes, grid=grid, block=block, shared=shared,
                           zero=frozenset(zero), defaults=defaults, cpu=cpu, name=name))  # fmt: skip
        self._mark = mark or uuid.uuid4().hex

        def step(expression: str) -> Step:
            signature, arguments = module.find(expression)
            option = {}
            for what, given in (("grid", grid), ("block", block), ("shared", shared)):
                option[what] = given.get(signature.name) if isinstance(given, Mapping) else given
            block_of = 256 if option["block"] is None else option["block"]
            return Step(signature, arguments, option["grid"], block_of, option["shared"] or 0)

        self.forward, self.backward = list(map(step, forward)), list(map(step, backward))
        self.name = name or self.forward[0].name.replace("::", "_")
        if not self.name.isidentifier():
            raise InvalidValueError(f"op name {self.name!r} is not an identifier")
        self.sizes, self.zero, self.defaults = dict(sizes), frozenset(zero), dict(defaults)
        self._read_forward(out)
        self._read_backward()
        self._kernels: dict[tuple[int, tuple[tuple[str, str], ...]], Kernel] = {}
        self._plans: dict[_PlanKey, tuple[dict[str, str], dict[str, str]]] = {}
        self._tensor: Any = None  # torch.Tensor, once registered with torch
        self._overload: Any = None
        self._again: Any = None  # calls that are known, once registered with torch
        self.__signature__ = self._python_signature()
        self.__name__ = self.name
        self.__doc__ = f"{self.name}({', '.join(map(str, self.params))}) -> {', '.join(map(str, self.outputs))}"
        if torch_module() is not None:
            self._register()
        _LIVE[self._mark] = self

    # An op is immutable and registered with torch under its name, so a copy is the op itself.

    def __copy__(self) -> Op:
        return self

    def __deepcopy__(self, memo: Any) -> Op:
        return self

    def __reduce__(self) -> tuple[Callable[..., Op], tuple[Any, ...]]:
        """The arguments of the constructor; functions among them must be importable by name."""
        return _restored, (self._mark, *self._made_from)

    # Reading the signatures of the kernels.

    def _read_forward(self, out: Any) -> None:
        """Which arguments of the kernels are the op's inputs, outputs, numbers and sizes."""
        outputs: dict[str, Param] = {}
        params: dict[str, Param] = {}
        asked: dict[str, Param] = {}
        for step in self.forward:
            for at, param in enumerate(step.signature.params):
                where = f"kernel {step.name}: argument {at + 1} `{param.name}`"
                if not param.name:
                    raise InvalidValueError(f"{where} has no name; ops go by names")
                number = param.kind is not None or param.base in {t.name for t in step.signature.template}
                if param.stars > 1 or not (param.stars or number):
                    raise InvalidValueError(f"{where} is {param.type}; an op gives arrays and numbers")
                if param.is_output:
                    if param.name in params:
                        raise InvalidValueError(f"{where} was an input before; an op does not change its inputs")
                    outputs[param.name] = param
                elif param.name in self.sizes or (param.name in SIZES and (param.kind or "f")[0] in "iu"):
                    asked[param.name] = param
                elif param.name not in outputs:
                    params.setdefault(param.name, param)
        if not outputs:
            text = f"{self.name}: no kernel writes: outputs are pointers that are not const"
            raise InvalidValueError(text)
        self.params, self.outputs = list(params.values()), list(outputs.values())
        self.inputs = [p for p in self.params if p.is_array]
        if not self.inputs:
            raise InvalidValueError(f"{self.name}: no input: inputs are pointers to const, `const float* x`")
        self._array_at = tuple(i for i, p in enumerate(self.params) if p.is_array)
        self.size_names = [name for name in dict.fromkeys([*SIZES, *self.sizes]) if name not in params]
        shapes = out if isinstance(out, Mapping) else {self.outputs[0].name: out} if out is not None else {}
        for known in shapes:
            if known not in outputs:
                raise InvalidValueError(f"{self.name}: out has `{known}`; outputs are {', '.join(outputs)}")
        self.shapes = {p.name: shapes.get(p.name, self.inputs[0].name) for p in self.outputs}
        for known in self.defaults:
            if known not in params:
                raise InvalidValueError(f"{self.name}: defaults has `{known}`; arguments are {', '.join(params)}")
        for known in self.zero:
            if known not in outputs and not any(known == p.name for step in self.backward for p in step.outputs):
                raise InvalidValueError(f"{self.name}: zero has `{known}`, which no kernel writes")

    def _read_backward(self) -> None:
        """Gradients go by names: a backward kernel reads d_y, x, y and numbers, and writes d_x."""
        arrays = {f"d_{p.name}" for p in self.outputs} | {p.name for p in self.inputs} | {p.name for p in self.outputs}
        numbers = {p.name for p in self.params if not p.is_array} | set(self.sizes) | set(SIZES)
        gradients = {f"d_{p.name}" for p in self.inputs}
        for step in self.backward:
            for param in step.signature.params:
                known = gradients if param.is_output else arrays if param.is_array else numbers
                if param.name not in known:
                    what = "writes" if param.is_output else "asks for"
                    there = ", ".join(sorted(known)) or "none"
                    text = f"backward kernel {step.name} {what} `{param.name}`; expected one of {there}"
                    raise InvalidValueError(text)
            if not step.outputs:
                text = f"backward kernel {step.name} writes nothing"
                raise InvalidValueError(f"{text}: d_x is a pointer that is not const")

    def _python_signature(self) -> inspect.Signature:
        parameters = []
        for param in self.params:
            name = param.name + "_" * keyword.iskeyword(param.name)
            default = self.defaults.get(param.name, inspect.Parameter.empty)
            parameters.append(inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD, default=default))
        try:
            return inspect.Signature(parameters)
        except ValueError:
            raise InvalidValueError(f"{self.name}: arguments without a default come before those with one") from None

    # Planning and launching a call.

    def codes(self, values: Mapping[str, Any], params: Iterable[Param]) -> dict[str, str | None]:
        """Element types of arrays by name."""
        found = {}
        for param in params:
            value = values[param.name]
            if isinstance(value, np.ndarray):
                found[param.name] = place(value).code  # type: ignore[union-attr] # never None for an array
            elif self._tensor is not None and isinstance(value, self._tensor):
                found[param.name] = _torch_code(value)
            else:
                where = f"{self.name}: `{param.name}` is {param.type}"
                raise InvalidValueError(f"{where}, got {shown(value)}; expected a numpy array or a tensor")
            if found[param.name] is None:
                dtype = str(value.dtype).removeprefix("torch.")
                there = ", ".join(DTYPES.values())
                raise InvalidValueError(f"{self.name}: `{param.name}` is {dtype}; kernels take {there}")
        return found

    def plan(
        self, step: Step, codes: Mapping[str, str | None], known: Mapping[str, str] = {}
    ) -> tuple[dict[str, str], dict[str, str]]:
        """Template parameters, and element types of the outputs. Refuses arrays of other types than the kernel's."""
        key = (id(step), tuple(codes.items()), tuple(known.items()))
        if key not in self._plans:
            bound = step.bind(self.module, codes, known)
            made = {}
            for at, param in enumerate(step.signature.bound(bound)):
                if not param.is_array:
                    continue
                wanted = element(param.base)
                given = codes.get(param.name, "")
                where = f"kernel {step.name}: argument {at + 1} `{param.name}` is {param.type}"
                if given and wanted and given != wanted[0]:
                    dtype = DTYPES[given]
                    raise InvalidValueError(f"{where}, got {'an' if dtype[0] == 'i' else 'a'} {dtype} array")
                if param.is_output and not given:
                    if wanted is None:
                        raise InvalidValueError(f"{where}, which is not an element type")
                    made[param.name] = wanted[0]
            self._plans[key] = (bound, made)
        return self._plans[key]

    def shape(self, name: str, values: Mapping[str, Any]) -> tuple[int, ...]:
        """The shape of an output."""
        given = by_name(f"{self.name}: out of `{name}`", self.shapes[name], values)
        if isinstance(given, str):
            if given not in values:
                there = ", ".join(values)
                raise InvalidValueError(f"{self.name}: out of `{name}` is like `{given}`; expected one of {there}")
            given = values[given]
        return _given.sizes(f"{self.name}: out of `{name}`", getattr(given, "shape", given))

    def sizes_of(self, values: Mapping[str, Any], out: Sequence[int]) -> dict[str, int]:
        """The integers that kernels ask for."""
        first = values[self.inputs[0].name].shape
        last = first[-1] if len(first) else 1
        found: dict[str, Any] = {"n": elements(out), "N": elements(out), "rows": elements(first[:-1]), "cols": last}
        for name, given in self.sizes.items():
            what = f"{self.name}: size `{name}`"
            (found[name],) = _given.sizes(what, [by_name(what, given, {**values, **found})])
        return {name: size for name, size in found.items() if name in self.size_names}

    def kernel(self, step: Step, bound: Mapping[str, str]) -> Kernel:
        """The kernel of a step, to be compiled together with the others of the op."""
        key = (id(step), tuple(bound.items()))
        if key not in self._kernels:
            names = []
            for other in self.forward + self.backward:
                fixed = other.arguments or []
                own = {t.name: a for t, a in zip(other.signature.template, fixed, strict=False) if a != t.name}
                template = other.signature.template
                all_bound = {t.name: own.get(t.name) or bound.get(t.name) or t.default for t in template}
                if not other.signature.c_linkage and all(all_bound.values()):
                    names.append(other.expression(all_bound))
            expression, params = step.expression(bound), step.signature.bound(dict(bound))
            together = tuple(dict.fromkeys([*names, *([] if step.signature.c_linkage else [expression])]))
            self._kernels[key] = Kernel(self.module, expression, params, step.signature.c_linkage, together)
        return self._kernels[key]

    def launch_of(self, step: Step, values: Mapping[str, Any]) -> tuple[_Sizes, _Sizes, int]:
        """Grid, block and bytes of shared memory of a step on arrays by name, outputs included."""
        what = f"kernel {step.name}"
        block = dims(step.name, "block", by_name(f"{what}: block", step.block, values))
        grid = by_name(f"{what}: grid", step.grid, values)
        if grid is None:
            grid = -(-elements(values[step.outputs[0].name].shape) // max(math.prod(block), 1))
        return dims(step.name, "grid", grid), block, by_name(f"{what}: shared", step.shared, values)

    def run(self, step: Step, values: Mapping[str, Any], bound: Mapping[str, str]) -> None:
        """Launches a step on arrays by name, outputs included."""
        grid, block, shared = self.launch_of(step, values)
        fresh = frozenset(p.name for p in step.outputs) - self.zero
        args = (values[p.name] for p in step.signature.params)
        self.kernel(step, bound).launch(*args, grid=grid, block=block, shared=shared, fresh=fresh)

    def run_forward(self, args: Sequence[Any], make: _Make, run: bool = True) -> list[Any]:
        """The outputs, made by `make(shape, element type, zero)` and filled by the kernels where `run`."""
        values = {p.name: value for p, value in zip(self.params, args, strict=True)}
        for step, bound in self.steps(values, make):
            if run:
                self.run(step, values, bound)
        return [values[p.name] for p in self.outputs]

    def steps(self, values: dict[str, Any], make: _Make) -> Iterator[tuple[Step, dict[str, str]]]:
        """The forward kernels with their template parameters; adds what each needs, outputs and sizes, to `values`."""
        codes = self.codes(values, self.inputs)
        sizes: dict[str, int] = {}
        for step in self.forward:
            bound, made = self.plan(step, {name: code for name, code in codes.items() if self._has(step, name)})
            for name, code in made.items():
                if name not in codes:
                    values[name] = make(self.shape(name, values), code, name in self.zero)
                    codes[name] = code
            if not sizes:
                sizes = self.sizes_of(values, values[self.forward[0].outputs[0].name].shape)
                values.update(sizes)
            yield step, bound

    def compile(self, args: Sequence[Any], arch: str | None = None) -> None:
        """Compiles the kernels, with the templates that these arguments ask for, and runs nothing."""
        codes = self.codes({p.name: value for p, value in zip(self.params, args, strict=True)}, self.inputs)
        names: list[str] = []
        for step in self.forward:
            bound, made = self.plan(step, {name: code for name, code in codes.items() if self._has(step, name)})
            codes.update(made)
            names += self.kernel(step, bound)._together
        self.module.compile(*names, arch=arch)

    @staticmethod
    def _has(step: Step, name: str) -> bool:
        return any(p.name == name for p in step.signature.params)

    # Calls.

    def __repr__(self) -> str:
        return f"<ironhorse.jit.Op {self.__doc__}>"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if kwargs or len(args) != len(self.params):
            args = self._complete(args, kwargs)
        if self._tensor is None and torch_module() is not None:
            self._register()
        if self._tensor is not None:
            result = self._again(args)
            if result is not None:
                return result
            for at in self._array_at:
                if isinstance(args[at], self._tensor):
                    if self.cpu is not None and args[self._array_at[0]].device.type == "cpu":
                        return self._call_cpu(args)
                    return self._overload(*args)
                if hasattr(type(args[at]), "__torch_function__"):  # stands for a tensor: a graph of torch.fx
                    return self._overload(*args)
        return self._call_numpy(args)

    def _complete(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
        """Arguments in order, with defaults."""
        names = [p.name for p in self.params]
        # A kernel's argument may be called `in`, which Python cannot say.
        kwargs = {name.removesuffix("_") if name not in names else name: value for name, value in kwargs.items()}
        twice = next((name for name in names[: len(args)] if name in kwargs), None)
        if twice is not None:
            raise InvalidValueError(f"{self.name}: `{twice}` is given twice, by place and by name")
        if len(args) > len(names) or any(name not in names for name in kwargs):
            odd = next((name for name in kwargs if name not in names), None)
            what = f"no argument `{odd}`" if odd else f"{len(args)} arguments"
            raise InvalidValueError(f"{self.name}: {what}; expected {', '.join(map(str, self.params))}")
        given = {**self.defaults, **dict(zip(names, args, strict=False)), **kwargs}
        missing = [name for name in names if name not in given]
        if missing:
            expected = ", ".join(map(str, self.params))
            raise InvalidValueError(f"{self.name}: `{missing[0]}` is missing; expected {expected}")
        return tuple(given[name] for name in names)

    def _register(self) -> None:
        from ._torch import register

        register(self)

    @property
    def torch(self) -> Any:
        """The operator as torch has it: torch.ops.ironhorse_jit.<name>.default."""
        if self._overload is None:
            try:
                import torch  # noqa: F401
            except ImportError:
                raise NotAvailableError(f"{self.name}: torch is not installed") from None
            self._register()
        return self._overload

    def _call_cpu(self, args: Sequence[Any]) -> Any:
        """The CPU version on tensors: torch sees its operations, so it has its gradient and compiles."""
        from ._torch import checked_cpu

        return checked_cpu(self, args)

    def _call_numpy(self, args: Sequence[Any]) -> Any:
        if cuda_available():
            outputs = self.run_forward(args, _numpy_array)
            return outputs[0] if len(outputs) == 1 else tuple(outputs)
        expected = self.run_forward(args, _numpy_array, run=False)
        if self.cpu is None:
            raise NotAvailableError(f"{self.name}: there is no CUDA device here, and the op has no cpu= version")
        result = _with_torch(self.cpu, args)
        results = result if isinstance(result, (tuple, list)) else (result,)
        results = [np.asarray(each) for each in results]
        self.check_result([(r.shape, r.dtype.name) for r in results], [(e.shape, e.dtype.name) for e in expected])
        return results[0] if len(results) == 1 else tuple(results)

    def check_result(self, found: list[_ShapeAndType], expected: list[_ShapeAndType]) -> None:
        """Raises InvalidValueError unless the results of cpu= have the shapes and types of the kernels' results."""
        if len(found) != len(expected):
            raise InvalidValueError(f"{self.name}: cpu= gave {len(found)} results, expected {len(expected)}")
        for param, got, want in zip(self.outputs, found, expected, strict=True):
            if (tuple(got[0]), got[1]) != (tuple(want[0]), want[1]):
                text = f"{self.name}: cpu= gave `{param.name}` as {got[1]} {list(got[0])}"
                raise InvalidValueError(f"{text}, expected {want[1]} {list(want[0])}")


def _restored(mark: str, module: Module, forward: list[str], backward: list[str], options: dict[str, Any]) -> Op:
    """The op of a pickle: the one that was made in this process, or a new one."""
    return _LIVE.get(mark) or Op(module, forward, backward, mark=mark, **options)


def _numpy_array(shape: tuple[int, ...], code: str, zero: bool) -> np.ndarray:
    if code == "bf2":
        raise NotAvailableError("numpy has no bfloat16; use torch")
    return np.zeros(shape, DTYPES[code]) if zero else np.empty(shape, DTYPES[code])


def _with_torch(cpu: Callable[..., Any], args: Sequence[Any]) -> Any:
    """Calls cpu= with numpy arrays; if it is written for tensors, with tensors of the same memory."""
    try:
        return cpu(*args)
    except (TypeError, AttributeError):
        torch = torch_module()
        if torch is None:
            raise
        result = cpu(*(torch.from_numpy(a) if isinstance(a, np.ndarray) else a for a in args))
        results = result if isinstance(result, (tuple, list)) else (result,)
        return tuple(r.detach().numpy() for r in results)


def _torch_code(tensor: Any) -> str | None:
    from ._torch import code_of

    return code_of(tensor)


def op(
    source: Module | str | os.PathLike[str],
    *,
    forward: str | Sequence[str],
    backward: str | Sequence[str] = (),
    out: Any = None,
    sizes: Mapping[str, Any] | None = None,
    grid: Any = None,
    block: Any = None,
    shared: Any = None,
    zero: Iterable[str] = (),
    defaults: Mapping[str, Any] | None = None,
    cpu: Callable[..., Any] | None = None,
    name: str | None = None,
    **options: Any,
) -> Op:
    """Makes an op of kernels in source, a file or a module.

    The kernels' arguments say what the op is. Pointers to const are inputs and numbers are arguments, in order; other
    pointers are outputs; `n` is the number of elements of the first output, `rows` and `cols` are the first input's.

    `backward` kernels go by names: they read `d_y` for an output `y`, inputs and outputs by their names, and write
    `d_x` for an input `x`. What they name is saved.

    `out`: an output's shape, that of the first input by default: a name, sizes, or a function; a dict for several
    outputs. `sizes`: further integers by name. `grid`, `block`, `shared`: the launch, one thread per element of the
    kernel's first output by default, in blocks of 256; a dict by kernel for several. All of these may be functions,
    which are called with the arguments that they name: `grid=lambda rows: rows`.

    `zero`: outputs that start as zeros. `defaults`: of arguments. `cpu`: a function for arrays on the CPU; torch takes
    the gradient from it. Template parameters are found from the arrays; others are written: `forward="f<T, 4>"`.
    Further options are those of `source`: `flags`, `include`, `defines`.
    """
    module = module_of(source, **options)
    forward, backward = _given.texts("forward", forward), _given.texts("backward", backward)
    if not forward:
        raise InvalidValueError("forward names no kernel")
    if cpu is not None and not callable(cpu):
        raise InvalidValueError(f"cpu is of type {type(cpu).__name__}; expected a function of the op's arguments")
    return Op(
        module, forward, backward, out=out, sizes=_given.table("sizes", sizes), grid=grid, block=block, shared=shared,
        zero=_given.texts("zero", zero), defaults=_given.table("defaults", defaults), cpu=cpu,
        name=None if name is None else _given.text("name", name),
    )  # fmt: skip
