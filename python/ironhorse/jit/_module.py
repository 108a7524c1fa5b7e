"""CUDA source and its kernels."""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from .._native import JitCode, JitKernel, JitSource
from ..errors import InvalidValueError, NotAvailableError
from . import _given
from ._arrays import Place, argument, torch_module
from ._types import SPELLED, Param, Signature, split_expression

Dims = int | tuple[int, ...]
OPTIONS = ("name", "folder", "flags", "include", "defines")


class Module:
    """CUDA source. Nothing is compiled until a kernel is used, or `compile` is called."""

    def __init__(
        self,
        text: str,
        *,
        name: str = "<string>",
        folder: str | os.PathLike[str] | None = None,
        flags: Iterable[str] = (),
        include: str | os.PathLike[str] | Iterable[str | os.PathLike[str]] = (),
        defines: Mapping[str, Any] | None = None,
    ) -> None:
        self.name = _given.text("name", name)
        self.text = _given.text(f"{name}: the source", text)
        if isinstance(flags, str):
            raise InvalidValueError(f"flags is {flags!r}; expected a list of flags")
        folders = _given.paths("include", include)
        missing = [each for each in folders if not os.path.isdir(each)]
        if missing:
            raise InvalidValueError(f"{name}: include folder {missing[0]} does not exist")
        beside = [_given.path("folder", folder)] if folder else []
        self._folders = [os.path.abspath(each) for each in beside + folders]
        self.flags = [*_given.texts("flags", flags), *_defines(defines)]
        self._source = JitSource(self.name, self.text, self._folders, self.flags)
        self.kernels: tuple[Signature, ...] = tuple(map(Signature.of, self._source.signatures()))
        self._codes: dict[tuple[str, tuple[str, ...]], JitCode] = {}
        self._arches: dict[int, str] = {}
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        return f"<ironhorse.jit.Module {self.name}: {', '.join(map(str, self.kernels)) or 'no kernels'}>"

    # A module is immutable, so a copy is the module itself. A pickle holds the source, not what was compiled.

    def __copy__(self) -> Module:
        return self

    def __deepcopy__(self, memo: Any) -> Module:
        return self

    def __reduce__(self) -> tuple[Callable[..., Module], tuple[str, str, list[str], list[str]]]:
        return _restored, (self.text, self.name, self._folders, self.flags)

    def arch(self, device: int = 0) -> str:
        """The architecture of a GPU of this machine."""
        device = _given.index("device", device)
        if device not in self._arches:
            self._arches[device] = JitSource.arch_of(device)
        return self._arches[device]

    def compile(self, *names: str, arch: str | None = None, device: int = 0) -> JitCode:
        """Device code for an architecture (default: the GPU's), from the cache if it is there.

        `names` are kernels that are not `extern "C"`, and templates with their arguments: "scale<float, 4>". Without
        names: all kernels that are not templates.
        """
        names = tuple(_given.texts("names", names))
        if arch is not None:
            arch = _given.text("arch", arch)
        asked = names or tuple(k.name for k in self.kernels if not k.template and not k.c_linkage)
        key = (arch or self.arch(device), tuple(dict.fromkeys(asked)))
        code = self._codes.get(key)
        if code is None:
            code = self._source.compile(list(key[1]), key[0], None)
            with self._lock:
                self._codes[key] = code
        return code

    def find(self, expression: str) -> tuple[Signature, list[str] | None]:
        """A kernel's signature, and its template arguments if the expression has them."""
        name, arguments = split_expression(_given.text("kernel", expression))
        found = [kernel for kernel in self.kernels if kernel.name == name]
        found = found or [kernel for kernel in self.kernels if kernel.name.split("::")[-1] == name]
        if len(found) == 1:
            return found[0], arguments
        if found:
            text = f"{self.name} has several kernels `{name}`: {'; '.join(map(str, found))}"
            raise InvalidValueError(f"{text}; rename one, or give signature=")
        there = "; ".join(map(str, self.kernels)) or "none"
        raise InvalidValueError(
            f"{self.name} has no kernel `{name}`; there are: {there}. One that a macro makes needs signature="
        )

    def kernel(self, name: str, signature: str | None = None) -> Kernel:
        """A kernel: "scale", or "scale<float, 4>" for a template.

        `signature` is its parameter list, "const float* x, float* y, long n", where it cannot be read from the source.
        """
        if signature is None:
            found, arguments = self.find(name)
            params = found.bound(found.bind(arguments or []))
            whole = found.name if arguments is None else f"{found.name}<{', '.join(arguments)}>"
            if arguments is None and found.template:
                whole += "<>"
            return Kernel(self, whole, params, found.c_linkage)
        name, signature = _given.text("kernel", name), _given.text("signature", signature)
        read = JitSource("signature", f"__global__ void kernel({signature}) {{}}", [], self.flags).signatures()
        if len(read) != 1 or set("(){};") & set(signature):
            raise InvalidValueError(f"kernel {name}: signature {signature!r} is not a parameter list")
        base, arguments = split_expression(name)
        whole = base if arguments is None else f"{base}<{', '.join(arguments)}>"
        return Kernel(self, whole, Signature.of(read[0]).params, False)

    __getitem__ = kernel

    def spell(self, code: str) -> str:
        """The C name of an element type in this source."""
        if code in SPELLED:
            return SPELLED[code]
        ours = {"f2": "f16", "bf2": "bf16"}[code]
        theirs, header = {"f2": ("__half", "cuda_fp16.h"), "bf2": ("__nv_bfloat16", "cuda_bf16.h")}[code]
        if "ironhorse.cuh" in self.text:
            return ours
        if header in self.text:
            return theirs
        text = f'16-bit floats need `#include "ironhorse.cuh"` ({ours}) or `#include <{header}>` ({theirs})'
        raise InvalidValueError(f"{self.name}: {text}")


