"""Integer arithmetic that refuses overflow, where numpy wraps around."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import InvalidValueError

Array = NDArray[Any]
Work = Callable[..., Any]


def check_fits(op: str, found: Array, works: tuple[Work, Work], operands: tuple[Array, ...]) -> None:
    """Raises InvalidValueError if an element of an integer result has overflowed.

    `works` are the function that computed `found`, and one that, applied to the absolute values of the operands, gives
    an upper bound of the absolute results. A sum that wraps around and comes back is correct and passes.
    """
    work, bound = works
    if found.dtype.kind not in "iu" or found.size == 0:
        return
    limit = np.iinfo(found.dtype)
    with np.errstate(over="ignore"):
        largest = np.max(bound(*(np.abs(one.astype(np.float64)) for one in operands)))
    if largest < limit.max / 2:  # a factor of 2 covers the rounding of the bound
        return
    exact = work(*(one.astype(object) for one in _short(work, operands)))
    for value in np.asarray(exact, dtype=object).ravel():
        if not limit.min <= value <= limit.max:
            text = str(value) if -(2**127) < value < 2**127 else "the result"
            raise InvalidValueError(f"{op}: {text} does not fit {found.dtype}")


def _short(work: Work, operands: tuple[Array, ...]) -> tuple[Array, ...]:
    """Exponents are cut at 64, because Python's exact integers would grow without limit: beyond, a power overflows as
    well, or its base is 0, 1 or -1."""
    if work is not np.power:
        return operands
    return operands[0], np.minimum(operands[1].astype(np.int64), 64)
