"""Ops as operators of torch: implementations, fakes for torch.compile, gradients."""

from __future__ import annotations

import keyword
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from ..errors import InvalidValueError, NotAvailableError
from ._again import Calls, dtype_of
from ._types import CODES, Param

if TYPE_CHECKING:
    from ._op import Op
    from ._step import Step

_Function = Callable[..., Any]
NAMESPACE = "ironhorse_jit"
_TAKEN: set[str] = set()
_LIBRARIES: list[Any] = []  # kept alive: an operator is unregistered when its library is deleted
_LOCK = threading.Lock()
_Backward = tuple[Any, list[str], list[str], list[str]]  # operator, arrays, numbers, outputs; all by name
_CODE = {getattr(torch, name): code for name, code in CODES.items() if hasattr(torch, name)}


def code_of(tensor: torch.Tensor) -> str | None:
    """The element type of a tensor."""
    return _CODE.get(tensor.dtype)


def _free(name: str) -> str:
    """The name, with a number if it is taken: a second op of a name does not replace the first."""
    free, number = name, 1
    while free in _TAKEN:
        number += 1
        free = f"{name}_{number}"
    _TAKEN.add(free)
    return free


def _escaped(name: str) -> str:
    """A name that torch's schemas accept: `in` is not allowed."""
    return name + "_" * keyword.iskeyword(name)


def _argument(param: Param) -> str:
    name = _escaped(param.name)
    if param.is_array:
        return f"Tensor {name}"
    kind = param.kind or "f8"  # a number of a template's type
    return f"{'bool' if kind == '?' else 'float' if 'f' in kind else 'SymInt'} {name}"


def _returns(count: int) -> str:
    return "Tensor" if count == 1 else f"({', '.join(['Tensor'] * count)})"


def _one(outputs: Sequence[Any]) -> Any:
    return outputs[0] if len(outputs) == 1 else tuple(outputs)


def _define(library: Any, name: str, schema: str, cuda: _Function, cpu: _Function, fake: _Function) -> Any:
    library.define(f"{name}{schema}", tags=(torch.Tag.pt2_compliant_tag,))
    library.impl(name, cuda, "CUDA")
    library.impl(name, cpu, "CPU")
    torch.library.register_fake(f"{NAMESPACE}::{name}", fake, lib=library)
    return getattr(getattr(torch.ops, NAMESPACE), name).default


def _maker(device: torch.device) -> Callable[[tuple[int, ...], str, bool], torch.Tensor]:
    def make(shape: tuple[int, ...], code: str, zero: bool) -> torch.Tensor:
        new = torch.zeros if zero else torch.empty
        return new(shape, dtype=dtype_of(code), device=device)

    return make


def _device(op: Op, args: Sequence[Any]) -> torch.device:
    """The one device of all arrays."""
    at = op._array_at[0]
    if not isinstance(args[at], torch.Tensor):
        text = f"{op.name}: `{op.params[at].name}` is of type {type(args[at]).__name__}"
        raise InvalidValueError(f"{text}; expected a tensor like the others")
    device: torch.device = args[at].device
    for other in op._array_at[1:]:
        if getattr(args[other], "device", device) != device:
            first, second = op.params[at].name, op.params[other].name
            text = f"{op.name}: `{first}` is on {device}, `{second}` on {args[other].device}; expected one device"
            raise InvalidValueError(text)
    return device


def checked_cpu(op: Op, args: Sequence[Any]) -> Any:
    """Runs cpu= and checks that its results have the shapes and types of the kernels' results."""
    assert op.cpu is not None
    if torch.compiler.is_compiling():
        return op.cpu(*args)
    expected = op.run_forward(args, _maker(torch.device("meta")), run=False)
    _device(op, args)
    result = op.cpu(*args)
    results = result if isinstance(result, (tuple, list)) else (result,)
    op.check_result(list(map(_shape_and_type, results)), list(map(_shape_and_type, expected)))
    return result


def _shape_and_type(tensor: torch.Tensor) -> tuple[tuple[int, ...], str]:
    return tensor.shape, str(tensor.dtype).removeprefix("torch.")


