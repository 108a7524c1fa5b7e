"""Tensors by name, made when they are looked at as numpy arrays or torch tensors; and back to what files hold."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from ..errors import FormatError, InvalidValueError, NotAvailableError
from ..formats.bf16 import from_bf16, join_master, to_bf16
from ..formats.header import Array
from .tables import Printed, table

Framework = Literal["numpy", "torch"]
Bf16 = Literal["float32", "bits", "ml_dtypes"]

# The names of safetensors, which are the names here for what a file holds.
_NAME_OF = {
    "f8": "F64", "f4": "F32", "f2": "F16", "i8": "I64", "i4": "I32", "i2": "I16", "i1": "I8",
    "u8": "U64", "u4": "U32", "u2": "U16", "u1": "U8", "b1": "BOOL",
}  # fmt: skip


@dataclass(frozen=True)
class Raw:
    """A tensor as a file holds it: `array` may be a view of the mapped file; bf16 is uint16 with dtype "BF16".

    With a `residual` it is an F32 tensor, kept as bf16 in `array` and the 16 bits that those lack; `whole` joins them.
    """

    array: Array
    dtype: str
    residual: Array | None = None

    def whole(self) -> Raw:
        """The same without a residual."""
        return self if self.residual is None else Raw(join_master(self.array, self.residual), self.dtype)

    @staticmethod
    def of(array: Array) -> Raw:
        """The type that numpy says."""
        return Raw(array, _NAME_OF[array.dtype.str[1:]])

    def f32_or_bits(self) -> Array:
        """For writers of .bin files: f32, or bf16 as bits."""
        return self.array if self.dtype == "BF16" else np.asarray(self.array, np.float32)


@dataclass(frozen=True)
class Maker:
    """How arrays come out."""

    framework: Framework
    bf16: Bf16

    def check(self) -> Maker:
        """Refuses what is not known or not installed, before a file is opened."""
        if self.framework not in ("numpy", "torch"):
            raise InvalidValueError(f'load: framework is {self.framework!r}; expected "numpy" or "torch"')
        if self.bf16 not in ("float32", "bits", "ml_dtypes"):
            raise InvalidValueError(f'load: bf16 is {self.bf16!r}; expected "float32", "bits" or "ml_dtypes"')
        module = "torch" if self.framework == "torch" else "ml_dtypes" if self.bf16 == "ml_dtypes" else "numpy"
        try:
            __import__(module)
        except ImportError:
            raise NotAvailableError(f"load: {module} is not installed; pip install {module}") from None
        return self

    def make(self, raw: Raw) -> Any:
        """The array of one tensor."""
        raw = raw.whole()
        if self.framework == "torch":
            return _to_torch(raw)
        if raw.dtype != "BF16" or self.bf16 == "bits":
            return raw.array
        if self.bf16 == "float32":
            return from_bf16(raw.array)
        import ml_dtypes

        return raw.array.view(ml_dtypes.bfloat16)


class Tensors(MutableMapping[str, Any], Printed):
    """name -> array, each made when it is first asked for and kept from then on.

    An array that needs no conversion is a view of the mapped file; what is written to it stays in memory. Tensors may
    be replaced, added and deleted; `ironhorse.save` writes what is here.
    """

    def __init__(self, raws: Mapping[str, Raw], maker: Maker) -> None:
        self._raws = dict(raws)
        self._made: dict[str, Any] = {}
        self._maker = maker

    def __getitem__(self, name: str) -> Any:
        if name not in self._made:
            self._made[name] = self._maker.make(self._raws[name])
        return self._made[name]

    def __setitem__(self, name: str, value: Any) -> None:
        self._made[name] = value
        self._raws.setdefault(name, Raw(np.zeros(0, np.float32), ""))  # keeps the order; its type is not known

    def __delitem__(self, name: str) -> None:
        del self._raws[name]
        self._made.pop(name, None)

    def __iter__(self) -> Iterator[str]:
        return iter(self._raws)

    def __len__(self) -> int:
        return len(self._raws)

    def __contains__(self, name: object) -> bool:
        return name in self._raws

    def __eq__(self, other: object) -> bool:
        return self is other  # comparing arrays gives arrays, and would make all of them

    __hash__ = object.__hash__

    def raw(self, name: str) -> Raw:
        """The tensor as a file would hold it; one that was bf16 in its file is bf16 again."""
        if name not in self._made:
            return self._raws[name].whole()
        return encode(name, self._made[name], self._raws[name].dtype or None)

    def shape(self, name: str) -> tuple[int, ...]:
        """Its sizes, without making it."""
        return tuple(self._made[name].shape if name in self._made else self._raws[name].array.shape)

    def stored(self, name: str) -> str:
        """Its type in the file: F32, BF16, I32, ...; empty for one that was added."""
        return self._raws[name].dtype

    def under(self, prefix: str) -> Tensors:
        """Those whose names start with `prefix`, which is taken off. The arrays are the same ones."""
        raws = {n.removeprefix(prefix): raw for n, raw in self._raws.items() if n.startswith(prefix)}
        part = Tensors(raws, self._maker)
        part._made = {n.removeprefix(prefix): value for n, value in self._made.items() if n.startswith(prefix)}
        return part

    def remade(self, maker: Maker) -> Tensors:
        """What the file holds, made in another way; nothing that was changed here."""
        return Tensors(self._raws, maker)

    def rows(self, most: int | None = None) -> str:
        """A table of names, shapes and types."""
        names = list(self)[:most]
        text = table(("tensor", "shape", "stored"), ((n, str(list(self.shape(n))), self.stored(n)) for n in names))
        left = len(self) - len(names)
        return text + (f"\n... and {left} more; print(x.tensors) shows all" if left else "")

    def __str__(self) -> str:
        return self.rows()

    def __repr__(self) -> str:
        return f"<Tensors: {len(self)}>"


def encode(name: str, value: Any, stored: str | None = None) -> Raw:
    """An array or torch tensor as a file holds it; `stored` is the type it had in its file.

    bf16 are torch's and ml_dtypes' bfloat16, and, where `stored` says BF16, uint16 (its bits) and float32.
    """
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.Tensor):
        return _from_torch(name, value, stored)
    if isinstance(value, np.ma.MaskedArray):
        raise FormatError(f"{name}: a masked array, and files hold no masks; x.filled(value) gives a plain one")
    array = np.asarray(value)
    if array.dtype.name == "bfloat16":
        return Raw(array.view(np.uint16), "BF16")
    if stored == "BF16" and array.dtype == np.uint16:
        return Raw(array, "BF16")
    if stored == "BF16" and array.dtype == np.float32:
        return Raw(to_bf16(array), "BF16")
    if array.dtype.str[1:] not in _NAME_OF:
        raise FormatError(f"{name}: {array.dtype} cannot be saved; give floats, integers or bool")
    return Raw.of(array)


def _from_torch(name: str, tensor: Any, stored: str | None) -> Raw:
    import torch

    try:
        tensor = tensor.detach().cpu().resolve_conj().resolve_neg()
        if tensor.dtype == torch.bfloat16:
            return Raw(tensor.contiguous().view(torch.int16).numpy().view(np.uint16), "BF16")
        return encode(name, tensor.numpy(), stored)
    except (RuntimeError, TypeError, NotImplementedError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise FormatError(f"{name}: this {tensor.dtype} tensor cannot be saved ({reason})") from None


def _to_torch(raw: Raw) -> Any:
    import torch

    array = raw.array
    usable = array.flags.writeable and array.flags.aligned and all(stride >= 0 for stride in array.strides)
    array = array if usable else array.copy()
    if raw.dtype == "BF16":
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    if array.dtype.kind == "u" and array.itemsize > 1 and not hasattr(torch, array.dtype.name):
        array = array.astype({2: np.int32, 4: np.int64, 8: np.int64}[array.itemsize])  # torch before 2.3
    return torch.from_numpy(array)
