"""The engine's contract beyond parity: misuse, non-finite steps, order across ranks, traffic, reading and writing."""

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
from tests.dist.engine.mistakes import unsaid
from tests.dist.engine.test_engine import make_net
from tests.dist.pool import run_ranks


class Stack(nn.Module):
    def __init__(self, width=8, depth=4):
        super().__init__()
        torch.manual_seed(2)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))

    def forward(self, x, order=None):
        for i in order or range(len(self.layers)):
            x = self.layers[i](x).tanh()
        return x


def make(shards=(2, 2, 2), per_node=2, optimizer=None, policy=None, **kwargs):
    mesh = create_mesh(shards=shards, ranks_per_node=per_node)
    model = Stack(**kwargs)
    engine = zero.shard(
        model,
        mesh=mesh,
        policy=policy or zero.Policy(block=4),
        units=model.layers,
        optimizer=optimizer or partial(torch.optim.SGD, lr=0.1),
    )
    return model, engine


def misuse():
    model, engine = make()
    x = torch.ones(3, 8)

    def backward():
        model(x).sum().backward()

    found = [
        *unsaid("without begin_step", engine.step),
        *unsaid("micro_batches >= 1", lambda: engine.begin_step(0)),
        *unsaid(r"begin_step\(micro_batches\)", backward),
        *unsaid("twice", lambda: (engine.begin_step(2), engine.begin_step(2))),
        *unsaid("after 1 backwards of 2", lambda: (backward(), engine.step())),
        *unsaid("backward number 3", lambda: (backward(), backward())),
        *unsaid("inside a step", lambda: engine.evaluation().__enter__()),
    ]
    engine.step()
    return found + unsaid("parameters are sharded", model.state_dict)


def test_misuse_is_named():
    assert run_ranks(2, misuse) == [[]] * 2


def refusals():
    mesh = create_mesh(shards=(2, 2, 2))
    model = Stack()
    half = Stack()
    half.layers[0].weight.data = half.layers[0].weight.data.bfloat16()
    meta = Stack().to("meta")
    adafactor, use = partial(torch.optim.Adafactor, lr=0.1), zero.Policy(lifetime="use")
    other = create_mesh(shards=(1, 1, 2))
    wide = zero.Codecs(weights=Blockwise(8, 128))
    differences = zero.Codecs(weights=Blockwise(4), delta=True)
    return [
        *unsaid("lies inside", lambda: zero.shard(model, mesh=mesh, units=[model, *model.layers])),
        *unsaid("not a submodule", lambda: zero.shard(model, mesh=mesh, units=[nn.Linear(2, 2)])),
        *unsaid("mixes dtypes", lambda: zero.shard(half, mesh=mesh, units=half.layers)),
        *unsaid("give init=", lambda: zero.shard(meta, mesh=mesh, units=meta.layers)),
        *unsaid("elementwise", lambda: zero.shard(Stack(), mesh=mesh, optimizer=adafactor)),
        *unsaid("nearest", lambda: zero.shard(Stack(), mesh=other, policy=use)),
        *unsaid("forever", lambda: zero.Policy(block=0, lifetime="forever")),
        *unsaid("nearest: 128", lambda: zero.Policy(block=64, codecs=wide)),
        *unsaid("does not go with outer", lambda: zero.Policy(codecs=differences, outer=zero.Outer(4))),
    ]


def test_refusals_name_the_cure():
    assert run_ranks(2, refusals) == [[]] * 2


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
    mesh = create_mesh(shards=(2, 2, 2))
    model = Wrapping()
    engine = zero.shard(model, mesh=mesh, units=[model])
    engine.begin_step(1)
    try:
        model(torch.ones(2, 8))
    except TypeError as error:
        return str(error)
    return "nothing"


def test_an_output_that_hides_its_tensors_is_refused():
    assert all("pytree" in said for said in run_ranks(2, opaque_output))


