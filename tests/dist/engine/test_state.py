"""What steps leave behind, and must not: aborts, gathers that ran ahead, memory that nobody wrote."""

from __future__ import annotations

import math

import pytest
import torch
import torch.distributed as dist

from megazero import zero
from megazero.comm.codec import Blockwise
from megazero.mesh.levels import INTER
from megazero.mesh.mesh import create_mesh
from megazero.zero.rounding import KINDS
from tests.dist.engine.test_rules import Stack, make, train
from tests.dist.pool import run_ranks

ROUNDED = zero.Codecs(weights=Blockwise(8, 8), gradients={INTER: Blockwise(4, 8)})


def aborted(shards, codecs, backwards):
    """Steps after an abort are those of an engine that had none. backwards: of rank 0 before the abort."""
    policy = zero.Policy(block=8, codecs=codecs)
    (model, engine), (plain, plain_engine) = (make(shards, per_node=1, policy=policy) for _ in range(2))
    x = torch.linspace(-1, 1, 24).view(3, 8) * (1 + dist.get_rank())
    engine.begin_step(2)
    if dist.get_rank() or backwards:
        (100 * model(x)).square().sum().backward()
    model(x)
    engine.abort_step()
    for _ in engine.units:  # each is the sample once
        infos = []
        for net, each in ((model, engine), (plain, plain_engine)):
            each.begin_step(1)
            net(x).square().sum().backward()
            infos.append(each.step())
        assert infos[0] == infos[1] and set(infos[1].errors) == (set() if codecs.exact else set(KINDS))


@pytest.mark.parametrize(
    "shards, codecs, backwards",
    [((2, 2, 2), zero.Codecs(), 1), ((2, 2, 2), ROUNDED, 1), ((1, 1, 1), zero.Codecs(), 0)],
    ids=["exact", "quantised", "at different places"],
)
def test_an_aborted_step_leaves_no_trace(shards, codecs, backwards):
    run_ranks(2, aborted, shards, codecs, backwards)


def no_gather_is_under_way_when_master_weights_are_written():
    model, engine = make()
    under_way = []
    update = engine.optimizer.update

    def watched(*given):
        under_way.append([u.name for u in engine.units if u.weights.ticket is not None])
        update(*given)

    engine.optimizer.update = watched
    for order in ([0, 1, 2, 3], [0, 1]):  # 2 and 3 are gathered ahead, and then not used
        train(model, engine, order=order)
    assert under_way == [[], []]


def a_refresh_holds_one_units_full_parameters_at_a_time():
    model, engine = make()
    train(model, engine)
    most, ensure = [], engine.gatherer.ensure
    engine.gatherer.ensure = lambda unit: (
        ensure(unit),
        most.append(sum(u.weights.full_present for u in engine.units)),
    )
    engine.refresh()
    assert most == [1, 1, 1, 1] and all(u.weights.version == u.master.version for u in engine.units)


def frozen_parameters_of_a_trained_unit_send_zeros():
    """Rounding errors are finite where memory that nobody wrote is NaN."""
    model = Stack()
    for layer in model.layers:
        layer.weight.requires_grad_(False)
    torch.use_deterministic_algorithms(True)  # fills what torch.empty makes
    try:
        mesh = create_mesh(shards=(2, 2, 2), ranks_per_node=1)
        engine = zero.shard(model, mesh=mesh, policy=zero.Policy(block=8, codecs=ROUNDED), units=model.layers)
        for _ in engine.units:
            info = train(model, engine)
            assert not info.skipped and set(info.errors) == set(KINDS)
            assert all(math.isfinite(error) for error in info.errors.values()), info
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize(
    "rule",
    [
        no_gather_is_under_way_when_master_weights_are_written,
        a_refresh_holds_one_units_full_parameters_at_a_time,
        frozen_parameters_of_a_trained_unit_send_zeros,
    ],
)
def test_rule(rule):
    run_ranks(2, rule)
