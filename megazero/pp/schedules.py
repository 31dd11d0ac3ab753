"""Pipeline schedules as data: what every rank computes, in which order, and what it sends. Pure; no torch.

Stage i lies on rank i % pp (partition.py). Every schedule here is one rule with other numbers: first ``warmup``
forwards, then one forward and one backward in turn, then the backwards that are left. With split backwards, the
gradient of the weights of a micro-batch is computed ``delay`` backwards after that of its input.

- gpipe runs all forwards first (Huang et al. 2019).
- 1f1b is PipeDream-flush (Narayanan et al. 2021, section 2.2.1).
- interleaved is 1F1B over several stages per rank, in groups of pp micro-batches (ibid., section 2.2.2). The order is
  Megatron's.
- zb-h1 is 1F1B with split backwards (Qi et al. 2023, section 3.1). Rank r puts weights' gradients off by r
  micro-batches. So every rank has at most pp in flight, as the first rank has under 1F1B, and the gradients that
  were put off fill the end. The first rank sends no gradient on and does not split. On one rank it is 1f1b.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import permutations
from types import MappingProxyType


@dataclass(frozen=True)
class Rule:
    """The rule of one schedule.

    warmup: the number of forwards before the first backward, from (ranks, stages per rank, micro-batches, rank).
    several_stages: The schedule takes several stages per rank, and only those, in groups of as many micro-batches as
    there are ranks.
    splits_backward: Backwards are split into INPUT and WEIGHT. Rank r computes the latter r micro-batches later.
    """

    warmup: Callable[[int, int, int, int], int]
    several_stages: bool = False
    splits_backward: bool = False


SCHEDULES: Mapping[str, Rule] = MappingProxyType(
    {
        "gpipe": Rule(lambda pp, virtual, micro_batches, rank: micro_batches),
        "1f1b": Rule(lambda pp, virtual, micro_batches, rank: pp - 1 - rank),
        "interleaved": Rule(
            lambda pp, virtual, micro_batches, rank: (virtual - 1) * pp + 2 * (pp - 1 - rank),
            several_stages=True,
        ),
        "zb-h1": Rule(lambda pp, virtual, micro_batches, rank: pp - 1 - rank, splits_backward=True),
    }
)


class Kind(StrEnum):
    """INPUT and WEIGHT are the halves of BACKWARD: the gradients of the stage's input and of its weights."""

    FORWARD = "F"
    BACKWARD = "B"
    INPUT = "I"
    WEIGHT = "W"


@dataclass(frozen=True)
class Action:
    """One computation of one rank. ``stage`` is a virtual stage."""

    kind: Kind
    stage: int
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.kind}(stage {self.stage}, micro-batch {self.micro_batch})"


Schedule = tuple[tuple[Action, ...], ...]  # by pipeline rank


@dataclass(frozen=True)
class Message:
    """``kind`` is 'activation' (it goes to the next stage) or 'gradient' (it goes to the one before)."""

    kind: str
    source_stage: int
    target_stage: int
    micro_batch: int


def schedule_problem(name: str, pp: int, virtual: int, micro_batches: int) -> str:
    """Return the rule that a schedule of this size breaks, with the nearest legal choice, or '' if it is legal."""
    if name not in SCHEDULES:
        return f"schedule {name!r} is not one of {', '.join(SCHEDULES)}; nearest: 1f1b"
    if min(pp, virtual, micro_batches) < 1:
        return (
            f"{pp} ranks, {virtual} stages per rank and {micro_batches} micro-batches must each be at least 1"
        )
    if pp == 1:
        return f"{virtual} stages per rank need more than one rank; nearest: 1" if virtual > 1 else ""
    if not SCHEDULES[name].several_stages:
        return (
            f"schedule {name} has one stage per rank, not {virtual}; nearest: interleaved"
            if virtual > 1
            else ""
        )
    if virtual == 1:
        return f"schedule {name} needs at least 2 stages per rank, not 1; nearest: 1f1b"
    if micro_batches % micro_batch_multiple(name, pp, virtual):
        low = micro_batches // pp * pp
        nearest = f"{low} or {low + pp}" if low else str(pp)
        return (
            f"schedule {name} needs a multiple of {pp} micro-batches ({pp} pipeline ranks), not "
            f"{micro_batches}; nearest: {nearest}"
        )
    return ""


def micro_batch_multiple(name: str, pp: int, virtual: int) -> int:
    """The micro-batches of a step must be a multiple of this number. It is 1 for an unknown schedule."""
    return pp if virtual > 1 and name in SCHEDULES and SCHEDULES[name].several_stages else 1


def make_schedule(name: str, pp: int, virtual: int, micro_batches: int) -> Schedule:
    """Return the actions of every pipeline rank in order. Raises ValueError as schedule_problem says."""
    if problem := schedule_problem(name, pp, virtual, micro_batches):
        raise ValueError(problem)
    return tuple(tuple(_actions(name, pp, virtual, micro_batches, rank)) for rank in range(pp))


def make_evaluation(pp: int, virtual: int, micro_batches: int) -> Schedule:
    """Return forwards, stage by stage over groups of as many micro-batches as ranks: all busy, few messages wait."""
    groups = [range(i, min(i + pp, micro_batches)) for i in range(0, micro_batches, pp)]
    return tuple(
        tuple(
            Action(Kind.FORWARD, chunk * pp + rank, m)
            for group in groups
            for chunk in range(virtual)
            for m in group
        )
        for rank in range(pp)
    )