def register(op: Op) -> None:
    """Makes the op and its gradient operators of torch."""
    with _LOCK:
        if op._overload is None:
            name = _free(op.name)
            library = torch.library.Library(NAMESPACE, "FRAGMENT")
            _LIBRARIES.append(library)
            backward = [_backward_op(op, library, f"{name}_backward_{i}", step) for i, step in enumerate(op.backward)]
            on_cpu = _cpu_backward_op(op, library, f"{name}_backward_cpu") if op.cpu is not None else None
            overload = _forward_op(op, library, name)
            _gradient(op, library, name, backward, on_cpu)
            op._overload, op._again, op._tensor = overload, Calls(op), torch.Tensor


def _forward_op(op: Op, library: Any, name: str) -> Any:
    schema = f"({', '.join(map(_argument, op.params))}) -> {_returns(len(op.outputs))}"

    def cuda(*args: Any) -> Any:
        return _one(op.run_forward(args, _maker(_device(op, args))))

    def cpu(*args: Any) -> Any:
        if op.cpu is None:
            text = "the op has no cpu= version; move the tensors to CUDA"
            raise NotAvailableError(f"{op.name}: tensors on the CPU, and {text}")
        result = checked_cpu(op, args)
        return _own(result, args)

    def fake(*args: Any) -> Any:
        return _one(op.run_forward(args, _maker(_device(op, args)), run=False))

    return _define(library, name, schema, cuda, cpu, fake)


def _own(result: Any, args: Sequence[Any]) -> Any:
    """Contiguous results that share no memory with the arguments, as torch demands of an operator."""
    results = result if isinstance(result, (tuple, list)) else (result,)
    taken = {a.untyped_storage().data_ptr() for a in args if isinstance(a, torch.Tensor)}
    owned = []
    for each in results:
        each = each.detach().contiguous()
        shares = each.untyped_storage().data_ptr() in taken and each.numel() > 0
        owned.append(each.clone() if shares else each)
        taken.add(owned[-1].untyped_storage().data_ptr())
    return _one(owned)


def _backward_op(op: Op, library: Any, name: str, step: Step) -> _Backward:
    """A backward kernel as an operator."""
    arrays = [p.name for p in step.arrays]
    numbers = [p.name for p in step.scalars]
    sizes = [name for name in op.size_names if name not in numbers]  # for functions of the launch
    outputs = [p.name for p in step.outputs]
    shapes = [f"SymInt[] shape_{name}" for name in outputs]
    arguments = [*(f"Tensor {_escaped(name)}" for name in arrays), *map(_argument, step.scalars)]
    arguments += [*(f"SymInt {_escaped(name)}" for name in sizes), *shapes]
    numbers += sizes
    if not arrays:
        raise InvalidValueError(f"backward kernel {step.name} reads no array")

    def run(args: Sequence[Any], launch: bool) -> Any:
        names = [*arrays, *numbers]
        values = dict(zip(names, args, strict=False))
        codes = {array: code_of(values[array]) for array in arrays}
        bound, made = op.plan(step, codes)
        make = _maker(values[arrays[0]].device)
        for output, shape in zip(outputs, args[len(names) :], strict=True):
            values[output] = make(tuple(shape), made[output], output in op.zero)
        if launch:
            op.run(step, values, bound)
        return _one([values[output] for output in outputs])

    def refuse(*args: Any) -> Any:
        raise NotAvailableError(f"{op.name}: kernel {step.name} does not run on tensors of the CPU")

    schema = f"({', '.join(arguments)}) -> {_returns(len(outputs))}"
    overload = _define(library, name, schema, lambda *a: run(a, True), refuse, lambda *a: run(a, False))

    def twice(ctx: Any, *grads: Any) -> Any:
        raise NotAvailableError(f"{op.name} has no second derivative: its gradient is a kernel")

    torch.library.register_autograd(f"{NAMESPACE}::{name}", twice, lib=library)
    return overload, arrays, numbers, outputs


