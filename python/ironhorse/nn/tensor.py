"""An array with a type and, if it is a parameter, a gradient."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import Enum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .. import _native
from ..errors import InvalidValueError

Axis = int | tuple[int, ...] | None
Array = NDArray[Any]
Work = Callable[..., Any]


class DType(Enum):
    """The type of the elements."""

    F32 = "float32"
    F16 = "float16"
    BF16 = "bfloat16"
    I32 = "int32"
    I64 = "int64"

    def to_numpy(self) -> np.dtype[Any]:
        """numpy's type; it has no bfloat16, whose values are kept as float32."""
        return np.dtype(np.float32 if self is DType.BF16 else self.value)


class Tensor:
    """An array in row-major order: `.data`. Its memory is its own, also if it was made from an array.

    `grad` is None until a backward made one, then a Tensor of the same shape to which every backward adds.
    """

    __slots__ = ("_data", "_dtype", "grad")
    __array_priority__ = 1000  # numpy's operators leave `array * tensor` to us

    def __init__(self, data: Any, dtype: DType = DType.F32) -> None:
        self._data: Array = np.array(data, dtype=dtype.to_numpy(), order="C")
        self._dtype = dtype
        self.grad: Tensor | None = None

    @classmethod
    def _wrap(cls, data: Array, dtype: DType = DType.F32) -> Tensor:
        """Of an array that is right already, without a copy."""
        made = cls.__new__(cls)
        made._data, made._dtype, made.grad = data, dtype, None
        return made

    def _of(self, data: Any) -> Tensor:
        """A result of the same type."""
        return Tensor._wrap(np.asarray(data, dtype=self._dtype.to_numpy(), order="C"), self._dtype)

    @property
    def data(self) -> Array:
        """The elements; a change is a change of the tensor."""
        return self._data

    @property
    def shape(self) -> tuple[int, ...]:
        """The sizes."""
        return self._data.shape

    @property
    def dtype(self) -> DType:
        """The type of the elements."""
        return self._dtype

    @property
    def numel(self) -> int:
        """How many elements."""
        return self._data.size

    @classmethod
    def zeros(cls, shape: Sequence[int], dtype: DType = DType.F32) -> Tensor:
        """All 0."""
        return cls._wrap(np.zeros(shape, dtype.to_numpy()), dtype)

    @classmethod
    def ones(cls, shape: Sequence[int], dtype: DType = DType.F32) -> Tensor:
        """All 1."""
        return cls._wrap(np.ones(shape, dtype.to_numpy()), dtype)

    @classmethod
    def randn(cls, shape: Sequence[int], dtype: DType = DType.F32, *, seed: int | None = None) -> Tensor:
        """Normally distributed, deviation 1; see `randn_std`."""
        return cls.randn_std(shape, dtype, 1.0, seed=seed)

    @classmethod
    def randn_std(
        cls, shape: Sequence[int], dtype: DType = DType.F32, std: float = 1.0, *, seed: int | None = None
    ) -> Tensor:
        """Normally distributed around 0. Without a seed they come from `np.random`, which `np.random.seed` sets."""
        values = normal(shape, std, generator(seed))
        return cls._wrap(values.astype(dtype.to_numpy(), copy=False), dtype)

    @classmethod
    def from_numpy(cls, arr: Any, dtype: DType = DType.F32) -> Tensor:
        """A copy of an array, converted to `dtype`."""
        return cls(arr, dtype)

    def numpy(self) -> Array:
        """The same as `.data`."""
        return self._data

    def clone(self) -> Tensor:
        """A copy, without the gradient."""
        return Tensor._wrap(self._data.copy(), self._dtype)

    def zero_grad(self) -> None:
        """The gradient becomes 0, if there is one."""
        if self.grad is not None:
            self.grad._data.fill(0)

    def reshape(self, shape: Sequence[int]) -> Tensor:
        """The same elements in another shape; a copy."""
        return self._of(_named("reshape", self._data.reshape, tuple(shape)).copy())

    def transpose(self, axes: Sequence[int] | None = None) -> Tensor:
        """The axes in this order, or reversed."""
        return self._of(_named("transpose", self._data.transpose, axes).copy())

    def add(self, other: Tensor | float) -> Tensor:
        """Element by element, with numpy's broadcasting."""
        return self._binary("add", other, np.add, _native.add)

    def sub(self, other: Tensor | float) -> Tensor:
        """Element by element."""
        return self._binary("sub", other, np.subtract)

    def mul(self, other: Tensor | float) -> Tensor:
        """Element by element."""
        return self._binary("mul", other, np.multiply, _native.mul)

    def div(self, other: Tensor | float) -> Tensor:
        """Element by element."""
        return self._binary("div", other, np.divide)

    def _binary(self, name: str, other: Any, by: Work, fast: Work | None = None) -> Tensor:
        right = other._data if isinstance(other, Tensor) else np.asarray(other)
        if fast is not None and self._is_f32() and right.dtype == np.float32 and right.shape == self._data.shape:
            return Tensor._wrap(fast(self._data, right))
        return self._of(_named(name, by, self._data, right))

    def _is_f32(self) -> bool:
        return self._data.dtype == np.float32

    def scale(self, scalar: float) -> Tensor:
        """Times a number."""
        if self._is_f32():
            return self._of(_native.scale(self._data, None, float(scalar)))
        return self._of(self._data * scalar)

    def neg(self) -> Tensor:
        """Times -1."""
        return self._of(-self._data)

    def exp(self) -> Tensor:
        """e to the power of each."""
        return self._of(np.exp(self._data))

    def log(self) -> Tensor:
        """Natural logarithms."""
        return self._of(np.log(self._data))

    def sqrt(self) -> Tensor:
        """Square roots."""
        return self._of(np.sqrt(self._data))

    def pow(self, exponent: float) -> Tensor:
        """To the power of `exponent`."""
        return self._of(np.power(self._data, exponent))

    def sum(self, axis: Axis = None, keepdims: bool = False) -> Tensor:
        """Over an axis, or all."""
        return self._of(_named("sum", np.sum, self._data, axis, keepdims=keepdims))

    def mean(self, axis: Axis = None, keepdims: bool = False) -> Tensor:
        """Over an axis, or all."""
        return self._of(_named("mean", np.mean, self._data, axis, keepdims=keepdims))

    def max(self, axis: Axis = None, keepdims: bool = False) -> Tensor:
        """Over an axis, or all."""
        return self._of(_named("max", np.max, self._data, axis, keepdims=keepdims))

    def argmax(self, axis: int | None = -1) -> Tensor:
        """Where the largest is along an axis, the first among equals; I64."""
        found = _named("argmax", np.argmax, self._data, axis)
        return Tensor._wrap(np.asarray(found, dtype=np.int64), DType.I64)

    def silu(self, *, device: str = "auto") -> Tensor:
        """x / (1 + e^-x)."""
        return self._of(_native.silu(self._single(), None, device))

    def softmax(self, axis: int = -1, *, device: str = "auto") -> Tensor:
        """Along an axis."""
        if self._data.ndim == 0:
            raise InvalidValueError("softmax: the tensor has no dimensions")
        moved = _named("softmax", np.moveaxis, self._single(), axis, -1)
        return self._of(np.moveaxis(_native.softmax(moved, None, None, None, device), -1, axis))

    def matmul(self, other: Tensor, *, device: str = "auto") -> Tensor:
        """The product of matrices; of stacks of them, one by one."""
        a, b = self._data, other._data
        if a.dtype == b.dtype == np.float32 and a.ndim == b.ndim == 2:
            return self._of(_native.gemm(a, b, device=device))
        if a.dtype == b.dtype == np.float32 and a.ndim == b.ndim == 3 and a.shape[0] == b.shape[0]:
            return self._of(_native.gemm_batched(a, b, device=device))
        return self._of(_named("matmul", np.matmul, a, b))

    def _single(self) -> Array:
        return self._data if self._is_f32() else self._data.astype(np.float32)

    def __add__(self, other: Tensor | float) -> Tensor:
        return self.add(other)

    __radd__ = __add__

    def __sub__(self, other: Tensor | float) -> Tensor:
        return self.sub(other)

    def __rsub__(self, other: float) -> Tensor:
        return self.neg().add(other)

    def __mul__(self, other: Tensor | float) -> Tensor:
        return self.mul(other) if isinstance(other, (Tensor, np.ndarray)) else self.scale(other)

    __rmul__ = __mul__

    def __truediv__(self, other: Tensor | float) -> Tensor:
        return self.div(other)

    def __rtruediv__(self, other: float) -> Tensor:
        return self._of(np.divide(other, self._data))

    def __pow__(self, exponent: float) -> Tensor:
        return self.pow(exponent)

    def __neg__(self) -> Tensor:
        return self.neg()

    def __matmul__(self, other: Tensor) -> Tensor:
        return self.matmul(other)

    def __getitem__(self, key: Any) -> Any:
        found = self._data[key._data if isinstance(key, Tensor) else key]
        return self._of(found.copy()) if isinstance(found, np.ndarray) else found

    def __setitem__(self, key: Any, value: Any) -> None:
        self._data[key] = value._data if isinstance(value, Tensor) else value

    def __len__(self) -> int:
        return len(self._data)

    def __float__(self) -> float:
        return float(self._data)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:
        return np.array(self._data, dtype=dtype) if copy else np.asarray(self._data, dtype=dtype)

    def __repr__(self) -> str:
        return f"Tensor(shape={self.shape}, dtype={self._dtype.name})"


def _named(name: str, work: Work, *arguments: Any, **named: Any) -> Any:
    """numpy's result, or its complaint as ours."""
    try:
        return work(*arguments, **named)
    except ValueError as error:  # an axis that does not exist is one too
        raise InvalidValueError(f"{name}: {error}") from None


Seed = int | np.random.Generator | None


def generator(seed: Seed) -> np.random.Generator:
    """Of a seed; without one, of numpy's global generator, so that `np.random.seed` decides."""
    if isinstance(seed, np.random.Generator):
        return seed
    return np.random.default_rng(np.random.randint(0, 2**32, size=4, dtype=np.uint32) if seed is None else seed)


def normal(shape: Sequence[int], std: float, rng: np.random.Generator) -> NDArray[np.float32]:
    """N(0, std) in f32."""
    values = rng.standard_normal(tuple(shape), dtype=np.float32)
    values *= np.float32(std)
    return values
