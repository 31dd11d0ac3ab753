"""The engine's contract beyond parity: misuse, non-finite steps, order across ranks, traffic, reading and writing.

A rule is a function that every rank runs, and that asserts there.
"""

from __future__ import annotations

import gc
import math
import weakref
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn

from megazero import zero
from megazero.comm.codec import Blockwise
from megazero.comm.lane import CommunicationError
from megazero.mesh.mesh import create_mesh
from tests.dist.capture import weights
from tests.dist.engine.test_engine import make_net
from tests.dist.pool import run_ranks
from tests.messages import names, refused

SGD = partial(torch.optim.SGD, lr=0.1)
wrong = partial(refused, by=RuntimeError)


class Stack(nn.Module):
    def __init__(self, width=8, depth=4):
        super().__init__()
        torch.manual_seed(2)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))

    def forward(self, x, order=None):
        for i in order or range(len(self.layers)):
            x = self.layers[i](x).tanh()
        return x


def make(shards=(2, 2, 2), per_node=2, optimizer=SGD, policy=None, **kwargs):
    mesh = create_mesh(shards=shards, ranks_per_node=per_node)
    model = Stack(**kwargs)
    policy = policy or zero.Policy(block=4)
    return model, zero.shard(model, mesh=mesh, policy=policy, units=model.layers, optimizer=optimizer)


def train(model, engine, x=None, order=None) -> zero.StepInfo:
    """A step of one micro-batch."""
    engine.begin_step(1)
    model(torch.ones(3, 8) if x is None else x, order).sum().backward()
    return engine.step()


def said_by(act) -> str:
    """Return an error's words. Nothing of it is kept: its frames hold collectives that will not end."""
    try:
        act()
    except RuntimeError as error:
        return str(error)
    return ""


# -- misuse and refusals ------------------------------------------------------------------------------


def misuse():
    model, engine = make()

    def backward():
        model(torch.ones(3, 8)).sum().backward()

    for words, act in (
        (["step()", "begin_step()"], engine.step),
        (["micro_batches >= 1", "0"], lambda: engine.begin_step(0)),
        (["begin_step(micro_batches)"], backward),
        (["begin_step", "twice", "abort_step()"], lambda: (engine.begin_step(2), engine.begin_step(2))),
        (["1 backwards of 2"], lambda: (backward(), engine.step())),
        (["number 3", "2 micro-batches"], lambda: (backward(), backward())),
        (["evaluation()", "step()"], lambda: engine.evaluation().__enter__()),
    ):
        with refused(*words, by=Exception):
            act()
    engine.step()
    with wrong("engine.gathered(): module.state_dict()"):
        model.state_dict()


def refusals():
    mesh, other, model, half = (
        create_mesh(shards=(2, 2, 2)), create_mesh(shards=(1, 1, 2)), Stack(), Stack(),
    )  # fmt: skip
    half.layers[0].weight.data = half.layers[0].weight.data.bfloat16()
    meta = Stack().to("meta")
    adafactor, use = partial(torch.optim.Adafactor, lr=0.1), zero.Policy(lifetime="use")
    wide = zero.Codecs(weights=Blockwise(8, 128))
    differences = zero.Codecs(weights=Blockwise(4), delta=True)
    for words, act in (
        (["inside"], lambda: zero.shard(model, mesh=mesh, units=[model, *model.layers])),
        (["Linear", "submodule"], lambda: zero.shard(model, mesh=mesh, units=[nn.Linear(2, 2)])),
        (["dtypes", "Policy(dtype=...)"], lambda: zero.shard(half, mesh=mesh, units=half.layers)),
        (["meta", "init="], lambda: zero.shard(meta, mesh=mesh, units=meta.layers)),
        (["Adafactor", "elementwise"], lambda: zero.shard(Stack(), mesh=mesh, optimizer=adafactor)),
        (["'use'", "nearest"], lambda: zero.shard(Stack(), mesh=other, policy=use)),
        (["block=0", "'forever'"], lambda: zero.Policy(block=0, lifetime="forever")),
        (["block=64", "nearest: 128"], lambda: zero.Policy(block=64, codecs=wide)),
        (["codecs.delta", "outer"], lambda: zero.Policy(codecs=differences, outer=zero.Outer())),
    ):
        with refused(*words):
            act()