def non_finite(shards):
    model, engine = make(shards)
    x = torch.ones(3, 8) * (math.inf if dist.get_rank() == 1 else 1)
    before = weights(engine)
    engine.begin_step(1)
    (model(torch.ones(3, 8)) * x).sum().backward()
    info = engine.step()
    after = weights(engine)
    engine.begin_step(1)
    model(torch.ones(3, 8)).sum().backward()
    return (
        info.skipped,
        math.isfinite(info.grad_norm),
        all(torch.equal(before[n], after[n]) for n in before),
        engine.step(),
    )


@pytest.mark.parametrize("shards", [(1, 1, 1), (2, 2, 2), (1, 1, 2)])
def test_a_non_finite_gradient_on_one_rank_skips_the_step_on_all(shards):
    for skipped, finite, same, following in run_ranks(2, non_finite, shards):
        assert skipped and not finite and same
        assert not following.skipped and following.grad_norm > 0


def other_order():
    model, engine = make()
    engine.begin_step(1)
    model(torch.ones(3, 8), order=[0, 1, 2, 3] if dist.get_rank() == 0 else [0, 2, 1, 3]).sum().backward()
    try:
        engine.step()
    except RuntimeError as error:
        return str(error)
    return "nothing"


def test_ranks_that_call_modules_in_another_order_are_told():
    assert all("different collectives" in said for said in run_ranks(2, other_order))


def changing_order():
    """The order of use may change from step to step, as long as it changes on every rank."""
    model, engine = make(per_node=1)
    plain = Stack()
    plain_optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    for order in ([0, 1, 2, 3], [3, 2, 1, 0], [0, 1], [1, 1, 2, 3], [0, 1, 2, 3]):
        engine.begin_step(1, divisor=2)
        model(torch.ones(3, 8), order).sum().backward()
        engine.step()
        plain_optimizer.zero_grad()
        plain(torch.ones(3, 8), order).sum().backward()
        plain_optimizer.step()
    return weights(engine), {n: p.detach().double() for n, p in plain.named_parameters()}


def test_order_may_change_between_steps():
    for got, want in run_ranks(2, changing_order):
        for name in want:
            torch.testing.assert_close(got[name], want[name], rtol=1e-6, atol=1e-6)


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


def writes():
    model, engine = make((2, 2, 2))
    with engine.gathered(model.layers[1], write=True), torch.no_grad():
        model.layers[1].weight.fill_(0.25)
    with engine.gathered():
        state = {n: p.detach().clone() for n, p in model.state_dict().items()}
    return state, weights(engine)


def test_gathered_reads_and_writes():
    plain = Stack().state_dict()
    plain["layers.1.weight"].fill_(0.25)
    for state, master in run_ranks(2, writes):
        for name, value in plain.items():
            assert torch.equal(state[name], value) and torch.equal(master[name].float(), value)


def frozen_base():
    """Adapters on a frozen base: only the adapters are reduced and updated."""
    mesh = create_mesh(shards=(2, 2, 2))
    model, plain = (make_net(dtype=torch.float32) for _ in range(2))
    for net in (model, plain):
        for name, p in net.named_parameters():
            p.requires_grad_("blocks.1" in name or name == "sometimes")
    engine = zero.shard(
        model, mesh=mesh, units=[model.embed, *model.blocks], optimizer=partial(torch.optim.SGD, lr=1e-3)
    )
    optimizer = torch.optim.SGD([p for p in plain.parameters() if p.requires_grad], lr=1e-3)
    tokens = torch.arange(10).view(2, 5)
    for _ in range(3):
        engine.begin_step(1, divisor=2)
        model(tokens, True).square().sum().backward()
        engine.step()
        optimizer.zero_grad()
        plain(tokens, True).square().sum().backward()
        optimizer.step()
    return weights(engine), {n: p.detach().double() for n, p in plain.named_parameters()}


def test_frozen_parameters_stay():
    for got, want in run_ranks(2, frozen_base):
        for name in want:
            torch.testing.assert_close(got[name], want[name], rtol=1e-5, atol=1e-6)


