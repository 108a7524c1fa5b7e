"""What a notebook or a script does with models and files: verify, load, save. Also as `ironhorse.NAME`.

`verify` compares with answers · `load`, `save` every file format · `tensors`
arrays that are made when looked at · `tables` plain text for people
"""

from __future__ import annotations

from .load import Loaded, load
from .save import Saved, save
from .tensors import Tensors
from .verify import Element, FirstWrong, OpCheck, TensorCheck, VerifyReport, verify

__all__ = [
    "Element",
    "FirstWrong",
    "Loaded",
    "OpCheck",
    "Saved",
    "TensorCheck",
    "Tensors",
    "VerifyReport",
    "load",
    "save",
    "verify",
]