def user_mistakes():
    model, engine = make()
    with refused("create_mesh() again", by=Exception):
        zero.shard(Stack(), mesh=engine.mesh)
    for act in (model.layers[0].state_dict, lambda: model.load_state_dict(Stack().state_dict())):
        with wrong("sharded", "engine.gathered("):
            act()
    model.layers[0].bias.requires_grad_(False)
    with wrong("requires_grad", "layers.0.bias"):
        engine.begin_step()
    torch.manual_seed(dist.get_rank())
    other, mesh = nn.Linear(8, 8), create_mesh(shards=(1, 1, 1))
    with refused("different values", "'weight'", "same seed"):
        zero.shard(other, mesh=mesh)


class Opaque:
    __slots__ = ("x",)

    def __init__(self, x):
        self.x = x


class Wrapping(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x):
        return Opaque(self.inner(x))


def opaque_output():
    model = Wrapping()
    engine = zero.shard(model, mesh=create_mesh(shards=(2, 2, 2)), units=[model])
    engine.begin_step(1)
    with refused("Opaque", "pytree", by=TypeError):
        model(torch.ones(2, 8))


def ranks_of_another_order():
    model, engine = make()
    order = [0, 1, 2, 3] if dist.get_rank() == 0 else [0, 2, 1, 3]
    names(said_by(lambda: train(model, engine, order=order)), "different collectives")


# -- order, reading and writing ------------------------------------------------------------------------


def order_that_changes_on_every_rank():
    model, engine = make(per_node=1)
    plain = Stack()
    optimizer = SGD(plain.parameters())
    for order in ([0, 1, 2, 3], [3, 2, 1, 0], [0, 1], [1, 1, 2, 3], [0, 1, 2, 3]):
        engine.begin_step(1, divisor=2)
        model(torch.ones(3, 8), order).sum().backward()
        engine.step()
        optimizer.zero_grad()
        plain(torch.ones(3, 8), order).sum().backward()
        optimizer.step()
    got = weights(engine)
    for name, p in plain.named_parameters():
        torch.testing.assert_close(got[name], p.detach().double(), rtol=1e-6, atol=1e-6)


def gathered_reads_and_writes():
    model, engine = make((2, 2, 2))
    with engine.gathered(model.layers[1], write=True), torch.no_grad():
        model.layers[1].weight.fill_(0.25)
    with engine.gathered():
        state = {n: p.detach().clone() for n, p in model.state_dict().items()}
    plain, master = Stack().state_dict(), weights(engine)
    plain["layers.1.weight"].fill_(0.25)
    for name, value in plain.items():
        assert torch.equal(state[name], value) and torch.equal(master[name].float(), value), name


def masters_that_were_not_written_stay_after_a_forward_while_gathered():
    torch.manual_seed(0)
    model = nn.Linear(8, 8).bfloat16()
    mesh = create_mesh(shards=(2, 2, 2))
    engine = zero.shard(model, mesh=mesh, units=[model], optimizer=partial(torch.optim.SGD, lr=1e-4))
    x = torch.ones(2, 8).bfloat16()
    engine.begin_step(1)
    model(x).sum().backward()
    engine.step()
    before = weights(engine)
    with engine.gathered(write=True), torch.no_grad():
        model(x)
        model.bias[0] = 3.0
    after = weights(engine)
    assert torch.equal(before["weight"], after["weight"]) and float(after["bias"][0]) == 3.0
    assert torch.equal(before["bias"][1:], after["bias"][1:])


