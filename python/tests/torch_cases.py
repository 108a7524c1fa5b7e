"""The operators of ironhorse.torch beside torch's own: one list that every test of them walks through."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import ironhorse.torch as ops
import pytest
import torch
import torch.nn.functional as F
from ironhorse.reference.activations import ACTIVATIONS
from torch import Tensor

CUDA = pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"))
DEVICES = ["cpu", CUDA]
FLOATS = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
LOW = (torch.bfloat16, torch.float16)
# Below this share of the type's rounding step, errors are not compared.
FLOOR = 0.05


@dataclass(frozen=True)
class Case:
    """A function of ours, what torch has for it, the operator below, and arguments by shape.

    `shapes` are what `make` gets, awkward ones among them; `op` turns the arguments into the operator's.
    """

    name: str
    ours: Callable[..., Tensor]
    torchs: Callable[..., Tensor]
    make: Callable[..., tuple[Any, ...]]
    shapes: list[tuple[int, ...]]
    op: Callable[..., tuple[Any, ...]]
    operator: str = ""

    def arguments(self, shape: tuple[int, ...], device: str, dtype: torch.dtype, grad: bool = True) -> tuple[Any, ...]:
        generator = torch.Generator().manual_seed(sum(shape) + 1)

        def normal(*sizes: int) -> Tensor:
            x = torch.randn(sizes, generator=generator, dtype=torch.float64).to(dtype)
            return x.to(device).requires_grad_(grad)

        return self.make(normal, generator, *shape)


def tensors(arguments: tuple[Any, ...]) -> list[Tensor]:
    """Those that may have a gradient."""
    return [a for a in arguments if isinstance(a, Tensor) and a.is_floating_point()]


def again(arguments: tuple[Any, ...], dtype: torch.dtype | None = None) -> tuple[Any, ...]:
    """The same values as leaves of their own, in another type if given."""

    def copy(a: Any) -> Any:
        if not isinstance(a, Tensor):
            return a
        made = a.detach().clone()
        if not a.is_floating_point():
            return made
        return (made if dtype is None else made.to(dtype)).requires_grad_(a.requires_grad)

    return tuple(copy(a) for a in arguments)


def _targets(generator: torch.Generator, classes: int, like: Tensor, *sizes: int) -> Tensor:
    targets = torch.randint(0, max(classes, 1), sizes, generator=generator)
    if targets.numel() > 2:
        targets.view(-1)[1] = -100
    return targets.to(like.device)


def _make_loss(normal: Any, generator: torch.Generator, *shape: int) -> tuple[Any, ...]:
    logits = normal(*shape)
    return logits, _targets(generator, shape[-1], logits, *shape[:-1])


def _torch_loss(reduction: str) -> Callable[..., Tensor]:
    def loss(logits: Tensor, targets: Tensor) -> Tensor:
        flat = F.cross_entropy(logits.reshape(-1, logits.shape[-1]), targets.reshape(-1), reduction=reduction)
        return flat.reshape(targets.shape) if reduction == "none" else flat

    return loss


def tables(x: Tensor, positions: int, dim: int) -> tuple[Tensor, Tensor]:
    dtype = torch.float64 if x.dtype is torch.float64 else torch.float32
    return ops.rope_tables(positions, dim, device=x.device, dtype=dtype)


def _torch_rope(interleaved: bool) -> Callable[..., Tensor]:
    def rope(x: Tensor) -> Tensor:
        cos, sin = tables(x, x.shape[-2], x.shape[-1])
        wide = x.to(cos.dtype)
        if interleaved:
            a, b = wide[..., 0::2], wide[..., 1::2]
            y = torch.stack((a * cos - b * sin, a * sin + b * cos), -1).flatten(-2)
        else:
            a, b = wide.chunk(2, -1)
            y = torch.cat((a * cos - b * sin, a * sin + b * cos), -1)
        return y.to(x.dtype)

    return rope


def _our_rope(interleaved: bool) -> Callable[[Tensor], Tensor]:
    return lambda x: ops.rope(x, *tables(x, x.shape[-2], x.shape[-1]), interleaved)


def _make_heads(normal: Any, _: Any, batch: int, heads: int, kv: int, q_len: int, kv_len: int, dim: int) -> Any:
    return normal(batch, heads, q_len, dim), normal(batch, kv, kv_len, dim), normal(batch, kv, kv_len, dim)


def _torch_attention(causal: bool) -> Callable[..., Tensor]:
    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        mask = None
        if causal:
            mask = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device)
            mask = mask.tril(k.shape[2] - q.shape[2])
        return F.scaled_dot_product_attention(q, k, v, mask, enable_gqa=True)

    return attention


def _one(normal: Any, _: Any, *shape: int) -> tuple[Any, ...]:
    return (normal(*shape),)


def _two(normal: Any, _: Any, *shape: int) -> tuple[Any, ...]:
    return normal(*shape), normal(*shape)


def _with_row(normal: Any, _: Any, *shape: int) -> tuple[Any, ...]:
    return normal(*shape), normal(shape[-1])


def _with_rows(normal: Any, _: Any, *shape: int) -> tuple[Any, ...]:
    return normal(*shape), normal(shape[-1]), normal(shape[-1])


ANY = [(), (1,), (33,), (3, 5), (2, 31, 7), (0,), (3, 0), (1025, 33)]
ROWS = [(1,), (33,), (3, 5), (2, 31, 7), (1, 1), (0, 4), (257, 129), (4, 4097)]
# A norm of one or two elements is ±1 whatever they are: its gradient is nothing but rounding
# (see test_norms_of_one_element).
NORMS = [(5,), (33,), (3, 5), (2, 31, 7), (0, 4), (257, 129), (4, 4097)]
LOSS = [(3, 5), (2, 7, 31), (65, 1), (33, 1025)]
HEADS = [
    (1, 1, 1, 1, 2, 8),
    (2, 4, 2, 33, 33, 16),
    (1, 2, 2, 5, 67, 64),
    (2, 3, 1, 31, 31, 32),
    (1, 2, 2, 130, 130, 128),
]

CASES = [
    Case("square", ops.square, torch.square, _one, ANY, lambda x: (x,)),
    # GELU has two forms, below
    *(
        Case(name, getattr(ops, name), activation.value, _one, ANY, lambda x: (x,))
        for name, activation in ACTIVATIONS.items()
        if name != "gelu"
    ),
    Case("silu", ops.silu, F.silu, _one, ANY, lambda x: (x,)),
    Case("gelu", ops.gelu, F.gelu, _one, ANY, lambda x: (x, False)),
    Case(
        "gelu_tanh",
        lambda x: ops.gelu(x, "tanh"),
        lambda x: F.gelu(x, approximate="tanh"),
        _one,
        ANY,
        lambda x: (x, True),
        "gelu",
    ),
    Case("swiglu", ops.swiglu, lambda gate, up: F.silu(gate) * up, _two, ANY, lambda gate, up: (gate, up)),
    Case(
        "fused_scale_bias_relu",
        lambda x, bias: ops.fused_scale_bias_relu(x, bias, 1.5),
        lambda x, bias: torch.relu(x * 1.5 + bias),
        _with_row,
        ROWS,
        lambda x, bias: (x, bias, 1.5),
    ),
    Case("softmax", ops.softmax, lambda x: F.softmax(x, -1), _one, ROWS, lambda x: (x,)),
    Case(
        "rmsnorm",
        ops.rmsnorm,
        lambda x, w: F.rms_norm(x, x.shape[-1:], w, 1e-6),
        _with_row,
        NORMS,
        lambda x, w: (x, w, 1e-6),
    ),
    Case(
        "layernorm",
        ops.layernorm,
        lambda x, w, b: F.layer_norm(x, x.shape[-1:], w, b),
        _with_rows,
        NORMS,
        lambda x, w, b: (x, w, b, 1e-5),
    ),
    *[
        Case(
            f"cross_entropy_{reduction}",
            lambda x, t, reduction=reduction: ops.cross_entropy(x, t, reduction=reduction),
            _torch_loss(reduction),
            _make_loss,
            LOSS,
            lambda x, t, number=number: (x, t, -100, number, False),
            "cross_entropy",
        )
        for number, reduction in enumerate(("none", "mean", "sum"))
    ],
    *[
        Case(
            f"rope{'_interleaved' * interleaved}",
            _our_rope(interleaved),
            _torch_rope(interleaved),
            _one,
            [(1, 1, 1, 2), (2, 3, 7, 6), (5, 8), (1, 2, 33, 64), (2, 0, 4, 8)],
            lambda x, interleaved=interleaved: (x, *tables(x, x.shape[-2], x.shape[-1]), 0, interleaved, False),
            "rope",
        )
        for interleaved in (False, True)
    ],
    *[
        Case(
            f"attention{'_causal' * causal}",
            lambda q, k, v, causal=causal: ops.attention(q, k, v, causal),
            _torch_attention(causal),
            _make_heads,
            HEADS,
            lambda q, k, v, causal=causal: (q, k, v, causal, 1 / math.sqrt(q.shape[-1])),
            "attention",
        )
        for causal in (False, True)
    ],
]

BY_NAME = {case.name: case for case in CASES}
each_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
each_device = pytest.mark.parametrize("device", DEVICES)
each_float = pytest.mark.parametrize("dtype", FLOATS, ids=lambda dtype: str(dtype).removeprefix("torch."))


def operator(case: Case) -> Any:
    return getattr(torch.ops.ironhorse, case.operator or case.name).default


def distance(got: Tensor, want: Tensor) -> float:
    """‖got - want‖ / ‖want‖ in float64."""
    got, want = got.detach().double(), want.detach().double()
    scale = want.norm().item()
    return (got - want).norm().item() / (scale or 1.0)


def allowed(theirs: Tensor, true: Tensor) -> float:
    """The distance from the truth that a result of ours may have beside torch's own in the same type."""
    dtype = theirs.dtype
    if dtype in LOW:
        # A result rounded once may be half a unit off, also where torch's few elements happen to be nearer.
        return max(2 * distance(theirs, true) + FLOOR * torch.finfo(dtype).eps, torch.finfo(dtype).eps / 2)
    return 1e-5 if dtype is torch.float32 else 1e-12


def run(function: Callable[..., Tensor], arguments: tuple[Any, ...], d_y: Tensor | None = None) -> list[Tensor]:
    """The result and the gradients of all tensors that want one."""
    y = function(*arguments)
    inputs = [a for a in tensors(arguments) if a.requires_grad]
    d_y = torch.ones_like(y) if d_y is None else d_y.to(y.dtype)
    return [y, *torch.autograd.grad(y, inputs, d_y)]
