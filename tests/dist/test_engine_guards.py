"""What a user does to the module that the engine would damage: it works on every layout, or is refused by name."""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn

from megazero import zero
from megazero.mesh.mesh import create_mesh
from megazero.zero.records import save_records
from tests.dist.capture import weights
from tests.dist.pool import run_ranks
from tests.dist.test_engine_rules import Stack, make

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
        with engine.gathered():
            change(model)
        return said_by(engine.begin_step)[0]

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


class Recurrent(nn.Module):
    """As many models do, it calls flatten_parameters, which on CUDA gives the weights other memory."""

    def __init__(self, kind, device="cpu"):
        super().__init__()
        torch.manual_seed(3)
        self.inner = kind(4, 5, num_layers=2, device=device)

    def forward(self, x):
        self.inner.flatten_parameters()
        return self.inner(x)[0].square().sum()


class Moving(nn.LSTM):
    def flatten_parameters(self):
        for param in self.parameters():
            param.data = param.data.clone()


def recurrent(shards, kind, device):
    """Largest difference from plain torch after steps in fp64, of a module made in fp32."""
    plain = Recurrent(kind).double()
    values = {n: p.detach().clone() for n, p in plain.named_parameters()}
    model = Recurrent(kind, device)
    policy = zero.Policy(block=4, dtype=torch.float64)
    mesh = create_mesh(shards=shards)
    engine = zero.shard(model, mesh=mesh, policy=policy, units=[model.inner], optimizer=SGD, init=values.get)
    optimizer = SGD(plain.parameters())
    x = torch.linspace(-1, 1, 24, dtype=torch.float64).view(3, 2, 4)
    for _ in range(2):
        engine.begin_step(1, divisor=2)
        model(x).backward()
        engine.step()
        optimizer.zero_grad()
        plain(x).backward()
        optimizer.step()
    with engine.gathered():
        inner = copy.deepcopy(model.inner)
    assert vars(inner).keys() == vars(plain.inner).keys()
    got = weights(engine)
    return max(float((got[n] - p.detach()).abs().max()) for n, p in plain.named_parameters())


@pytest.mark.parametrize(
    "kind,device", [(nn.LSTM, "cpu"), (nn.GRU, "meta"), (nn.RNN, "cpu"), (Moving, "cpu")]
)
def test_recurrent_modules_train(kind, device):
    for shards in ((1, 1, 1), (2, 2, 2)):
        assert max(run_ranks(2, recurrent, shards, kind, device)) < 1e-12


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
        kept = any(u.in_backward or u.levels.p and u.full_present for u in engine.units)
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


# -- a save's memory ----------------------------------------------------------------------------------


def saved(delta):
    from tests.dist.test_engine_state import ROUNDED

    codecs = zero.Codecs(weights=ROUNDED.weights, delta=True) if delta else zero.Codecs()
    mesh = create_mesh(shards=(1, 1, 2) if delta else (2, 2, 2), ranks_per_node=1)
    model = Stack().bfloat16()
    engine = zero.shard(model, mesh=mesh, policy=zero.Policy(block=8, codecs=codecs), units=model.layers)
    if delta:
        engine.refresh()
    records = save_records(engine)
    own = [t for u in engine.units for t in (u.master, u.copy)]
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
