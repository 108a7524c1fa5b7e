"""An array with a type and, if it is a parameter, a gradient."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import Enum
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .. import ops
from ..errors import InvalidValueError
from .checks import check_count, check_number, check_real, check_text
from .whole import check_fits

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

    @classmethod
    def of(cls, dtype: DType | str) -> DType:
        """A type, or its name here ("F32") or in numpy ("float32")."""
        if isinstance(dtype, cls):
            return dtype
        for one in cls:
            if dtype in (one.value, one.name):
                return one
        names = ", ".join(one.value for one in cls)
        raise InvalidValueError(f"Tensor: dtype is {dtype!r}; expected one of {names}")

    def to_numpy(self) -> np.dtype[Any]:
        """numpy's type; it has no bfloat16, whose values are kept as float32."""
        return np.dtype(np.float32 if self is DType.BF16 else self.value)


WHOLE = (DType.I32, DType.I64)


class Tensor:
    """An array in row-major order: `.data`. Its memory is its own, also if it was made from an array.

    `grad` is None until a backward made one, then a Tensor of the same shape to which every backward adds.
    """

    __slots__ = ("_data", "_dtype", "grad")
    __array_priority__ = 1000  # `array * tensor` calls our operator, not numpy's

    def __init__(self, data: Any, dtype: DType | str = DType.F32) -> None:
        self._dtype = DType.of(dtype)
        self._data: Array = _fitting(as_array(data, "Tensor", "data"), self._dtype, "Tensor").copy()
        self.grad: Tensor | None = None

    @classmethod
    def _wrap(cls, data: Array, dtype: DType = DType.F32) -> Tensor:
        """Wraps an array that already has the right type and layout, without a copy."""
        made = cls.__new__(cls)
        made._data, made._dtype, made.grad = data, dtype, None
        return made

    def _of(self, data: Any) -> Tensor:
        """A result as a tensor of the same type; fractions computed from integers become F32."""
        data = np.asarray(data)
        if self._dtype in WHOLE:
            dtype = DType.F32 if data.dtype.kind == "f" else self._dtype
            return Tensor._wrap(np.ascontiguousarray(_fitting(data, dtype, "Tensor")).reshape(data.shape), dtype)
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
    def zeros(cls, shape: Sequence[int], dtype: DType | str = DType.F32) -> Tensor:
        """All 0."""
        return cls._wrap(_named("zeros", np.zeros, shape, DType.of(dtype).to_numpy()), DType.of(dtype))

    @classmethod
    def ones(cls, shape: Sequence[int], dtype: DType | str = DType.F32) -> Tensor:
        """All 1."""
        return cls._wrap(_named("ones", np.ones, shape, DType.of(dtype).to_numpy()), DType.of(dtype))

    @classmethod
    def randn(cls, shape: Sequence[int], dtype: DType | str = DType.F32, *, seed: int | None = None) -> Tensor:
        """Normally distributed, deviation 1; see `randn_std`."""
        return cls.randn_std(shape, dtype, 1.0, seed=seed)

    @classmethod
    def randn_std(
        cls, shape: Sequence[int], dtype: DType | str = DType.F32, std: float = 1.0, *, seed: int | None = None
    ) -> Tensor:
        """Normally distributed around 0. Without a seed they come from `np.random`, which `np.random.seed` sets."""
        kind = DType.of(dtype)
        if kind in WHOLE:
            raise InvalidValueError(f"randn: dtype is {kind.value}, expected one of fractions")
        values = _named("randn", normal, shape, check_number("randn", "std", std), generator(seed))
        return cls._wrap(values.astype(kind.to_numpy(), copy=False), kind)

    @classmethod
    def from_numpy(cls, arr: Any, dtype: DType | str = DType.F32) -> Tensor:
        """A copy of an array, converted to `dtype`. Values that it cannot hold, 0.5 or 2³¹ as int32, are refused."""
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
        return self._of(_named("reshape", self._data.reshape, shape).copy())

    def transpose(self, axes: Sequence[int] | None = None) -> Tensor:
        """The axes in this order, or reversed."""
        return self._of(_named("transpose", self._data.transpose, axes).copy())

    def add(self, other: Tensor | float) -> Tensor:
        """Element by element, with numpy's broadcasting."""
        return self._binary("add", other, np.add, ops.add)

    def sub(self, other: Tensor | float) -> Tensor:
        """Element by element."""
        return self._of(_arithmetic("sub", np.subtract, self._data, _operand(other, "sub"), bound=np.add))

    def mul(self, other: Tensor | float) -> Tensor:
        """Element by element."""
        return self._binary("mul", other, np.multiply, ops.mul)

    def div(self, other: Tensor | float) -> Tensor:
        """Element by element."""
        return self._binary("div", other, np.divide)

    def _binary(self, name: str, other: Any, by: Work, fast: Work | None = None) -> Tensor:
        right = _operand(other, name)
        if fast is not None and self._is_f32() and right.dtype == np.float32 and right.shape == self._data.shape:
            return Tensor._wrap(fast(self._data, right))
        return self._of(_arithmetic(name, by, self._data, right))

    def _is_f32(self) -> bool:
        return self._data.dtype == np.float32

    def scale(self, scalar: float) -> Tensor:
        """Times a number."""
        check_real("scale", "scalar", scalar)
        if self._is_f32():
            return self._of(ops.scale(self._data, float(scalar)))
        return self._of(_arithmetic("scale", np.multiply, self._data, _operand(scalar, "scale")))

    def neg(self) -> Tensor:
        """Times -1."""
        return self._of(_arithmetic("neg", np.negative, self._data, bound=np.positive))

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
        return self._of(_arithmetic("pow", np.power, self._data, _operand(exponent, "pow")))

    def sum(self, axis: Axis = None, keepdims: bool = False) -> Tensor:
        """Over an axis, or all."""
        return self._of(_arithmetic("sum", partial(np.sum, axis=axis, keepdims=keepdims), self._data))

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
        return self._of(ops.silu(self._single(), device=check_text("silu", device)))

    def softmax(self, axis: int = -1, *, device: str = "auto") -> Tensor:
        """Along an axis."""
        if self._data.ndim == 0:
            raise InvalidValueError("softmax: the tensor has no dimensions")
        check_text("softmax", device)
        moved = _named("softmax", np.moveaxis, self._single(), axis, -1)
        return self._of(np.moveaxis(ops.softmax(moved, device=device), -1, axis))

    def matmul(self, other: Tensor | Array, *, device: str = "auto") -> Tensor:
        """The product of matrices; of stacks of them, one by one."""
        a, b = self._data, _operand(other, "matmul")
        check_text("matmul", device)
        if a.dtype == b.dtype == np.float32 and a.ndim == b.ndim == 2:
            return self._of(ops.gemm(a, b, device=device))
        if a.dtype == b.dtype == np.float32 and a.ndim == b.ndim == 3 and a.shape[0] == b.shape[0]:
            return self._of(ops.gemm_batched(a, b, device=device))
        return self._of(_arithmetic("matmul", np.matmul, a, b))

    def _single(self) -> Array:
        return self._data if self._is_f32() else self._data.astype(np.float32)

    __add__ = __radd__ = add
    __sub__ = sub
    __truediv__ = div
    __pow__ = pow
    __neg__ = neg
    __matmul__ = matmul

    def __rsub__(self, other: float) -> Tensor:
        return self._of(_arithmetic("sub", np.subtract, _operand(other, "sub"), self._data, bound=np.add))

    def __mul__(self, other: Tensor | float) -> Tensor:
        if isinstance(other, (int, float, np.number)) and not isinstance(other, bool):
            return self.scale(other)
        return self.mul(other)

    __rmul__ = __mul__

    def __rtruediv__(self, other: float) -> Tensor:
        return self._of(_named("div", np.divide, _operand(other, "div"), self._data))

    def __rmatmul__(self, other: Any) -> Tensor:
        left = _operand(other, "matmul")
        return Tensor(left, DType.F32 if self._dtype in WHOLE and left.dtype.kind == "f" else self._dtype).matmul(self)

    def __getitem__(self, key: Any) -> Any:
        found = self._data[key._data if isinstance(key, Tensor) else key]
        return self._of(found.copy()) if isinstance(found, np.ndarray) else found

    def __setitem__(self, key: Any, value: Any) -> None:
        values = _fitting(_operand(value, "setitem"), self._dtype, "setitem")
        place = key._data if isinstance(key, Tensor) else key
        _named("setitem", self._data.__setitem__, place, values)

    def __len__(self) -> int:
        return len(self._data)

    def __float__(self) -> float:
        return float(self._data)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:
        return np.array(self._data, dtype=dtype) if copy else np.asarray(self._data, dtype=dtype)

    def __repr__(self) -> str:
        return f"Tensor(shape={self.shape}, dtype={self._dtype.name})"


