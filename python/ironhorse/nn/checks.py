"""Checks of arguments that are numbers or a device; errors begin with `who`, the function or class that was called."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from ..errors import InvalidValueError


def check_text(who: str, device: Any) -> str:
    """Refuses a device that is not a string; returns it. Whether the device exists is checked where it is used."""
    if not isinstance(device, str):
        raise InvalidValueError(f'{who}: device is {device!r}; expected "auto", "cpu", "cuda" or "cuda:N"')
    return device


def check_real(who: str, name: str, value: Any) -> Any:
    """Refuses a value that is not a number; returns it."""
    if isinstance(value, bool) or not isinstance(value, (int, float, np.integer, np.floating)):
        raise InvalidValueError(f"{who}: {name} is {value!r}, expected a number")
    return value


def check_number(who: str, name: str, value: Any, below: float = math.inf) -> Any:
    """Refuses a value that is not a finite number of at least 0 and below the limit; returns it."""
    if not 0 <= check_real(who, name, value) < below:  # also if it is a NaN
        limit = "a number of at least 0" if below == math.inf else f"at least 0 and below {below}"
        raise InvalidValueError(f"{who}: {name} is {value}, expected {limit}")
    return value


def check_count(who: str, name: str, value: Any) -> Any:
    """Refuses a value that is not an integer of at least 0; returns it."""
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < 0:
        raise InvalidValueError(f"{who}: {name} is {value!r}, expected a whole number of at least 0")
    return value
