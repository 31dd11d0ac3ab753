"""What a user does to the module that the engine would damage: it works on every layout, or is refused by name.

A guard is a function that every rank runs, and that asserts there.
"""

from __future__ import annotations

import copy
import weakref
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._dynamo.utils import counters

from megazero import zero
from megazero.comm import lane
from megazero.comm.codec import Blockwise
from megazero.mesh.mesh import create_mesh
from megazero.zero.records import save_records
from tests.dist.capture import weights
from tests.dist.engine.test_rules import Stack, make, said_by, wrong
from tests.dist.engine.test_state import ROUNDED as CODED
from tests.dist.pool import run_ranks
from tests.messages import names, refused

LAYOUTS = [(1, 1, 1), (1, 1, 2), (2, 2, 2)]
SGD = partial(torch.optim.SGD, lr=0.01)


def x_of(dtype=torch.float32):
    return torch.ones(3, 8, dtype=dtype)


# -- the parameters' data, and copies ------------------------------------------------------------------


def other_data(shards):
    """A conversion after ``zero.shard`` is refused where the block ends, and by the next step."""

    def other_tensor(model):
        model.layers[1].bias.data = model.layers[1].bias.data.clone()

    for change, words in (
        (Stack.bfloat16, ("'layers.0.bias'", "torch.float32", "torch.bfloat16")),
        (Stack.double, ("'layers.0.bias'", "torch.float32", "torch.float64")),
        (other_tensor, ("'layers.1.bias'", "another tensor")),
    ):
        model, engine = make(shards)
        with wrong(*words, "before zero.shard"), engine.gathered():
            change(model)
        with wrong(*words, "before zero.shard"):
            engine.begin_step()


def users_hook(module, args, output):
    return None


def deep_copies(shards):
    """They are made while gathered, and are plain modules."""
    model, engine = make(shards)
    for act in (lambda: copy.deepcopy(model), lambda: copy.deepcopy(model.layers[0])):
        with wrong("engine.gathered(): copy.deepcopy"):
            act()
    model.layers[1].register_forward_hook(users_hook)
    with engine.gathered():
        average = copy.deepcopy(model)
        one = copy.deepcopy(model.layers[2])
    plain = Stack()
    assert all(map(torch.equal, average.parameters(), plain.parameters()))
    if dist.get_rank() == 0:  # alone: a hook of the engine would wait for the other rank
        out = average(x_of())
        out.sum().backward()
        assert torch.equal(out, plain(x_of()))
    average.bfloat16(), average.state_dict(), copy.deepcopy(average), one(torch.ones(8))
    with torch.no_grad():
        for param in average.parameters():
            param.zero_()
    engine.begin_step()
    model(x_of()).sum().backward()  # the module itself is as it was
    hooks = [list(m._forward_hooks.values()) + list(m._forward_pre_hooks.values()) for m in average.modules()]
    assert sum(hooks, []) == [users_hook] and engine.step().grad_norm > 0
    with wrong("sharded"):
        model.state_dict()


def hooked(device):
    """Hooks run in a step of a module that zero.shard converts or takes off the meta device."""
    model = Stack().to(device)
    values, params, ran = Stack().state_dict(), list(model.parameters()), []
    params[0].register_hook(lambda grad: ran.append(grad.dtype))
    params[1].register_post_accumulate_grad_hook(lambda p: ran.append(p.dtype))
    policy, mesh = zero.Policy(block=4, dtype=torch.bfloat16), create_mesh(shards=(2, 2, 2))
    engine = zero.shard(model, mesh=mesh, policy=policy, units=model.layers, init=values.get)
    engine.begin_step()
    model(x_of(torch.bfloat16)).sum().backward()
    engine.step()
    assert ran == [torch.bfloat16] * 2
    assert all(a is b for a, b in zip(params, model.parameters(), strict=True))


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_conversion_keeps_the_users_hooks(device):
    run_ranks(2, hooked, device)


# -- parameters and modules that training would damage ------------------------------------------------


def of_dtype(dtype, trained):
    model = nn.Linear(2, 2)
    model.odd = nn.Parameter(torch.zeros(3, dtype=dtype), requires_grad=trained)
    return model