def prefetch():
    model, engine = make((2, 2, 2), policy=zero.Policy(block=4, prefetch_bytes=10**6))
    waited = []
    wait = engine.gathers.wait
    engine.gathers.wait = lambda ticket: (waited.append(ticket.label), wait(ticket))
    launched = []
    launch = engine.gatherer._launch
    engine.gatherer._launch = lambda unit: (
        launched.append((engine.units.index(unit), len(waited))),
        launch(unit),
    )
    for _ in range(2):
        launched.clear(), waited.clear()
        engine.begin_step(1)
        model(torch.ones(3, 8)).sum().backward()
        engine.step()
    return launched


def test_gathers_run_ahead_once_the_order_is_known():
    launched = run_ranks(2, prefetch)[0]
    ahead = [unit for unit, waited in launched if waited == 0]
    assert ahead[:4] == [0, 1, 2, 3], "all four were started before the first was waited for"


def dead_peer():
    model, engine = make((2, 2, 2))
    engine.begin_step(1)
    if dist.get_rank() == 1:
        __import__("os")._exit(9)
    try:
        model(torch.ones(3, 8)).sum().backward()
    except CommunicationError as error:
        return str(error)
    return "nothing"


def test_a_dead_peer_is_reported_with_rank_unit_and_axis():
    answers = run_ranks(2, dead_peer, timeout=20, return_errors=True)
    assert not answers[0].error, answers[0]
    for word in ("rank 0", "layers.", "p_intra", "A peer died"):
        assert word in answers[0].value, answers[0]


def shorter_evaluations():
    """Gathers that ran ahead and were never used are finished, whatever their order of completion."""
    mesh = create_mesh(shards=(2, 2, 2))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 4000), nn.Linear(4000, 8), nn.Linear(8, 8))
    engine = zero.shard(model, mesh=mesh, units=model)
    for forwards in (3, 1, 3, 1):
        with engine.evaluation():
            for _ in range(forwards):
                model(torch.ones(2, 8))
    engine.begin_step(1)
    model(torch.ones(2, 8)).sum().backward()
    return engine.step().grad_norm


def test_unused_gathers_are_finished():
    norms = run_ranks(2, shorter_evaluations, timeout=30)
    assert norms[0] == norms[1] > 0


def user_mistakes():
    model, engine = make()
    found = [
        *unsaid(r"create_mesh\(\) again", lambda: zero.shard(Stack(), mesh=engine.mesh)),
        *unsaid("sharded", lambda: model.layers[0].state_dict()),
        *unsaid("sharded", lambda: model.load_state_dict(Stack().state_dict())),
    ]
    model.layers[0].bias.requires_grad_(False)
    found += unsaid("requires_grad", engine.begin_step)
    torch.manual_seed(dist.get_rank())
    other, mesh = nn.Linear(8, 8), create_mesh(shards=(1, 1, 1))
    return found + unsaid("start from different values", lambda: zero.shard(other, mesh=mesh))


def test_user_mistakes_are_named():
    assert run_ranks(2, user_mistakes) == [[]] * 2


def reads_while_gathered():
    mesh = create_mesh(shards=(2, 2, 2))
    torch.manual_seed(0)
    model = nn.Linear(8, 8).bfloat16()
    engine = zero.shard(model, mesh=mesh, units=[model], optimizer=partial(torch.optim.SGD, lr=1e-4))
    engine.begin_step(1)
    model(torch.ones(2, 8).bfloat16()).sum().backward()
    engine.step()
    before = weights(engine)
    with engine.gathered(write=True), torch.no_grad():
        model(torch.ones(2, 8).bfloat16())
        model.bias[0] = 3.0
    after = weights(engine)
    changed = {n: int((before[n] != after[n]).sum()) for n in before}
    return changed, float(after["bias"][0])


def test_gathered_survives_a_forward_and_keeps_masters_that_were_not_written():
    for changed, value in run_ranks(2, reads_while_gathered):
        assert changed == {"weight": 0, "bias": 1} and value == 3.0


def freed():
    model, engine = make()
    engine.begin_step()
    model(torch.ones(1, 8)).sum().backward()
    engine.step()
    alive = weakref.ref(engine)
    del engine, model
    gc.collect()
    return alive() is None


def test_an_engine_that_nobody_holds_is_freed():
    """With its buffers and communicators: hooks on parameters are out of the collector's sight."""
    assert run_ranks(2, freed) == [True, True]


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
