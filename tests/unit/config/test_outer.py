"""Outer replicas: which there are, what their flags need, and what they send and keep."""

from __future__ import annotations

from typing import Any

import pytest

from megazero.config import World, make_config
from megazero.config.layout.outer import feeds_back, outer_coding
from megazero.config.summary import describe
from megazero.mesh.grid import make_grid
from megazero.mesh.levels import INTER
from megazero.plan.communication import Formats, OuterFormat, UnitShape
from megazero.zero.plan import UnitCut
from tests.sizes import SMALL

WORLD = World(8, 2)
STEPS = {"outer_interval": 4}


def config(world: World = WORLD, **values: Any) -> Any:
    return make_config({**SMALL, **values}, world)


def test_replicas_are_nodes_or_groups_of_nodes() -> None:
    for values, replicas, d, h in (
        ({}, 1, 8, 2),
        (STEPS, 4, 2, 2),
        ({**STEPS, "outer_replicas": 2}, 2, 4, 2),
        ({**STEPS, "outer_replicas": 1}, 1, 8, 2),
        ({**STEPS, "outer_replicas": 2, "tensor_model_parallel_size": 2}, 2, 2, 1),
    ):
        made = config(**values)
        assert made.outer_replicas(WORLD) == replicas
        assert (made.shard_ranks(WORLD), made.data_ranks_per_node(WORLD)) == (d, h)
        assert made.data_parallel_size(WORLD) == replicas * d, "all share the global batch"
        assert made.shards(WORLD).os == d
    assert config(World(8, 8), **STEPS).outer_replicas(World(8, 8)) == 1, "one node"


def test_a_replica_is_a_grid_of_its_own() -> None:
    """Four ranks a replica, tp 2 x dp 2: the same axes as without, and one that joins equal places."""
    alone, both = make_grid(4, 2, tp=2), make_grid(8, 2, tp=2, outer=2)
    assert both.axes[1:] == alone.axes and both.data_axes == alone.data_axes and both.dp == 2
    outer = both.axis("outer")
    assert (outer.size, outer.link, outer.ranks(3)) == (2, INTER, (3, 7))
    assert sorted(both.rank_of(0, i, t, r) for r in range(2) for i in range(2) for t in range(2)) == list(
        range(8)
    )
    assert make_grid(8, 2, tp=2, outer=1) == make_grid(8, 2, tp=2)


def test_the_start_says_what_crosses() -> None:
    text = "\n".join(describe(config(**STEPS, outer_bits=4), WORLD))
    assert "4 replicas of 2 ranks meet every 4 steps: nesterov" in text
    assert "differences INT4, error feedback" in text
    assert "--train-iters 9: outer replicas meet last at 8" in "\n".join(config(**STEPS, train_iters=9).notes)
    assert "meet last" not in "\n".join(config(**STEPS, train_iters=8).notes)
    batch = 64
    samples = {"train_iters": None, "train_samples": 9 * batch + 1, "global_batch_size": batch}
    said = "\n".join(config(**STEPS, **samples).notes)
    assert f"{9 * batch + 1}, 9 steps: outer replicas meet last at 8" in said
    assert f"nearest: {8 * batch} or {12 * batch}" in said
    assert "of the first replica" in "\n".join(describe(config(**STEPS, outer_evaluation="replica"), WORLD))
    late = config(**STEPS, outer_delay=1, train_iters=8)
    text = "\n".join(describe(late, WORLD))
    assert "meet every 4 steps: nesterov" in text and "differences exact, 1 step on its way" in text
    assert "meet last at 5, and that anchor is evaluated and exported at the end; nearest: 5" in text
    assert "--outer-delay 1: what replicas learn" in text
    assert "none, one replica" in "\n".join(describe(config(**STEPS, outer_replicas=1), WORLD))
    assert "outer steps" not in "\n".join(describe(config(), WORLD))
    piped = config(**STEPS, outer_replicas=2, pipeline_model_parallel_size=2)
    assert "2 outer replicas x 1 tensor-parallel x 2 data-parallel" in "\n".join(describe(piped, WORLD))


@pytest.mark.parametrize(
    "bits,width", [(32, 4.0), (16, 2.0), (8, 1 + 2 / 64), (4, 0.5 + 2 / 64), (2, 0.25 + 2 / 64)]
)
def test_bytes_of_a_meeting(bits: int, width: float) -> None:
    """There and back 2 (R - 1) / R of what a rank of d takes across."""
    outer = config(**STEPS, outer_bits=bits).outer
    assert feeds_back(outer) == (bits < 32) and (outer_coding(outer) is None) == (bits >= 16)
    form = OuterFormat.of(outer, 4, sums=4)
    assert form is not None and OuterFormat.of(outer, 1, sums=4) is None
    n, grid = 1 << 16, make_grid(8, 2, outer=4)
    there, back = form.meeting(UnitShape(n, 0, False).plan(UnitCut.of(grid.data_axes), Formats(2, 4)), grid)[
        :2
    ]
    assert there.sent == back.sent == 3 / 4 * width * n / grid.dp
