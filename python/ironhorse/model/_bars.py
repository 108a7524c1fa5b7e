"""Progress: tqdm's bar where tqdm is installed, a plain line on a terminal otherwise, nothing elsewhere."""

from __future__ import annotations

import shutil
import sys
import time
from typing import Any, Protocol

# Seconds between two drawings of the plain bar.
_EVERY = 0.1
_WIDTH = 30


class Bar(Protocol):
    """What shows a run."""

    def begin(self, made: int, steps: int) -> None:
        """The first step is about to be made, after `made` of `steps`."""

    def show(self, done: int, text: str) -> None:
        """So many steps are done."""

    def write(self, text: str) -> None:
        """A line that stays."""

    def close(self) -> None:
        """The run is over."""


class Silent:
    """Shows nothing."""

    def begin(self, made: int, steps: int) -> None:
        """Nothing."""

    def show(self, done: int, text: str) -> None:
        """Nothing."""

    def write(self, text: str) -> None:
        """Nothing."""

    def close(self) -> None:
        """Nothing."""


class Line:
    """One line on a terminal, drawn over and over."""

    def __init__(self) -> None:
        self._made, self._steps, self._shown = 0, 0, 0
        self._began, self._drawn = time.monotonic(), 0.0

    def begin(self, made: int, steps: int) -> None:
        """Starts the clock."""
        self._made, self._steps, self._began = made, steps, time.monotonic()

    def show(self, done: int, text: str) -> None:
        """Draws the line, not too often."""
        now = time.monotonic()
        if now - self._drawn < _EVERY and done < self._steps:
            return
        self._drawn = now
        full = _WIDTH * done // max(self._steps, 1)
        left = (now - self._began) / max(done - self._made, 1) * (self._steps - done)
        line = f"{'█' * full}{'░' * (_WIDTH - full)} {done}/{self._steps}  {text}  ETA {left:.0f}s"
        line = line[: shutil.get_terminal_size().columns - 1]
        sys.stderr.write("\r" + line.ljust(self._shown))
        sys.stderr.flush()
        self._shown = len(line)

    def write(self, text: str) -> None:
        """The line is drawn again below the text."""
        sys.stderr.write("\r" + " " * self._shown + "\r" + text + "\n")
        sys.stderr.flush()
        self._shown, self._drawn = 0, 0.0

    def close(self) -> None:
        """Removes the line."""
        sys.stderr.write("\r" + " " * self._shown + "\r")
        sys.stderr.flush()


class Tqdm:
    """tqdm's own bar: a widget in a notebook, text in a terminal."""

    def __init__(self, tqdm: Any) -> None:
        self._tqdm = tqdm
        self._bar: Any = None

    def begin(self, made: int, steps: int) -> None:
        """Draws the bar."""
        self._bar = self._tqdm(total=steps, initial=made, unit="step", desc="train")

    def show(self, done: int, text: str) -> None:
        """Moves the bar, back too where a run goes back to a checkpoint."""
        if self._bar is not None:
            self._bar.set_postfix_str(text, refresh=False)
            self._bar.update(done - self._bar.n)

    def write(self, text: str) -> None:
        """A line above the bar."""
        self._tqdm.write(text, file=sys.stderr)

    def close(self) -> None:
        """The bar stays, as users of tqdm expect."""
        if self._bar is not None:
            self._bar.close()


def bar() -> Bar:
    """The bar of a run that will begin."""
    try:
        from tqdm.auto import tqdm
    except ImportError:
        terminal = sys.stderr is not None and sys.stderr.isatty()
        return Line() if terminal else Silent()
    return Tqdm(tqdm)
