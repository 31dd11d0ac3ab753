"""Charts: matplotlib figures, written as whole files, and curves as text. No display is needed."""

from __future__ import annotations

import io
import math
import os
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

from megazero.files import replacing

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))  # of a Braille cell, by row and column
Point = tuple[float, float]


def new_figure(width: float, height: float, dpi: int = 80, title: str | None = None) -> Figure:
    """Return an empty figure of ``width`` x ``height`` inches. Raises ValueError without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ValueError(f"charts need matplotlib ({error}): pip install matplotlib") from error
    figure = Figure(figsize=(width, height), dpi=dpi, layout="constrained")
    if title:
        figure.suptitle(title, fontsize=9)
    return figure


def save(figure: Figure, path: str | os.PathLike[str]) -> None:
    """Write a figure as a PNG file, which is replaced as a whole."""
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    with replacing(Path(path)) as file:
        file.write(png(figure))


def png(figure: Figure) -> bytes:
    """Return a figure as PNG."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    FigureCanvasAgg(figure)  # needs neither a display nor pyplot's global state
    file = io.BytesIO()
    figure.savefig(file, format="png")
    return file.getvalue()


def text_chart(
    points: Sequence[Point], x_name: str, y_name: str, width: int = 80, height: int = 12, braille: bool = True
) -> list[str]:
    """Draw points as lines of text of ``width`` characters below ``y_name`` and above ``x_name``, whose values are
    whole numbers. Points that are not finite are left out.

    Each column of dots has the least and the greatest value that fall into it, and what is between them; columns
    without a value lie on the straight line between their neighbours.
    """
    points = [point for point in points if all(map(math.isfinite, point))]
    if not points:
        return ["no finite value"]
    (left, right), (low, high) = (_range([point[axis] for point in points]) for axis in (0, 1))
    labels = [f"{high:.4g}", f"{low:.4g}"]
    margin = max(map(len, labels)) + 2
    columns, rows = 2 * max(4, width - margin), 4 * height
    spans: dict[int, list[float]] = {}
    for x, y in points:
        row = (high - y) / (high - low) * (rows - 1)
        spans.setdefault(round((x - left) / (right - left) * (columns - 1)), []).append(row)
    for before, after in pairwise(sorted(spans)):
        step = (spans[after][0] - spans[before][-1]) / (after - before)
        spans |= {c: [spans[before][-1] + step * (c - before)] for c in range(before + 1, after)}
    cells = [[0] * (columns // 2) for _ in range(height)]
    for column, found in spans.items():
        for row in range(round(min(found)), round(max(found)) + 1):
            cells[row // 4][column // 2] |= _DOTS[row % 4][column % 2]
    lines = [" " * margin + y_name]
    for number, cell in enumerate(cells):
        label = labels[0] if number == 0 else labels[1] if number == height - 1 else ""
        drawn = "".join((chr(0x2800 + dots) if braille else "*") if dots else " " for dots in cell)
        lines.append(f"{label:>{margin - 2}} {'│' if braille else '|'}{drawn}".rstrip())
    ends = f"{left:,.0f}", f"{right:,.0f}"
    between = columns // 2 - sum(map(len, ends))
    return [*lines, " " * margin + ends[0] + x_name.center(between) + ends[1]]


def _range(values: Sequence[float]) -> tuple[float, float]:
    low, high = min(values), max(values)
    return (low, high) if high > low else (low, low + (abs(low) or 1.0))