def _named(name: str, work: Work, *arguments: Any, **named: Any) -> Any:
    """numpy's result; its errors become InvalidValueError."""
    try:
        return work(*arguments, **named)
    except (ValueError, TypeError, OverflowError) as error:  # an axis that does not exist is one too
        raise InvalidValueError(f"{name}: {error}") from None


def _arithmetic(name: str, work: Work, *operands: Array, bound: Work | None = None) -> Array:
    """numpy's result; integers that overflow are refused. `bound` as in `check_fits`, by default `work`."""
    found = np.asarray(_named(name, work, *operands))
    check_fits(name, found, (work, bound or work), operands)
    return found


def as_array(x: Any, op: str, name: str) -> Array:
    """The array of a tensor, or of anything that numpy converts."""
    if isinstance(x, Tensor):
        return x._data
    try:
        return np.asarray(x)
    except RuntimeError as error:  # a torch tensor that requires grad
        raise InvalidValueError(f"{op}: `{name}`: {error}") from None
    except (ValueError, TypeError, OverflowError):
        raise InvalidValueError(
            f"{op}: `{name}` is not an array; expected numbers, all rows of the same length"
        ) from None


def _operand(x: Any, op: str) -> Array:
    """The array of an operand, which must be numbers."""
    array = as_array(x, op, "other")
    if array.dtype.kind not in "fiub":
        raise InvalidValueError(f"{op}: `other` is of type {_type_of(x, array)}, expected numbers")
    return array


