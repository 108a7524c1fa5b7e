"""Checks of the arguments of jit's functions; errors name the argument, what it is and what was expected."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import Any

from ..errors import InvalidValueError


def _wrong(what: str, value: Any, expected: str) -> InvalidValueError:
    plain = isinstance(value, (int, float, str, type(None)))
    return InvalidValueError(f"{what} is {value!r}; expected {expected}" if plain else
                             f"{what} is of type {type(value).__name__}; expected {expected}")  # fmt: skip


def text(what: str, value: Any) -> str:
    """A string without NUL bytes and surrogates, which C can take."""
    if not isinstance(value, str):
        raise _wrong(what, value, "text")
    if "\0" in value:
        raise InvalidValueError(f"{what} has a NUL byte")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise InvalidValueError(f"{what} has surrogates, which cannot be encoded as UTF-8") from None
    return value


def texts(what: str, value: Any) -> list[str]:
    """One string or several."""
    if isinstance(value, str):
        return [text(what, value)]
    if not isinstance(value, Iterable) or isinstance(value, (bytes, Mapping)):
        raise _wrong(what, value, "text, or a list of it")
    return [text(f"{what}[{at}]", each) for at, each in enumerate(value)]


def path(what: str, value: Any) -> str:
    """A path as text."""
    if not isinstance(value, (str, os.PathLike)):
        raise _wrong(what, value, "a path")
    return text(what, os.fsdecode(os.fspath(value)))


def paths(what: str, value: Any) -> list[str]:
    """One path or several."""
    if isinstance(value, (str, os.PathLike)):
        return [path(what, value)]
    if not isinstance(value, Iterable) or isinstance(value, (bytes, Mapping)):
        raise _wrong(what, value, "a folder, or a list of folders")
    return [path(f"{what}[{at}]", each) for at, each in enumerate(value)]


def table(what: str, value: Any) -> dict[str, Any]:
    """A dictionary with names as keys; None is an empty one."""
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise _wrong(what, value, "a dict by name")
    return {text(f"{what}: the name {name!r}", name): each for name, each in value.items()}


def index(what: str, value: Any) -> int:
    """The number of a GPU."""
    if isinstance(value, bool) or not hasattr(value, "__index__") or not 0 <= value.__index__() < 1 << 16:
        raise _wrong(what, value, "the number of a GPU, 0 or more")
    return int(value.__index__())


def only(what: str, options: Mapping[str, Any], known: Iterable[str]) -> None:
    """Raises InvalidValueError for an option that is not known."""
    odd = next((name for name in options if name not in known), None)
    if odd is not None:
        raise InvalidValueError(f"{what} has no option `{odd}`; expected one of {', '.join(known)}")


def sizes(what: str, value: Any) -> tuple[int, ...]:
    """A shape. Sizes may be symbols of torch.compile, which are whole numbers there."""
    many = isinstance(value, Iterable) and not isinstance(value, (str, bytes, Mapping))
    found = tuple(value) if many else (value,)
    for size in found:
        whole = hasattr(size, "__index__") or type(size).__name__ == "SymInt"
        if isinstance(size, bool) or not whole or (isinstance(size, int) and size < 0):
            raise InvalidValueError(f"{what} is {value!r}; expected sizes of 0 or more, or the name of an array")
    return found
