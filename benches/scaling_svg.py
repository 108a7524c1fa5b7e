"""Draws a report of `compare_torch.py --scaling` as SVG: tokens per second over the tokens of a step.

    python benches/scaling_svg.py docs/benchmarks/cpu-d12-scaling.json docs/img/cpu-scaling.svg

Needs neither torch nor ironhorse. Style and helpers are those of curve_svg.py. Steps become longer by their batch or by
their sequences: two lines that differ in dashes and marks, over a logarithmic axis.
"""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

from curve_svg import (
    BASE,
    COLOURS,
    DASHES,
    FINE_GRID,
    GRID,
    INK,
    LABEL,
    LARGE,
    NORMAL,
    _head,
    _line,
    _round_step,
    _text,
)

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 860, 420, 84, 828, 80, 350


def picture(report: dict[str, Any]) -> str:
    """Both series in one frame."""
    rows = report["rows"]
    series = {
        f"larger batches, sequences of {rows[0]['seq']} tokens": [row for row in rows if row["over"] == "batch"],
        "longer sequences, one at a time": [row for row in rows if row["over"] == "seq"],
    }
    tokens = sorted({row["batch"] * row["seq"] for row in rows})
    first, last = math.log2(tokens[0]), max(math.log2(tokens[-1]), math.log2(tokens[0]) + 1)
    top = 1.08 * max(row["tokens_per_s"] for row in rows)
    title = f"{report['model']} on the CPU: the speed of steps of different sizes"

    def place(row: dict[str, Any]) -> tuple[float, float]:
        across = (math.log2(row["batch"] * row["seq"]) - first) / (last - first)
        return LEFT + (RIGHT - LEFT) * across, BOTTOM - (BOTTOM - TOP) * row["tokens_per_s"] / top

    subtitle = f"{report['dtype']}, {report['threads']} threads, commit {report['commit']}"
    parts = [*_head((WIDTH, HEIGHT), LEFT, title, subtitle)]
    step = _round_step(top)
    for number in range(math.floor(top / step) + 1):
        y = BOTTOM - (BOTTOM - TOP) * number * step / top
        parts += [_line((LEFT, y), (RIGHT, y), f'stroke="{GRID}"')]
        parts += [_text(LEFT - 10, y + 4.5, f"{number * step:g}", NORMAL, LABEL, "end")]
    for count in tokens:
        x = place({"batch": count, "seq": 1, "tokens_per_s": 0.0})[0]
        parts += [_line((x, TOP), (x, BOTTOM), f'stroke="{FINE_GRID}"')]
        parts += [_text(x, BOTTOM + 21, f"{count:,}", NORMAL, LABEL, "middle")]
    parts += [
        _line((LEFT, BOTTOM), (RIGHT, BOTTOM), f'stroke="{BASE}"'),
        _text((LEFT + RIGHT) / 2, BOTTOM + 47, "tokens of a step", LARGE, LABEL, "middle"),
        f'<text transform="translate(20 {(TOP + BOTTOM) / 2}) rotate(-90)" text-anchor="middle" '
        f'font-size="{LARGE}" fill="{LABEL}">speed (tokens/s)</text>',
    ]
    for i, (name, rows_) in enumerate(series.items()):
        if not rows_:
            continue
        points, colour, y = [place(row) for row in rows_], COLOURS[i], BOTTOM - 42 + 22 * i
        stroke = f'stroke="{colour}" stroke-width="2"' + (f' stroke-dasharray="{DASHES[i]}"' if DASHES[i] else "")
        path = "L".join(f"{x:.1f} {y:.1f}" for x, y in points)
        parts += [f'<path fill="none" stroke-linejoin="round" stroke-linecap="round" {stroke} d="M{path}"/>']
        parts += [_mark(x, y, i, colour) for x, y in points]
        parts += [_line((RIGHT - 360, y - 4.5), (RIGHT - 320, y - 4.5), stroke), _mark(RIGHT - 340, y - 4.5, i, colour)]
        parts += [_text(RIGHT - 308, y, name, LARGE, INK)]
    return "\n".join([*parts, "</svg>\n"])


def _mark(x: float, y: float, series: int, colour: str) -> str:
    """A dot, or a square."""
    if series == 0:
        return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{colour}"/>'
    style = f'fill="#ffffff" stroke="{colour}" stroke-width="2"'
    return f'<rect x="{x - 4:.1f}" y="{y - 4:.1f}" width="8" height="8" {style}/>'


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(f"usage: {sys.argv[0]} REPORT.json PICTURE.svg")
    Path(sys.argv[2]).write_text(picture(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))), encoding="utf-8")
