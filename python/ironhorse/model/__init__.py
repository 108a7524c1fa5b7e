"""`ironhorse.Model`: a model with its weights on a device, which computes, writes, learns and is saved.

`_model` the class · `_inputs` tokens and element types · `_settings` keyword arguments as the command's settings ·
`_training` what follows a run, and its report · `_bars` progress
"""

from __future__ import annotations

from ._model import Model
from ._training import Best, Callback, TrainReport

__all__ = ["Best", "Callback", "Model", "TrainReport"]