def _defines(given: Any) -> list[str]:
    """The flags -DNAME=VALUE; a name is a C identifier, or a macro with parameters, a value a number or one line."""
    flags = []
    for name, value in _given.table("defines", given).items():
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*(\([\w, .]*\))?", name):
            raise InvalidValueError(f"defines: {name!r} is not an identifier of C")
        if not isinstance(value, (bool, int, float, str)) or (isinstance(value, str) and "\n" in value):
            raise InvalidValueError(f"defines: {name} is {value!r}; expected a number or text on one line")
        flags.append(f"-D{name}={int(value) if isinstance(value, bool) else value}")
    return [_given.text("defines", flag) for flag in flags]


def _restored(text: str, name: str, folders: list[str], flags: list[str]) -> Module:
    """The module of a pickle."""
    return Module(text, name=name, include=folders, flags=flags)


class Kernel:
    """A kernel: `kernel[grid, block](x, y, n)` launches it.

    Arrays are numpy arrays, which are copied to the GPU and, where the pointer is not const, back; or CUDA tensors,
    which are used in place, on torch's current stream. Writes outside of the arrays cannot be
    caught: run `compute-sanitizer python your.py`.
    """

    def __init__(
        self, module: Module, name: str, params: tuple[Param, ...], c_linkage: bool, together: tuple[str, ...] = ()
    ) -> None:
        self.module, self.name, self.params = module, name, params
        self._c_linkage = c_linkage
        self._together = together or (() if c_linkage else (name,))  # compiled in the same run of NVRTC
        self._loaded: dict[int, JitKernel] = {}
        for at, param in enumerate(params):
            if param.kind is None or param.stars > 1:
                text = f"kernel {name}: argument {at + 1} `{param.name}` is {param.type}, which Python cannot give"
                raise InvalidValueError(text + "; pass pointers and numbers")

    def __copy__(self) -> Kernel:
        return self

    def __deepcopy__(self, memo: Any) -> Kernel:
        return self

    def __reduce__(self) -> tuple[type[Kernel], tuple[Any, ...]]:
        return Kernel, (self.module, self.name, self.params, self._c_linkage, self._together)

    def __repr__(self) -> str:
        return f"<ironhorse.jit.Kernel {self.name}({', '.join(map(str, self.params))})>"

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        raise InvalidValueError(f"kernel {self.name}: give grid and block: kernel[grid, block](...)")

    def __getitem__(self, shape: tuple[Dims, Dims] | tuple[Dims, Dims, int]) -> _Bound:
        if not isinstance(shape, tuple) or len(shape) not in (2, 3):
            raise InvalidValueError(f"kernel {self.name}: expected kernel[grid, block] or kernel[grid, block, shared]")
        return _Bound(self, *shape)

    def on(self, device: int = 0) -> JitKernel:
        """The kernel on a GPU, compiled and loaded at first use; has `registers`, `static_shared`, `max_threads`."""
        device = _given.index("device", device)
        loaded = self._loaded.get(device)
        if loaded is None:
            code = self.module.compile(*self._together, device=device)
            lowered = self.name if self._c_linkage else code.lowered[self.name]
            loaded = code.load(device, self.name, lowered, [(p.name, p.kind or "") for p in self.params])
            self._loaded[device] = loaded
        return loaded

    def launch(
        self,
        *args: Any,
        grid: Dims | None = None,
        block: Dims = 256,
        shared: int = 0,
        device: int | None = None,
        fresh: frozenset[str] = frozenset(),
    ) -> None:
        """Launches it. `device` is the GPU for numpy arrays; `fresh` names outputs whose contents do not matter."""
        name = self.name
        if grid is None:
            raise InvalidValueError(f"kernel {name}: give grid=, the number of blocks")
        if len(args) != len(self.params):
            expected = ", ".join(map(str, self.params))
            raise InvalidValueError(f"kernel {name}: {len(args)} arguments, expected {len(self.params)}: {expected}")
        values: list[Any] = []  # as they are passed
        arrays: list[tuple[int, Place, Param]] = []  # of these; a Place keeps its memory alive
        index: int | None = None
        for at, (param, value) in enumerate(zip(self.params, args, strict=True)):
            value, found = argument(name, at, param, value)
            if found is not None:
                if arrays and found.device != index:
                    both = " and ".join("the host" if d is None else f"cuda:{d}" for d in (index, found.device))
                    raise InvalidValueError(f"kernel {name}: arrays are on {both}, expected one place (`{param.name}`)")
                index = found.device
                arrays.append((at, found, param))
            values.append(value)
        grid, block = dims(name, "grid", grid), dims(name, "block", block)
        if isinstance(shared, bool) or not isinstance(shared, int) or not 0 <= shared < 1 << 31:
            raise InvalidValueError(f"kernel {name}: shared is {shared!r}, expected bytes")
        if index is not None:
            self.on(index).launch(grid, block, shared, current_stream(index), tuple(values))
            return
        for at, array, param in arrays:
            values[at] = (array.address, array.bytes, param.name not in fresh, param.is_output)
        self.on(device or 0).launch_host(grid, block, shared, tuple(values))


