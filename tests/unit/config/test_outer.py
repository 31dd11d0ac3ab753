"""Outer steps: what a start says of them, their rate, and what a rank sends."""

from __future__ import annotations

from typing import Any

import pytest

from megazero.config import World, make_config
from megazero.config.layout.outer import feedback, meeting_point, outer_coding, outer_rate, planned_replicas
from megazero.config.summary import describe
from megazero.mesh.grid import make_grid
from megazero.plan.communication import Formats, OuterFormat, UnitShape
from megazero.zero.plan import UnitCut
from tests.messages import refused
from tests.sizes import SMALL

WORLD = World(8, 2)
STEPS = {"outer_interval": 4, "outer_meet": "local:4", "train_iters": None, "train_samples": 640}


def config(world: World = WORLD, **values: Any) -> Any:
    return make_config({**SMALL, **values}, world)


def test_the_start_says_what_crosses() -> None:
    text = "\n".join(describe(config(**STEPS, outer_bits=4), WORLD))
    assert "replicas meet at local:4 every 4 steps: nesterov (learning rate 0.7, momentum 0.5)" in text
    assert "differences INT4, error feedback" in text
    assert "replica's own weights" in "\n".join(describe(config(**STEPS, outer_evaluation="replica"), WORLD))
    late = config(**STEPS, outer_delay=1, outer_lr_decay_style="linear", outer_min_lr=0.1)
    text = "\n".join(describe(late, WORLD))
    assert "0.7 to 0.1" in text and "differences exact, 1 step on its way" in text
    assert any("--outer-delay 1: what replicas learn" in note for note in late.notes)
    assert "outer steps" not in "\n".join(describe(config(), WORLD))


def test_the_rate_falls_by_the_samples_of_all() -> None:
    falling = config(**STEPS, outer_lr_decay_style="linear", outer_min_lr=0.1).outer
    assert [outer_rate(falling, at, 640) for at in (0, 320, 640, 700)] == pytest.approx([0.7, 0.4, 0.1, 0.1])
    assert outer_rate(config(**STEPS).outer, 320, 640) == 0.7
    assert outer_rate(config(**STEPS, outer_optimizer="average").outer, 320, 640) == 1.0


def test_where_replicas_meet() -> None:
    there = {**STEPS, "outer_meet": "[::1]:29600", "outer_least": 3}
    assert meeting_point(config(**there).outer) == ("::1", 29600)
    assert [planned_replicas(config(**each).outer) for each in (STEPS, there)] == [4, 3]
    with refused("here", "HOST:PORT", "local:2"):
        config(**{**STEPS, "outer_meet": "here"})


def test_iterations_of_one_batch_are_samples_of_all() -> None:
    lengths = {"train_iters": 20, "lr_decay_iters": 15, "lr_warmup_iters": 2, "global_batch_size": 32}
    found = config(outer_meet="local:4", **lengths)
    assert (found.training.train_iters, found.training.train_samples) == (None, 640)
    assert (found.optimizer.lr_decay_samples, found.optimizer.lr_warmup_samples) == (480, 64)
    assert any(
        "--train-samples 640, --lr-decay-samples 480, --lr-warmup-samples 64" in x for x in found.notes
    )
    with refused("--train-iters 20", "--train-samples"):
        config(outer_meet="local:4", **lengths, rampup_batch_size=(16, 16, 100))


@pytest.mark.parametrize(
    "bits,width", [(32, 4.0), (16, 2.0), (8, 1 + 2 / 64), (4, 0.5 + 2 / 64), (2, 0.25 + 2 / 64)]
)
def test_bytes_of_a_meeting(bits: int, width: float) -> None:
    """A rank of d sends its share of a unit, once to each of the others."""
    outer = config(**STEPS, outer_bits=bits).outer
    assert (feedback(outer) == 1.0) == (bits < 32) and (outer_coding(outer) is None) == (bits >= 16)
    form = OuterFormat.of(outer, sums=4)
    assert form is not None and form.replicas == 4 and OuterFormat.of(config().outer, sums=4) is None
    n, grid = 1 << 16, make_grid(8, 2)
    plan = UnitShape(n, 0, False).plan(UnitCut.of(grid.data_axes), Formats(2, 4))
    assert form.message(plan) == width * n / grid.dp
