"""When every action of a schedule runs, simulated from times per action, and what follows from it. Pure.

The timeline of a step is the spans of all its actions. When a rank may post a receive is read off a simulated one.
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

    @property
    def backward(self) -> float:
        return self.backward_input + self.backward_weight

    def of(self, action: Action) -> float:
        return {
            Kind.FORWARD: self.forward,
            Kind.BACKWARD: self.backward,
            Kind.INPUT: self.backward_input,
            Kind.WEIGHT: self.backward_weight,
        }[action.kind]


@dataclass(frozen=True)
class Span:
    """One action of one pipeline rank. It lasts from ``start`` to ``stop`` (seconds or units)."""

    rank: int
    action: Action
    start: float
    stop: float


def simulate(
    schedule: Sequence[Sequence[Action]], pp: int, *, time_of: Callable[[Action], float], latency: float = 0.0
) -> tuple[Span, ...]:
    """Run every action as soon as its rank is free and its inputs are there.

    latency: the time between the end of an action and the start of one on another rank that needs it.
    Raises ValueError if the schedule hangs.
    """
    stages = stage_count(schedule)
    free, done, spans = [0.0] * pp, dict[Action, float](), []
    for rank, action in in_order(schedule, stages):
        ready = [done[event] + latency * (event.stage % pp != rank) for event in needs(action, stages)]
        start = max([free[rank], *ready])
        free[rank] = done[done_by(action)] = start + time_of(action)
        spans.append(Span(rank, action, start, free[rank]))
    return tuple(spans)


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
    order = simulate(schedule, pp, time_of=Times().of, latency=POSTING_LATENCY)
    issued, after = [0] * pp, dict[Message, int]()
    for span in sorted(order, key=lambda span: span.start):
        if message := sent_by(span.action, stages, pp):
            after[message] = issued[message.target_stage % pp]
        issued[span.rank] += 1
    return after


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
    return idle / (micro_batches * (times.forward + times.backward) + idle)