def frozen_base():
    """Adapters on a frozen base: only the adapters are reduced and updated."""
    model, plain = (make_net(dtype=torch.float32) for _ in range(2))
    for net in (model, plain):
        for name, p in net.named_parameters():
            p.requires_grad_("blocks.1" in name or name == "sometimes")
    sgd, mesh = partial(torch.optim.SGD, lr=1e-3), create_mesh(shards=(2, 2, 2))
    engine = zero.shard(model, mesh=mesh, units=[model.embed, *model.blocks], optimizer=sgd)
    optimizer = sgd([p for p in plain.parameters() if p.requires_grad])
    tokens = torch.arange(10).view(2, 5)
    for _ in range(3):
        engine.begin_step(1, divisor=2)
        model(tokens, True).square().sum().backward()
        engine.step()
        optimizer.zero_grad()
        plain(tokens, True).square().sum().backward()
        optimizer.step()
    got = weights(engine)
    for name, p in plain.named_parameters():
        torch.testing.assert_close(got[name], p.detach().double(), rtol=1e-5, atol=1e-6)


def gathers_run_ahead_once_the_order_is_known():
    """All four units are started before the first is waited for."""
    model, engine = make((2, 2, 2), policy=zero.Policy(block=4, prefetch_bytes=10**6))
    waited, launched = [], []
    wait, launch = engine.gathers.wait, engine.gatherer._launch
    engine.gathers.wait = lambda ticket: (waited.append(ticket.label), wait(ticket))
    engine.gatherer._launch = lambda unit: (
        launched.append((engine.units.index(unit), len(waited))),
        launch(unit),
    )
    for _ in range(2):
        launched.clear(), waited.clear()
        train(model, engine)
    assert [unit for unit, waits in launched if waits == 0][:4] == [0, 1, 2, 3], launched


def unused_gathers_are_finished():
    """They ran ahead, whatever their order of completion."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 4000), nn.Linear(4000, 8), nn.Linear(8, 8))
    engine = zero.shard(model, mesh=create_mesh(shards=(2, 2, 2)), units=model)
    for forwards in (3, 1, 3, 1):
        with engine.evaluation():
            for _ in range(forwards):
                model(torch.ones(2, 8))
    engine.begin_step(1)
    model(torch.ones(2, 8)).sum().backward()
    assert engine.step().grad_norm > 0


def an_engine_that_nobody_holds_is_freed():
    """With its buffers and communicators: hooks on parameters are out of the collector's sight."""
    model, engine = make()
    train(model, engine)
    alive = weakref.ref(engine)
    del engine, model
    gc.collect()
    assert alive() is None


RULES = [
    misuse,
    refusals,
    user_mistakes,
    opaque_output,
    ranks_of_another_order,
    order_that_changes_on_every_rank,
    gathered_reads_and_writes,
    masters_that_were_not_written_stay_after_a_forward_while_gathered,
    frozen_base,
    gathers_run_ahead_once_the_order_is_known,
    unused_gathers_are_finished,
    an_engine_that_nobody_holds_is_freed,
]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_rule(rule):
    run_ranks(2, rule, timeout=30)


def non_finite(shards):
    model, engine = make(shards)
    x = torch.ones(3, 8) * (math.inf if dist.get_rank() == 1 else 1)
    before = weights(engine)
    engine.begin_step(1)
    (model(torch.ones(3, 8)) * x).sum().backward()
    info, after = engine.step(), weights(engine)
    assert info.skipped and not math.isfinite(info.grad_norm)
    assert all(torch.equal(before[n], after[n]) for n in before)
    following = train(model, engine)
    assert not following.skipped and following.grad_norm > 0


@pytest.mark.parametrize("shards", [(1, 1, 1), (2, 2, 2), (1, 1, 2)])
def test_a_non_finite_gradient_on_one_rank_skips_the_step_on_all(shards):
    run_ranks(2, non_finite, shards)


