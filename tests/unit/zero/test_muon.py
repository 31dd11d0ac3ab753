"""Muon's step on one rank: beside singular values in fp64, and beside torch's."""

from __future__ import annotations

import inspect
from functools import partial

import pytest
import torch
from torch import nn

from megazero import zero
from megazero.config.options.optimizers import NEWTON_SCHULZ_STEPS
from megazero.config.run import all_options
from megazero.mesh.mesh import create_mesh
from megazero.zero.by_matrix import COEFFICIENTS, MATRIX, SCALES, Muon, newton_schulz
from megazero.zero.elementwise import Probe
from megazero.zero.records import optimizer_kinds
from tests.messages import refused
from tests.oracle_muon import POLYNOMIALS, orthogonalised, plain_step

SHAPES = [(12, 12), (20, 8), (8, 20), (1, 6)]
BY_HAND = {
    "spectral": lambda m, n: max(m, n) ** 0.5,
    "unit_rms_norm": lambda m, n: (m / n) ** 0.5,
    "shape_scaling": lambda m, n: max(1.0, m / n) ** 0.5,
}


def matrices(shape, count, dtype=torch.float64):
    generator = torch.Generator().manual_seed(shape[0])
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for _ in range(count)]


@pytest.mark.parametrize("name", COEFFICIENTS)
@pytest.mark.parametrize("dtype,limit", [(torch.float64, 1e-11), (torch.float32, 1e-4)])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_newton_schulz_is_its_polynomials_of_the_singular_values(shape, dtype, limit, name):
    """fp32: the slope at 0 is up to 493, so rounding of 1e-7 of the norm is up to 5e-5 in what comes out."""
    (matrix,) = matrices(shape, 1)
    kept = matrix.clone()
    got = newton_schulz(matrix.to(dtype), 5, COEFFICIENTS[name]).double()
    assert got.shape == shape and torch.equal(matrix, kept)
    assert (got - orthogonalised(matrix, POLYNOMIALS[name])).norm() / got.norm() < limit


def test_the_configuration_offers_what_there_is():
    assert set(all_options()["muon_scale_mode"].choices) == set(SCALES)
    assert inspect.signature(Muon).parameters["steps"].default == NEWTON_SCHULZ_STEPS


def test_a_matrix_of_zeros_has_no_direction():
    assert not newton_schulz(torch.zeros(3, 4), 5, COEFFICIENTS["quintic"]).any()


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("nesterov", [False, True])
def test_steps_are_those_of_an_independent_loop(nesterov, scale):
    """Matrices by the rule of the module's docstring, the rest by torch's AdamW."""
    options = {"lr": 0.02, "weight_decay": 0.1}
    for shape in SHAPES:
        start, *gradients = matrices(shape, 6)
        plain, momentum = start.clone(), torch.zeros_like(start)
        weight, bias, other = (
            nn.Parameter(start.clone()),
            nn.Parameter(start[0].clone()),
            nn.Parameter(start[0].clone()),
        )
        muon = Muon(
            [{"params": [weight], MATRIX: True}, {"params": [bias], "weight_decay": 0.0}],
            **options, momentum=0.8, nesterov=nesterov, scale=scale, extra_scale=0.3, precision="high",
        )  # fmt: skip
        adamw = torch.optim.AdamW([other], lr=0.02, weight_decay=0.0)
        for gradient in gradients:
            weight.grad, bias.grad, other.grad = gradient.clone(), gradient[0].clone(), gradient[0].clone()
            muon.step()
            adamw.step()
            plain_step(
                plain, gradient, momentum, lr=0.02, decay=0.1, beta=0.8, nesterov=nesterov,
                polynomials=POLYNOMIALS["quintic"], scale=lambda m, n: 0.3 * BY_HAND[scale](m, n),
            )  # fmt: skip
        torch.testing.assert_close(weight.detach(), plain, rtol=0, atol=1e-9)
        torch.testing.assert_close(bias, other, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    "theirs,ours",
    [
        ("original", {"scale": "shape_scaling"}),
        ("match_rms_adamw", {"scale": "spectral", "extra_scale": 0.2}),
    ],
)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_with_its_settings_it_is_torchs(shape, theirs, ours):
    """Both iterate in bfloat16, whose rounding (2^-8) the slope at 0 and five products make larger."""
    start, *gradients = matrices(shape, 6, torch.float32)
    mine, other = nn.Parameter(start.clone()), nn.Parameter(start.clone())
    ours = {"momentum": 0.95, "nesterov": True, "coefficients": "simple", **ours}
    muon = Muon([{"params": [mine], MATRIX: True}], lr=0.1, weight_decay=0.1, **ours)
    reference = torch.optim.Muon([other], lr=0.1, weight_decay=0.1, adjust_lr_fn=theirs)
    exact = nn.Parameter(start.clone())
    high = Muon([{"params": [exact], MATRIX: True}], lr=0.1, weight_decay=0.1, **ours, precision="high")
    for gradient in gradients:
        for weight, optimizer in ((mine, muon), (other, reference), (exact, high)):
            weight.grad = gradient.clone()
            optimizer.step()
    change = (mine - start).norm()
    assert (mine - other).norm() / change < 1e-3
    # which could not be told from another update if bfloat16 alone moved it as much
    assert 1e-3 < (mine - exact).norm() / change < 0.1


