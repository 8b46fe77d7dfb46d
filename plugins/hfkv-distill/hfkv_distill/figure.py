"""A curve as SVG, written plainly: it needs no library, and follows the reader's light or dark."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

WIDTH, HEIGHT = 560, 320
_LEFT, _RIGHT, _TOP, _BOTTOM = 56, 16, 34, 40
_INK, _LINE, _FAINT = "#7d8590", "#3b7dd8", "#3b7dd844"


def curve(title: str, x_label: str, y_label: str, points: Sequence[tuple[float, float]]) -> str:
    """The points, and their running mean over them.

    Raises
    ------
    ValueError
        There are no points.
    """
    if not points:
        raise ValueError("there is nothing to draw: no point was given")
    x_ticks = ticks(0, max(x for x, _ in points))
    y_ticks = ticks(min(y for _, y in points), max(y for _, y in points))

    def place(x: float, y: float) -> str:
        across = (x - x_ticks[0]) / (x_ticks[-1] - x_ticks[0])
        up = (y - y_ticks[0]) / (y_ticks[-1] - y_ticks[0])
        return (
            f"{_LEFT + across * (WIDTH - _LEFT - _RIGHT):.1f},{HEIGHT - _BOTTOM - up * (HEIGHT - _TOP - _BOTTOM):.1f}"
        )

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
        f'aria-label="{escape(title)}" font-family="sans-serif" font-size="12" fill="{_INK}">',
        f'<text x="{_LEFT}" y="18" font-size="14">{escape(title)}</text>',
    ]
    for value in y_ticks:
        left, right = place(x_ticks[0], value), place(x_ticks[-1], value)
        parts.append(f'<polyline points="{left} {right}" stroke="{_INK}" stroke-opacity="0.25" fill="none"/>')
        parts.append(
            f'<text x="{_LEFT - 6}" y="{float(left.split(",")[1]) + 4:.1f}" text-anchor="end">{value:g}</text>'
        )
    for value in x_ticks:
        x = place(value, y_ticks[0]).split(",")[0]
        parts.append(f'<text x="{x}" y="{HEIGHT - _BOTTOM + 16}" text-anchor="middle">{value:g}</text>')
    parts.append(f'<text x="{WIDTH / 2}" y="{HEIGHT - 6}" text-anchor="middle">{escape(x_label)}</text>')
    middle = HEIGHT / 2
    parts.append(
        f'<text x="12" y="{middle}" text-anchor="middle" transform="rotate(-90 12 {middle})">{escape(y_label)}</text>'
    )
    for line, colour, width in ((points, _FAINT, 1), (smoothed(points), _LINE, 2)):
        joined = " ".join(place(x, y) for x, y in line)
        parts.append(f'<polyline points="{joined}" stroke="{colour}" stroke-width="{width}" fill="none"/>')
    return "\n".join([*parts, "</svg>", ""])


def smoothed(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """The mean of each point and of the tenth of all points before it."""
    span = max(1, len(points) // 10)
    result = []
    for index, (x, _) in enumerate(points):
        window = [y for _, y in points[max(0, index - span + 1) : index + 1]]
        result.append((x, sum(window) / len(window)))
    return result


def ticks(low: float, high: float) -> list[float]:
    """Round numbers, four to eight of them, from below ``low`` to above ``high``."""
    span = (high - low) or abs(high) or 1.0
    power = 10.0 ** math.floor(math.log10(span))
    step = next(power * factor for factor in (0.2, 0.5, 1, 2) if span / (power * factor) <= 6)
    first, last = math.floor(low / step), math.ceil(high / step)
    return [round(index * step, 10) for index in range(first, max(last, first + 1) + 1)]
