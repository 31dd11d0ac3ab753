"""Chart what README shows first: an 8B over the link's rate as planned, beside the lab's small model as measured.

    python -m benchmarks.planning.first_screen          # seconds

Reads docs/results/planned_rates.md and benchmarks/results/comparison.json, and writes docs/results/first_screen.png.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from statistics import median

from benchmarks import harness
from benchmarks.links.comparison_report import OVER_RATES
from benchmarks.planning.planned_rates import PAGE
from benchmarks.results import PAGES, RESULTS
from megazero.charts import new_figure, save

CHART, TITLE = PAGES / "first_screen.png", "8B on 4 nodes of 8 H100"
# One colour for one kind, planned and measured.
COLOURS = {
    **{"FSDP2": "C0", "HSDP, once a step": "C1", "HSDP once": "C1"},
    **{"ZeRO-1 with TP": "C2", "DDP": "C4", "zeropp": "C3", "megazero zeropp": "C3"},
}


def planned(text: str, title: str) -> tuple[list[float], dict[str, list[float]]]:
    """Return the rates in Gb/s, and the seconds of each line, of a table of planned_rates.md."""
    part = text.split(f"## {title}\n")[1].split("\n## ")[0]
    head, _, *rows = [line.strip("| ").split(" | ") for line in part.splitlines() if line.startswith("|")]
    lines = {name: list(map(float, cells)) for name, *cells in rows if "does not fit" not in cells}
    return list(map(float, head[1:])), lines


def measured(stored: Mapping, micro_batches: int) -> tuple[list[str], dict[str, list[float]]]:
    """Return the rates in tc's words, and the median seconds of each contestant, of comparison.json."""
    rates = list(dict.fromkeys(each["rate"] for each in stored["results"]))
    lines: dict[str, list[float]] = {}
    for name, heat in OVER_RATES.items():
        found = [
            median(each["seconds"][name])
            for each in stored["results"]
            if (each["micro_batches"], each["heat"]) == (micro_batches, heat) and name in each["seconds"]
        ]
        if len(found) == len(rates):
            lines[name] = found
    return rates, lines


def main() -> None:
    harness.parser(__doc__).parse_args()
    figure = new_figure(8.4, 2.8)
    left, right = figure.subplots(1, 2)
    rates, lines = planned(PAGE.read_text("utf-8"), TITLE)
    for name, seconds in lines.items():
        left.plot(rates, seconds, marker="o", markersize=3, label=name, color=COLOURS[name])
    left.set(xscale="log", yscale="log", xlabel="Gb/s of a node", ylabel="seconds of a step")
    left.set_yticks([5, 10, 20, 40], ["5", "10", "20", "40"])
    left.set_xticks(rates, [f"{rate:g}" for rate in rates])
    left.set_title(f"planned: {TITLE}", size=9)
    words, found = measured(json.loads((RESULTS / "comparison.json").read_text()), 1)
    for name, seconds in found.items():
        right.plot(range(len(words)), seconds, marker="o", markersize=3, label=name, color=COLOURS[name])
    right.set_xticks(range(len(words)), [_spelt(word) for word in words])
    right.set(ylim=(0, None), xlabel="link between the nodes")
    right.set_title("measured: 8.4M on 2 nodes of 2 CPU ranks", size=9)
    _small((left, right))
    save(figure, CHART)


def _spelt(rate: str) -> str:
    found = re.fullmatch(r"(\d+)([mg])bit", rate)
    return f"{found[1]} {found[2].upper()}b/s" if found else "no limit"


def _small(panels: Sequence) -> None:
    for panel in panels:
        panel.legend(fontsize=6)
        panel.tick_params(labelsize=7)
        panel.minorticks_off()
        panel.xaxis.label.set_size(8)
        panel.yaxis.label.set_size(8)


if __name__ == "__main__":
    harness.start(main)
