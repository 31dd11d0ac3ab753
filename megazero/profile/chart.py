"""This draws a measured cluster: collectives by size, and modules by micro-batch."""

from __future__ import annotations

import os
from collections import defaultdict
from pathlib import Path

from megazero.config.options.cluster import Cluster

Series = dict[str, list[tuple[float, float, float]]]  # name -> (x, y, relative spread)


def draw(cluster: Cluster, output: Path) -> Path:
    """Draw a line per collective and per module, with the rounds' spread, as a PNG that is replaced as a whole.

    Raises ValueError if there is no matplotlib.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ValueError(f"no chart: drawing needs matplotlib ({error}): pip install matplotlib") from error
    collectives, modules = series(cluster)
    figure = Figure(figsize=(12, 5), dpi=80, layout="constrained")
    FigureCanvasAgg(figure)  # draws without a display and without pyplot's global state
    figure.suptitle(f"{cluster.name}: {cluster.nodes} nodes of {cluster.ranks_per_node}", fontsize=9)
    left, right = figure.subplots(1, 2)
    for axes, lines, label in (
        (left, collectives, "bytes that a rank sends"),
        (right, modules, "micro-batch"),
    ):
        for name, points in sorted(lines.items()):
            x, y, spread = zip(*sorted(points), strict=True)
            half = [value * part / 2 for value, part in zip(y, spread, strict=True)]
            axes.errorbar(x, y, yerr=half, label=name, marker=".", capsize=2)
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.set_xlabel(label)
        axes.set_ylabel("seconds")
        if lines:
            axes.legend(fontsize=7)
    beside = output.with_name(output.name + ".partial")
    figure.savefig(beside, format="png")
    os.replace(beside, output)
    return output


def series(cluster: Cluster) -> tuple[Series, Series]:
    """Return the lines of both halves."""
    collectives: Series = defaultdict(list)
    for row in cluster.collectives:
        name = f"{row.operation} {row.ranks}x{row.nodes}"
        collectives[name].append((row.bytes, row.seconds, row.spread or 0.0))
    modules: Series = defaultdict(list)
    for part in cluster.layers:
        for what, seconds in (("forward", part.forward_seconds), ("backward", part.backward_seconds)):
            name = f"{part.module} {what}, TP {part.tp}"
            modules[name].append((part.micro_batch or 1, seconds, part.spread or 0.0))
    return collectives, modules
