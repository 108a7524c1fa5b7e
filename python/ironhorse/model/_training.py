"""What follows a training run, and what is left of it: the report of `ironhorse train`."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

from ..bridge.tables import Printed, table
from ._bars import Bar, Silent, bar

# Is given a step's line of metrics.jsonl as a dictionary; False stops the run.
Callback: TypeAlias = Callable[[dict[str, Any]], bool | None]

_LOG = logging.getLogger("ironhorse")


@dataclass(frozen=True)
class Best:
    """The lowest validation loss of a run, and after how many steps it was measured."""

    step: int
    val_loss: float


@dataclass(frozen=True)
class TrainReport(Printed):
    """How a run ended. `ending` is done, patience or stopped; a run that stopped can be resumed from `run`."""

    run: Path
    checkpoint: Path  # the last one, whose weights the model has now
    ending: str
    steps: int  # made in all
    last_loss: float
    seconds: float
    stopped_by: str | None = None
    first_val_loss: float | None = None
    last_val_loss: float | None = None
    best: Best | None = None
    best_checkpoint: Path | None = None
    bad_steps: int = 0  # skipped, because their loss or gradient norm was NaN or infinite
    sample: str = ""
    eval: dict[str, dict[str, Any]] = field(default_factory=dict)  # accuracies by task

    @staticmethod
    def of(text: str) -> TrainReport:
        """The report as the command writes it with --json."""
        given: dict[str, Any] = json.loads(text)
        best, at = given["best"], given["best_checkpoint"]
        return TrainReport(
            run=Path(given["run"]),
            checkpoint=Path(given["checkpoint"]),
            ending=given["ending"],
            steps=given["steps"],
            last_loss=_number(given["last_loss"]),
            seconds=given["seconds"],
            stopped_by=given["stopped_by"],
            first_val_loss=given["first_val_loss"],
            last_val_loss=given["last_val_loss"],
            best=None if best is None else Best(best["step"], _number(best["val_loss"])),
            best_checkpoint=None if at is None else Path(at),
            bad_steps=given["bad_steps"],
            sample=given["sample"],
            eval=given.get("eval", {}),
        )

    def __str__(self) -> str:
        shown = {name: value for name, value in vars(self).items() if value not in (None, "", {}, 0)}
        return table(("train", ""), ((name, str(value)) for name, value in shown.items()))


def _number(value: float | None) -> float:
    """JSON has no NaN: a missing number is one."""
    return math.nan if value is None else value


class Watcher:
    """Is told of a run by the native module: shows it, and asks the user's callback."""

    def __init__(self, callback: Callback | None, progress: bool) -> None:
        self._callback = callback
        self._bar: Bar = bar() if progress else Silent()

    def begin(self, made: int, steps: int) -> None:
        """The first step is about to be made."""
        self._draw(lambda shown: shown.begin(made, steps))

    def step(self, line: str) -> bool | None:
        """A step is done; False stops the run."""
        metrics: dict[str, Any] = json.loads(line)
        for name in ("loss", "lr", "ms", "tokens_per_s"):
            metrics[name] = _number(metrics[name])
        rate, loss = metrics["tokens_per_s"], metrics["loss"]
        self._draw(lambda shown: shown.show(metrics["step"] + 1, f"loss {loss:.4f}  {rate:.0f} tok/s"))
        if "val_loss" in metrics:
            self.note(f"step {metrics['step']:>5}  validation loss {_number(metrics['val_loss']):.4f}")
        return None if self._callback is None else self._callback(metrics)

    def sample(self, step: int, text: str) -> None:
        """A sample was written."""
        self.note(f"step {step:>5}  sample: {text[:160]!r}")

    def note(self, text: str) -> None:
        """Something that the command would print: above the bar where there is one, else to the log `ironhorse`."""
        if isinstance(self._bar, Silent):
            _LOG.info(text)
        else:
            self._draw(lambda shown: shown.write(text))

    def close(self) -> None:
        """The run is over."""
        self._draw(lambda shown: shown.close())

    def _draw(self, draw: Callable[[Bar], None]) -> None:
        try:
            draw(self._bar)
        except (OSError, ValueError):  # a terminal that was closed must not end a run
            self._bar = Silent()