class _Bound:
    """A kernel with its grid, block and shared memory: what `kernel[grid, block]` gives."""

    def __init__(self, kernel: Kernel, grid: Dims, block: Dims, shared: int = 0) -> None:
        self.kernel, self.grid, self.block, self.shared = kernel, grid, block, shared

    def __call__(self, *args: Any, device: int | None = None) -> None:
        self.kernel.launch(*args, grid=self.grid, block=self.block, shared=self.shared, device=device)


def dims(kernel: str, what: str, given: Any) -> tuple[int, int, int]:
    """Sizes in x, y and z."""
    if type(given) is int and 0 <= given < 1 << 32:
        return given, 1, 1
    sizes = given if isinstance(given, (tuple, list)) else (given,)
    try:
        whole = tuple(size.__index__() for size in sizes)
    except (AttributeError, TypeError):
        whole = ()
    if not 1 <= len(whole) <= 3 or any(not 0 <= size < 1 << 32 for size in whole):
        raise InvalidValueError(f"kernel {kernel}: {what} is {given!r}, expected one to three sizes")
    return (*whole, 1, 1)[:3]


def current_stream(device: int) -> int:
    """torch's current stream; the default one without torch."""
    torch = torch_module()
    if torch is None or not torch.cuda.is_initialized():
        return 0
    raw = getattr(torch._C, "_cuda_getCurrentRawStream", None)  # makes no object
    stream: int = raw(device) if raw is not None else torch.cuda.current_stream(device).cuda_stream
    return stream


def source(text: str, **options: Any) -> Module:
    """CUDA source from a string. Options: `name` for messages, `flags`, `include` (folders), `defines`."""
    _given.only("source", options, OPTIONS)
    return Module(text, **options)


def load(path: str | os.PathLike[str], **options: Any) -> Module:
    """CUDA source from a file; its folder is the first for `#include`. Options as for `source`."""
    path = Path(_given.path("load: path", path))
    _given.only("load", options, OPTIONS)
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise NotAvailableError(f"{path}: there is no such file") from None
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidValueError(f"{path}: {error}") from error
    return Module(text, **{"name": str(path), "folder": path.resolve().parent, **options})


def module_of(given: Module | str | os.PathLike[str], **options: Any) -> Module:
    """A module itself, or the module of a file (a path) or of source (text)."""
    _given.only("jit", options, OPTIONS)
    if isinstance(given, Module):
        if options:
            raise InvalidValueError(f"`{next(iter(options))}` belongs to the source; {given!r} was made without it")
        return given
    if not isinstance(given, (str, os.PathLike)):
        raise InvalidValueError(f"source is of type {type(given).__name__}; expected CUDA source, a path or a Module")
    is_path = isinstance(given, os.PathLike) or ("\n" not in given and given.endswith((".cu", ".cuh")))
    return load(given, **options) if is_path else Module(str(given), **options)


def compile(given: Module | str | os.PathLike[str], *names: str, arch: str | None = None, **options: Any) -> JitCode:
    """Device code of source or a file: `compile(text, arch="sm_90a")` needs no GPU. See `Module.compile`."""
    return module_of(given, **options).compile(*names, arch=arch)
