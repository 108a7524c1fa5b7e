"""Operations on numpy arrays, computed in Rust.

Each op has two forms: `y = silu(x)` makes its result, `silu(x, out)` writes it into `out`, with the arguments in the
order of the C functions (`cuda_silu(x, out, n, stream)`) without the stream. Sizes may be left out where the shapes of
the arrays tell them. Inputs are float32 (indices int32, seeds uint64); they are copied if they are not contiguous.
Outputs must be contiguous, writable and of the right type and shape. An error raises `IronhorseError`, whose `code`
says the kind; an invalid argument is a `ValueError` too. `help(ops.rmsnorm)` shows arguments, shapes and an example.

`device` says where to compute. "auto" and "cpu" mean the CPU: numpy arrays are in its memory, and copying them to a GPU
and back takes longer than computing here. "cuda" (or "cuda:1") copies them all the same, computes on the GPU and waits
for the result; without a usable GPU it raises `NotAvailableError`, which says why.

The interpreter lock is released during long calls and calls on a GPU, and large calls use all cores; results do not
depend on how many.
"""

from __future__ import annotations

from .._native import OPS as _OPS
from .._native import cuda_available
from ..errors import Code, InvalidValueError, IronhorseError, LaunchFailedError, NotAvailableError, OutOfMemoryError

# Every function of the table of ops in Rust; __init__.pyi has their types.
globals().update(_OPS)

# What bindings of the same C functions elsewhere call them.
CudaError, CudaErrorCode = IronhorseError, Code

__all__ = [  # noqa: PLE0604 # names of functions, which are strings
    "Code",
    "InvalidValueError",
    "IronhorseError",
    "LaunchFailedError",
    "NotAvailableError",
    "OutOfMemoryError",
    "cuda_available",
    *_OPS,
]
