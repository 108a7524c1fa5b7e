"""Arithmetic of whole numbers that refuses what does not fit; numpy lets it wrap."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import InvalidValueError

Array = NDArray[Any]
Work = Callable[..., Any]


def check_fits(op: str, found: Array, works: tuple[Work, Work], operands: tuple[Array, ...]) -> None:
    """Refuses a result of whole numbers in which one has wrapped.

    `works` are what numpy computed `found` with, and a bound: of the absolute values it is no less than the absolute
    results. Sums that wrap on the way and come back are right, and pass.
    """
    work, bound = works
    if found.dtype.kind not in "iu" or found.size == 0:
        return
    limit = np.iinfo(found.dtype)
    with np.errstate(over="ignore"):
        largest = np.max(bound(*(np.abs(one.astype(np.float64)) for one in operands)))
    if largest < limit.max / 2:  # the other half is for the rounding of the bound
        return
    exact = work(*(one.astype(object) for one in _short(work, operands)))
    for value in np.asarray(exact, dtype=object).ravel():
        if not limit.min <= value <= limit.max:
            text = str(value) if -(2**127) < value < 2**127 else "the result"
            raise InvalidValueError(f"{op}: {text} does not fit {found.dtype}")


def _short(work: Work, operands: tuple[Array, ...]) -> tuple[Array, ...]:
    """Powers beyond the 64th fit as little as that one, or are 0, 1 or -1; Python would write them out."""
    if work is not np.power:
        return operands
    return operands[0], np.minimum(operands[1].astype(np.int64), 64)
