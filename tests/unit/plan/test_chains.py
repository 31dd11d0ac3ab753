"""The chains of a unit: a step sends each message as often as the engine does."""

from __future__ import annotations

from collections import Counter

import pytest

from megazero.config import World, make_config
from megazero.config.options.cluster import (
    Cluster,
    Device,
    InterNode,
    IntraNode,
    MeasuredCollective,
)
from megazero.mesh.levels import INTER
from megazero.plan.base_layout import BaseLayout
from megazero.plan.gathers import gathers
from megazero.plan.layout import Chain, Layout
from megazero.plan.seconds import Collectives
from megazero.plan.simulate import ENGINE, _Lane, _run
from tests.sizes import PLANNED

MODEL = {**PLANNED, "num_layers": 4, "num_attention_heads": 4, "global_batch_size": 16, "ranks_per_node": 2}


def lab() -> Cluster:
    """Two nodes of 2 devices, on which a MB takes a microsecond."""
    rows = [
        MeasuredCollective(operation, 2, nodes, size, size / 1e12)
        for operation in ("gather", "exchange", "message", "sum")
        for nodes in (1, 2)
        for size in (1000, 10**7)
    ]
    device = Device("core", 16.0, 10.0, 1.0, fp32_tflops=0.05, reserved_gib=0.0, update_gbytes_per_s=1e6)
    link, across = IntraNode(10.0, 0.0), InterNode(10.0, None, 0.0)
    return Cluster("lab", 2, 2, device, link, across, tuple(rows))


def layout(on: Cluster, **values: object) -> Layout:
    world = World(4, 2)
    config = make_config({**MODEL, **values}, world)
    return Layout(BaseLayout(config, world, on, Collectives(on)), config.zero)


@pytest.mark.parametrize("micro_batches", [1, 4])
@pytest.mark.parametrize("preset", ["hpz", "zero3", "zero1"])
def test_a_step_sends_each_message_as_often_as_the_engine(
    preset: str, micro_batches: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A unit is refreshed once, whatever its gathers, and summed across nodes with the last micro-batch alone."""
    plan = layout(lab(), zero_preset=preset, global_batch_size=4 * micro_batches, zero_prefetch_bytes=0)
    sent = Counter[str]()

    def note(lane: _Lane, chain: Chain, start: float, links: dict[str, float]) -> float:
        for hop in chain:
            sent[hop.link] += hop.seconds
        return start

    monkeypatch.setattr(_Lane, "run", note)
    _run(plan, ENGINE, micro_batches)
    works = [plan.chains_of(unit) for unit in plan.units(0).shapes]
    often = gathers(plan.copies(0), plan.program(0, micro_batches), [work.ahead_bytes for work in works])
    expected = Counter[str]()
    for number, work in enumerate(works):
        for chain, times in (
            (work.refresh, 1), (work.gather, often[number]), (work.every, micro_batches - 1), (work.last, 1),
        ):  # fmt: skip
            for hop in chain:
                expected[hop.link] += times * hop.seconds
    assert sent == pytest.approx(expected) and sent[INTER] > 0