class SparseLookup(nn.Embedding):
    def forward(self, tokens):
        return nn.functional.embedding(tokens, self.weight, sparse=True)


def unfit():
    mesh, values = create_mesh(shards=(2, 2, 2)), torch.zeros(4, 4)
    nested = nn.Sequential(nn.Linear(2, 2), nn.Embedding(4, 2, max_norm=1.0))
    sparse = nn.Sequential(nn.Embedding(4, 4, sparse=True, _weight=values))
    bag, recurrent = nn.EmbeddingBag(4, 2, max_norm=1.0), nn.Sequential(nn.Linear(2, 2), nn.LSTM(2, 2))
    scaled = {"loss_scaled": True}
    for model, policy, words in (
        (of_dtype(torch.float16, True), {}, ("'odd'", "trained", "bfloat16", "Policy(loss_scaled=True)")),
        (of_dtype(torch.float32, True), {"dtype": torch.float16}, ("'weight'", "Policy(dtype)")),
        (of_dtype(torch.complex64, True), scaled, ("'odd'", "complex64", "view_as_real")),
        (of_dtype(torch.complex64, False), {"dtype": torch.bfloat16}, ("'odd'", "frozen", "view_as_real")),
        (of_dtype(torch.int64, False), {}, ("'odd'", "int64", "buffer")),
        (of_dtype(torch.int8, False), {"dtype": torch.bfloat16}, ("'odd'", "int8", "buffer")),
        (of_dtype(torch.float8_e4m3fn, False), {}, ("'odd'", "float8_e4m3fn", "bfloat16")),
        (nested, {}, ("module '1'", "max_norm=1.0", "max_norm=None")),
        (bag, {}, ("max_norm=1.0",)),
        (recurrent, {}, ("module '1'", "torch.nn.LSTM", "LSTMCell")),
        (sparse, {}, ("module '0'", "sparse=False")),
        (nn.EmbeddingBag(4, 4, sparse=True, mode="sum"), {}, ("'EmbeddingBag'", "sparse=False")),
    ):
        with refused(*words):
            zero.shard(model, mesh=mesh, units=[], policy=zero.Policy(**policy))
    frozen = nn.Embedding(4, 4, sparse=True, _weight=values)
    frozen.weight.requires_grad_(False)
    zero.shard(frozen, mesh=mesh)


def a_parameter_that_somebody_watches_cannot_leave_the_meta_device():
    model = Stack().to("meta")
    held, mesh = weakref.ref(model.layers[2].weight), create_mesh(shards=(2, 2, 2))
    with refused("'layers.2.weight'", "cpu"):
        zero.shard(model, mesh=mesh, units=model.layers, init=Stack().state_dict().get)
    assert held() is not None


def frozen_parameters_that_fp32_holds_are_kept():
    for dtype in (torch.float16, torch.int8, torch.uint8, torch.bool):
        model = nn.Sequential(nn.Linear(8, 8), nn.Module())
        model[1].odd = nn.Parameter(torch.arange(100).to(dtype), requires_grad=False)
        engine = zero.shard(model, mesh=create_mesh(shards=(2, 2, 2)), units=[model[0], model[1]])
        with engine.gathered():
            assert torch.equal(model[1].odd, torch.arange(100).to(dtype))


def sparse_gradients(shards):
    model = nn.Sequential(SparseLookup(4, 4, _weight=torch.zeros(4, 4)))
    engine = zero.shard(model, mesh=create_mesh(shards=shards), units=[model[0]])
    engine.begin_step()
    with wrong("'0.weight'", "unit '0'", "torch.sparse_coo", "to_dense()"):
        model(torch.tensor([1, 2])).sum().backward()


# -- writes -------------------------------------------------------------------------------------------


class Renormalises(nn.Linear):
    def forward(self, x):
        with torch.no_grad():
            self.weight.mul_(0.5)
        return super().forward(x)


