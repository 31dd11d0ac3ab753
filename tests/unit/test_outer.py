"""Outer replicas: what one rank shows of their meetings, their checkpoints and the notes on them. No ranks."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megazero.checkpoint.placement import Placement
from megazero.checkpoint.records import SliceRecord
from megazero.config import World, make_config
from megazero.train.state.origin import _changed_replicas
from megazero.zero.outer import OuterSteps
from megazero.zero.records import in_replica
from tests.sizes import SMALL


def test_coded_moments_of_a_replica_are_made_by_their_own_name() -> None:
    held = {"exp_avg": torch.empty(4, device="meta")}
    record = SliceRecord(Placement.plain("w", (4,)), 0, 4, held, make=lambda kind: {"exp_avg": "made"}[kind])
    (own,) = in_replica([record], 1)
    assert list(own.tensors) == ["replica 1 exp_avg"]
    assert own.make is not None and own.make("replica 1 exp_avg") == "made"


@pytest.mark.parametrize("since, meets", [(0, [4, 8]), (3, [1, 5]), (4, [1, 5]), (30, [1, 5])])
def test_replicas_meet_also_under_a_shorter_interval_than_before(since: int, meets: list[int]) -> None:
    """since: steps since the last meeting when the checkpoint was saved."""
    steps: Any = SimpleNamespace(since=since, told=torch.zeros(4), outer=SimpleNamespace(interval=4))
    found: list[int] = []
    for step in range(1, 9):

        def take(step: int = step) -> None:
            steps.since = 0
            found.append(step)

        steps._take = take
        OuterSteps.count(steps)
    assert found == meets


@pytest.mark.parametrize(
    "now, values, said",
    [
        (2, {}, None),
        (2, {"outer_interval": 9, "outer_lr": 0.5, "outer_bits": 8, "outer_rounding": "nearest"}, None),
        (2, {"outer_bits": 8}, "other outer momentum or feedback"),
        (2, {"outer_optimizer": "average"}, "other outer momentum or feedback"),
        (4, {}, "2 outer replicas and this run 4"),
    ],
)
def test_a_merge_of_replicas_is_told(now: int, values: dict[str, Any], said: str | None) -> None:
    def config(**others: Any) -> Any:
        return make_config({**SMALL, "outer_interval": 4, **others}, World(8, 8 // now))

    saved = SimpleNamespace(configuration={"outer": vars(config().outer)})
    origin: Any = SimpleNamespace(state={"replicas": [{}, {}]}, manifest=saved)
    notes = list(_changed_replicas(config(**values), now, origin))
    assert [said in note for note in notes if said] == ([True] if said else []) and (said or not notes)
