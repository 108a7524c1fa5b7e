"""Draws loss curves in one frame and their differences in a second frame below, as SVG."""

from __future__ import annotations

import math

WIDTH, LEFT, RIGHT = 860, 72, 828
UPPER, LOWER = (64, 300), (350, 500)  # top and bottom of the two frames
# colours and dashes as in crates/train/src/picture/svg.rs
COLORS = ("#2563eb", "#ea580c", "#059669", "#9333ea")
DASHES = ("", "7 4", "2 4", "10 4 2 4")


def draw(title: str, curves: dict[str, list[float]], gaps: dict[str, list[float]]) -> str:
    """`curves` in the upper frame, linear; `gaps` (at least 0) in the lower one, logarithmic. One value per step."""
    steps = max(len(values) for values in (*curves.values(), *gaps.values()))
    values = [v for curve in curves.values() for v in curve]
    low, high = math.floor(min(values)), math.ceil(max(values))
    gap_values = [v for gap in gaps.values() for v in gap if v > 0] or [1e-9]
    decades = math.floor(math.log10(min(gap_values))), math.ceil(math.log10(max(gap_values)))
    if decades[0] == decades[1]:
        decades = decades[0], decades[0] + 1
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} 540" font-family="system-ui, sans-serif" '
        f'font-size="13"><rect width="{WIDTH}" height="540" fill="#fff"/>',
        f'<text x="{LEFT}" y="28" font-size="17">{title}</text>',
    ]
    for value in range(low, high + 1):
        parts.append(_rule(_y(value, low, high, UPPER), str(value)))
    for power in range(decades[0], decades[1] + 1):
        parts.append(_rule(_y(power, *decades, LOWER), f"1e{power}"))
    for number in range(0, steps + 1, max(1, steps // 5)):
        x = LEFT + (RIGHT - LEFT) * number / max(steps - 1, 1)
        parts.append(f'<text x="{min(x, RIGHT):.0f}" y="520" text-anchor="middle">{number}</text>')
    for i, (name, curve) in enumerate(curves.items()):
        line = [(n, _y(v, low, high, UPPER)) for n, v in enumerate(curve)]
        parts.append(_path(line, steps, COLORS[i], f'stroke-width="{2 - i * 0.5}" stroke-dasharray="{DASHES[i]}"'))
        parts.append(_legend(name, COLORS[i], LEFT + 260 * i, 50))
    for i, (name, gap) in enumerate(gaps.items()):
        line = [(n, _y(math.log10(v), *decades, LOWER)) for n, v in enumerate(gap) if v > 0]
        parts.append(_path(line, steps, COLORS[i + 1], f'stroke-width="1" stroke-dasharray="{DASHES[i + 1]}"'))
        parts.append(_legend(name, COLORS[i + 1], LEFT + 260 * i, 338))
    return "\n".join([*parts, "</svg>\n"])


def _y(value: float, low: float, high: float, frame: tuple[int, int]) -> float:
    return frame[1] - (frame[1] - frame[0]) * (value - low) / max(high - low, 1e-12)


def _rule(y: float, text: str) -> str:
    return (f'<path d="M{LEFT} {y:.1f}H{RIGHT}" stroke="#ddd"/>'
            f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{text}</text>')  # fmt: skip


def _path(points: list[tuple[int, float]], steps: int, color: str, style: str) -> str:
    at = [f"{LEFT + (RIGHT - LEFT) * n / max(steps - 1, 1):.1f} {y:.1f}" for n, y in points]
    return f'<path d="M{"L".join(at)}" fill="none" stroke="{color}" {style}/>' if at else ""


def _legend(text: str, color: str, x: float, y: float) -> str:
    return f'<path d="M{x} {y - 4}h18" stroke="{color}" stroke-width="2"/><text x="{x + 24}" y="{y}">{text}</text>'
