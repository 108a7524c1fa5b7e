"""Arrays of numpy, torch and any object with `__cuda_array_interface__`, as arguments of a launch."""

from __future__ import annotations

import sys
from functools import cache
from typing import Any, NamedTuple

import numpy as np

from ..errors import InvalidValueError
from ._types import CODES, Param, element, same_bits, size_of


class Place(NamedTuple):
    """An array's memory."""

    address: int
    bytes: int
    code: str | None  # the element type; None if C has no such type
    dtype: str
    device: int | None  # None is the host
    contiguous: bool
    writable: bool
    holder: Any  # keeps the memory alive


def torch_module() -> Any:
    """torch, if the program uses it."""
    return sys.modules.get("torch")


@cache
def _named(dtype: Any) -> tuple[str | None, str]:
    """Code and name of an element type of numpy or torch; one in the other byte order has no code."""
    name = str(dtype).removeprefix("torch.")
    return CODES.get(name), name


def place(value: Any) -> Place | None:
    """The memory of an array; None if the value is not an array."""
    if isinstance(value, np.ndarray):
        if type(value) is not np.ndarray and isinstance(value, np.ma.MaskedArray):
            raise InvalidValueError("a masked array, and kernels ignore masks; x.filled(value) gives a plain one")
        flags = value.flags
        code, name = _named(value.dtype)
        whole = flags.c_contiguous and flags.aligned
        return Place(value.ctypes.data, value.nbytes, code, name, None, whole, flags.writeable, value)
    torch = torch_module()
    if torch is not None and isinstance(value, torch.Tensor):
        code, name = _named(value.dtype)
        kind = value.device.type
        if kind not in ("cpu", "cuda") or value.layout is not torch.strided:
            what = f"a tensor on {value.device} with layout {value.layout}"
            raise InvalidValueError(f"{what}; expected a plain one on cpu or cuda")
        device = value.device.index if kind == "cuda" else None
        nbytes = value.numel() * value.element_size()
        plain = value.is_contiguous() and not value.is_conj() and not value.is_neg()
        return Place(value.data_ptr(), nbytes, code, name, device, plain, True, value)
    interface = getattr(value, "__cuda_array_interface__", None)
    if isinstance(interface, dict):
        dtype = np.dtype(interface["typestr"])
        address, read_only = interface["data"]
        count = int(np.prod(interface["shape"], dtype=np.int64))
        device = getattr(getattr(value, "device", None), "id", 0)
        plain = interface.get("strides") is None
        nbytes, code = count * dtype.itemsize, CODES.get(dtype.name)
        return Place(address, nbytes, code, dtype.name, device, plain, not read_only, value)
    return None


def whole(value: Any) -> Any:
    """A contiguous array with the same elements."""
    if isinstance(value, np.ndarray):
        return np.require(value, requirements=["C", "A"])
    torch = torch_module()
    if torch is not None and isinstance(value, torch.Tensor):
        return value.resolve_conj().resolve_neg().contiguous()
    raise InvalidValueError("an array that is not contiguous; copy it first")


def shown(value: Any) -> str:
    """The type of a value in words, for a message."""
    found = place(value)
    if found is None:
        return f"{value!r}" if isinstance(value, (int, float, bool, type(None))) else f"a {type(value).__name__}"
    article = "an" if found.dtype[0] in "aeiou" and not found.dtype.startswith("u") else "a"
    return f"{article} {found.dtype} array" if found.device is None else f"{article} {found.dtype} tensor"


def argument(kernel: str, at: int, param: Param, value: Any) -> tuple[Any, Place | None]:
    """A value for an argument, checked: (what to pass, its memory if it is an array)."""
    if param.stars:
        found = place(value)
        if found is not None and found.contiguous and found.writable:
            wanted = element(param.base)
            if wanted is not None and wanted[1] == 1 and wanted[0] == found.code:
                return found.address, found
    elif isinstance(value, (int, float)):
        return value, None
    where = f"kernel {kernel}: argument {at + 1} `{param.name}` is {param.type}"
    if not param.stars:
        if place(value) is not None:
            hint = "; pass a number (x.item())" if getattr(value, "ndim", 1) == 0 else ""
            raise InvalidValueError(f"{where}, got {shown(value)}{hint}")
        if isinstance(value, (str, bytes, type(None))):
            raise InvalidValueError(f"{where}, got {shown(value)}")
        return value, None
    if value is None:
        return 0, None
    found = place(value)
    if found is None:
        raise InvalidValueError(f"{where}, got {shown(value)}")
    wanted = element(param.base)
    if param.base != "void" and wanted is not None and not same_bits(found.code or "?", wanted[0]):
        raise InvalidValueError(f"{where}, got {shown(value)}")
    if not found.contiguous or (found.bytes and found.address % alignment(param)):
        if param.is_output:
            why = "is not aligned to it" if found.contiguous else "is not contiguous"
            raise InvalidValueError(f"{where}, and the array {why}: an output is used in place")
        copy = whole(value)
        if found.contiguous:
            copy = copy.clone() if hasattr(copy, "clone") else copy.copy()
        found = place(copy)
        assert found is not None
        if found.bytes and found.address % alignment(param):
            raise InvalidValueError(f"{where}, and the array is not aligned to it")
    if param.is_output and not found.writable:
        raise InvalidValueError(f"{where}, and the array is read-only (const {param.type} takes it)")
    return found.address, found


def alignment(param: Param) -> int:
    """Bytes that an array's address is a multiple of, where that is more than torch and numpy guarantee; else 1."""
    wanted = element(param.base)
    if wanted is None or wanted[1] == 1:
        return 1
    lanes = 1 if wanted[1] == 3 else wanted[1]
    return min(16, lanes * size_of(wanted[0]))