def traffic(shards, micro_batches, steps=2):
    model, engine = make(shards, per_node=2, policy=zero.Policy(block=4, prefetch_bytes=0))
    for _ in range(steps):
        engine.traffic.take()
        engine.begin_step(micro_batches)
        for _ in range(micro_batches):
            model(torch.ones(3, 8)).sum().backward()
        engine.step()
    n = sum(u.layout.numel for u in engine.units)
    return engine.traffic.take(), n, engine.units[0].layout.numel


def test_traffic_equals_the_formula():
    """fp32, 4 ranks on 2 nodes. zero3: each gather 3/4 N (1/2 in the node, 1/4 across), the last unit's second
    one and the first unit's in later micro-batches, which are still there; each reduction 3/4 N. hpz: across nodes
    only the refresh, once per step. Nothing is held ahead but what the next module needs."""
    for m in (1, 3):
        got, n, unit = run_ranks(4, traffic, (4, 4, 4), m)[0]
        gathers = m * (2 * n - unit) - (m - 1) * unit
        assert got["gather_intra_node_bytes"] == 4 * gathers // 2
        assert got["gather_inter_node_bytes"] == 4 * gathers // 4
        assert got["reduce_intra_node_bytes"] == 4 * m * n // 2
        assert got["reduce_inter_node_bytes"] == 4 * m * n // 4
        got, n, unit = run_ranks(4, traffic, (2, 2, 4), m)[0]
        assert got["refresh_inter_node_bytes"] == 4 * n // 4
        assert got["gather_intra_node_bytes"] == 4 * gathers // 2
        assert got["reduce_inter_node_bytes"] == 4 * n // 4, "across nodes once per step"
        assert "gather_inter_node_bytes" not in got


def dead_peer():
    model, engine = make((2, 2, 2))
    engine.begin_step(1)
    if dist.get_rank() == 1:
        __import__("os")._exit(9)
    with refused("rank 0", "layers.", "p_intra", "died", by=CommunicationError):
        model(torch.ones(3, 8)).sum().backward()


def test_a_dead_peer_is_reported_with_rank_unit_and_axis():
    answers = run_ranks(2, dead_peer, timeout=20, return_errors=True)
    assert not answers[0].error, answers[0]


class Given(nn.Module):
    """A parameter whose gradient is what forward is given."""

    def __init__(self, numel):
        super().__init__()
        self.p = nn.Parameter(torch.zeros(numel, dtype=torch.bfloat16))

    def forward(self, gradient):
        return (self.p * gradient).sum()


def whole_sums(shards, micro_batches):
    """Sums of whole numbers that bf16 holds, and of which it does not hold the sums."""
    mesh = create_mesh(shards=shards, ranks_per_node=2)
    model = Given(1000)
    engine = zero.shard(model, mesh=mesh, units=[model], optimizer=partial(torch.optim.SGD, lr=0.0))
    drawn = torch.randint(-255, 256, (4, micro_batches, 1000), generator=torch.Generator().manual_seed(0))
    engine.begin_step(micro_batches)
    for gradient in drawn[dist.get_rank()]:
        model(gradient.bfloat16()).backward()
    engine.step()
    (unit,) = engine.units
    found = []
    for _, low, high, at in unit.layout.ranges(unit.axes.os):
        start = unit.layout.within(unit.axes.os, unit.axes.g)[0].start + at
        found.append(
            torch.equal(unit.gradients.grad[start : start + high - low], drawn.sum((0, 1))[low:high].float())
        )
    return found


@pytest.mark.parametrize("micro_batches", [1, 3])
@pytest.mark.parametrize("shards", [(1, 1, 1), (2, 2, 2), (1, 1, 4), (4, 4, 4)], ids=str)
def test_sums_of_bf16_gradients_are_not_rounded_to_bf16_anywhere(shards, micro_batches):
    """Nor on the way back of replicas, which after one micro-batch has only gradients behind it."""
    for found in run_ranks(4, whole_sums, shards, micro_batches):
        assert found and all(found)