def test_the_rate_and_decay_of_a_group_are_those_of_both_halves():
    weight, bias = nn.Parameter(torch.ones(4, 4)), nn.Parameter(torch.ones(4))
    muon = Muon([{"params": [weight], MATRIX: True}, {"params": [bias]}], lr=0.1, weight_decay=0.5)
    for group in muon.param_groups:
        group["lr"] = 0.2
    weight.grad, bias.grad = torch.zeros(4, 4), torch.zeros(4)
    muon.step()
    torch.testing.assert_close(weight.detach(), torch.full((4, 4), 0.9))
    torch.testing.assert_close(bias.detach(), torch.full((4,), 0.9))


def test_torchs_own_is_refused_with_the_one_to_take():
    for name, words in (
        ("Muon", "zero.Muon, lr="),
        ("Shampoo", "rows and columns"),
        ("SOAP", "rows and columns"),
    ):
        made = type(name, (torch.optim.Muon,), {})
        with refused(name, "elementwise", words):
            Probe(partial(made, lr=0.1), [()], torch.float32, torch.device("cpu")).refuse_unless_elementwise()


class Small(nn.Module):
    """An embedding, two linears and a norm between."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(11, 8)
        self.layers = nn.ModuleList([nn.Linear(8, 20), nn.LayerNorm(20), nn.Linear(20, 8)])

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.table(tokens)
        for layer in self.layers:
            x = layer(x)
        return x


def matrix_of(name: str, param: nn.Parameter) -> zero.Traits:
    return zero.Traits(matrix=name.startswith("layers.") and param.ndim == 2)


def sharded(**options):
    torch.manual_seed(0)
    module = Small()
    options = {"optimizer": partial(Muon, lr=0.01), "traits": matrix_of, **options}
    return module, zero.shard(module, mesh=create_mesh(), units=list(module.layers), **options)


def one_step(module, engine, factor=1.0):
    engine.begin_step()
    (module(torch.arange(11)).square() * factor).sum().backward()
    return engine.step()


def test_an_engine_of_one_rank_is_the_plain_optimizer():
    module, engine = sharded(optimizer=partial(Muon, lr=0.01, precision="high"))
    torch.manual_seed(0)
    plain = Small()
    named = dict(plain.named_parameters())
    groups = [{"params": [p], MATRIX: matrix_of(name, p).matrix} for name, p in named.items()]
    muon = Muon(groups, lr=0.01, precision="high")
    for _ in range(3):
        one_step(module, engine)
        muon.zero_grad()
        plain(torch.arange(11)).square().sum().backward()
        muon.step()
    with engine.gathered():
        for name, p in module.named_parameters():
            torch.testing.assert_close(p, named[name], rtol=1e-4, atol=1e-6)


class Stacked(nn.Module):
    """Three matrices, in one Parameter or each in one of its own."""

    def __init__(self, apart: bool) -> None:
        super().__init__()
        values = torch.randn(3, 8, 20, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        whole = [values] if not apart else list(values)
        self.weights = nn.ParameterList(nn.Parameter(each.clone()) for each in whole)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack([x.tanh() @ w for p in self.weights for w in p.view(-1, 8, 20)])


@pytest.mark.parametrize("engine_of_apart", [False, True])
def test_a_stack_is_stepped_as_its_matrices(engine_of_apart):
    """In an engine, and in the plain optimizer."""
    x, optimizer = torch.arange(40.0, dtype=torch.float64).view(5, 8), partial(Muon, lr=0.1, precision="high")
    stack, apart = Stacked(False), Stacked(True)
    sharded, plain = (apart, stack) if engine_of_apart else (stack, apart)
    traits = lambda *_: zero.Traits(matrix=True)  # noqa: E731
    engine = zero.shard(sharded, mesh=create_mesh(), optimizer=optimizer, traits=traits)
    muon = optimizer([{"params": list(plain.parameters()), MATRIX: True}])
    for _ in range(3):
        engine.begin_step()
        sharded(x).square().sum().backward()
        engine.step()
        muon.zero_grad()
        plain(x).square().sum().backward()
        muon.step()
    with engine.gathered():
        (whole,) = stack.weights
        torch.testing.assert_close(whole, torch.stack(list(apart.weights)), rtol=1e-9, atol=1e-12)
    assert not torch.allclose(whole.detach(), Stacked(False).weights[0].detach())


def test_a_skipped_step_leaves_momentum_and_weights():
    module, engine = sharded()
    one_step(module, engine)
    runs, state = engine.optimizer.runs, engine.optimizer.torch.state
    held = [[run.leaf.detach(), *state[run.leaf].values()] for run in runs]
    kept = [[tensor.clone() for tensor in tensors] for tensors in held]
    assert one_step(module, engine, factor=torch.inf).skipped
    for now, before in zip(held, kept, strict=True):
        assert all(map(torch.equal, now, before))


def test_state_is_made_for_a_save_without_a_step():
    module, engine = sharded()
    engine.optimizer.ensure_state()
    assert engine.optimizer.scalars() == {"step": 0.0}
    assert optimizer_kinds(engine) == ["exp_avg", "exp_avg_sq", "momentum_buffer"]
    one_step(module, engine)
    assert engine.optimizer.scalars() == {"step": 1.0}


def test_state_is_made_where_nothing_but_matrices_is_trained():
    """As a resume does before the first step."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(8, 4), nn.Linear(4, 2))
    for linear in module:
        linear.bias.requires_grad_(False)
    optimizer = partial(Muon, lr=0.01)
    engine = zero.shard(
        module,
        mesh=create_mesh(),
        units=list(module),
        optimizer=optimizer,
        traits=lambda _, p: zero.Traits(matrix=p.ndim == 2),
    )
    assert optimizer_kinds(engine) == ["momentum_buffer"]
    assert engine.optimizer.scalars() == {"step": 0.0}


@pytest.mark.parametrize(
    "options,words",
    [
        ({"traits": None}, ("Muon", "traits=", "Traits(matrix=True)")),
        ({"traits": lambda *_: zero.Traits(matrix=True)}, ("matrix=True", "'layers.0.bias'", "(20,)")),
        ({"optimizer": partial(torch.optim.AdamW, lr=0.1)}, ("AdamW", "elementwise", "zero.Muon")),
        ({"optimizer": partial(torch.optim.Muon, lr=0.1), "traits": None}, ("Muon", "zero.Muon, lr=")),
    ],
    ids=["which", "a vector", "elementwise", "torch's"],
)
def test_mistakes_are_named_with_their_cure(options, words):
    with refused(*words):
        sharded(**options)
