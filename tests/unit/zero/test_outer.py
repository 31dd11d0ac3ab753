"""Outer replicas: what one rank shows of their meetings, their checkpoints and the notes on them. No ranks."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from megazero.checkpoint.placement import Placement
from megazero.checkpoint.records import SliceRecord
from megazero.comm.codec import Blockwise, Codec
from megazero.comm.lane import Chain
from megazero.config import World, make_config
from megazero.config.options.sections import OuterConfig
from megazero.mesh.grid import make_grid
from megazero.mesh.mesh import Axis, Mesh
from megazero.train.parallelize import make_outer
from megazero.train.state.origin import _changed_replicas
from megazero.zero import Outer, Policy, shard
from megazero.zero import outer as outer_steps
from megazero.zero.agreement import IssueHash
from megazero.zero.context import Context
from megazero.zero.layout import Slice
from megazero.zero.outer import Anchor, Flight, OuterSteps, leaving
from megazero.zero.records import in_replica
from megazero.zero.unit import Unit
from tests.sizes import SMALL


def test_an_own_loop_has_the_defaults_of_the_flags() -> None:
    assert Outer(4) == make_outer(OuterConfig(outer_interval=4), num_layers=2)


def test_coded_moments_of_a_replica_are_made_by_their_own_name() -> None:
    held = {"exp_avg": torch.empty(4, device="meta")}
    record = SliceRecord(Placement.plain("w", (4,)), 0, 4, held, make=lambda kind: {"exp_avg": "made"}[kind])
    (own,) = in_replica([record], 1)
    assert list(own.tensors) == ["replica 1 exp_avg"]
    assert own.make is not None and own.make("replica 1 exp_avg") == "made"


def meetings(clock: int, outer: Outer, steps: int, left: int | None = None) -> list[tuple[int, str]]:
    """What happens in the steps after ``clock`` of a round: (step, 'leaves' or 'arrives' and which).

    left: steps until the last fragment arrives, which is on its way.
    """
    flight = None if left is None else Flight(outer.count - 1, {}, left)
    found: list[tuple[int, str]] = []
    begun: Any = SimpleNamespace(
        clock=clock, since=[0] * outer.count, moved=torch.zeros(2), outer=outer, flight=flight
    )

    def meet(fragment: int) -> None:
        found.append((begun.step, f"leaves {fragment}"))
        begun.flight = Flight(fragment, {}, outer.delay) if outer.delay else None

    def land() -> None:
        found.append((begun.step, f"arrives {begun.flight.fragment}"))
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

    def noted(unit: Unit, axis: Axis, level: int, codec: Codec, sums: Slice, context: Context) -> Chain:
        own.append(sums.rows(level, 1)[0].clone())
        yield from share_back(unit, axis, level, codec, sums, context)
        own.append(sums.rows(level, 1)[0].clone())

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
    assert meetings(clock, Outer(4), 8) == [(step, "leaves 0") for step in meets]


def test_fragments_leave_one_after_the_other_and_arrive_in_their_step() -> None:
    three = Outer(8, fragments=(("a",), ("b",), ("c",)), delay=1)
    found = meetings(0, three, 13)
    assert [step for step, what in found if what.startswith("leaves")] == [2, 5, 8, 10, 13]
    assert found[:4] == [(2, "leaves 0"), (3, "arrives 0"), (5, "leaves 1"), (6, "arrives 1")]
    # What was longer on its way in the run before arrives when the next one leaves, at the latest.
    assert meetings(0, three, 3, left=9) == [(2, "arrives 2"), (2, "leaves 0"), (3, "arrives 0")]
    assert [leaving(clock, 3, 3) for clock in range(1, 5)] == [0, 1, 2, 2]


def test_fragments_are_of_modules_by_name() -> None:
    two = Outer(4, fragments=(("embedding", "layers.1"), ("layers.10", "head")))
    names = ["embedding.word_embeddings.weight", "layers.1", "layers.1[2]", "layers.10", "head[0]"]
    assert [two.fragment_of(name) for name in names] == [0, 0, 0, 1, 1]
    with pytest.raises(ValueError, match="unit 'layers.11' is of no module"):
        two.fragment_of("layers.11")
    for wrong, said in (
        ({"fragments": (("a",),) * 5}, "5 fragments do not each have a step of their own in interval=4"),
        ({"fragments": (("a",), ("b",)), "delay": 2}, "delay=2 must be from 0 to 1"),
        ({"mixing": 0.0}, "mixing=0.0"),
    ):
        with pytest.raises(ValueError, match=said):
            Outer(4, **wrong)


@pytest.mark.parametrize(
    "now, values, said",
    [
        (2, {}, None),
        (2, {"outer_interval": 9, "outer_lr": 0.5, "outer_bits": 8, "outer_rounding": "nearest"}, None),
        (2, {"outer_bits": 8}, "other outer momentum or feedback"),
        (2, {"outer_optimizer": "average"}, "other outer momentum or feedback"),
        (2, {"outer_delay": 1, "outer_mixing": 0.5, "outer_offload": True}, None),
        (2, {"outer_fragments": 2}, "other fragments"),
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


class OneUnit:
    """Of one rank: nothing comes back from others. It is its own frame, too."""

    name, axes = "unit", SimpleNamespace(all=0, os=0, hop_specs=lambda *_: ())

    def __init__(self) -> None:
        self.master = SimpleNamespace(value=torch.ones(4))
        self.weights = SimpleNamespace(outdate=lambda: None)

    def take(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(numel, dtype=dtype)


def test_what_lies_in_host_memory_is_one_stretch_and_the_host_waits_once_for_all_units(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On CUDA, by fakes: a copy that the host waited for would hold up the next unit's chain."""
    told: list[Any] = []
    for name in ("lock_pages", "unlock_pages"):
        monkeypatch.setattr(outer_steps, name, lambda memory, name=name: told.append((name, memory.nbytes)))
    stream = SimpleNamespace(synchronize=lambda: told.append("the host waits"))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: stream)
    steps: Any = object.__new__(OuterSteps)
    steps.outer, steps.device = Outer(4, momentum=0.5, nesterov=True, offload=True), torch.device("cuda")
    rooms = list(steps._rooms([torch.zeros(4)] * 4 + [torch.zeros(129, dtype=torch.float64)]))
    first = rooms[0].data_ptr()
    assert [(room.data_ptr() - first, room.numel()) for room in rooms] == [
        *((512 * k, 4) for k in range(4)), (2048, 129),
    ]  # fmt: skip
    assert told == [("lock_pages", 2048 + 1536)]

    units, copy = [OneUnit(), OneUnit()], torch.Tensor.copy_

    def copied(to: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
        if to.data_ptr() in {room.data_ptr() for room in rooms}:
            told.append("copied to the host" if non_blocking else "the host waits")
        return copy(to, source)

    for room in rooms:
        room.zero_()
    steps.anchors = {unit: Anchor(*rooms[2 * k : 2 * k + 2], None) for k, unit in enumerate(units)}
    steps.index, steps.axis = {unit: k for k, unit in enumerate(units)}, SimpleNamespace(size=2)
    steps.squares, steps.hashes = torch.zeros(2, 2).double(), torch.zeros(2, dtype=torch.int64)
    steps.runs = {unit: [] for unit in units}
    steps.context = SimpleNamespace(
        issued=IssueHash(units),
        frame=lambda: nullcontext(units[0]),
        policy=SimpleNamespace(pending_reductions=1),
    )
    steps.lane = SimpleNamespace(follow=list, wait=list, submit=lambda name, plan, chain: list(chain))
    monkeypatch.setattr(torch.Tensor, "copy_", copied)
    told.clear()
    steps._run(units, lambda _: (), lambda unit: steps._take_up(unit, SimpleNamespace(buffer=torch.ones(4))))
    assert told == ["copied to the host"] * 4 + ["the host waits"]
    told.clear()
    steps.measured = SimpleNamespace(unmeasured=nullcontext)
    with steps.reading(anchor=True):
        pass
    assert told == (["copied to the host"] * 2 + ["the host waits"]) * 2
    steps = None
    assert told[-1] == ("unlock_pages", 2048 + 1536)
