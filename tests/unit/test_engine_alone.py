"""Rules of an engine that one rank shows: its wires bring what it sends. No ranks."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

from megazero import zero
from megazero.comm.codec import Blockwise
from megazero.zero.optimizer import clip_factor
from megazero.zero.records import MASTER, RESIDUAL, load_records, rank_tensors, save_records
from tests.gpu.test_hpz_race import CPU, Cluster, Landing, Wire

BLOCK = 512  # more than the layers fill: every unit has padding within its last block
CODED = Blockwise(4, BLOCK)
LR = 0.1  # of the cluster's plain SGD


def engine(patch: pytest.MonkeyPatch, shards: tuple[int, int, int], **policy: Any) -> Cluster:
    patch.setattr(
        Wire, "gather", lambda wire, out, own: Landing(wire, partial(out.copy_, own.repeat(wire.size)))
    )
    patch.setattr(Cluster, "_compute", lambda *_: None)  # it looks for other ranks' parameters
    torch.manual_seed(5)
    return Cluster(CPU, 0, patch, shards=shards, policy=zero.Policy(block=BLOCK, **policy))


def step(cluster: Cluster, factor: float = 1.0, divisor: float = 1.0) -> zero.StepInfo:
    cluster.engine.begin_step(divisor=divisor)
    (cluster.module(cluster.inputs) * factor).sum().backward()
    return cluster.engine.step()


def test_gradients_below_the_limit_stay() -> None:
    assert (
        clip_factor(0.5, 1.0, 4.0) == clip_factor(0.5, None, 4.0) == clip_factor(torch.nan, 1.0, 4.0) == 0.25
    )
    assert clip_factor(8.0, 2.0, 4.0) == pytest.approx(0.25 / 4)


@pytest.mark.parametrize("shards", [(1, 1, 1), (1, 1, 4), (2, 4, 4)], ids=str)
def test_a_step_that_is_not_finite_leaves_nothing_for_the_next(
    shards: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No NaN in padding, which blocks that were not finite bring, and no other noise."""
    codecs = zero.Codecs(CODED, Blockwise(4, BLOCK, stochastic=True), Blockwise(4, BLOCK, stochastic=True))
    runs = []
    for factors in ((1.0, 1.0), (1.0, torch.inf, 1.0)):
        cluster = engine(monkeypatch, shards, codecs=codecs)
        skipped = [step(cluster, factor).skipped for factor in factors]
        assert skipped == [factor == torch.inf for factor in factors]
        runs.append(cluster.engine)
    assert runs[0].state() == runs[1].state()
    for one, other in zip(runs[0].units, runs[1].units, strict=True):
        assert torch.equal(one.master, other.master)


def test_a_load_of_what_receivers_hold_sends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """R was loaded with the master weights: a refresh before their next update would advance it once more."""
    held = engine(monkeypatch, (2, 2, 4), codecs=zero.Codecs(weights=CODED, delta=True)).engine
    held.refresh()
    held.traffic.take()
    for unit in held.units:
        unit.master.add_(1)
    held.invalidate()
    held.refresh()
    assert not any(held.traffic.take().values())
    whole = engine(monkeypatch, (2, 2, 4), codecs=zero.Codecs(weights=CODED)).engine
    whole.refresh()
    whole.traffic.take()
    whole.invalidate()
    whole.refresh()
    assert whole.traffic.take()["refresh_inter_node_bytes"] > 0


def test_a_save_before_the_first_step_changes_no_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """The optimizer's state is made for it, by a step that must not count."""
    masters = []
    for saves in (0, 1, 2):
        cluster = engine(monkeypatch, (1, 1, 1))
        units = cluster.engine.units
        traits = cluster.engine.traits
        adam = partial(torch.optim.AdamW, lr=0.1, weight_decay=0.1, fused=True)
        cluster.engine.optimizer = zero.optimizer.SliceOptimizer(units, traits, adam)
        for _ in range(saves):
            save_records(cluster.engine)
        assert set(cluster.engine.optimizer.scalars().values()) <= {0.0}
        for _ in range(2):
            step(cluster)
        assert cluster.engine.optimizer.scalars() == {"step": 2.0}
        masters.append(torch.cat([unit.master for unit in units]))
    assert torch.equal(masters[0], masters[1]) and torch.equal(masters[0], masters[2])


@pytest.mark.parametrize("shards", [(1, 1, 1), (1, 1, 4), (2, 2, 4)], ids=str)
def test_what_was_carried_is_added_in_the_sums_unit(
    shards: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A residual is one of divided gradients; and until it is paid, it is not a rank's own."""
    masters = []
    for carried in (0.0, 3.0):
        cluster = engine(monkeypatch, shards, codecs=zero.Codecs(gradients_inter=CODED, feedback=True))
        held = cluster.engine
        for record in load_records(held, optimizer=False, residual=True):
            assert set(record.tensors) == {MASTER, RESIDUAL}
            record.tensors[RESIDUAL].fill_(carried)
        held.invalidate()
        assert step(cluster, torch.inf).skipped
        assert all(unit.residual is not None for unit in held.units) and not rank_tensors(held)
        assert not step(cluster, divisor=8.0).skipped and len(rank_tensors(held)) == len(held.units)
        masters.append([unit.master for unit in held.units])
    for unit, plain, more in zip(held.units, *masters, strict=True):
        for _, low, high, at in unit.layout.ranges(unit.levels.os):
            moved = (more - plain)[at : at + high - low]
            torch.testing.assert_close(moved, torch.full_like(moved, -LR * 3.0), rtol=1e-3, atol=1e-6)
