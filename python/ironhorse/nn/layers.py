"""The layers that a model is made of.

Inside, layers pass numpy arrays to each other: `_fwd` and `_bwd` are `forward` and `backward` without the wrapping.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .. import _native, ops
from ..errors import InvalidValueError, IronhorseError
from .checks import check_number, check_text
from .tensor import Seed, Tensor, as_array, generator, normal

F32 = NDArray[np.float32]
I32 = NDArray[np.int32]

# The initial standard deviation of Hugging Face's Mixtral and Llama, of `ironhorse.reference` and of the engine.
INIT_STD = 0.02


def check_device(device: str, who: str) -> str:
    """Raises NotAvailableError, with the reason, unless ops run there, InvalidValueError if it is not a device name."""
    check_text(who, device)
    try:
        ops.silu(np.zeros(1, np.float32), device=device)
    except IronhorseError as error:
        raise type(error)(f"{who}: {str(error).removeprefix('silu: ')}") from None
    return device


def floats(x: Any, op: str, name: str, last: int | None = None) -> F32:
    """The float32 array of a tensor, or of anything that numpy converts; its last dimension must be `last`."""
    array = as_array(x, op, name)
    if array.dtype != np.float32:
        if array.dtype.kind not in "fiu":
            raise InvalidValueError(f"{op}: `{name}` is of type {array.dtype}, expected numbers")
        array = array.astype(np.float32)
    if last is not None and (array.ndim == 0 or array.shape[-1] != last):
        raise InvalidValueError(f"{op}: `{name}` is {list(array.shape)}, expected [..., {last}]")
    return array


def kept_floats(x: Any, op: str, name: str, last: int | None = None) -> F32:
    """Like `floats`, but a copy if the caller could change it: the layer keeps the array until its backward."""
    array = floats(x, op, name, last)
    given = x._data if isinstance(x, Tensor) else x
    return array.copy() if not isinstance(given, (list, tuple)) and np.may_share_memory(array, given) else array


def token_ids(x: Any, op: str, name: str, vocab: int) -> I32:
    """Token ids in 0..vocab as int32; floats are accepted if they are whole numbers."""
    array = as_array(x, op, name)
    if array.size == 0:
        raise InvalidValueError(f"{op}: `{name}` is {list(array.shape)}: there are no tokens")
    if array.dtype.kind not in "iuf":
        raise InvalidValueError(f"{op}: `{name}` is of type {array.dtype}, expected token numbers")
    if not (array.min() >= 0 and array.max() < vocab):  # also if there is a NaN
        at = int(np.argmin((array.ravel() >= 0) & (array.ravel() < vocab)))
        found = array.ravel()[at]
        raise InvalidValueError(f"{op}: `{name}` has {found} at position {at}, expected 0 to {vocab - 1}")
    ids = array.astype(np.int32)
    if array.dtype.kind == "f" and (ids != array).any():
        at = int(np.argmax((ids != array).ravel()))
        raise InvalidValueError(f"{op}: `{name}` has {array.ravel()[at]} at position {at}, expected a whole number")
    return ids


def give_grad(parameter: Tensor, grad: F32) -> None:
    """Adds a new array to the gradient."""
    if parameter.grad is None:
        parameter.grad = Tensor._wrap(grad)
    else:
        kept = parameter.grad._data
        ops.add(kept, grad, kept)


class Layer(ABC):
    """The interface of a layer."""

    device: str = "auto"

    @abstractmethod
    def forward(self, x: Any) -> Any:
        """The result for x; keeps what `backward` needs."""

    @abstractmethod
    def backward(self, grad_output: Any) -> Tensor:
        """Takes the gradient of the result, adds to the gradients of the parameters, and returns the gradient of x."""

    @abstractmethod
    def parameters(self) -> list[Tensor]:
        """The tensors that are trained."""

    def __call__(self, x: Any) -> Any:
        return self.forward(x)

    def zero_grad(self) -> None:
        """All gradients become 0."""
        for parameter in self.parameters():
            parameter.zero_grad()

    def to(self, device: str) -> Any:
        """Computes on `device` from now on. Returns the layer."""
        check_device(device, f"{type(self).__name__}.to")
        for layer in self._layers():
            layer.device = device
        return self

    def _layers(self) -> Iterator[Layer]:
        """This layer and all layers inside it."""
        yield self
        for value in vars(self).values():
            for inner in value if isinstance(value, list) else (value,):
                if isinstance(inner, Layer):
                    yield from inner._layers()

    def _kept(self, what: Any) -> Any:
        if what is None:
            raise InvalidValueError(f"{type(self).__name__}: backward without a forward before it")
        return what


class Embedding(Layer):
    """The row of a table for each token: (...) -> (..., hidden_dim)."""

    def __init__(self, vocab_size: int, hidden_dim: int, *, seed: Seed = None, device: str = "auto") -> None:
        check_sizes("Embedding", vocab_size=vocab_size, hidden_dim=hidden_dim)
        self.vocab_size, self.hidden_dim = vocab_size, hidden_dim
        self.weight = Tensor._wrap(normal((vocab_size, hidden_dim), INIT_STD, generator(seed)))
        self.device = check_device(device, "Embedding")
        self._ids: I32 | None = None

    def forward(self, x: Any) -> Tensor:
        """x: token numbers."""
        return Tensor._wrap(self._fwd(token_ids(x, "Embedding", "x", self.vocab_size)))

    def forward_ids(self, token_ids: Sequence[int]) -> Tensor:
        """(tokens, hidden_dim)."""
        return self.forward(token_ids)

    def _fwd(self, ids: I32) -> F32:
        self._ids = ids
        return self.weight._data.take(ids, axis=0)

    def backward(self, grad_output: Any) -> Tensor:
        """Token numbers have no gradient: what is returned is 0."""
        grad = floats(grad_output, "Embedding.backward", "grad_output", self.hidden_dim)
        self._bwd(grad)
        return Tensor.zeros(grad.shape)

    def _bwd(self, grad: F32) -> None:
        ids = self._kept(self._ids)
        if grad.shape != (*ids.shape, self.hidden_dim):
            expected = [*ids.shape, self.hidden_dim]
            raise InvalidValueError(f"Embedding.backward: `grad_output` is {list(grad.shape)}, expected {expected}")
        if self.weight.grad is None:
            self.weight.grad = Tensor.zeros(self.weight.shape)
        rows = grad.reshape(-1, self.hidden_dim)
        ops.scatter_add(rows, ids.reshape(-1), self.weight.grad._data, device=self.device)

    def parameters(self) -> list[Tensor]:
        """The table."""
        return [self.weight]


class RMSNorm(Layer):
    """x / sqrt(mean(x²) + eps) · weight, over the last dimension."""

    def __init__(self, dim: int, eps: float = 1e-6, *, device: str = "auto") -> None:
        check_sizes("RMSNorm", dim=dim)
        self.dim, self.eps = dim, check_number("RMSNorm", "eps", eps)
        self.weight = Tensor.ones((dim,))
        self.device = check_device(device, "RMSNorm")
        self._last: tuple[F32, F32] | None = None  # x, 1 / root mean square

    def forward(self, x: Any) -> Tensor:
        """(..., dim) -> (..., dim)."""
        return Tensor._wrap(self._fwd(kept_floats(x, "RMSNorm", "x", self.dim)))

    def _fwd(self, x: F32) -> F32:
        y, rstd = _native.nn_rmsnorm(x, self.weight._data, eps=self.eps, device=self.device)
        self._last = x, rstd
        return y

    def backward(self, grad_output: Any) -> Tensor:
        """The gradient of x."""
        return Tensor._wrap(self._bwd(floats(grad_output, "RMSNorm.backward", "grad_output", self.dim)))

    def _bwd(self, grad: F32) -> F32:
        x, rstd = self._kept(self._last)
        d_x, d_weight = _native.nn_rmsnorm_bwd(grad, x, self.weight._data, rstd, device=self.device)
        give_grad(self.weight, d_weight)
        return d_x

    def parameters(self) -> list[Tensor]:
        """The scale."""
        return [self.weight]


class Linear(Layer):
    """x weightᵀ + bias: (..., in_features) -> (..., out_features)."""

    def __init__(
        self, in_features: int, out_features: int, bias: bool = False, *, seed: Seed = None, device: str = "auto"
    ) -> None:
        check_sizes("Linear", in_features=in_features, out_features=out_features)
        weight = normal((out_features, in_features), INIT_STD, generator(seed))
        self._setup(weight, Tensor.zeros((out_features,)) if bias else None, check_device(device, "Linear"))

    def _setup(self, weight: F32, bias: Tensor | None, device: str) -> None:
        self.out_features, self.in_features = weight.shape
        self.use_bias, self.bias = bias is not None, bias
        self.weight = Tensor._wrap(weight)
        self.device = device
        self._x: F32 | None = None

    @classmethod
    def _view(cls, weight: F32, device: str) -> Linear:
        """A layer whose weight is a view of another array: an expert's part of a stack."""
        made = cls.__new__(cls)
        made._setup(weight, None, device)
        return made

    def forward(self, x: Any) -> Tensor:
        """(..., in_features) -> (..., out_features)."""
        return Tensor._wrap(self._fwd(kept_floats(x, "Linear", "x", self.in_features)))

    def _fwd(self, x: F32) -> F32:
        self._x = x
        y = _native.nn_matmul(x, self.weight._data, None, False, True, self.device)
        if self.bias is not None:
            y += self.bias._data
        return y

    def backward(self, grad_output: Any) -> Tensor:
        """The gradient of x."""
        return Tensor._wrap(self._bwd(floats(grad_output, "Linear.backward", "grad_output", self.out_features)))

    def _bwd(self, grad: F32, add_to: F32 | None = None) -> F32:
        """The gradient of x, added to `add_to` if that is given."""
        x, weight = self._kept(self._x), self.weight
        if grad.shape[:-1] != x.shape[:-1]:
            expected = [*x.shape[:-1], self.out_features]
            raise InvalidValueError(f"Linear.backward: `grad_output` is {list(grad.shape)}, expected {expected}")
        if weight.grad is None:
            weight.grad = Tensor._wrap(_native.nn_matmul(grad, x, None, True, False, self.device))
        else:
            _native.nn_matmul(grad, x, weight.grad._data, True, False, self.device)
        if self.bias is not None:
            give_grad(self.bias, grad.reshape(-1, self.out_features).sum(axis=0))
        return _native.nn_matmul(grad, weight._data, add_to, False, False, self.device)

    def parameters(self) -> list[Tensor]:
        """The weight (out_features, in_features), and the bias if there is one."""
        return [self.weight] if self.bias is None else [self.weight, self.bias]


