"""Outer replicas: what one rank shows of their meetings, their checkpoints and the notes on them. No ranks."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from megazero.checkpoint.errors import CheckpointError
from megazero.comm.codec import Blockwise, Codec
from megazero.comm.lane import Chain
from megazero.config.options.sections import OuterConfig
from megazero.mesh.grid import make_grid
from megazero.mesh.mesh import Axis, Mesh
from megazero.train.parallelize import make_outer
from megazero.train.state.origin import _changed_replicas
from megazero.zero import Outer, Policy, shard
from megazero.zero import outer as outer_steps
from megazero.zero.context import Context
from megazero.zero.outer import Flight, OuterSteps
from megazero.zero.plan import Hop
from megazero.zero.slices import Slice
from megazero.zero.unit import Unit
from tests.messages import refused


def test_an_own_loop_has_the_defaults_of_the_flags() -> None:
    assert Outer(4) == make_outer(OuterConfig(outer_interval=4))


def meetings(clock: int, outer: Outer, steps: int, left: int | None = None) -> list[tuple[int, str]]:
    """What happens in the steps after ``clock`` of a round: (step, 'leaves' or 'arrives').

    left: steps until differences arrive, which are on their way.
    """
    found: list[tuple[int, str]] = []
    begun: Any = SimpleNamespace(clock=clock, moved=torch.zeros(2), outer=outer)
    begun.flight = None if left is None else Flight({}, left)

    def meet() -> None:
        found.append((begun.step, "leaves"))
        begun.flight = Flight({}, outer.delay) if outer.delay else None

    def land() -> None:
        found.append((begun.step, "arrives"))
        begun.flight = None

    begun._meet, begun._land = meet, land
    for begun.step in range(1, steps + 1):
        OuterSteps.updated(begun, True)
    return found


def test_what_the_returned_sum_lost_is_sent_by_its_owner_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two replicas of one rank, of which the other's differences are as this one's."""
    grid = make_grid(2, 1, outer=2)
    axes = {spec.name: Axis(spec, spec.index(0), spec.ranks(0), None, None) for spec in grid.axes}
    monkeypatch.setattr(Mesh, "gather_along", lambda mesh, axes, row: row[None])
    landed = SimpleNamespace(is_completed=lambda: True, wait=lambda *_: None)

    def exchange(out: torch.Tensor, own: torch.Tensor, *_: Any, **__: Any) -> Any:
        out.copy_(own)
        return landed

    monkeypatch.setattr(dist, "all_to_all_single", exchange)
    module, codec = nn.Linear(16, 16), Blockwise(4, 32)
    policy = Policy(block=32, outer=Outer(1, codec=codec, feedback=True))
    engine = shard(module, mesh=Mesh(grid, 0, torch.device("cpu"), axes), policy=policy)
    held = engine.outer
    assert held is not None
    (unit,) = engine.units
    own: list[torch.Tensor] = []
    share_back = outer_steps.share_back

    def noted(unit: Unit, hop: Hop[Codec], sums: Slice, context: Context) -> Chain:
        own.append(sums.rows(hop.level, 1)[0].clone())
        yield from share_back(unit, hop, sums, context)
        own.append(sums.rows(hop.level, 1)[0].clone())

    monkeypatch.setattr(outer_steps, "share_back", noted)
    unit.master.value.add_(torch.randn_like(unit.master.value))
    held.updated(True)
    summed, returned = own
    residual = held.anchors[unit].residual
    assert residual is not None and not torch.equal(summed, returned)
    kept = Slice(unit.layout, residual, unit.axes.all).rows(unit.axes.all, 2)[0]
    assert torch.equal(kept[:1], summed - returned) and kept[1].any()


@pytest.mark.parametrize("clock, meets", [(0, [4, 8]), (3, [1, 5]), (4, [1, 5]), (30, [1, 5])])
def test_replicas_meet_also_under_a_shorter_interval_than_before(clock: int, meets: list[int]) -> None:
    """clock: steps since the last meeting when the checkpoint was saved."""
    assert meetings(clock, Outer(4), 8) == [(step, "leaves") for step in meets]


def test_differences_arrive_in_their_step() -> None:
    late = Outer(4, delay=1)
    assert meetings(0, late, 9) == [(4, "leaves"), (5, "arrives"), (8, "leaves"), (9, "arrives")]
    # What was longer on its way in the run before arrives when the next leaves, at the latest.
    assert meetings(0, late, 5, left=9) == [(4, "arrives"), (4, "leaves"), (5, "arrives")]
    with refused("delay=4", "0 to 3"):
        Outer(4, delay=4)


@pytest.mark.parametrize(
    "stored, values, said",
    [
        ({}, {}, ""),
        ({}, {"outer_interval": 9, "outer_lr": 0.5, "outer_bits": 8, "outer_rounding": "nearest"}, ""),
        ({}, {"outer_bits": 8}, "rounding error of the last meeting begins at zero"),
        ({}, {"outer_optimizer": "average"}, "outer momentum of the checkpoint is dropped"),
        ({}, {"outer_delay": 1}, ""),
        ({"outer_fragments": 2}, {}, "--outer-fragments 2"),
    ],
)
def test_other_outer_state_is_told(stored: dict[str, Any], values: dict[str, Any], said: str) -> None:
    def outer(**others: Any) -> OuterConfig:
        return OuterConfig(**{"outer_interval": 4, **others})

    manifest = SimpleNamespace(configuration={"outer": vars(outer()) | stored})
    origin: Any = SimpleNamespace(state={"replicas": [{}, {}]}, manifest=manifest, path="here")
    with refused(said, "--finetune", by=CheckpointError) if stored else nullcontext():
        assert list(_changed_replicas(outer(**values), 2, origin)) == ([f"the {said}"] if said else [])
    for now in (1, 4):
        with refused(
            "2 outer replicas", f"has {now}", "--outer-replicas 2", "--finetune", by=CheckpointError
        ):
            list(_changed_replicas(outer(**values), now, origin))
