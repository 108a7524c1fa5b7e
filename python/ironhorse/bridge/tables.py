"""Plain text for people: the same in a terminal, a log and a notebook."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any, Protocol


class Pretty(Protocol):
    """The part of IPython's printer that is used here."""

    def text(self, text: str) -> Any: ...


class Printed:
    """A result that `print`, a notebook and IPython show as its table; `repr` stays short."""

    def _repr_pretty_(self, printer: Pretty, cycle: bool) -> None:
        printer.text("..." if cycle else str(self))


def table(heads: Sequence[str], rows: Iterable[Sequence[str]], right: str = "") -> str:
    """Columns two spaces apart; those named in `right` (their numbers) are flush right."""
    lines = [list(heads), *(list(row) for row in rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(heads))]

    def cell(text: str, i: int) -> str:
        return text.rjust(widths[i]) if str(i) in right else text.ljust(widths[i])

    return "\n".join("  ".join(cell(text, i) for i, text in enumerate(line)).rstrip() for line in lines)


def without_dashes(text: str, names: Iterable[str]) -> str:
    """Text of the command (`--loss-tolerance is ...`) as Python's arguments are called (`loss_tolerance is ...`)."""
    for name in names:
        flag = "--" + name.replace("_", "-")
        text = re.sub(rf"(?<![\w/-]){re.escape(flag)}(?![\w-])", name, text)
    return text.removesuffix(" (see --help)")
