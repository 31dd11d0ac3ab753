"""This draws the time bill and the memory of the layouts that the planner found."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from megazero.plan.memory import GIB
from megazero.plan.report import WORDS, describe
from megazero.plan.search import Found
from megazero.plan.simulate import BILL


def draw(best: Sequence[Found], output: Path, title: str) -> Path:
    """Draw a bar per layout, of its seconds and of its memory by item, as a PNG that is replaced as a whole.

    Raises ValueError if there is no matplotlib.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ValueError(f"no chart: drawing needs matplotlib ({error}): pip install matplotlib") from error
    figure = Figure(figsize=(13, 1.5 + 0.45 * len(best)), dpi=80, layout="constrained")
    FigureCanvasAgg(figure)  # draws without a display and without pyplot's global state
    figure.suptitle(title, fontsize=9)
    times, sizes = figure.subplots(1, 2, sharey=True)
    names = [f"{i}: {describe(found.layout)}" for i, found in enumerate(best, 1)]
    bars = [
        (
            times,
            {WORDS[name]: [found.timing.bill[name] for found in best] for name in BILL},
            "seconds of a step",
        ),
        (
            sizes,
            {
                name: [f.layout.memory.items()[name] / GIB for f in best]
                for name in best[0].layout.memory.items()
            },
            "GiB of the fullest rank",
        ),
    ]
    for axes, items, label in bars:
        left = [0.0] * len(best)
        for number, (name, values) in enumerate(items.items()):
            if any(values):
                axes.barh(names, values, left=left, color=f"C{number}", label=name)
            left = [start + value for start, value in zip(left, values, strict=True)]
        axes.set_xlabel(label)
        axes.legend(fontsize=6, loc="upper center", bbox_to_anchor=(0.5, -0.14), ncol=4)
        axes.tick_params(labelsize=7)
    sizes.axvline(best[0].layout.room / GIB, color="black", linestyle="--", linewidth=1)
    times.invert_yaxis()
    output.parent.mkdir(parents=True, exist_ok=True)
    beside = output.with_name(output.name + ".partial")
    figure.savefig(beside, format="png")
    os.replace(beside, output)
    return output
