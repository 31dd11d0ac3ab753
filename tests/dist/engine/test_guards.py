"""What a user does to the module that the engine would damage: it works on every layout, or is refused by name."""

from __future__ import annotations

import copy
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
from megazero.kernels.fingerprint import fingerprint
from megazero.mesh.mesh import create_mesh
from megazero.zero.records import save_records
from tests.dist.capture import weights
from tests.dist.engine.test_rules import Stack, make
from tests.dist.pool import run_ranks

LAYOUTS = [(1, 1, 1), (1, 1, 2), (2, 2, 2)]
SGD = partial(torch.optim.SGD, lr=0.01)


def said_by(*calls) -> list[str]:
    said = []
    for call in calls:
        try:
            call()
            said.append("nothing")
        except (RuntimeError, ValueError) as error:
            said.append(str(error))
    return said


def assert_says(answers: list[list[str]], expected: list[tuple[str, ...]]) -> None:
    for said in answers:
        assert len(said) == len(expected)
        for text, words in zip(said, expected, strict=True):
            assert all(word in text for word in words), (words, text)


# -- the parameters' data ---------------------------------------------------------------------------


def moved(shards):
    def after(change) -> str:
        model, engine = make(shards)

        def inside():
            with engine.gathered():
                change(model)

        said = said_by(inside, engine.begin_step)
        return said[0] if said[0] == said[1] else "nothing"

    def other_tensor(model):
        model.layers[1].bias.data = model.layers[1].bias.data.clone()

    return [after(Stack.bfloat16), after(Stack.double), after(other_tensor)]


@pytest.mark.parametrize("shards", LAYOUTS, ids=str)
def test_a_module_converted_after_shard_is_refused(shards):
    cure = "before zero.shard"
    expected = [
        ("'layers.0.bias'", "dtype was torch.float32 and is torch.bfloat16", cure),
        ("'layers.0.bias'", "dtype was torch.float32 and is torch.float64", cure),
        ("'layers.1.bias'", "another tensor", cure),
    ]
    assert_says(run_ranks(2, moved, shards), expected)


def hooked(shards, device):
    """Hooks that ran in a step, of a module that zero.shard converts or takes off the meta device."""
    model = Stack().to(device)
    values, params, ran = Stack().state_dict(), list(model.parameters()), []
    params[0].register_hook(lambda grad: ran.append(grad.dtype))
    params[1].register_post_accumulate_grad_hook(lambda p: ran.append(p.dtype))
    policy = zero.Policy(block=4, dtype=torch.bfloat16)
    mesh = create_mesh(shards=shards)
    engine = zero.shard(model, mesh=mesh, policy=policy, units=model.layers, init=values.get)
    engine.begin_step()
    model(torch.ones(3, 8, dtype=torch.bfloat16)).sum().backward()
    engine.step()
    return ran, all(a is b for a, b in zip(params, model.parameters(), strict=True))


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_conversion_keeps_the_users_hooks(device):
    assert run_ranks(2, hooked, (2, 2, 2), device) == [([torch.bfloat16] * 2, True)] * 2


def watched():
    """A parameter of the meta device to which somebody holds a weak reference."""
    model = Stack().to("meta")
    held = __import__("weakref").ref(model.layers[2].weight)
    mesh = create_mesh(shards=(2, 2, 2))
    said = said_by(lambda: zero.shard(model, mesh=mesh, units=model.layers, init=Stack().state_dict().get))
    return said if held() is not None else []


def test_a_parameter_that_cannot_leave_the_meta_device_is_named():
    assert_says(run_ranks(2, watched), [("'layers.2.weight'", "build the module on cpu")])


# -- copies -------------------------------------------------------------------------------------------


