"""The certificate's checks of outer steps, on records made by hand: DiLoCo in numpy is right, and faults are seen."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from megazero.config import RunConfig, World, make_config
from megazero.verify.checks import Check, by_replica, bytes_check, outer_checks
from megazero.verify.expected_bytes import ExpectedBytes
from megazero.verify.full_tensors import Assembler
from megazero.verify.recorder import OuterRecord, StepRecord, UnitSlice
from megazero.verify.reference import Reference, Tensors, train_together
from megazero.verify.training_run import RankRecord, replica_rows
from tests.sizes import TINY

STEPS, WORLD = 9, World(2, 1)

BETWEEN = "outer_inter_node_bytes"


def configured(**values: Any) -> RunConfig:
    return make_config({**TINY, "train_iters": STEPS, "ranks_per_node": 1, **values}, WORLD)


CONFIG = configured(outer_interval=2)
LATE = configured(outer_interval=3, outer_delay=1)
SHAPES = {name: place.local_shape for name, place in Assembler(CONFIG).one_rank.items()}


def slices(values: Mapping[str, np.ndarray]) -> list[UnitSlice]:
    return [
        UnitSlice(n, 0, ((n, 0, v.size, 0),), v.astype(np.float32).reshape(-1)) for n, v in values.items()
    ]


def records(config: RunConfig = CONFIG, fault: str = "") -> list[RankRecord]:
    """Two replicas of a rank each, which drift at random and meet as configured."""
    rng, outer = np.random.default_rng(0), config.outer
    anchor = {name: rng.normal(size=shape) for name, shape in SHAPES.items()}
    velocity = {name: np.zeros(shape) for name, shape in SHAPES.items()}
    own = [dict(anchor), dict(anchor)]
    found = [RankRecord(0, 0, 0, True, replica=replica) for replica in range(2)]
    under_way: dict[int, dict[str, np.ndarray]] = {}

    def gradient_of(name: str) -> np.ndarray:
        return anchor[name] - sum(each[name] for each in own) / (1 if fault == "sum" else 2)

    for step in range(STEPS):
        own = [{n: w + 0.01 * rng.normal(size=w.shape) for n, w in each.items()} for each in own]
        before, updated = dict(anchor), [dict(each) for each in own]
        leaves = (step + 1) % outer.outer_interval == 0
        if leaves and not (fault == "late" and step == outer.outer_interval - 1):
            under_way[step + outer.outer_delay] = {n: gradient_of(n) for n in SHAPES}
        for n, gradient in under_way.pop(step, {}).items():
            gradient = gradient_of(n) if fault == "arrival" else gradient
            velocity[n] = outer.outer_momentum * velocity[n] + gradient
            ahead = outer.outer_momentum * velocity[n] if outer.outer_optimizer == "nesterov" else 0.0
            gradient = gradient if outer.outer_optimizer == "nesterov" else velocity[n]
            anchor[n] = anchor[n] - outer.outer_lr * (gradient + ahead)
            if fault != "kept":
                own = [{**each, n: anchor[n]} for each in own]
        for replica, record in enumerate(found):
            after = {n: w + 1e-3 * (fault == "apart" and replica) for n, w in anchor.items()}
            gone_on = dict(own[replica])
            if fault == "nan" and (step, replica) == (STEPS - 1, 1):
                gone_on["head.weight"] = np.full_like(gone_on["head.weight"], np.nan)
            seen = OuterRecord(*map(slices, (updated[replica], before, after, gone_on)))
            record.steps.append(StepRecord(outer=seen))
    return found


def failed(found: list[Check]) -> set[str]:
    return {check.name for check in found if not check.good}


@pytest.mark.parametrize(
    ("config", "fault", "names"),
    [
        (CONFIG, "", set()),
        (CONFIG, "late", {"meetings", "outer steps"}),
        (CONFIG, "sum", {"outer steps"}),
        (CONFIG, "apart", {"anchors"}),
        (CONFIG, "nan", {"weights after outer steps"}),
        (LATE, "", set()),
        (LATE, "late", {"meetings", "outer steps"}),
        (LATE, "arrival", {"outer steps"}),
        (LATE, "kept", {"weights after outer steps"}),
    ],
)
def test_a_fault_of_outer_steps_is_seen(config: RunConfig, fault: str, names: set[str]) -> None:
    found = outer_checks(Assembler(config), records(config, fault))
    assert failed(found) >= names and bool(failed(found)) == bool(names), found


def test_rounded_differences_have_a_bound_of_their_own() -> None:
    four = Assembler(replace(CONFIG, outer=replace(CONFIG.outer, outer_bits=4)))
    limits = {check.name: check.limit for check in outer_checks(four, records())}
    assert (limits["outer steps"], limits["weights after outer steps"]) == ("0.8", "1e-06")
    assert failed(outer_checks(four, records(CONFIG, "sum"))) == {"outer steps"}


def sent_in(*steps: int) -> RankRecord:
    """A rank that sends so many bytes to other replicas in each step."""
    return RankRecord(0, 0, 0, True, steps=[StepRecord(traffic={BETWEEN: sent}) for sent in steps])


def test_bytes_of_what_is_on_its_way_are_compared_as_it_arrives(monkeypatch: pytest.MonkeyPatch) -> None:
    """Differences leave in steps 3 and 6, and take one more. Step 3 is followed by a save, step 6 is the last."""
    expected = ExpectedBytes(LATE, WORLD, True, 8)
    sizes = [expected.bytes_of(0, step, False).get(BETWEEN, 0) for step in range(6)]
    sent = sizes[2]
    assert sizes == [0, 0, sent, 0, 0, sent] and sent > 0
    monkeypatch.setattr(expected, "bytes_of", lambda rank, step, *_, **__: {BETWEEN: sizes[step]})
    for saved, steps, wrong in (
        (0, (0, 0, sent - 8, 8, 0, sent), 0),
        (0, (0, 0, 0, sent, 0, sent), 0),
        (0, (0, 0, sent - 8, 0, 8, sent), 2),  # step 4 has them no longer, and step 5 no more
        (2, (0, 0, sent - 8, 8, 0, sent), 2),  # before a save they are waited for
        (0, (0, 0, sent, 0, 0, sent - 8), 1),
    ):
        check = bytes_check("bytes sent", expected, [sent_in(*steps)], saved)
        assert check.figure == f"{wrong} counters", (steps, check)


def test_replicas_of_the_reference_share_the_batch_and_meet() -> None:
    rows = torch.cat([replica_rows(8, 1, 4, replica, 2) for replica in range(2)])
    assert sorted(rows.tolist()) == list(range(8)) and replica_rows(8, 1, 4, 1, 2).tolist() == [2, 3, 6, 7]
    assert replica_rows(8, 2, 4, 0, 1).tolist() == list(range(8))

    def trained(config: RunConfig, steps: int) -> list[Tensors]:
        references = [Reference(config, 2, replica, 2) for replica in range(2)]
        curves = train_together(references, steps)
        assert curves[0].losses[0] != curves[1].losses[0] and len(curves[0].losses) == steps
        return [each.weights for each in references]

    met = trained(CONFIG, 4)
    assert all(np.array_equal(met[0][n], met[1][n]) for n in met[0])
    early, arrived = trained(LATE, 3), trained(LATE, 4)
    assert not any(np.array_equal(early[0][n], early[1][n]) for n in SHAPES)
    assert all(np.array_equal(arrived[0][n], arrived[1][n]) for n in SHAPES)
    train_together([Reference(CONFIG, 2, 0, 2), Reference(CONFIG, 2, 1, 2)][:1], 1)
    assert [len(each) for each in by_replica(records())] == [1, 1]