def _cpu_backward_op(op: Op, library: Any, name: str) -> Any:
    """The gradient of the CPU version as an operator: gradients of the outputs, then the arguments."""
    schema = ", ".join([*(f"Tensor d_{p.name}" for p in op.outputs), *map(_argument, op.params)])

    def cpu(*args: Any) -> Any:
        grads, args = args[: len(op.outputs)], args[len(op.outputs) :]

        def work() -> Any:
            own = [a.detach().requires_grad_(a.is_floating_point()) if isinstance(a, torch.Tensor) else a for a in args]
            assert op.cpu is not None
            result = op.cpu(*own)
            results = result if isinstance(result, (tuple, list)) else (result,)
            pairs = [(r, g) for r, g in zip(results, grads, strict=True) if r.requires_grad]
            wanted = [own[i] for i in op._array_at if own[i].requires_grad]
            found = torch.autograd.grad(
                [r for r, _ in pairs], wanted, [g for _, g in pairs], allow_unused=True, materialize_grads=True
            )
            given = iter(found)
            return [next(given) if own[i].requires_grad else torch.zeros_like(own[i]) for i in op._array_at]

        # Inside an operator autograd is off; a new thread starts with it on.
        return _own(_elsewhere(work), [*grads, *args])

    def fake(*args: Any) -> Any:
        args = args[len(op.outputs) :]
        return _one([torch.empty(args[i].shape, dtype=args[i].dtype, device=args[i].device) for i in op._array_at])

    def cuda(*args: Any) -> Any:
        raise NotAvailableError(f"{op.name}: the CPU version got tensors of CUDA")

    returns = _returns(len(op._array_at))
    return _define(library, name, f"({schema}) -> {returns}", cuda, cpu, fake)


def _elsewhere(work: Callable[[], Any]) -> Any:
    """Runs `work` in a new thread and waits for its result."""
    done: list[Any] = []

    def run() -> None:
        try:
            done.extend((work(), None))
        except BaseException as error:  # noqa: BLE001 - raised again in the caller's thread
            done.extend((None, error))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    result, error = done
    if error is not None:
        raise error
    return result


def _gradient(op: Op, library: Any, name: str, backward: list[_Backward], on_cpu: Any) -> None:
    inputs = {p.name for p in op.inputs}
    writes = {output for _, _, _, outputs in backward for output in outputs}
    arrays = {array for _, arrays, _, _ in backward for array in arrays}
    outputs = [p.name for p in op.outputs]

    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        values = {p.name: value for p, value in zip(op.params, inputs, strict=True)}
        made = output if isinstance(output, (tuple, list)) else (output,)
        values.update(zip(outputs, made, strict=True))
        ctx.on_cpu = on_cpu is not None and values[op.inputs[0].name].device.type == "cpu"
        keep = [p.name for p in op.inputs] if ctx.on_cpu else [n for n in values if n in arrays]
        ctx.keep = keep
        ctx.save_for_backward(*(values[n] for n in keep))
        ctx.numbers = {p.name: values[p.name] for p in op.params if not p.is_array}
        ctx.numbers.update(op.sizes_of(values, values[outputs[0]].shape))
        ctx.shapes = {p.name: values[p.name].shape for p in op.inputs}
        ctx.made = [(each.shape, each.dtype, each.device) for each in made]

    def gradient(ctx: Any, *grads: Any) -> Any:
        saved = dict(zip(ctx.keep, ctx.saved_tensors, strict=True))
        for output, grad, (shape, dtype, device) in zip(outputs, grads, ctx.made, strict=True):
            saved[f"d_{output}"] = torch.zeros(shape, dtype=dtype, device=device) if grad is None else grad
        wanted = [p.name for i, p in enumerate(op.params) if ctx.needs_input_grad[i] and p.name in inputs]
        found: dict[str, Any] = {}
        if ctx.on_cpu:
            d_outputs = [saved[f"d_{output}"] for output in outputs]
            args = [saved[p.name] if p.is_array else ctx.numbers[p.name] for p in op.params]
            made = on_cpu(*d_outputs, *args)
            made = made if isinstance(made, (tuple, list)) else (made,)
            found = {f"d_{p.name}": each for p, each in zip(op.inputs, made, strict=True)}
        else:
            for each in wanted:
                if f"d_{each}" not in writes:
                    text = f"no backward kernel writes d_{each}" if backward else "the op has no backward="
                    raise NotAvailableError(f"{op.name}: the gradient of `{each}` is needed, and {text}")
            for overload, arrays, numbers, made in backward:
                if any(output.removeprefix("d_") in wanted for output in made):
                    shapes = [list(ctx.shapes[output.removeprefix("d_")]) for output in made]
                    result = overload(*(saved[a] for a in arrays), *(ctx.numbers[n] for n in numbers), *shapes)
                    found.update(zip(made, result if isinstance(result, (tuple, list)) else (result,), strict=True))
        return tuple(found.get(f"d_{p.name}") if p.name in wanted else None for p in op.params)

    torch.library.register_autograd(f"{NAMESPACE}::{name}", gradient, setup_context=setup_context, lib=library)