def copied(shards):
    model, engine = make(shards)
    said = said_by(lambda: copy.deepcopy(model), lambda: copy.deepcopy(model.layers[0]))
    model.layers[1].register_forward_hook(users_hook)
    with engine.gathered():
        average = copy.deepcopy(model)
        one = copy.deepcopy(model.layers[2])
    plain = Stack()
    same = all(torch.equal(a, b) for a, b in zip(average.parameters(), plain.parameters(), strict=True))
    if dist.get_rank() == 0:  # alone: a hook of the engine would wait for the other rank
        out = average(torch.ones(3, 8))
        out.sum().backward()
        same = same and torch.equal(out, plain(torch.ones(3, 8)))
    average.bfloat16(), average.state_dict(), copy.deepcopy(average), one(torch.ones(8))
    with torch.no_grad():
        for param in average.parameters():
            param.zero_()
    engine.begin_step()
    model(torch.ones(3, 8)).sum().backward()  # the module itself is as it was
    hooks = [list(m._forward_hooks.values()) + list(m._forward_pre_hooks.values()) for m in average.modules()]
    return said, same, sum(hooks, []) == [users_hook], engine.step().grad_norm > 0, said_by(model.state_dict)


def users_hook(module, args, output):
    return None


@pytest.mark.parametrize("shards", LAYOUTS, ids=str)
def test_a_deep_copy_is_a_plain_module_and_is_made_while_gathered(shards):
    for said, same, hooks, trains, later in run_ranks(2, copied, shards, timeout=20):
        assert_says([said], [("engine.gathered(): copy.deepcopy",)] * 2)
        assert same and hooks and trains
        assert_says([later], [("sharded",)])


# -- parameters and modules that training would damage ------------------------------------------------


def of_dtype(dtype, trained):
    model = nn.Linear(2, 2)
    model.odd = nn.Parameter(torch.zeros(3, dtype=dtype), requires_grad=trained)
    return model


def unfit():
    mesh = create_mesh(shards=(2, 2, 2))

    def shard(model, dtype=None, **policy):
        return lambda: zero.shard(model, mesh=mesh, units=[], policy=zero.Policy(dtype=dtype, **policy))

    nested = nn.Sequential(nn.Linear(2, 2), nn.Embedding(4, 2, max_norm=1.0))
    return said_by(
        shard(of_dtype(torch.float16, True)),
        shard(of_dtype(torch.float32, True), torch.float16),
        shard(of_dtype(torch.complex64, True), loss_scaled=True),
        shard(of_dtype(torch.complex64, False), torch.bfloat16),
        shard(of_dtype(torch.int64, False)),
        shard(of_dtype(torch.int8, False), torch.bfloat16),
        shard(of_dtype(torch.float8_e4m3fn, False)),
        shard(nested),
        shard(nn.EmbeddingBag(4, 2, max_norm=1.0)),
        shard(nn.Sequential(nn.Linear(2, 2), nn.LSTM(2, 2))),
    )


def test_unfit_parameters_and_modules_are_refused():
    expected = [
        ("'odd'", "trained", "loss scaling", "bfloat16", "Policy(loss_scaled=True)"),
        ("'weight'", "Policy(dtype)", "loss scaling"),
        ("'odd'", "complex64", "view_as_real"),
        ("'odd'", "frozen", "view_as_real"),
        ("'odd'", "int64", "buffer"),
        ("'odd'", "int8", "buffer"),
        ("'odd'", "float8_e4m3fn", "bfloat16"),
        ("module '1'", "max_norm=1.0", "max_norm=None"),
        ("max_norm=1.0",),
        ("module '1'", "torch.nn.LSTM", "LSTMCell"),
    ]
    assert_says(run_ranks(2, unfit), expected)


def small_integers(dtype):
    mesh = create_mesh(shards=(2, 2, 2))
    model = nn.Sequential(nn.Linear(8, 8), nn.Module())
    model[1].odd = nn.Parameter(torch.arange(100).to(dtype), requires_grad=False)
    engine = zero.shard(model, mesh=mesh, units=[model[0], model[1]])
    with engine.gathered():
        return torch.equal(model[1].odd, torch.arange(100).to(dtype))


def test_frozen_parameters_that_fp32_holds_are_kept():
    for dtype in (torch.float16, torch.int8, torch.uint8, torch.bool):
        assert run_ranks(2, small_integers, dtype) == [True] * 2


