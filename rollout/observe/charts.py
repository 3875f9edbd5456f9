"""Small charts as inline SVG: lines, stacked columns and a histogram, with axes and a legend, styled by the page's CSS.

Owns scales, ticks and shapes. Refuses to know what is drawn, and to need a script: a point's value is its tooltip.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from html import escape

Values = Sequence[float | None]
Format = Callable[[float], str]

WIDTH, HEIGHT = 420.0, 190.0
LEFT, RIGHT, TOP, BOTTOM = 46.0, 10.0, 8.0, 24.0
PALETTE = ("#1a8a4f", "#e5484d", "#4a7fd8", "#f08c3c", "#7c5cd6", "#2f9e9a", "#9aa3ad")


def ticks(low: float, high: float, about: int = 4) -> list[float]:
    """Round numbers from at or below `low` to at or above `high`, `about` so many."""
    if not high > low:
        high = low + (abs(low) or 1.0)
    rough = (high - low) / about
    unit = 10.0 ** math.floor(math.log10(rough))
    step = next(unit * factor for factor in (1, 2, 2.5, 5, 10) if unit * factor >= rough * (1 - 1e-9))
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [i * step for i in range(first, last + 1)]


def short(value: float) -> str:
    """A number in few characters: 1234567 is "1.2M"."""
    for size, suffix in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= size:
            scaled = value / (1e3 if suffix == "k" else size)
            return f"{scaled:.3g}{suffix}"
    return f"{value:.3g}" if abs(value) < 1000 else f"{value:,.0f}"


def share(value: float) -> str:
    """A share in percent."""
    return f"{value * 100:.3g}%"


def lines(x: Sequence[float], series: Mapping[str, Values], *, form: Format = short, zero: bool = True) -> str:
    """A line for each series over `x`; None leaves a gap.

    Args:
        x: places, ascending.
        series: values by name, as many as `x`.
        form: writes values.
        zero: whether the axis begins at zero.
    """
    there = [v for values in series.values() for v in values if v is not None]
    if not there:
        return _nothing()
    scale = _Scale(x, ticks(min([*there, 0.0] if zero else there), max(there)), form)
    parts = []
    for color, (name, values) in zip(_colors(series), series.items(), strict=True):
        runs: list[list[str]] = [[]]
        for at, value in zip(x, values, strict=True):
            if value is None:
                runs.append([])
            else:
                runs[-1].append(f"{scale.x(at):.1f} {scale.y(value):.1f}")
        for run in runs:
            if len(run) > 1:
                parts.append(f'<path d="M{"L".join(run)}" fill="none" stroke="{color}" stroke-width="2"/>')
        for at, value in zip(x, values, strict=True):
            if value is not None:
                seen = 3.0 if len(x) <= 40 else 0.0  # the tooltip's target stays
                parts.append(
                    f'<g class="dot"><circle cx="{scale.x(at):.1f}" cy="{scale.y(value):.1f}" r="{seen:g}" '
                    f'fill="{color}"/><circle cx="{scale.x(at):.1f}" cy="{scale.y(value):.1f}" r="8" fill="#0000">'
                    f"<title>{escape(name)}, {short(at)}: {escape(form(value))}</title></circle></g>"
                )
    return scale.svg(parts) + _legend(series)


def columns(
    x: Sequence[float],
    series: Mapping[str, Sequence[float]],
    *,
    form: Format = short,
    colors: Mapping[str, str] | None = None,
) -> str:
    """A column at each `x`, the series stacked from the bottom; what is zero throughout is left out.

    Args:
        x: places, ascending and evenly spaced.
        series: values of at least 0 by name, as many as `x`.
        form: writes values.
        colors: by name; by default those of the palette in turn.
    """
    series = {name: values for name, values in series.items() if any(values)}
    if not series:
        return _nothing()
    colors = colors or dict(zip(series, _colors(series), strict=True))
    totals = [math.fsum(values) for values in zip(*series.values(), strict=True)]
    scale = _Scale(x, ticks(0.0, max(totals)), form, columns=True)
    width = scale.column * (0.8 if len(x) <= 60 else 1.0)
    parts, base = [], [0.0] * len(x)
    for name, values in series.items():
        for i, (at, value) in enumerate(zip(x, values, strict=True)):
            if value > 0:
                top, bottom = scale.y(base[i] + value), scale.y(base[i])
                base[i] += value
                parts.append(
                    f'<rect x="{scale.x(at) - width / 2:.1f}" y="{top:.1f}" width="{width:.1f}" '
                    f'height="{bottom - top:.1f}" fill="{colors[name]}"><title>{escape(name)}, {short(at)}: '
                    f"{escape(form(value))}</title></rect>"
                )
    return scale.svg(parts) + _legend(series, colors)


def histogram(edges: Sequence[float], counts: Sequence[int]) -> str:
    """Columns from edge to edge: one edge more than counts."""
    if not counts:
        return _nothing()
    scale = _Scale(edges, ticks(0.0, max(counts)), short)
    parts = []
    for low, high, count in zip(edges[:-1], edges[1:], counts, strict=True):
        left, right = scale.x(low), scale.x(high)
        parts.append(
            f'<rect x="{left + 0.5:.1f}" y="{scale.y(count):.1f}" width="{max(1.0, right - left - 1):.1f}" '
            f'height="{scale.y(0) - scale.y(count):.1f}" fill="{PALETTE[0]}"><title>{short(low)} to {short(high)}: '
            f"{count}</title></rect>"
        )
    return scale.svg(parts)


class _Scale:
    """Values to pixels, and the axes' marks."""

    def __init__(self, x: Sequence[float], marks: Sequence[float], form: Format, *, columns: bool = False) -> None:
        self.low, self.high = float(x[0]), float(x[-1])
        between = (self.high - self.low) / (len(x) - 1) if len(x) > 1 else 1.0
        if columns:
            self.low, self.high = self.low - between / 2, self.high + between / 2
        elif len(x) == 1:
            self.low, self.high = self.low - 0.5, self.high + 0.5
        self.column = (WIDTH - LEFT - RIGHT) * between / (self.high - self.low)
        self.marks, self.form = marks, form
        self.places = [m for m in ticks(float(x[0]), float(x[-1]), 5) if x[0] <= m <= x[-1]] if len(x) > 1 else [x[0]]

    def x(self, value: float) -> float:
        return LEFT + (value - self.low) / (self.high - self.low) * (WIDTH - LEFT - RIGHT)

    def y(self, value: float) -> float:
        low, high = self.marks[0], self.marks[-1]
        return HEIGHT - BOTTOM - (value - low) / (high - low) * (HEIGHT - TOP - BOTTOM)

    def svg(self, parts: Sequence[str]) -> str:
        axes = []
        for mark in self.marks:
            y = self.y(mark)
            axes.append(f'<path d="M{LEFT:g} {y:.1f}H{WIDTH - RIGHT:g}" class="rule"/>')
            axes.append(f'<text x="{LEFT - 6:g}" y="{y + 4:.1f}" text-anchor="end">{escape(self.form(mark))}</text>')
        axes += [
            f'<text x="{self.x(place):.1f}" y="{HEIGHT - 6:g}" text-anchor="middle">{short(place)}</text>'
            for place in self.places
        ]
        return f'<svg viewBox="0 0 {WIDTH:g} {HEIGHT:g}" role="img">{"".join([*axes, *parts])}</svg>'


def _colors(series: Mapping[str, object]) -> list[str]:
    return [PALETTE[i % len(PALETTE)] for i in range(len(series))]


def _legend(series: Mapping[str, object], colors: Mapping[str, str] | None = None) -> str:
    if len(series) < 2:
        return ""
    colors = colors or dict(zip(series, _colors(series), strict=True))
    items = (f'<li><i style="background:{colors[name]}"></i>{escape(name)}</li>' for name in series)
    return f'<ul class="legend">{"".join(items)}</ul>'


def _nothing() -> str:
    return '<p class="none">nothing recorded</p>'
