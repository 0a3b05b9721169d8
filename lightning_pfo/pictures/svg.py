"""Small charts as SVG: colours are CSS classes of the page, so that they follow the reader's light or dark."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from html import escape

Point = tuple[float, float]

_LEFT, _RIGHT, _TOP, _BOTTOM = 80, 16, 14, 52  # as letters of narrow pages need
_TICKS = 4


@dataclass
class Chart:
    """One pair of axes; add to it, then `text`.

    Attributes:
        x_label: What is to the right, with its unit.
        y_label: What is upwards, with its unit.
        width: Of the drawing, in units of which a letter is 12.
        height: Likewise.
    """

    x_label: str
    y_label: str
    width: int = 460
    height: int = 280
    _shapes: list[tuple[str, str, Sequence[Point], str]] = field(default_factory=list)

    def line(self, points: Sequence[Point], css: str, title: str = "") -> None:
        """Join points."""
        self._shapes.append(("line", css, list(points), title))

    def dots(self, points: Sequence[Point], css: str, title: str = "") -> None:
        """Mark points; each tells its values where the pointer rests on it, after the title."""
        self._shapes.append(("dots", css, list(points), title))

    def text(self) -> str:
        """The drawing."""
        everything = [point for _, _, points, _ in self._shapes for point in points]
        if not everything:
            return ""
        x_from, x_to = _span([x for x, _ in everything])
        y_from, y_to = _span([y for _, y in everything])
        wide, high = self.width - _LEFT - _RIGHT, self.height - _TOP - _BOTTOM

        def place(point: Point) -> Point:
            x = _LEFT + wide * (point[0] - x_from) / (x_to - x_from)
            return x, _TOP + high * (1 - (point[1] - y_from) / (y_to - y_from))

        parts = [
            f'<svg viewBox="0 0 {self.width} {self.height}" role="img" aria-label="{escape(self.y_label)} over '
            f'{escape(self.x_label)}">'
        ]
        for value in _ticks(y_from, y_to):
            y = place((x_from, value))[1]
            parts.append(f'<line class="grid" x1="{_LEFT}" x2="{self.width - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
            parts.append(f'<text class="tick" x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{value:g}</text>')
        for value in _ticks(x_from, x_to):
            x = place((value, y_from))[0]
            parts.append(f'<text class="tick" x="{x:.1f}" y="{_TOP + high + 20}" text-anchor="middle">{value:g}</text>')
        for kind, css, points, title in self._shapes:
            parts += _line(points, css, place) if kind == "line" else _dots(points, css, title, place)
        middle = _LEFT + wide / 2
        parts.append(
            f'<text class="label" x="{middle:.0f}" y="{self.height - 6}" text-anchor="middle">'
            f"{escape(self.x_label)}</text>"
        )
        parts.append(
            f'<text class="label" transform="translate(18 {_TOP + high / 2:.0f}) rotate(-90)" text-anchor="middle">'
            f"{escape(self.y_label)}</text>"
        )
        return "".join([*parts, "</svg>"])


Place = Callable[[Point], Point]


def _line(points: Sequence[Point], css: str, place: Place) -> list[str]:
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in map(place, points))
    return [f'<polyline class="{css}" points="{path}"/>']


def _dots(points: Sequence[Point], css: str, title: str, place: Place) -> list[str]:
    return [
        f'<circle class="{css}" cx="{place(point)[0]:.1f}" cy="{place(point)[1]:.1f}" r="3.5">'
        f"<title>{escape(title)} {point[0]:.5g}, {point[1]:.5g}</title></circle>"
        for point in points
    ]


def _span(values: Sequence[float]) -> tuple[float, float]:
    low, high = min(values), max(values)
    margin = 0.06 * (high - low) or 0.01 * abs(high) or 1.0
    return low - margin, high + margin


def _ticks(low: float, high: float) -> list[float]:
    step = 10 ** math.floor(math.log10((high - low) / _TICKS))
    step = next(one for one in (step, 2 * step, 5 * step, 10 * step) if (high - low) / one <= _TICKS + 1)
    first = math.ceil(low / step)
    return [round(n * step, 12) for n in range(first, math.floor(high / step) + 1)]
