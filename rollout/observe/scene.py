"""`Scene`: rectangles, outlines and text on a white sheet, written as SVG, or as PNG where matplotlib is installed.

Owns the two writers, so that a picture is laid out once. Refuses to know what is drawn.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import Any, Literal

Anchor = Literal["start", "middle", "end"]
FONT = "system-ui, -apple-system, 'Segoe UI', 'DejaVu Sans', sans-serif"
INK, GREY = "#1f2328", "#6e7781"


@dataclass(frozen=True, slots=True)
class _Shape:
    points: tuple[tuple[float, float], ...]
    fill: str
    stroke: str


@dataclass(frozen=True, slots=True)
class _Text:
    x: float
    y: float
    text: str
    size: float
    fill: str
    anchor: Anchor
    bold: bool


@dataclass(slots=True)
class Scene:
    """A sheet of `width` x `height` pixels; y grows downwards. What is added later lies on top."""

    width: float
    height: float
    _items: list[_Shape | _Text] = field(default_factory=list)

    def rect(self, x: float, y: float, width: float, height: float, fill: str) -> None:
        """A filled rectangle; one without area is left out."""
        if width > 0 and height > 0:
            self.polygon(((x, y), (x + width, y), (x + width, y + height), (x, y + height)), fill)

    def polygon(self, points: Sequence[tuple[float, float]], fill: str) -> None:
        """A filled outline."""
        self._items.append(_Shape(tuple(points), fill, "none"))

    def line(self, points: Sequence[tuple[float, float]], stroke: str) -> None:
        """A line of one pixel's width through the points."""
        self._items.append(_Shape(tuple(points), "none", stroke))

    def text(
        self,
        x: float,
        y: float,
        text: str,
        *,
        size: float = 13,
        fill: str = INK,
        anchor: Anchor = "start",
        bold: bool = False,
    ) -> None:
        """A line of text, `y` at its baseline."""
        self._items.append(_Text(x, y, text, size, fill, anchor, bold))

    def write(self, path: str | Path) -> Path:
        """Writes .svg or .png, as `path` ends.

        Raises:
            ValueError: another ending.
            ImportError: .png, and matplotlib isn't installed.
        """
        path = Path(path)
        if path.suffix == ".svg":
            path.write_text(self.to_svg(), encoding="utf-8")
        elif path.suffix == ".png":
            self._write_png(path)
        else:
            raise ValueError(f"a picture is written as .svg or .png, not {path.name}")
        return path

    def to_svg(self) -> str:
        """An SVG document that needs nothing from elsewhere, fit to stand in HTML."""
        lines = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self.width:g} {self.height:g}" '
            f'width="{self.width:g}" height="{self.height:g}" font-family="{FONT}">',
            f'<rect width="{self.width:g}" height="{self.height:g}" fill="#fff"/>',
        ]
        for item in self._items:
            if isinstance(item, _Shape):
                path = "M" + "L".join(f"{_short(x)} {_short(y)}" for x, y in item.points)
                closed = "" if item.fill == "none" else "Z"
                stroke = "" if item.stroke == "none" else f' stroke="{item.stroke}"'
                lines.append(f'<path d="{path}{closed}" fill="{item.fill}"{stroke}/>')
            else:
                bold = ' font-weight="600"' if item.bold else ""
                lines.append(
                    f'<text x="{_short(item.x)}" y="{_short(item.y)}" font-size="{item.size:g}" fill="{item.fill}" '
                    f'text-anchor="{item.anchor}"{bold}>{escape(item.text, quote=False)}</text>'
                )
        return "\n".join([*lines, "</svg>\n"])

    def _write_png(self, path: Path, dots_per_pixel: float = 2.0) -> None:
        try:
            figure_module: Any = importlib.import_module("matplotlib.figure")
            patches: Any = importlib.import_module("matplotlib.patches")
        except ImportError as error:
            raise ImportError("PNG needs matplotlib: pip install matplotlib, or write .svg instead") from error
        inch = 100.0
        figure = figure_module.Figure(figsize=(self.width / inch, self.height / inch), dpi=inch * dots_per_pixel)
        axes = figure.add_axes((0, 0, 1, 1))
        axes.set(xlim=(0, self.width), ylim=(self.height, 0))
        axes.axis("off")
        sides = {"start": "left", "middle": "center", "end": "right"}
        for item in self._items:
            if isinstance(item, _Text):
                weight = "bold" if item.bold else "normal"
                style = {"fontsize": item.size * 72 / inch, "color": item.fill, "weight": weight}
                axes.text(item.x, item.y, item.text, ha=sides[item.anchor], va="baseline", **style)
            elif item.fill == "none":
                axes.plot(*zip(*item.points, strict=True), color=item.stroke, linewidth=72 / inch)
            else:
                axes.add_patch(patches.Polygon(item.points, closed=True, facecolor=item.fill, linewidth=0))
        figure.savefig(path)


def _short(number: float) -> str:
    return f"{number:.2f}".rstrip("0").rstrip(".")
