"""Draws a report of moe_curve.py as SVG: the loss of both sides in one frame, the differences in a second one below.

    python benches/curve_svg.py docs/benchmarks/cpu-moe-curve.json docs/img/moe_curve.svg

Needs neither torch nor ironhorse. The style is that of crates/train/src/picture, and a test compares the constants with
svg.rs: a pale line for single steps and their running mean in full colour; series differ in dashes too; axes carry
their unit.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

COLOURS = ("#2563eb", "#ea580c", "#059669", "#9333ea")
DASHES = ("", "7 4", "2 4", "10 4 2 4")
INK, LABEL, PALE, BASE, GRID, FINE_GRID = "#111827", "#4b5563", "#6b7280", "#9ca3af", "#e5e7eb", "#f3f4f6"
NORMAL, LARGE = 13, 14
FONT = "Inter, system-ui, -apple-system, 'Segoe UI', 'DejaVu Sans', sans-serif"

WIDTH, HEIGHT, LEFT, RIGHT = 860, 640, 72, 828
UPPER, LOWER = (80, 330), (374, 578)  # top and bottom of the two frames
POINTS = 500  # of a curve, at least: of more steps only some are drawn


@dataclass
class Frame:
    """The scale of one frame: its ticks by value, from the bottom up; `log` for powers of ten."""

    name: str
    ends: tuple[int, int]
    ticks: dict[float, str]
    top: float
    log: bool = False

    def y(self, value: float) -> float:
        """Where a value is; one below the lowest tick is on the bottom line."""
        at: Callable[[float], float] = math.log10 if self.log else float
        low = at(min(self.ticks))
        return self.ends[1] - (self.ends[1] - self.ends[0]) * max((at(value) - low) / (at(self.top) - low), 0.0)


def gaps(a: list[float], b: list[float]) -> list[float]:
    """|a - b| of every step."""
    return [abs(x - y) for x, y in zip(a, b, strict=True)]


def picture(report: dict[str, Any]) -> str:
    """The losses of both sides in f32 and their difference; beside it that of PyTorch from itself in f64."""
    runs = report["losses"]
    losses = {side: runs[side] for side in ("torch f32", "ironhorse f32")}
    pairs = (("ironhorse f32", "torch f32"), ("torch f32", "torch f64"))
    apart = {f"{a} - {b}": gaps(runs[a], runs[b]) for a, b in pairs}
    steps = max(map(len, losses.values()))
    title, subtitle = "A mixture of experts: ironhorse beside PyTorch", f"{steps} steps, the same weights and batches"
    parts = [
        *_head((WIDTH, HEIGHT), LEFT, title, subtitle),
        *_draw(_linear("loss (nats per token)", losses), losses, steps, 0, "{:.3f}"),
        *_draw(_decades("difference of the loss", apart), apart, steps, len(losses), "{:.1e}"),
        _text((LEFT + RIGHT) / 2, LOWER[1] + 47, "step", LARGE, LABEL, "middle"),
    ]
    return "\n".join([*parts, "</svg>\n"])


def _head(size: tuple[int, int], left: int, title: str, subtitle: str) -> Iterable[str]:
    """The beginning of a picture: its size, what is behind all of it, and what stands above."""
    width, height = size
    yield (f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
           f'font-family="{FONT}">')  # fmt: skip
    yield f"<title>{title}</title>"
    yield f'<rect width="{width}" height="{height}" rx="10" fill="#ffffff"/>'
    yield f'<text x="{left}" y="36" font-size="19" font-weight="600" fill="{INK}">{title}</text>'
    yield _text(left, 57, subtitle, NORMAL, PALE)


def _linear(name: str, series: dict[str, list[float]]) -> Frame:
    high = max(value for values in series.values() for value in values if math.isfinite(value))
    step = _round_step(high)
    ticks = {i * step: f"{i * step:g}" for i in range(math.floor(high / step) + 1)}
    return Frame(name, UPPER, ticks, 1.04 * high)


def _decades(name: str, series: dict[str, list[float]]) -> Frame:
    values = [value for one in series.values() for value in one if 0 < value < math.inf] or [1e-9]
    low = math.floor(math.log10(min(values)) + 1e-6)  # reports have seven digits: 1e-7 may be a little less
    high = max(math.ceil(math.log10(max(values))), low + 1)
    return Frame(name, LOWER, {10.0**power: f"1e{power}" for power in range(low, high + 1)}, 10.0**high, log=True)


def _round_step(width: float) -> float:
    """1, 2 or 5 times a power of ten, so that there are at most about eight steps."""
    rough = max(width, 1e-9) / 8
    power = 10.0 ** math.floor(math.log10(rough))
    return next(m * power for m in (1, 2, 5, 10) if m * power >= 0.95 * rough)


def _draw(frame: Frame, series: dict[str, list[float]], steps: int, first: int, last: str) -> Iterable[str]:
    """The frame with its axes, its series with the colours from `first` on, and a legend with their last values."""
    (top, bottom), last_step = frame.ends, max(steps - 1, 1)
    for value, label in frame.ticks.items():
        y = frame.y(value)
        yield _line((LEFT, y), (RIGHT, y), f'stroke="{GRID}"')
        yield _text(LEFT - 10, y + 4.5, label, NORMAL, LABEL, "end")
    spacing = _round_step(last_step)
    for number in range(math.floor(last_step / spacing + 0.02) + 1):
        x = LEFT + (RIGHT - LEFT) * min(number * spacing / last_step, 1)
        yield _line((x, top), (x, bottom), f'stroke="{FINE_GRID}"')
        if frame.ends == LOWER:
            yield _text(x, bottom + 21, f"{number * spacing:g}", NORMAL, LABEL, "middle")
    yield _line((LEFT, bottom), (RIGHT, bottom), f'stroke="{BASE}"')
    yield (f'<text transform="translate(18 {(top + bottom) / 2}) rotate(-90)" text-anchor="middle" '
           f'font-size="{LARGE}" fill="{LABEL}">{frame.name}</text>')  # fmt: skip
    width = 8 * max(map(len, series)) + 150
    right = LEFT + width if frame.log else RIGHT  # a loss falls and differences grow: these corners are empty
    style = f'rx="6" fill="#ffffff" fill-opacity="0.88" stroke="{GRID}"'
    legend = [f'<rect x="{right - width}" y="{top}" width="{width}" height="{14 + 22 * len(series)}" {style}/>']
    for i, (name, values) in enumerate(series.items()):
        mean, y = _running_mean(values), top + 22 + 22 * i
        stroke = f'stroke="{COLOURS[first + i]}"'
        full = f'{stroke} stroke-width="2"' + (f' stroke-dasharray="{DASHES[first + i]}"' if DASHES[first + i] else "")
        yield _path(frame, values, last_step, f'{stroke} stroke-width="1" stroke-opacity="0.28"')
        yield _path(frame, mean, last_step, full)
        mark = right - width + 14
        legend.append(_line((mark, y - 4.5), (mark + 26, y - 4.5), full))
        legend.append(_text(mark + 36, y, name, LARGE, INK))
        legend.append(_text(right - 16, y, last.format(mean[-1]), LARGE, INK, "end"))
    yield from legend


def _running_mean(values: list[float]) -> list[float]:
    """The mean of a window around each step, as in picture/curves.rs: as many steps before it as after it."""
    reach, means = max(len(values) // 60, 1), []
    for i in range(len(values)):
        back = min(reach, i)
        window = values[i - back : i + back + 1]
        means.append(sum(window) / len(window))
    return means


def _path(frame: Frame, values: list[float], last_step: int, stroke: str) -> str:
    points = [
        f"{LEFT + (RIGHT - LEFT) * step / last_step:.1f} {frame.y(value):.1f}"
        for step, value in list(enumerate(values))[:: max(len(values) // POINTS, 1)]
        if math.isfinite(value) and (value > 0 or not frame.log)
    ]
    style = f'fill="none" stroke-linejoin="round" stroke-linecap="round" {stroke}'
    return f'<path {style} d="M{"L".join(points)}"/>' if points else ""


def _line(a: tuple[float, float], b: tuple[float, float], stroke: str) -> str:
    return f'<line x1="{a[0]:.1f}" x2="{b[0]:.1f}" y1="{a[1]:.1f}" y2="{b[1]:.1f}" {stroke}/>'


def _text(x: float, y: float, text: str, size: int, colour: str, anchor: str = "start") -> str:
    place = "" if anchor == "start" else f' text-anchor="{anchor}"'
    return f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" fill="{colour}"{place}>{escape(text)}</text>'


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(f"usage: {sys.argv[0]} REPORT.json PICTURE.svg")
    Path(sys.argv[2]).write_text(picture(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))), encoding="utf-8")
