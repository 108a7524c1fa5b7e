"""ironhorse: transformer training in Rust, checked against PyTorch.

`ironhorse.ops` has the operations for numpy arrays, `ironhorse.torch` those for PyTorch, `ironhorse.jit` makes new ones
from CUDA source, `ironhorse.nn` is a mixture-of-experts transformer layer by layer; `Model` is a model on a device that
computes, writes and learns; `verify`, `load`, `save` and `export` deal with models and files. Importing this package is
cheap and needs no torch; the parts that need it import it themselves.
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

from .errors import Code, IronhorseError

if TYPE_CHECKING:
    from . import jit as jit
    from . import nn as nn
    from . import ops as ops
    from . import torch as torch
    from .bridge.load import load as load
    from .bridge.save import save as save
    from .bridge.verify import verify as verify
    from .export import export as export
    from .model import Model as Model

__version__ = "0.1.0"

# Where the CUDA libraries of this environment's packages are: the interpreter may run without it being active.
os.environ.setdefault("IRONHORSE_PYTHON_PREFIX", sys.prefix)

# Without torch and jit: `import *` should need nothing that may be missing, and not hide another `torch`.
__all__ = ["Code", "IronhorseError", "Model", "__version__", "export", "load", "nn", "ops", "save", "verify"]

# Imported when first used: the command and the file formats need neither numpy's start-up time nor the native module.
_MODULES = ("export", "jit", "nn", "ops", "torch")
_FUNCTIONS = {"Model": ".model", "load": ".bridge.load", "save": ".bridge.save", "verify": ".bridge.verify"}


def __getattr__(name: str) -> object:
    from importlib import import_module

    if name in _MODULES:
        return import_module(f".{name}", __name__)
    if name in _FUNCTIONS:
        globals()[name] = function = getattr(import_module(_FUNCTIONS[name], __name__), name)
        return function
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*__all__, *_MODULES, *(name for name in globals() if name.startswith("__"))})