def writes_that_a_layout_would_lose(shards):
    model, engine = make(shards)
    model.layers[1].__class__ = Renormalises
    engine.begin_step()
    with wrong("'layers.1.weight'", "in a forward"):
        model(x_of())
    engine.abort_step()
    model.layers[1].__class__ = nn.Linear

    def on_purpose():
        with engine.gathered(write=True), torch.no_grad():
            for param in model.parameters():
                param.fill_(0.25)
            Stack.forward(model, x_of(), [0, 2, 3])  # a forward meanwhile is none of its business

    on_purpose()
    with engine.gathered():
        model.state_dict()
    with engine.gathered(write=True), torch.no_grad():
        model.layers[3].bias.fill_(0.25)
        with engine.gathered():
            model.state_dict()
    engine.begin_step()
    engine.abort_step()
    with wrong("'layers.3.bias'", "gathered()", "write=True"), engine.gathered(), torch.no_grad():
        model.layers[3].bias.fill_(7.0)
    with wrong("'layers.3.bias'", "since the last step", "write=True"):
        engine.begin_step()
    on_purpose()
    engine.begin_step()
    engine.abort_step()
    assert all((w == 0.25).all() for w in weights(engine).values())


NODES = {"ranks_per_node": 1}  # rounded between the ranks
ROUNDED = zero.Codecs(weights=Blockwise(8, 8))
DELTA = zero.Codecs(weights=Blockwise(4, 8), delta=True)
# By name: shard factors, dtype, policy and mesh. The master weights are the parameters (fp32), a part of the P copy,
# or apart; the P copy holds parameters, messages or R; it stays, or goes with the step.
WRITABLE = {
    "ddp": ((1, 1, 1), torch.float32, {}, {}),
    "ddp, bf16": ((1, 1, 1), torch.bfloat16, {}, {}),
    "zero1": ((1, 1, 2), torch.float32, {}, {}),
    "zero1, bf16": ((1, 1, 2), torch.bfloat16, {}, {}),
    "zero2, lifetime step": ((1, 2, 2), torch.bfloat16, {"lifetime": "step"}, {}),
    "zero1, rounded": ((1, 1, 2), torch.bfloat16, {"codecs": ROUNDED}, NODES),
    "zero1, differences": ((1, 1, 2), torch.bfloat16, {"codecs": DELTA}, NODES),
    "zero3": ((2, 2, 2), torch.float32, {}, {}),
    "zero3, bf16": ((2, 2, 2), torch.bfloat16, {}, {}),
    "zero3, rounded": ((2, 2, 2), torch.bfloat16, {"codecs": ROUNDED}, NODES),
    "hpz": ((2, 2, 4), torch.bfloat16, {}, {"ranks_per_node": 2}),
    "hpz, rounded": ((2, 2, 4), torch.bfloat16, {"codecs": ROUNDED}, {"ranks_per_node": 2}),
    "hpz, differences": ((2, 4, 4), torch.bfloat16, {"codecs": DELTA}, {"ranks_per_node": 2}),
}