# -- writes -------------------------------------------------------------------------------------------


class Renormalises(nn.Linear):
    def forward(self, x):
        with torch.no_grad():
            self.weight.mul_(0.5)
        return super().forward(x)


def written(shards):
    model, engine = make(shards)
    model.layers[1].__class__ = Renormalises
    x = torch.ones(3, 8)
    engine.begin_step()
    said = said_by(lambda: model(x))
    engine.abort_step()

    def by_accident():
        with engine.gathered(), torch.no_grad():
            model.layers[3].bias.fill_(7.0)

    def on_purpose():
        with engine.gathered(write=True), torch.no_grad():
            for param in model.parameters():
                param.fill_(0.25)
            Stack.forward(model, x, [0, 2, 3])  # a forward meanwhile is none of its business

    def read():
        with engine.gathered():
            model.state_dict()

    def nested():
        with engine.gathered(write=True), torch.no_grad():
            model.layers[3].bias.fill_(0.25)
            read()

    model.layers[1].__class__ = nn.Linear
    said += said_by(on_purpose, read, nested, engine.begin_step)
    engine.abort_step()
    said += said_by(by_accident, engine.begin_step, on_purpose, engine.begin_step)
    return said, {n: set(w.flatten().tolist()) for n, w in weights(engine).items()}


@pytest.mark.parametrize("shards", LAYOUTS, ids=str)
def test_writes_that_a_layout_would_lose_are_refused_on_all(shards):
    expected = [
        ("'layers.1.weight'", "in a forward"),
        ("nothing",),
        ("nothing",),
        ("nothing",),
        ("nothing",),
        ("'layers.3.bias'", "inside gathered()", "write=True"),
        ("'layers.3.bias'", "since the last step", "write=True"),
        ("nothing",),
        ("nothing",),
    ]
    for said, values in run_ranks(2, written, shards):
        assert_says([said], expected)
        assert all(value == {0.25} for value in values.values())


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


def surprises(name):
    """What is said of writes that no counter sees and of blocks that raise, and the master weights after them."""
    shards, dtype, policy, nodes = WRITABLE[name]
    model = Stack().to(dtype)
    engine = zero.shard(
        model,
        mesh=create_mesh(shards=shards, **nodes),
        policy=zero.Policy(block=8, exact_numel=0, **policy),
        units=model.layers,
        optimizer=SGD,
    )
    layers = model.layers

    def past_the_counter():
        with engine.gathered():
            layers[3].bias.data.fill_(7.0)
            layers[2].weight.data.view(-1)[:2] = 64.0

    def broken_off():
        with engine.gathered(write=True), torch.no_grad():
            layers[3].bias.data.fill_(0.5)
            layers[0].weight.fill_(0.25)
            raise ValueError("in the middle")

    def by_rank():
        with engine.gathered(write=True), torch.no_grad():
            layers[1].bias.fill_(dist.get_rank())

    def replaced():
        with engine.gathered(write=True):
            layers[1].bias.data = torch.ones(8, dtype=dtype)

    def nested():
        with engine.gathered(write=True):
            layers[0].bias.data.fill_(1.0)
            with engine.gathered(layers[0]):
                layers[0](torch.ones(8, dtype=dtype))
            with engine.gathered(layers[0], write=True):
                layers[0].bias.data[1] = 2.0
            layers[0].bias.data[2] = 3.0
            layers[0](torch.ones(8, dtype=dtype))

    def train():
        engine.begin_step()
        model(torch.ones(3, 8, dtype=dtype)).sum().backward()
        engine.step()

    found = []
    for act in (past_the_counter, engine.begin_step, broken_off, nested):
        found.append((said_by(act), {n: w.to(dtype) for n, w in weights(engine).items()}))
    with engine.gathered():
        shown = {n: p.detach().clone() for n, p in model.named_parameters()}
    said = said_by(train, by_rank, engine.evaluation().__enter__, replaced)
    return found, shown, said


