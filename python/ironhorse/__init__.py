"""ironhorse: transformer training in Rust, checked against PyTorch.

`ironhorse.ops` has the operations for numpy arrays, `ironhorse.jit` makes ops of your own CUDA source. Importing this
package is cheap and needs no torch; the parts that need it (`ironhorse.reference`, `ironhorse.export`) import it themselves.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .errors import Code, IronhorseError

if TYPE_CHECKING:
    from . import jit as jit
    from . import ops as ops

__version__ = "0.1.0"

__all__ = ["Code", "IronhorseError", "__version__", "jit", "ops"]


def __getattr__(name: str) -> object:
    # Not at import: the command and the file formats need neither numpy's start-up time nor the native module.
    if name in ("jit", "ops"):
        from importlib import import_module

        return import_module(f".{name}", __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