class SwiGLU(Layer):
    """down(silu(gate(x)) · up(x)): (..., hidden_dim) -> (..., hidden_dim)."""

    def __init__(self, hidden_dim: int, ffn_dim: int, *, seed: Seed = None, device: str = "auto") -> None:
        check_sizes("SwiGLU", hidden_dim=hidden_dim, ffn_dim=ffn_dim)
        rng = generator(seed)
        self.hidden_dim, self.ffn_dim, self.device = hidden_dim, ffn_dim, check_device(device, "SwiGLU")
        self.gate = Linear(hidden_dim, ffn_dim, seed=rng, device=device)
        self.up = Linear(hidden_dim, ffn_dim, seed=rng, device=device)
        self.down = Linear(ffn_dim, hidden_dim, seed=rng, device=device)
        self._last: tuple[F32, F32] | None = None  # gate(x), up(x)

    @classmethod
    def _view(cls, gate: F32, up: F32, down: F32, device: str) -> SwiGLU:
        """A layer whose weights are views of other arrays."""
        made = cls.__new__(cls)
        made.ffn_dim, made.hidden_dim = gate.shape
        made.gate, made.up, made.down = (Linear._view(part, device) for part in (gate, up, down))
        made.device, made._last = device, None
        return made

    def forward(self, x: Any) -> Tensor:
        """(..., hidden_dim) -> (..., hidden_dim)."""
        return Tensor._wrap(self._fwd(kept_floats(x, "SwiGLU", "x", self.hidden_dim)))

    def _fwd(self, x: F32) -> F32:
        self._last = gate, up = self.gate._fwd(x), self.up._fwd(x)
        return self.down._fwd(ops.swiglu(gate, up, device=self.device))

    def backward(self, grad_output: Any) -> Tensor:
        """The gradient of x."""
        return Tensor._wrap(self._bwd(floats(grad_output, "SwiGLU.backward", "grad_output", self.hidden_dim)))

    def _bwd(self, grad: F32) -> F32:
        gate, up = self._kept(self._last)
        d_gate, d_up = _native.nn_swiglu_bwd(self.down._bwd(grad), gate, up, device=self.device)
        return self.up._bwd(d_up, self.gate._bwd(d_gate))

    def parameters(self) -> list[Tensor]:
        """Those of gate, up and down."""
        return self.gate.parameters() + self.up.parameters() + self.down.parameters()


def check_sizes(layer: str, **sizes: int) -> None:
    """Raises InvalidValueError unless all sizes are integers of at least 1."""
    for name, size in sizes.items():
        if isinstance(size, bool) or not isinstance(size, (int, np.integer)) or size < 1:
            raise InvalidValueError(f"{layer}: {name} is {size!r}, expected a whole number of at least 1")
