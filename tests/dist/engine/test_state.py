"""What steps leave behind, and must not: aborts, gathers that ran ahead, memory that nobody wrote."""

from __future__ import annotations

import math

import pytest
import torch
import torch.distributed as dist

from megazero import zero
from megazero.comm.codec import Blockwise
from megazero.mesh.mesh import create_mesh
from megazero.zero.rounding import KINDS
from tests.dist.engine.test_rules import Stack, make
from tests.dist.pool import run_ranks

ROUNDED = zero.Codecs(weights=Blockwise(8, 8), gradients_inter=Blockwise(4, 8))


def aborted(shards, codecs, backwards):
    """Steps after an abort, and of an engine that had none. backwards: of rank 0 before the abort."""
    policy = zero.Policy(block=8, codecs=codecs)
    model, engine = make(shards, per_node=1, policy=policy)
    plain, plain_engine = make(shards, per_node=1, policy=policy)
    x = torch.linspace(-1, 1, 24).view(3, 8) * (1 + dist.get_rank())
    engine.begin_step(2)
    if dist.get_rank() or backwards:
        (100 * model(x)).square().sum().backward()
    model(x)
    engine.abort_step()
    seen = []
    for net, each in ((model, engine), (plain, plain_engine)):
        seen.append([])
        for _ in each.units:  # each is the sample once
            each.begin_step(1)
            net(x).square().sum().backward()
            seen[-1].append(each.step())
    return seen


@pytest.mark.parametrize("codecs", [zero.Codecs(), ROUNDED], ids=["exact", "quantised"])
def test_an_aborted_step_leaves_no_trace(codecs):
    for first, second in run_ranks(2, aborted, (2, 2, 2), codecs, 1):
        assert first == second
        assert [set(info.errors) for info in second] == [set() if codecs.exact else set(KINDS)] * 4


def test_ranks_may_be_aborted_at_different_places():
    for first, second in run_ranks(2, aborted, (1, 1, 1), zero.Codecs(), 0):
        assert first == second


def update_after_a_shorter_pass():
    """Whether a gather was under way when the master weights were written, by step."""
    model, engine = make()
    under_way = []
    update = engine.optimizer.update

    def watched(*given):
        under_way.append([u.name for u in engine.units if u.weights.ticket is not None])
        update(*given)

    engine.optimizer.update = watched
    for order in ([0, 1, 2, 3], [0, 1]):  # 2 and 3 are gathered ahead, and then not used
        engine.begin_step(1)
        model(torch.ones(3, 8), order).sum().backward()
        engine.step()
    return under_way


def test_no_gather_is_under_way_when_master_weights_are_written():
    assert run_ranks(2, update_after_a_shorter_pass) == [[[], []]] * 2


def refreshed():
    """How many units were gathered at once, at most; versions that differ afterwards."""
    model, engine = make()
    engine.begin_step(1)
    model(torch.ones(3, 8)).sum().backward()
    engine.step()
    most = []
    ensure = engine.gatherer.ensure
    engine.gatherer.ensure = lambda unit: (
        ensure(unit),
        most.append(sum(u.weights.full_present for u in engine.units)),
    )
    engine.refresh()
    return most, [u.name for u in engine.units if u.weights.version != u.master.version]


def test_a_refresh_holds_one_units_full_parameters_at_a_time():
    assert run_ranks(2, refreshed) == [([1, 1, 1, 1], [])] * 2


def partly_frozen():
    """Rounding errors by step where memory that nobody wrote is NaN."""
    model = Stack()
    for layer in model.layers:
        layer.weight.requires_grad_(False)
    torch.use_deterministic_algorithms(True)  # fills what torch.empty makes
    try:
        mesh = create_mesh(shards=(2, 2, 2), ranks_per_node=1)
        engine = zero.shard(model, mesh=mesh, policy=zero.Policy(block=8, codecs=ROUNDED), units=model.layers)
        infos = []
        for _ in engine.units:
            engine.begin_step(1)
            model(torch.ones(3, 8)).sum().backward()
            infos.append(engine.step())
    finally:
        torch.use_deterministic_algorithms(False)
    return infos


def test_frozen_parameters_of_a_trained_unit_send_zeros():
    for infos in run_ranks(2, partly_frozen):
        for info in infos:
            assert not info.skipped and set(info.errors) == set(KINDS)
            assert all(math.isfinite(error) for error in info.errors.values()), info
