"""The certificate's checks of outer steps, on records made by hand: DiLoCo in numpy is right, and faults are seen."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import pytest
import torch

from megazero.config import World, make_config
from megazero.verify.checks import Check, by_replica, outer_checks
from megazero.verify.full_tensors import Assembler
from megazero.verify.recorder import OuterRecord, StepRecord, UnitSlice
from megazero.verify.reference import Reference, Tensors, train_together
from megazero.verify.training_run import RankRecord, replica_rows
from tests.sizes import TINY

STEPS = 4
CONFIG = make_config({**TINY, "train_iters": STEPS, "outer_interval": 2, "ranks_per_node": 1}, World(2, 1))
SHAPES = {name: place.local_shape for name, place in Assembler(CONFIG).of_rank(1, 0).items()}


def slices(values: Mapping[str, np.ndarray]) -> list[UnitSlice]:
    return [
        UnitSlice(n, 0, ((n, 0, v.size, 0),), v.astype(np.float32).reshape(-1)) for n, v in values.items()
    ]


def records(fault: str = "") -> list[RankRecord]:
    """Two replicas of a rank each, which drift at random and meet every second step."""
    rng, outer = np.random.default_rng(0), CONFIG.outer
    anchor = {name: rng.normal(size=shape) for name, shape in SHAPES.items()}
    velocity = {name: np.zeros(shape) for name, shape in SHAPES.items()}
    own = [dict(anchor), dict(anchor)]
    found = [RankRecord(0, 0, 0, True, replica) for replica in range(2)]
    for step in range(STEPS):
        own = [{n: w + 0.01 * rng.normal(size=w.shape) for n, w in each.items()} for each in own]
        before, updated = dict(anchor), [dict(each) for each in own]
        if (step + 1) % 2 == 0 and not (fault == "late" and step == 1):
            for n, theta in anchor.items():
                gradient = theta - sum(each[n] for each in own) / (1 if fault == "sum" else 2)
                velocity[n] = outer.outer_momentum * velocity[n] + gradient
                anchor[n] = theta - outer.outer_lr * (gradient + outer.outer_momentum * velocity[n])
            own = [dict(anchor), dict(anchor)]
        for replica, record in enumerate(found):
            after = {n: w + 1e-3 * (fault == "apart" and replica) for n, w in anchor.items()}
            seen = OuterRecord(slices(updated[replica]), slices(before), slices(after))
            record.steps.append(StepRecord(outer=seen))
    return found


def failed(found: list[Check]) -> set[str]:
    return {check.name for check in found if not check.good}


@pytest.mark.parametrize(
    ("fault", "names"),
    [
        ("", set()),
        ("late", {"meetings", "outer steps"}),
        ("sum", {"outer steps"}),
        ("apart", {"anchors"}),
    ],
)
def test_a_fault_of_outer_steps_is_seen(fault: str, names: set[str]) -> None:
    found = outer_checks(Assembler(CONFIG), records(fault), CONFIG.outer)
    assert failed(found) >= names and bool(failed(found)) == bool(names), found


def test_rounded_differences_have_a_bound_of_their_own() -> None:
    four = replace(CONFIG.outer, outer_bits=4)
    assert [check.limit for check in outer_checks(Assembler(CONFIG), records(), four)][-1] == "0.8"
    assert failed(outer_checks(Assembler(CONFIG), records("sum"), four)) == {"outer steps"}


def test_replicas_of_the_reference_share_the_batch_and_meet() -> None:
    rows = torch.cat([replica_rows(8, 1, 4, replica, 2) for replica in range(2)])
    assert sorted(rows.tolist()) == list(range(8)) and replica_rows(8, 1, 4, 1, 2).tolist() == [2, 3, 6, 7]
    assert replica_rows(8, 2, 4, 0, 1).tolist() == list(range(8))
    references = [Reference(CONFIG, 2, replica, 2) for replica in range(2)]
    curves = train_together(references, STEPS)
    weights: list[Tensors] = [each.weights for each in references]
    assert all(np.array_equal(weights[0][n], weights[1][n]) for n in weights[0]), "they have just met"
    assert curves[0].losses[0] != curves[1].losses[0] and len(curves[0].losses) == STEPS
    assert sum(each.share(0) for each in references) == pytest.approx(1)
    train_together([Reference(CONFIG, 2, 0, 2), Reference(CONFIG, 2, 1, 2)][:1], 1)
    assert [len(each) for each in by_replica(records())] == [1, 1]