def _actions(name: str, pp: int, virtual: int, micro_batches: int, rank: int) -> Iterator[Action]:
    warmup, delay = _phases(name, pp, virtual, micro_batches, rank)
    slots = [(k // pp % virtual, k // (pp * virtual) * pp + k % pp) for k in range(virtual * micro_batches)]
    forwards = [Action(Kind.FORWARD, chunk * pp + rank, m) for chunk, m in slots]
    yield from forwards[:warmup]
    for k, (chunk, m) in enumerate(slots):
        yield from forwards[warmup + k : warmup + k + 1]
        yield Action(Kind.INPUT if delay else Kind.BACKWARD, (virtual - 1 - chunk) * pp + rank, m)
        if delay and k >= delay:
            yield Action(Kind.WEIGHT, rank, k - delay)
    if delay:
        yield from (Action(Kind.WEIGHT, rank, m) for m in range(max(0, micro_batches - delay), micro_batches))


def _phases(name: str, pp: int, virtual: int, micro_batches: int, rank: int) -> tuple[int, int]:
    """Return (warmup, delay) of the rule in the module's docstring. A delay of 0 means whole backwards."""
    rule = SCHEDULES[name]
    return rule.warmup(pp, virtual, micro_batches, rank), rank if rule.splits_backward else 0


def peak_activations(name: str, pp: int, virtual: int, micro_batches: int) -> tuple[int, ...]:
    """Return, per rank, the most forwards (of one stage and micro-batch) whose backward, weights' half included, has
    not ended."""
    phases = (_phases(name, pp, virtual, micro_batches, rank) for rank in range(pp))
    return tuple(min(warmup + 1 + delay, virtual * micro_batches) for warmup, delay in phases)


def done_by(action: Action) -> Action:
    """Return the event that others wait for: a stage's input gradient is there after INPUT as after BACKWARD."""
    return Action(Kind.INPUT, action.stage, action.micro_batch) if action.kind == Kind.BACKWARD else action


def needs(action: Action, stages: int) -> tuple[Action, ...]:
    """Return the events (done_by) that an action waits for. ``stages`` counts all virtual stages."""
    kind, stage, m = action.kind, action.stage, action.micro_batch
    if kind == Kind.FORWARD:
        return (Action(kind, stage - 1, m),) if stage else ()
    if kind == Kind.WEIGHT:
        return (Action(Kind.INPUT, stage, m),)
    own = Action(Kind.FORWARD, stage, m)
    return (own, Action(Kind.INPUT, stage + 1, m)) if stage < stages - 1 else (own,)


def in_order(schedule: Sequence[Sequence[Action]], stages: int) -> Iterator[tuple[int, Action]]:
    """Yield (rank, action) of a whole schedule, each after what it needs. If it hangs, a ValueError names the cycle.

    Sends do not block, and the messages from one rank to another are received in the order in which they are sent.
    So a message is there as soon as it is computed, and a schedule ends exactly if no wait is circular.
    """
    queues = [deque(actions) for actions in schedule]
    done: set[Action] = set()
    moved = True
    while moved:
        moved = False
        for rank, queue in enumerate(queues):
            while queue and done.issuperset(needs(queue[0], stages)):
                action = queue.popleft()
                done.add(done_by(action))
                moved = True
                yield rank, action
    if any(queues):
        raise ValueError(f"the schedule hangs: {_cycle(queues, done, stages)}")


def _cycle(queues: Sequence[Sequence[Action]], done: set[Action], stages: int) -> str:
    """Name the waits, 'rank 0: A waits for B; rank 1: ...', along the cycle, or to an event that no rank computes."""
    holder = {done_by(action): rank for rank, queue in enumerate(queues) for action in queue}
    rank, waits = next(rank for rank, queue in enumerate(queues) if queue), dict[int, str]()
    while rank not in waits:
        head = queues[rank][0]
        missing = next(event for event in needs(head, stages) if event not in done)
        waits[rank] = f"rank {rank}: {head} waits for {missing}"
        if missing not in holder:
            return f"{waits[rank]}, which no rank computes"
        waits[rank] += f" of rank {holder[missing]}"
        rank = holder[missing]
    return "; ".join(list(waits.values())[list(waits).index(rank) :])


def sends(schedule: Sequence[Sequence[Action]], pp: int) -> Mapping[tuple[int, int], tuple[Message, ...]]:
    """Map (source rank, target rank) to its messages, in the order in which the source computes them.

    Every pair of distinct ranks is a key.
    """
    stages = stage_count(schedule)
    out: dict[tuple[int, int], list[Message]] = {pair: [] for pair in permutations(range(pp), 2)}
    for rank, actions in enumerate(schedule):
        for action in actions:
            if message := sent_by(action, stages, pp):
                out[rank, message.target_stage % pp].append(message)
    return {pair: tuple(messages) for pair, messages in out.items()}


def sent_by(action: Action, stages: int, pp: int) -> Message | None:
    """Return what an action sends to another rank, or None. ``stages`` counts all virtual stages.

    A forward sends its activation to the next stage. A backward (its input's half, if split) sends a gradient to the
    stage before. Nothing is sent where one rank holds both.
    """
    if action.kind == Kind.WEIGHT:
        return None
    kind, step = ("activation", 1) if action.kind == Kind.FORWARD else ("gradient", -1)
    target = action.stage + step
    if not 0 <= target < stages or target % pp == action.stage % pp:
        return None
    return Message(kind, action.stage, target, action.micro_batch)


def stage_count(schedule: Sequence[Sequence[Action]]) -> int:
    """Return the number of all virtual stages."""
    return 1 + max(action.stage for actions in schedule for action in actions)
