"""The operators in torch's registry: `torch.ops.ironhorse`.

Every operator with a gradient is there twice. `NAME` has autograd and is what compiled code and direct users call;
`NAME_fwd` is the same kernel without, which eager code calls from an autograd.Function of its own: half the cost of a
call. Gradients are `NAME_bwd`.

From torch 2.10 on, Rust registers them with libtorch's C interface. Before, or with IRONHORSE_TORCH_SHIM=0,
torch.library registers the same names, and their Python bodies call the same Rust.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.compiler import is_compiling
from torch.overrides import handle_torch_function, has_torch_function_unary, has_torch_function_variadic

from .. import _native
from ..errors import IronhorseError

Op = Callable[..., Tensor]
"""An operator with one result."""

Ops = Callable[..., tuple[Tensor, ...]]
"""An operator with several."""

OLDEST = (2, 4)
"""What torch.library needs to be able to do: register_fake and register_autograd."""

SHIM_SINCE = (2, 10)


def _version(text: str) -> tuple[int, int]:
    major, minor = re.match(r"(\d+)\.(\d+)", text).groups()  # type: ignore[union-attr] # all of torch's match
    return int(major), int(minor)


def _checked_version(text: str) -> tuple[int, int]:
    version = _version(text)
    if version < OLDEST:
        raise ImportError(f"ironhorse.torch needs PyTorch {OLDEST[0]}.{OLDEST[1]} or newer, this is {text}")
    return version


SHIM = _checked_version(torch.__version__) >= SHIM_SINCE and os.environ.get("IRONHORSE_TORCH_SHIM", "1") != "0"
"""Whether Rust registers the operators itself."""


def _body(name: str, results: int) -> Callable[..., Any]:
    def call(*args: Any) -> Any:
        try:
            out = _native.torch_call(name, args)
        except IronhorseError as error:
            raise RuntimeError(str(error)) from None  # as libtorch raises it
        return out[0] if results == 1 else tuple(out)

    return call


def _register() -> torch.library.Library | None:
    if SHIM:
        _native.torch_register()
        return None
    library = torch.library.Library("ironhorse", "FRAGMENT")
    # Compiled code must pass tensors with the strides that the fakes saw: results have the layout of their inputs.
    strides = getattr(torch.Tag, "needs_exact_strides", torch.Tag.needs_fixed_stride_order)
    for name, schema in _native.torch_ops():
        library.define(schema, tags=(torch.Tag.pt2_compliant_tag, strides))
        body = _body(name, schema.partition("->")[2].count("Tensor"))
        for key in ("CPU", "CUDA"):
            library.impl(name, body, key)
    return library


_kept = _register()


def public(name: str) -> Any:
    """The operator with autograd."""
    return getattr(torch.ops.ironhorse, name).default


def raw(name: str) -> Any:
    """An operator without autograd, called as directly as possible. Not for code that Dynamo traces."""
    overload = getattr(torch.ops.ironhorse, name).default
    return getattr(overload, "_op", overload)


def fake(name: str, shapes: Callable[..., Any]) -> None:
    """What an operator returns, without values."""
    names = [name] if name.endswith(("_bwd", "_gated")) else [name, f"{name}_fwd"]

    def checked(*args: Any) -> Any:
        # A tensor of the meta device beside real ones comes here instead of to the kernel.
        devices = {a.device for a in args if isinstance(a, Tensor)}
        if len(devices) > 1:
            raise RuntimeError(f"{name}: tensors are on {', '.join(sorted(map(str, devices)))}, expected one device")
        return shapes(*args)

    for one in names:
        torch.library.register_fake(f"ironhorse::{one}", checked)


Gradients = Callable[[Any, Tensor], tuple[Tensor | None, ...]]
"""The gradients of the tensors of a call, from its context and the gradient of its first result. The context has
`saved_tensors`, `numbers` (the arguments after the tensors) and `needs_input_grad`."""


def differentiable(
    name: str,
    tensors: int,
    *,
    save: Callable[[tuple[Any, ...], tuple[Tensor, ...]], tuple[Tensor, ...]],
    kernel: Gradients,
    graph: Gradients,
    forward: Callable[..., tuple[Tensor, tuple[Tensor, ...]]] | None = None,
) -> Op:
    """The operator `name` as a function with a gradient, of its first result if it has several.

    Its first `tensors` arguments are tensors. `save(arguments, results)` says what the backward needs of them. `kernel`
    computes the gradients; `graph` does so in torch's own operations where a graph is wanted (create_graph=True), so
    that they can be differentiated again. `forward` replaces the forward where a gradient will follow: it gives the
    result and what to save.
    """
    compiled, bare = public(name), raw(f"{name}_fwd")
    several = len(compiled._schema.returns) > 1

    def results(made: Any) -> tuple[Tensor, ...]:
        return made if several else (made,)

    def setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.save_for_backward(*save(inputs, results(output)))
        ctx.numbers = inputs[tensors:]
        if several:
            ctx.mark_non_differentiable(*output[1:])
            ctx.set_materialize_grads(False)

    def back(ctx: Any, d: Tensor | None, *_: Tensor | None) -> tuple[Tensor | None, ...]:
        needs = ctx.needs_input_grad
        if d is None:
            return (None,) * len(needs)
        made = graph(ctx, d) if torch.is_grad_enabled() else kernel(ctx, d)
        wanted = (gradient if need else None for gradient, need in zip(made, needs, strict=False))
        return (*wanted, *(None,) * (len(needs) - len(made)))

    class Eager(torch.autograd.Function):
        """For plain autograd: a forward that keeps only what it must."""

        backward = staticmethod(back)

        @staticmethod
        def forward(ctx: Any, *args: Any) -> Tensor:
            ctx.numbers = args[tensors:]
            if forward is None:
                made = results(bare(*args))
                first, saved = made[0], save(args, made)
            else:
                first, saved = forward(*args)
            ctx.save_for_backward(*saved)
            return first

    class Transformed(torch.autograd.Function):
        """For torch.func, which register_autograd does not serve."""

        generate_vmap_rule = True
        setup_context = staticmethod(setup)
        backward = staticmethod(back)

        @staticmethod
        def forward(*args: Any) -> Any:
            return bare(*args)

    torch.library.register_autograd(f"ironhorse::{name}", back, setup_context=setup)
    eager: Callable[..., Tensor] = Eager.apply
    transformed: Callable[..., Any] = Transformed.apply

    def call(*args: Any) -> Tensor:
        if is_compiling():
            made = compiled(*args)
        elif _differentiates(args[:tensors]):
            if not functorch_active():
                return eager(*args)
            made = transformed(*args)
        else:
            made = bare(*args)
        return results(made)[0]

    return call


def _differentiates(tensors: tuple[Tensor, ...]) -> bool:
    """Whether autograd wants to know about a call."""
    if torch.is_grad_enabled():
        for tensor in tensors:
            if tensor.requires_grad:
                return True
    return forward_mode()


def like(x: Tensor) -> Tensor:
    """A fake as large as x; results are contiguous."""
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def wanted(need: bool, x: Tensor) -> Tensor:
    """The fake of a gradient of x: without elements if it is not needed."""
    return like(x) if need else x.new_empty(0)


def column_sums(x: Tensor) -> Tensor:
    """Sums over all but the last dimension, also where that has no elements."""
    return x.flatten(0, -2).sum(0) if x.dim() > 1 else x


def acc(x: Tensor) -> torch.dtype:
    """The type of sums and statistics."""
    return torch.float64 if x.dtype is torch.float64 else torch.float32


instead = handle_torch_function
"""What a function returns if an argument stands for a tensor: one node in a graph of torch.fx, or what a subclass of
Tensor makes of the call."""

stands_in: Callable[[object], bool] = has_torch_function_unary


def stand_in(function: str, **given: object) -> bool:
    """Whether an argument is not a plain tensor but stands for one. Refuses arguments that are neither."""
    for name, value in given.items():
        if not isinstance(value, Tensor) and not stands_in(value):
            kind = type(value).__name__
            raise TypeError(
                f"{function}: `{name}` is of type {kind}, expected a torch.Tensor (torch.as_tensor makes one)"
            )
    return has_torch_function_variadic(*given.values())


functorch_active: Callable[[], bool] = getattr(torch._C, "_are_functorch_transforms_active", lambda: False)
"""Whether torch.func is at work, which wants an autograd.Function of its own kind."""


def forward_mode() -> bool:
    """Whether torch differentiates forward (dual numbers, torch.func.jvp). Our ops have no such derivative: their
    autograd.Functions say so, where the bare kernels would silently return a derivative of 0."""
    level: int = forward_ad._current_level
    return level >= 0


_any_autocast: Callable[[], bool] = getattr(torch._C, "_is_any_autocast_enabled", lambda: True)


def autocast_on(x: Tensor) -> bool:
    """Whether autocast is on where x is."""
    if not torch.compiler.is_compiling() and not _any_autocast():
        return False
    on: bool = torch.is_autocast_enabled(x.device.type)
    return on


def in_f32(x: Tensor) -> Tensor:
    """x as float32 if it is less: what autocast does for ops that need the range."""
    return x.float() if x.dtype in (torch.bfloat16, torch.float16) else x


def in_lower(x: Tensor) -> Tensor:
    """x in autocast's type: what it does for matrix products."""
    dtype = torch.get_autocast_dtype(x.device.type)
    return x if x.dtype in (dtype, torch.float64) else x.to(dtype)


def promoted(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Both in the wider type: what autocast does for ops of several tensors."""
    dtype = torch.promote_types(a.dtype, b.dtype)
    return a.to(dtype), b.to(dtype)