def _type_of(x: Any, array: Array) -> str:
    return str(array.dtype) if isinstance(x, (np.ndarray, list, tuple)) else type(x).__name__


def _fitting(array: Array, dtype: DType, op: str) -> Array:
    """The array as `dtype`, row-major. Refuses values that the type cannot hold; floats may be rounded."""
    target = dtype.to_numpy()
    if array.dtype == target:
        return np.asarray(array, order="C")
    if array.dtype.kind not in "fiub":
        raise InvalidValueError(f"{op}: the elements are of type {array.dtype}, expected numbers")
    if dtype in WHOLE:
        limit = np.iinfo(target)
        # As floats, 2^63 - 1 would be 2^63; the limits below and above are powers of two, which are exact.
        if array.dtype.kind == "f":
            good = (array >= float(limit.min)) & (array < -float(limit.min)) & (array == np.floor(array))
        elif array.dtype.kind == "u":
            good = array <= np.uint64(limit.max)
        elif array.dtype.kind == "i" and array.dtype.itemsize > target.itemsize:
            good = (array >= limit.min) & (array <= limit.max)
        else:
            good = np.ones(array.shape, bool)
    else:
        with np.errstate(over="ignore"):
            good = np.isfinite(array.astype(target)) | ~np.isfinite(array)
    if not good.all():
        wrong = array.ravel()[int(np.argmin(good.ravel()))]
        raise InvalidValueError(f"{op}: {wrong} does not fit {dtype.value}")
    return array.astype(target, order="C")


Seed = int | np.random.Generator | None


def generator(seed: Seed) -> np.random.Generator:
    """The generator of a seed; without one it is seeded from numpy's global state, so that `np.random.seed` decides."""
    if isinstance(seed, np.random.Generator):
        return seed
    if seed is None:
        return np.random.default_rng(np.random.randint(0, 2**32, size=4, dtype=np.uint32))
    return np.random.default_rng(check_count("random numbers", "seed", seed))


def normal(shape: Sequence[int], std: float, rng: np.random.Generator) -> NDArray[np.float32]:
    """N(0, std) in f32."""
    values = rng.standard_normal(tuple(shape), dtype=np.float32)
    values *= np.float32(std)
    return values
