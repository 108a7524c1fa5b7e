"""What a notebook or a script does with models and files: verify, load, save, export. Also as `ironhorse.NAME`.

`verify` compares with answers · `load`, `save` every file format · `export` makes answers with PyTorch · `tensors`
arrays that are made when looked at · `tables` plain text for people
"""

from __future__ import annotations

from .export import Exported, ExportedFile, export
from .load import Loaded, load
from .save import Saved, save
from .tensors import Tensors
from .verify import Element, FirstWrong, OpCheck, TensorCheck, VerifyReport, verify

__all__ = [
    "Element",
    "Exported",
    "ExportedFile",
    "FirstWrong",
    "Loaded",
    "OpCheck",
    "Saved",
    "TensorCheck",
    "Tensors",
    "VerifyReport",
    "export",
    "load",
    "save",
    "verify",
]
