"""Charts: matplotlib figures, written as whole files. No display is needed."""

from __future__ import annotations

import io
import os
from pathlib import Path
from typing import TYPE_CHECKING

from megazero.files import replacing

if TYPE_CHECKING:
    from matplotlib.figure import Figure


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
