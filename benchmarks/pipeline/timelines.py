"""Timelines of pipelines, measured or simulated: who computes when, and how long ranks are idle."""

from __future__ import annotations

from dataclasses import dataclass

from megazero.pp.schedules import Kind
from megazero.pp.timeline import Span


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
