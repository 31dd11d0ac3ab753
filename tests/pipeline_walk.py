"""Whether a schedule is legal; what its receives depend on, when the links post them, whether ranks that wait end.

Nothing here knows the rule by which receives are posted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from unittest.mock import patch

import torch
import torch.distributed as dist

from megazero.comm.hops import Traffic
from megazero.comm.timing import Waits
from megazero.pp.links import Links
from megazero.pp.schedules import Action, Kind, Message, done_by, in_order, needs, sends, sent_by, stage_count

Schedule = Sequence[Sequence[Action]]
Posts = list[
    list[list[Message]]
]  # by rank: what is posted before its action k is issued; at last, after the last


def depends(schedule: Schedule, pp: int) -> dict[Message, int]:
    """Of every message, how many of its receiver's actions it depends on: back through all ranks' programs."""
    stages = stage_count(schedule)
    seen = {
        rank: [0] * pp for rank in range(pp)
    }  # how many actions of each rank a rank's last one comes after
    done: dict[Action, list[int]] = {}
    for rank, action in in_order(schedule, stages):
        before = [seen[rank], *(done[event] for event in needs(action, stages))]
        seen[rank] = done[done_by(action)] = [max(counts) for counts in zip(*before, strict=True)]
        seen[rank][rank] += 1
    every = [message for pair in sends(schedule, pp).values() for message in pair]
    kinds = {"activation": Kind.FORWARD, "gradient": Kind.INPUT}
    sent = {x: done[Action(kinds[x.kind], x.source_stage, x.micro_batch)] for x in every}
    return {message: counts[message.target_stage % pp] for message, counts in sent.items()}


def wanted(action: Action, stages: int, pp: int) -> Message | None:
    """The message from another rank that an action waits for."""
    if action.kind == Kind.WEIGHT:
        return None
    kind, source = ("activation", -1) if action.kind == Kind.FORWARD else ("gradient", 1)
    source += action.stage
    if not 0 <= source < stages or source % pp == action.stage % pp:
        return None
    return Message(kind, source, action.stage, action.micro_batch)


def posted(schedule: Schedule, pp: int, after: Mapping[Message, int]) -> Posts:
    """What the links of every rank post, and when, if each action asks for its message and is then issued."""
    return [_posted_by(rank, schedule, pp, after) for rank in range(pp)]


def _posted_by(rank: int, schedule: Schedule, pp: int, after: Mapping[Message, int]) -> list[list[Message]]:
    every = {source: m for (source, target), m in sends(schedule, pp).items() if target == rank and m}
    coming = {source: iter(messages) for source, messages in every.items()}
    log: list[list[Message]] = [[]]

    def irecv(tensor: torch.Tensor, peer: int, group: object) -> object:
        log[-1].append(next(coming[peer]))
        return SimpleNamespace(wait=lambda: None, is_completed=lambda: False)

    axis = SimpleNamespace(ranks=range(pp), index=rank, size=pp, gather_group=None, reduce_group=None)
    grid = SimpleNamespace(link=lambda a, b: "intra_node")
    mesh = SimpleNamespace(device=torch.device("cpu"), rank=rank, pp=axis, grid=grid)
    links = Links(mesh, torch.float32, Traffic(), lambda: False, Waits())  # type: ignore[arg-type]
    links._watched = lambda direction, other, work: work  # type: ignore[method-assign]
    with patch.object(dist, "irecv", irecv):
        links.open((1,), every, after)
        for action in schedule[rank]:
            if message := wanted(action, stage_count(schedule), pp):
                links.receive(message, message.source_stage % pp)
            log.append([])
            links.advance()
    return log


def ends(schedule: Schedule, pp: int, posts: Posts) -> bool:
    """True if the schedule ends when every action waits for all messages that its rank has posted or sent before."""
    stages, at = stage_count(schedule), [0] * pp
    met: dict[Message, int] = {}  # how many of its two ends are there
    waits = [list(log[0]) for log in posts]

    def meet(messages: Sequence[Message]) -> None:
        for message in messages:
            met[message] = met.get(message, 0) + 1

    for first in waits:
        meet(first)
    moved = True
    while moved:
        moved = False
        for rank, actions in enumerate(schedule):
            while at[rank] < len(actions) and all(met[message] == 2 for message in waits[rank]):
                sent = sent_by(actions[at[rank]], stages, pp)
                at[rank] += 1
                waits[rank] = [*([sent] if sent else []), *posts[rank][at[rank]]]
                meet(waits[rank])
                moved = True
    return at == [len(actions) for actions in schedule]


def check_schedule(schedule: Sequence[Sequence[Action]], pp: int, virtual: int, micro_batches: int) -> None:
    """Raises ValueError naming the first fault: an action that is missing, double or misplaced, or a cycle."""
    if len(schedule) != pp:
        raise ValueError(f"the schedule has {len(schedule)} ranks, not {pp}")
    stages = pp * virtual
    seen: set[Action] = set()
    for rank, actions in enumerate(schedule):
        for action in actions:
            if not (0 <= action.stage < stages and 0 <= action.micro_batch < micro_batches):
                raise ValueError(
                    f"rank {rank}: {action} is not one of {stages} stages and {micro_batches} micro-batches"
                )
            if action.stage % pp != rank:
                raise ValueError(f"rank {rank}: {action} belongs on rank {action.stage % pp}")
            if action in seen:
                raise ValueError(f"rank {rank}: {action} stands there twice")
            seen.add(action)
    for stage in range(stages):
        for m in range(micro_batches):
            _check_complete({kind for kind in Kind if Action(kind, stage, m) in seen}, stage, m)
    for _ in in_order(schedule, stages):
        pass


def _check_complete(kinds: set[Kind], stage: int, micro_batch: int) -> None:
    whole, split = {Kind.FORWARD, Kind.BACKWARD}, {Kind.FORWARD, Kind.INPUT, Kind.WEIGHT}
    if kinds not in (whole, split):
        found = ", ".join(sorted(kinds)) or "nothing"
        raise ValueError(
            f"stage {stage}, micro-batch {micro_batch} has {found}, not one F and either one B or one I and one W"
        )
