"""Names for the arrays of the ops."""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

F32: TypeAlias = NDArray[np.float32]
I32: TypeAlias = NDArray[np.int32]
U64: TypeAlias = NDArray[np.uint64]
Device: TypeAlias = str  # "auto", "cpu", "cuda" or "cuda:N"