@pytest.mark.first(4)
@pytest.mark.parametrize("name", WRITABLE)
def test_writes_in_gathered_are_kept_on_every_layout(name):
    """Without ``write`` they are errors, too."""
    shards, dtype, policy, _ = WRITABLE[name]
    lost = ("inside gathered()", "write=True")
    for found, shown, said in run_ranks(max(2, *shards), surprises, name):
        plain = Stack().to(dtype).state_dict()
        plain["layers.3.bias"].fill_(7.0)
        plain["layers.2.weight"].view(-1)[:2] = 64.0
        for i, (words, values) in enumerate(found):
            if i == 2:
                plain["layers.3.bias"].fill_(0.5)
                plain["layers.0.weight"].fill_(0.25)
            if i == 3:
                plain["layers.0.bias"].copy_(torch.tensor([1.0, 2, 3, 1, 1, 1, 1, 1]))
            expected = [("'layers.2.weight'", *lost), ("'layers.2.weight'", "since the last step")]
            assert_says([words], [[*expected, ("in the middle",), ("nothing",)][i]])
            for key, value in values.items():
                if "codecs" in policy and key in ("layers.2.weight", "layers.0.bias"):
                    continue  # written in part: the rest is as it was rounded
                assert torch.equal(value, plain[key]), (i, key)
        for key, value in shown.items():
            if "codecs" not in policy:
                assert torch.equal(value, plain[key])
        different = ("different values into parameter 'layers.1.bias'", "broadcast")
        assert_says([said], [("nothing",), different, ("nothing",), ("'layers.1.bias'", "another tensor")])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64, torch.int8])
def test_a_fingerprint_sees_every_change(dtype):
    values = torch.randn(70_001).mul(100).to(dtype)
    before = int(fingerprint(values))
    assert int(fingerprint(values.clone())) == before and int(fingerprint(values[:0])) == 0
    for change in (
        lambda v: v[-1:].add_(1),
        lambda v: v[3:].copy_(v[:-3].clone()),
        lambda v: v[66_000:].copy_(v[66_000:].flip(0)),
        lambda v: v.copy_(v.flip(0)),
        lambda v: v.zero_(),
        lambda v: v.neg_(),
    ):
        other = values.clone()
        change(other)
        assert int(fingerprint(other)) != before


# -- torch.autograd.grad ------------------------------------------------------------------------------


def penalised(shards):
    """Largest difference from plain torch, of a loss with the gradient of the input in it."""

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
        out = model(torch.ones(3, 8).requires_grad_()).sum()
        torch.autograd.grad(out, model.layers[3].bias)  # after the last backward
        kept = any(u.weights.in_backward or u.axes.p and u.weights.full_present for u in engine.units)
        engine.step()
        optimizer.zero_grad()
        loss(plain).backward()
        optimizer.step()
    got = weights(engine)
    far = max(float((got[n] - p.detach().double()).abs().max()) for n, p in plain.named_parameters())
    engine.begin_step()
    out = model(torch.ones(3, 8).requires_grad_()).sum()
    torch.autograd.grad(out, [*model.parameters()])
    return far, kept, said_by(engine.step)


@pytest.mark.parametrize("shards", LAYOUTS, ids=str)
def test_autograd_grad_is_no_backward(shards):
    for far, kept, said in run_ranks(2, penalised, shards):
        assert far < 1e-6 and not kept
        assert_says([said], [("after 0 backwards of 1", "torch.autograd.grad is none")])


def partial_backward():
    """Gradient norms of steps whose backward is for some parameters only, as inputs= asks."""
    model, engine = make((2, 2, 2))
    norms = []
    for inputs in ([model.layers[3].bias], [model.layers[0].weight]):
        engine.begin_step()
        model(torch.ones(3, 8)).sum().backward(inputs=inputs)
        norms.append(engine.step().grad_norm)
    return norms


def test_a_backward_for_some_parameters_is_one():
    assert all(norm > 0 for norms in run_ranks(2, partial_backward) for norm in norms)


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


