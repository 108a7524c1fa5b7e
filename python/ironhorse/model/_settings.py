"""Keyword arguments as the settings of a command, which the command's own parser reads: nothing is said twice."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np

from ..errors import InvalidValueError

Value: TypeAlias = bool | int | float | str | os.PathLike[str]
Setting: TypeAlias = Value | Sequence[Value] | None


def settings_json(call: str, given: Mapping[str, Setting]) -> str:
    """The settings that are not `None`."""
    return json.dumps({name: _plain(call, name, value) for name, value in given.items() if value is not None})


def _plain(call: str, name: str, value: Any) -> Any:
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, float) and not np.isfinite(value):
        return str(value)  # JSON has no such number; the parser names it
    if isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, os.PathLike):
        return os.fsdecode(value)
    if isinstance(value, Sequence) and not isinstance(value, (bytes, bytearray)):
        return [_plain(call, name, item) for item in value]
    raise InvalidValueError(
        f"{call}: {name} is of type {type(value).__name__}, expected a number, a text, a path, True or False, or a list"
    )
