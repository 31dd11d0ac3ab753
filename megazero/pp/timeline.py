"""When every action of a schedule runs: simulated from times per action, or measured. Pure.

A span is one action of one rank, and a timeline is all of them. Bubbles and peaks are read off the spans, so measured
and simulated runs are judged by the same code. When a rank may post a receive is read off a simulated timeline, too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from megazero.pp.schedules import (
    SCHEDULES,
    Action,
    Kind,
    Message,
    done_by,
    in_order,
    needs,
    sent_by,
    stage_count,
)

# Of the timeline that orders receives, in forwards. Of 0, 0.5, 1, 2 and 4 it costs least: simulated steps of 2 to 8
# ranks whose transfers take 0.1 to 2 forwards are as long under gpipe and 1f1b as if receives were posted at once,
# 0.8% longer under interleaved and 2.4% under zb-h1 (means).
POSTING_LATENCY = 2.0


@dataclass(frozen=True)
class Times:
    """Times of one stage and micro-batch, in seconds or any one unit. A whole backward is the sum of its halves."""

    forward: float = 1.0
    backward_input: float = 1.0
    backward_weight: float = 1.0

    def of(self, kind: Kind) -> float:
        whole = self.backward_input + self.backward_weight
        return {
            Kind.FORWARD: self.forward,
            Kind.BACKWARD: whole,
            Kind.INPUT: self.backward_input,
            Kind.WEIGHT: self.backward_weight,
        }[kind]


@dataclass(frozen=True)
class Span:
    """One action of one pipeline rank. It lasts from ``start`` to ``stop`` (seconds or units)."""

    rank: int
    action: Action
    start: float
    stop: float


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


def simulate(
    schedule: Sequence[Sequence[Action]],
    pp: int,
    *,
    times: Times | Sequence[Times] | Callable[[Action], float],
    latency: float = 0.0,
) -> Timeline:
    """Run every action as soon as its rank is free and its inputs are there.

    times: one for all stages, one for each virtual stage, or a function of the action.
    latency: the time between the end of an action and the start of one on another rank that needs it.
    Raises ValueError if the schedule hangs.
    """
    stages = stage_count(schedule)
    if isinstance(times, Sequence) and len(times) != stages:
        raise ValueError(
            f"times of {len(times)} stages for a schedule of {stages}; give one each, or one for all"
        )
    free, done, spans = [0.0] * pp, dict[Action, float](), []
    for rank, action in in_order(schedule, stages):
        ready = [done[event] + latency * (event.stage % pp != rank) for event in needs(action, stages)]
        start = max([free[rank], *ready])
        free[rank] = done[done_by(action)] = start + _time(times, action)
        spans.append(Span(rank, action, start, free[rank]))
    return Timeline(pp, tuple(spans))


def post_after(schedule: Sequence[Sequence[Action]], pp: int) -> Mapping[Message, int]:
    """Map every message between ranks to the actions that its receiver must have issued before it posts the receive.

    On NCCL a posted receive occupies the device until the message comes. What waits for the whole device then waits
    for the message, too: the first launch of a kernel that is loaded lazily, a retry of the allocator, a new
    communicator. One rank must not wait for itself (the message depends on a later action of its own). Nor must two
    ranks wait for each other (each has posted a receive that the other's next action must feed). So it is not enough
    that a rank has issued the actions a message depends on.

    All ranks order all actions alike, by their start on a simulated timeline, so each comes after those it needs. A
    receive is posted when the receiver has issued its own actions that come before the sending one. Then every wait
    is for something earlier in that order, and no schedule hangs, even if each action waits for all messages that its
    rank has posted.
    """
    stages = stage_count(schedule)
    order = simulate(schedule, pp, times=Times(), latency=POSTING_LATENCY).spans
    issued, after = [0] * pp, dict[Message, int]()
    for span in sorted(order, key=lambda span: span.start):
        if message := sent_by(span.action, stages, pp):
            after[message] = issued[message.target_stage % pp]
        issued[span.rank] += 1
    return after


def _time(times: Times | Sequence[Times] | Callable[[Action], float], action: Action) -> float:
    if isinstance(times, Times):
        return times.of(action.kind)
    return times[action.stage].of(action.kind) if isinstance(times, Sequence) else times(action)


def ideal_bubble(name: str, pp: int, virtual: int, micro_batches: int, times: Times = Times()) -> float:  # noqa: B008
    """Return the idle share of a schedule with equal stages and no latency. ``times`` are those of one virtual stage.

    It is (pp - 1) / (virtual * micro_batches + pp - 1) for whole backwards (Narayanan et al. 2021, section 2.2). With
    split backwards the schedule idles for (pp - 1)(F + I - W) (Qi et al. 2023, table 2) where I >= W and there are at
    least pp micro-batches. In general a deferred W hides no more than an I, and a rank defers at most
    micro_batches - 1 of them.
    """
    if pp == 1:
        return 0.0
    if not SCHEDULES[name].splits_backward:
        return (pp - 1) / (virtual * micro_batches + pp - 1)
    hidden = min(micro_batches, pp) - 1
    idle = (pp - 1) * (times.forward + times.backward_input)
    idle -= hidden * min(times.backward_input, times.backward_weight)
    return idle / (micro_batches * (times.of(Kind.FORWARD) + times.of(Kind.BACKWARD)) + idle)