def odd_outputs(shards):
    """Largest difference from plain torch, and how many hooks are left on the parameters."""
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
    got = weights(engine)
    far = max(float((got[n] - p.detach().double()).abs().max()) for n, p in plain.named_parameters())
    return far, sum(len(p._backward_hooks or ()) for p in model.parameters())


@pytest.mark.parametrize("shards", LAYOUTS, ids=str)
def test_parameters_and_hidden_tensors_are_returned(shards):
    for far, hooks in run_ranks(2, odd_outputs, shards):
        assert far < 1e-4 and not hooks


# -- sparse gradients -----------------------------------------------------------------------------------


class SparseLookup(nn.Embedding):
    def forward(self, tokens):
        return nn.functional.embedding(tokens, self.weight, sparse=True)


def sparse(shards):
    mesh, values = create_mesh(shards=shards), torch.zeros(4, 4)
    frozen = nn.Embedding(4, 4, sparse=True, _weight=values)
    frozen.weight.requires_grad_(False)
    named = nn.Sequential(nn.Embedding(4, 4, sparse=True, _weight=values))
    said = said_by(
        lambda: zero.shard(named, mesh=mesh),
        lambda: zero.shard(nn.EmbeddingBag(4, 4, sparse=True, mode="sum"), mesh=mesh),
        lambda: zero.shard(frozen, mesh=mesh),
    )
    model = nn.Sequential(SparseLookup(4, 4, _weight=values))
    engine = zero.shard(model, mesh=create_mesh(shards=shards), units=[model[0]])
    engine.begin_step()
    return said + said_by(lambda: model(torch.tensor([1, 2])).sum().backward())


@pytest.mark.parametrize("shards", LAYOUTS, ids=str)
def test_sparse_gradients_are_refused(shards):
    dense = ("'0.weight' of unit '0'", "torch.sparse_coo", "dense")
    expected = [("module '0'", "sparse=False"), ("'EmbeddingBag'", "sparse=False"), ("nothing",), dense]
    assert_says(run_ranks(2, sparse, shards), expected)


# -- units that some ranks use --------------------------------------------------------------------------


def skipped(shards, dtype):
    model = Stack().to(dtype)
    policy = zero.Policy(block=4, prefetch_bytes=0)
    engine = zero.shard(
        model, mesh=create_mesh(shards=shards), policy=policy, units=model.layers, optimizer=SGD
    )
    every = [0, 1, 2, 3]
    patience, lane.PATIENCE = lane.PATIENCE, lane.PATIENCE / 20

    def train(order):
        engine.begin_step()
        model(torch.ones(3, 8, dtype=dtype), order=order).sum().backward()
        engine.step()

    try:
        said = said_by(lambda: train(every), lambda: train([0, 2, 3] if dist.get_rank() else every))
    finally:
        lane.PATIENCE = patience
    store = dist.distributed_c10d._get_default_store()  # nobody leaves before the other has been told
    store.set(f"told {dist.get_rank()}", "")
    store.wait(["told 0", "told 1"])
    return said


@pytest.mark.parametrize("shards", [(1, 1, 1), (1, 1, 2), (1, 2, 2), (2, 2, 2)], ids=str)
def test_a_unit_that_one_rank_skips_is_named(shards):
    for dtype in (torch.float32, torch.bfloat16):
        answers = run_ranks(2, skipped, shards, dtype, timeout=30)
        assert_says(answers, [("nothing",), ("different collectives", "unit 'layers.1'", "where rank")])


def uneven(shards, order):
    """Evaluations of as many forwards on both ranks, then one in which rank 1 has run fewer, in this order."""
    model, engine = make(shards, policy=zero.Policy(block=4, prefetch_bytes=0))
    patience, lane.PATIENCE = lane.PATIENCE, lane.PATIENCE / 20

    def evaluate(count):
        with engine.evaluation():
            for _ in range(count):
                model(torch.ones(3, 8), order=order)

    try:
        said = said_by(partial(evaluate, 2), partial(evaluate, 1 if dist.get_rank() else 3))
    finally:
        lane.PATIENCE = patience
    store = dist.distributed_c10d._get_default_store()  # nobody leaves before the other has been told
    store.set(f"told {dist.get_rank()}", "")
    if dist.get_rank():  # a process that ends is what tells a rank that waits for it
        store.wait(["told 0"])
    return said