def writes_that_no_counter_sees(name):
    """They are kept, and so are those of blocks that raise. Without ``write`` those that counters see are errors."""
    shards, dtype, policy, nodes = WRITABLE[name]
    model, plain = Stack().to(dtype), Stack().to(dtype).state_dict()
    policy, mesh = zero.Policy(block=8, exact_numel=0, **policy), create_mesh(shards=shards, **nodes)
    engine = zero.shard(model, mesh=mesh, policy=policy, units=model.layers, optimizer=SGD)
    layers, rounded = model.layers, not policy.codecs.exact

    def assert_kept():
        for key, value in weights(engine).items():
            if not (rounded and key in ("layers.2.weight", "layers.0.bias")):
                assert torch.equal(value.to(dtype), plain[key]), (
                    key
                )  # else in part: the rest is as it was rounded

    with wrong("'layers.2.weight'", "gathered()", "write=True"), engine.gathered(), torch.no_grad():
        layers[3].bias.fill_(7.0)
        layers[2].weight.view(-1)[:2] = 64.0
    plain["layers.3.bias"].fill_(7.0)
    plain["layers.2.weight"].view(-1)[:2] = 64.0
    assert_kept()
    with wrong("'layers.2.weight'", "since the last step"):
        engine.begin_step()
    with refused("in the middle"), engine.gathered(write=True), torch.no_grad():
        layers[3].bias.data.fill_(0.5)
        layers[0].weight.fill_(0.25)
        raise ValueError("in the middle")
    plain["layers.3.bias"].fill_(0.5)
    plain["layers.0.weight"].fill_(0.25)
    assert_kept()
    with engine.gathered(write=True):
        layers[0].bias.data.fill_(1.0)
        with engine.gathered(layers[0]):
            layers[0](torch.ones(8, dtype=dtype))
        with engine.gathered(layers[0], write=True):
            layers[0].bias.data[1] = 2.0
        layers[0].bias.data[2] = 3.0
        layers[0](torch.ones(8, dtype=dtype))
    plain["layers.0.bias"].copy_(torch.tensor([1.0, 2, 3, 1, 1, 1, 1, 1]))
    assert_kept()
    with engine.gathered():
        assert rounded or all(torch.equal(p, plain[n]) for n, p in model.named_parameters())
    engine.begin_step()
    model(x_of(dtype)).sum().backward()
    engine.step()
    different = wrong("different values", "'layers.1.bias'", "broadcast")
    with different, engine.gathered(write=True), torch.no_grad():
        layers[1].bias.fill_(dist.get_rank())
    with engine.evaluation():
        pass
    with wrong("'layers.1.bias'", "another tensor"), engine.gathered(write=True):
        layers[1].bias.data = torch.ones(8, dtype=dtype)


@pytest.mark.first(4)
@pytest.mark.parametrize("name", WRITABLE)
def test_writes_in_gathered_are_kept_on_every_layout(name):
    run_ranks(max(2, *WRITABLE[name][0]), writes_that_no_counter_sees, name)


# -- torch.autograd.grad ------------------------------------------------------------------------------


def assert_near(engine, plain, most):
    got = weights(engine)
    for n, p in plain.named_parameters():
        torch.testing.assert_close(got[n], p.detach().double(), rtol=0, atol=most, msg=n)


def autograd_grad_is_no_backward(shards):
    """A loss with the gradient of the input in it, beside plain torch."""

    def loss(net):
        x = torch.linspace(-1, 1, 24).view(3, 8).requires_grad_()
        out = net(x).square().sum()
        torch.autograd.grad(out, [*net.parameters()][:1], retain_graph=True)
        (slope,) = torch.autograd.grad(out, x, create_graph=True)
        return out + slope.square().sum()

    model, engine = make(shards, optimizer=SGD)
    plain = Stack()
    optimizer = SGD(plain.parameters())
    for _ in range(3):
        engine.begin_step(2, divisor=4)
        for _ in range(2):
            loss(model).backward()
        out = model(x_of().requires_grad_()).sum()
        torch.autograd.grad(out, model.layers[3].bias)  # after the last backward
        assert not any(u.weights.in_backward or u.axes.p and u.weights.full_present for u in engine.units), (
            "kept"
        )
        engine.step()
        optimizer.zero_grad()
        loss(plain).backward()
        optimizer.step()
    assert_near(engine, plain, 1e-6)
    engine.begin_step()
    out = model(x_of().requires_grad_()).sum()
    torch.autograd.grad(out, [*model.parameters()])
    with wrong("0 backwards of 1", "torch.autograd.grad"):
        engine.step()


def a_backward_for_some_parameters_is_one():
    model, engine = make((2, 2, 2))
    for inputs in ([model.layers[3].bias], [model.layers[0].weight]):
        engine.begin_step()
        model(x_of()).sum().backward(inputs=inputs)
        assert engine.step().grad_norm > 0


# -- what modules return --------------------------------------------------------------------------------


class Table(nn.Module):
    """Returns its own parameter."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(4)
        self.weight = nn.Parameter(torch.randn(3, 8))

    def forward(self):
        return self.weight


@dataclass(frozen=True, slots=True)
class Held:
    tensors: Any


class Plain:
    def __init__(self, held):
        self.held, self.itself = held, self


class Hiding(nn.Module):
    """Returns what has no gradient beside objects that hold what it computed, and a view of its weight."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(5)
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        y = self.second(self.first(x).tanh())
        return x.detach(), Held([{"y": Plain(y)}]), Held({"rows": self.second.weight[:3]})


