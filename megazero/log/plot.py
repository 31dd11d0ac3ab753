"""Draws the loss curve of one or more runs as a PNG."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megazero.charts import new_figure, save
from megazero.log.metrics import METRICS_FILE, read_metrics

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MARKERS = "os^vDPX*"  # one for each data set that is evaluated


def plot_loss(
    metrics: Sequence[str | os.PathLike[str]], output: str | os.PathLike[str], *, title: str = "loss"
) -> Path:
    """Draw training loss (line), evaluation loss (points) and resumes (dashed lines) over iterations.

    metrics: metrics.jsonl files or their log directories; each gives one curve. output: the path of a .png, which is
    replaced as a whole. Returns this path. Raises ValueError if there is no matplotlib, if no files are given, or if
    a file has no losses.
    """
    if not metrics:
        raise ValueError("no metrics files to draw; give at least one metrics.jsonl or log directory")
    figure = new_figure(8, 5, dpi=120)
    axes = figure.add_subplot(xlabel="iteration", ylabel="loss (nats per token)", title=title)
    axes.locator_params(axis="x", integer=True)
    axes.grid(alpha=0.3)
    for index, name in enumerate(_names(metrics)):
        path = Path(metrics[index])
        _draw(axes, read_metrics(path), path, f"C{index}", f"{name} " if name else "")
    axes.legend()
    target = Path(output)
    save(figure, target)
    return target


def _draw(axes: Axes, lines: Sequence[Mapping[str, Any]], path: Path, colour: str, prefix: str) -> None:
    train = [line for line in lines if "lm_loss" in line]
    evaluations: dict[str, list[Mapping[str, Any]]] = {}  # by the name of their data
    for line in lines:
        if "eval_lm_loss" in line:
            evaluations.setdefault(line.get("eval_data", ""), []).append(line)
    if not train and not evaluations:
        raise ValueError(f"{path} has no line with lm_loss or eval_lm_loss; is it the right file?")
    if train:
        iterations, losses = [m["iteration"] for m in train], [m["lm_loss"] for m in train]
        axes.plot(iterations, losses, color=colour, linewidth=1, alpha=0.8, label=f"{prefix}train")
    for number, (data, of_data) in enumerate(evaluations.items()):
        iterations, losses = [m["iteration"] for m in of_data], [m["eval_lm_loss"] for m in of_data]
        of_what = f"{prefix}evaluation{f' {data}' if data else ''}"
        axes.plot(iterations, losses, f"{MARKERS[number % len(MARKERS)]}--", color=colour, markersize=5,
                  markeredgecolor="black", label=of_what)  # fmt: skip
    resumes = [m["resumed_from"] for m in train if "resumed_from" in m]
    for number, iteration in enumerate(resumes):
        label = f"{prefix}resume" if number == 0 else None
        axes.axvline(iteration, color=colour, linestyle="--", linewidth=1, alpha=0.6, label=label)


def _names(metrics: Sequence[str | os.PathLike[str]]) -> list[str]:
    """Return a name of each file for the legend: none for one file, else that of its directory, or its stem."""
    if len(metrics) == 1:
        return [""]
    paths = [Path(item) for item in metrics]
    return [p.parent.name if p.name == METRICS_FILE else p.stem for p in paths]
