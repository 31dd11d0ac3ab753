"""Timelines of pipelines, measured or simulated: idle time, a picture (needs matplotlib), a trace for Perfetto."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from megazero.charts import new_figure, save
from megazero.pp.schedules import Kind
from megazero.pp.timeline import Span

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLOURS = {Kind.FORWARD: "#4c8bd6", Kind.BACKWARD: "#58b368", Kind.INPUT: "#7fd0c0", Kind.WEIGHT: "#f0a830"}
NAMES = {
    Kind.FORWARD: "forward",
    Kind.BACKWARD: "backward",
    Kind.INPUT: "gradient of the input",
    Kind.WEIGHT: "gradient of the weights",
}


@dataclass(frozen=True)
class Timeline:
    """All spans of one step, at least one, in any order."""

    pp: int
    spans: tuple[Span, ...]

    @property
    def makespan(self) -> float:
        return max(span.stop for span in self.spans) - min(span.start for span in self.spans)

    @property
    def busy(self) -> tuple[float, ...]:
        """Return the time that each rank computes."""
        return tuple(sum(s.stop - s.start for s in self.spans if s.rank == rank) for rank in range(self.pp))

    @property
    def idle(self) -> tuple[float, ...]:
        """Return, per rank, the time not computing between the first start and the last stop of any rank."""
        return tuple(self.makespan - busy for busy in self.busy)

    @property
    def bubble(self) -> float:
        """Return the share of all ranks' time that is idle."""
        return 1 - sum(self.busy) / (self.pp * self.makespan)

    def peak_activations(self) -> tuple[int, ...]:
        """Return, per rank, the most forwards whose backward (the weights' half, if split) has not ended."""
        held, peak = [0] * self.pp, [0] * self.pp
        for span in sorted(self.spans, key=lambda span: span.start):
            if span.action.kind == Kind.FORWARD:
                held[span.rank] += 1
                peak[span.rank] = max(peak[span.rank], held[span.rank])
            elif span.action.kind != Kind.INPUT:
                held[span.rank] -= 1
        return tuple(peak)


def chrome_trace(timeline: Timeline) -> dict[str, Any]:
    """Return JSON for chrome://tracing and Perfetto, with one row per rank. Spans count as seconds."""
    events: list[dict[str, Any]] = [
        {"name": "thread_name", "ph": "M", "pid": 0, "tid": rank, "args": {"name": f"pipeline rank {rank}"}}
        for rank in range(timeline.pp)
    ]
    for span in timeline.spans:
        kind, stage, micro_batch = span.action.kind, span.action.stage, span.action.micro_batch
        events.append(
            {
                "name": f"{kind.value}{micro_batch}",
                "cat": NAMES[kind],
                "ph": "X",
                "pid": 0,
                "tid": span.rank,
                "ts": span.start * 1e6,
                "dur": (span.stop - span.start) * 1e6,
                "args": {"stage": stage, "micro_batch": micro_batch},
            }
        )
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def draw(timelines: Mapping[str, Timeline], path: str | os.PathLike[str]) -> None:
    """Draw a PNG with one panel per timeline, one row per rank and one time axis.

    Boxes carry micro-batch numbers where they are wide enough; every other stage of a rank is paler. Raises
    ValueError if there is no matplotlib or there are no timelines.
    """
    if not timelines:
        raise ValueError("no timelines to draw; give at least one")
    rows = [timeline.pp for timeline in timelines.values()]
    figure = new_figure(12, 0.8 + sum(0.3 * pp + 0.55 for pp in rows), dpi=110)
    from matplotlib.patches import Patch

    panels = figure.subplots(len(rows), 1, sharex=True, squeeze=False, height_ratios=rows)[:, 0]
    end = max(timeline.makespan for timeline in timelines.values())
    for axes, (name, timeline) in zip(panels, timelines.items(), strict=True):
        _panel(axes, name, timeline, end)
    panels[-1].set_xlabel("time")
    used = {span.action.kind for timeline in timelines.values() for span in timeline.spans}
    handles = [Patch(facecolor=COLOURS[kind], label=NAMES[kind]) for kind in Kind if kind in used]
    figure.legend(handles=handles, loc="outside upper right", ncols=len(handles), frameon=False, fontsize=9)
    save(figure, path)


def _panel(axes: Axes, name: str, timeline: Timeline, end: float) -> None:
    """Draw one timeline from its own first start on an axis that ends at ``end``."""
    begin = min(span.start for span in timeline.spans)
    boxes: dict[tuple[int, Kind, bool], list[tuple[float, float]]] = {}
    for span in timeline.spans:
        left, width = span.start - begin, span.stop - span.start
        pale = span.action.stage // timeline.pp % 2 == 1
        boxes.setdefault((span.rank, span.action.kind, pale), []).append((left, width))
        number = str(span.action.micro_batch)
        if width > 0.009 * end * len(number):
            axes.text(left + width / 2, span.rank, number, ha="center", va="center_baseline", fontsize=6.5)
    for (rank, kind, pale), ranges in boxes.items():
        style: dict[str, Any] = {"alpha": 0.65 if pale else 1.0, "edgecolor": "white", "linewidth": 0.5}
        axes.broken_barh(ranges, (rank - 0.43, 0.86), facecolor=COLOURS[kind], **style)
    axes.set_xlim(0, end)
    axes.set_ylim(timeline.pp - 0.5, -0.5)
    axes.set_yticks(range(timeline.pp), [f"rank {rank}" for rank in range(timeline.pp)], fontsize=8)
    axes.set_title(f"{name}: bubble {timeline.bubble:.1%}", loc="left", fontsize=10)
    axes.spines[["top", "right"]].set_visible(False)