class Odd(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.hiding = Table(), nn.ModuleList(Hiding() for _ in range(3))

    def forward(self, extra):
        x = self.table()
        for layer in self.hiding:
            _, held, rows = layer(x)
            x = held.tensors[0]["y"].held + rows.tensors["rows"]
        return (x * extra).square().sum()


def parameters_and_hidden_tensors_are_returned(shards):
    """As in plain torch, and no hooks are left on the parameters."""
    model, plain = Odd(), Odd()
    mesh, units = create_mesh(shards=shards), [model.table, *model.hiding]
    engine = zero.shard(model, mesh=mesh, policy=zero.Policy(block=4), units=units, optimizer=SGD)
    optimizer = SGD(plain.parameters())
    for _ in range(3):
        engine.begin_step(2, divisor=4)
        for extra in (1.0, 0.5):
            model(extra).backward()
        engine.step()
        optimizer.zero_grad()
        ((plain(1.0) + plain(0.5)) / 2).backward()
        optimizer.step()
    assert_near(engine, plain, 1e-4)
    assert not any(p._backward_hooks for p in model.parameters())


# -- units that some ranks use --------------------------------------------------------------------------


@contextmanager
def impatient():
    patience, lane.PATIENCE = lane.PATIENCE, lane.PATIENCE / 20
    try:
        yield
    finally:
        lane.PATIENCE = patience


def told() -> Any:
    """Note that this rank has been told. Nobody leaves before the other has."""
    store = dist.distributed_c10d._get_default_store()
    store.set(f"told {dist.get_rank()}", "")
    return store


def a_unit_that_one_rank_skips(shards, dtype):
    model = Stack().to(dtype)
    policy, mesh = zero.Policy(block=4, prefetch_bytes=0), create_mesh(shards=shards)
    engine = zero.shard(model, mesh=mesh, policy=policy, units=model.layers, optimizer=SGD)

    def train(order):
        engine.begin_step()
        model(x_of(dtype), order=order).sum().backward()
        engine.step()

    with impatient():
        train([0, 1, 2, 3])
        said = said_by(lambda: train([0, 2, 3] if dist.get_rank() else [0, 1, 2, 3]))
    names(said, "different collectives", "unit 'layers.1'", "where rank")
    told().wait(["told 0", "told 1"])


@pytest.mark.parametrize("shards", [(1, 1, 1), (1, 1, 2), (1, 2, 2), (2, 2, 2)], ids=str)
def test_a_unit_that_one_rank_skips_is_named(shards):
    for dtype in (torch.float32, torch.bfloat16):
        run_ranks(2, a_unit_that_one_rank_skips, shards, dtype, timeout=30)


def uneven(shards) -> str:
    """What is said of an evaluation in which rank 1 runs fewer forwards than rank 0, after one of as many."""
    model, engine = make(shards, policy=zero.Policy(block=4, prefetch_bytes=0))

    def evaluate(count):
        with engine.evaluation():
            for _ in range(count):
                model(x_of(), order=[0, 1, 2, 3])

    with impatient():
        evaluate(2)
        said = said_by(lambda: evaluate(1 if dist.get_rank() else 3))
    if dist.get_rank():  # a process that ends is what tells a rank that waits for it
        told().wait(["told 0"])
    told()
    return said


def test_an_evaluation_of_fewer_forwards_is_named():
    first, second = run_ranks(2, uneven, (2, 2, 2), timeout=30)
    names(first, "rank 0 gathers unit", "where rank 1 has ended its evaluation()", "as often")
    names(second, "rank 1 has ended its evaluation(), and another rank has failed")
    assert run_ranks(2, uneven, (1, 1, 2), timeout=30) == ["", ""], "no gather is needed"


# -- torch.compile --------------------------------------------------------------------------------------


class Outer(nn.Module):
    """A unit, in which another module was compiled."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner(x)


def compiled(shards):
    """Weights and names after three steps are those of a module that is not compiled."""
    compile_ = partial(torch.compile, backend="aot_eager")

    def replace(model, wrap=compile_):
        model.layers[1] = wrap(model.layers[1])
        return model

    def in_place(model):
        for layer in model.layers[2:]:
            layer.compile(backend="aot_eager")
        return model

    def same(model):
        return model

    forms = {  # before and after ``zero.shard``
        "the module": (compile_, same),
        "a unit": (replace, same),
        "units in place": (in_place, same),
        "what a unit calls": (lambda model: replace(model, lambda layer: Outer(compile_(layer))), same),
        "the module, after": (same, compile_),
        "a unit, after": (same, replace),
        "units in place, after": (same, in_place),
        "a function of the module": (same, lambda model: compile_(lambda x: model(x).sum())),
    }
    plain, plain_names, graphs = _trained(shards, same, same)
    assert not graphs
    for name, form in forms.items():
        found, own_names, graphs = _trained(shards, *form)
        assert graphs and all(map(torch.equal, found, plain)), name
        assert own_names == plain_names or name == "what a unit calls"  # a module more


def _trained(shards, before, after):
    torch._dynamo.reset()
    counters.clear()
    torch.manual_seed(0)
    model = before(Stack())
    mesh, policy = create_mesh(shards=shards), zero.Policy(block=4)
    engine = zero.shard(model, mesh=mesh, policy=policy, units=model.layers, optimizer=SGD)
    call = after(model)
    for step in range(3):
        engine.begin_step(2)
        for micro_batch in range(2):
            call(torch.full((3, 8), 0.1 * (step + micro_batch + mesh.dp_rank))).sum().backward()
        engine.step()
    with engine.gathered():
        found = [p.detach().clone() for p in model.parameters()]
    return found, [r.placement.name for r in save_records(engine)], counters["stats"]["unique_graphs"]


@pytest.mark.slow
@pytest.mark.parametrize("shards", LAYOUTS)
def test_units_compiled_before_and_after_train_as_others(shards):
    run_ranks(2, compiled, shards, timeout=240)


# -- a save's memory ----------------------------------------------------------------------------------


def records_to_save_are_views_of_what_the_engine_holds():
    for shards, codecs in (
        ((2, 2, 2), zero.Codecs()),
        ((1, 1, 2), zero.Codecs(weights=CODED.weights, delta=True)),
    ):
        model, mesh = Stack().bfloat16(), create_mesh(shards=shards, ranks_per_node=1)
        policy = zero.Policy(block=8, codecs=codecs)
        engine = zero.shard(model, mesh=mesh, policy=policy, units=model.layers)
        engine.refresh()
        records = save_records(engine)
        own = [t for u in engine.units for t in (u.master.value, u.weights.copy)]
        own += [t for state in engine.optimizer.torch.state.values() for t in state.values()]
        held = {t.untyped_storage().data_ptr() for t in own}
        tensors = [t for r in records for t in r.tensors.values()]
        assert len(tensors) > 8 and {t.untyped_storage().data_ptr() for t in tensors} <= held
        assert {r.stored["weights"] for r in records} == {torch.bfloat16}


ON_EVERY_LAYOUT = [
    other_data,
    deep_copies,
    sparse_gradients,
    writes_that_a_layout_would_lose,
    autograd_grad_is_no_backward,
    parameters_and_hidden_tensors_are_returned,
]
GUARDS = [
    unfit,
    a_parameter_that_somebody_watches_cannot_leave_the_meta_device,
    frozen_parameters_that_fp32_holds_are_kept,
    a_backward_for_some_parameters_is_one,
    records_to_save_are_views_of_what_the_engine_holds,
]


@pytest.mark.parametrize("guard", ON_EVERY_LAYOUT, ids=lambda guard: guard.__name__)
@pytest.mark.parametrize("shards", LAYOUTS, ids=str)
def test_on_every_layout(guard, shards):
    run_ranks(2, guard, shards, timeout=30)


@pytest.mark.parametrize("guard", GUARDS, ids=lambda guard: guard.__name__)
def test_guard(guard):
    run_ranks(2, guard)