def test_an_evaluation_of_fewer_forwards_is_named():
    answers = run_ranks(2, uneven, (2, 2, 2), [0, 1, 2, 3], timeout=30)
    assert_says(
        answers[:1],
        [("nothing",), ("rank 0 gathers unit", "where rank 1 has ended its evaluation()", "as often")],
    )
    assert_says(
        answers[1:], [("nothing",), ("rank 1 has ended its evaluation(), and another rank has failed",)]
    )


def test_an_evaluation_of_fewer_forwards_that_need_no_gather_is_allowed():
    assert run_ranks(2, uneven, (1, 1, 2), [0, 1, 2, 3], timeout=30) == [["nothing", "nothing"]] * 2


# -- torch.compile --------------------------------------------------------------------------------------


def compiled(shards):
    """Weights, names and graphs of three steps, by what was compiled before or after ``zero.shard``."""
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

    forms = {
        "nothing": (same, same),
        "the module": (compile_, same),
        "a unit": (replace, same),
        "units in place": (in_place, same),
        "what a unit calls": (lambda model: replace(model, lambda layer: Outer(compile_(layer))), same),
        "the module, after": (same, compile_),
        "a unit, after": (same, replace),
        "units in place, after": (same, in_place),
        "a function of the module": (same, lambda model: compile_(lambda x: model(x).sum())),
    }
    return [(name, *_trained(shards, *form)) for name, form in forms.items()]


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
    return (
        found,
        [record.placement.name for record in save_records(engine)],
        counters["stats"]["unique_graphs"],
    )


class Outer(nn.Module):
    """A unit, in which another module was compiled."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner(x)


@pytest.mark.slow
@pytest.mark.parametrize(
    "shards",
    [shards if shards[1] > 1 else pytest.param(shards, marks=pytest.mark.slow) for shards in LAYOUTS],
)
def test_units_compiled_before_and_after_train_as_others(shards):
    """Without sharding, too: pytest -m slow tests/dist/engine/test_guards.py."""
    for (_, *plain), *rest in run_ranks(2, compiled, shards, timeout=240):
        assert not plain[2]
        for name, weights_, names, graphs in rest:
            assert all(map(torch.equal, weights_, plain[0])), name
            assert names == plain[1] or name == "what a unit calls"  # a module more
            assert graphs, name


# -- a save's memory ----------------------------------------------------------------------------------


def saved(delta):
    from tests.dist.engine.test_state import ROUNDED

    codecs = zero.Codecs(weights=ROUNDED.weights, delta=True) if delta else zero.Codecs()
    mesh = create_mesh(shards=(1, 1, 2) if delta else (2, 2, 2), ranks_per_node=1)
    model = Stack().bfloat16()
    engine = zero.shard(model, mesh=mesh, policy=zero.Policy(block=8, codecs=codecs), units=model.layers)
    if delta:
        engine.refresh()
    records = save_records(engine)
    own = [t for u in engine.units for t in (u.master.value, u.weights.copy)]
    own += [t for state in engine.optimizer.torch.state.values() for t in state.values()]
    held = {t.untyped_storage().data_ptr() for t in own}
    tensors = [t for r in records for t in r.tensors.values()]
    return (
        all(t.untyped_storage().data_ptr() in held for t in tensors),
        {r.stored["weights"] for r in records},
        len(tensors),
    )


@pytest.mark.parametrize("delta", [False, True])
def test_records_to_save_are_views_of_what_the_engine_holds(delta):
    for views, stored, count in run_ranks(2, saved, delta):
        assert views and stored == {torch.bfloat16} and count > 8
