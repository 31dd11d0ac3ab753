"""What the engine finds out about optimizers by running them, and what the table says of its own."""

from __future__ import annotations

from contextlib import nullcontext as does_not_raise
from functools import partial
from pkgutil import resolve_name
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from megazero.config.options.optimizers import OPTIMIZERS, OptimizerConfig
from megazero.kernels import dispatch
from megazero.train.lion import Lion
from megazero.zero import elementwise
from megazero.zero.elementwise import (
    Probe,
    default_adamw,
    make_state,
)
from tests.messages import refused

GROUPS = [(), (("weight_decay", 0.0),)]


def refuse(factory, groups=GROUPS, dtype=torch.float32):
    """Raise ValueError if the optimizer is not elementwise."""
    Probe(factory, groups, dtype, torch.device("cpu")).refuse_unless_elementwise()


ELEMENTWISE = {
    "AdamW, rate 0": default_adamw(lr=0.0, weight_decay=0.1),
    "Adam, foreach, amsgrad": partial(torch.optim.Adam, foreach=True, amsgrad=True),
    "Adam, rate a tensor": lambda groups: torch.optim.Adam(groups, lr=torch.tensor(0.0)),
    "Nesterov": partial(torch.optim.SGD, lr=1.0, momentum=0.9, nesterov=True),
    **{
        f"--optimizer {name} --optimizer-impl {implementation}": partial(
            resolve_name(factory), **OptimizerConfig(optimizer=name, lr=0.1).arguments
        )
        for name, own in OPTIMIZERS.items()
        for implementation, factory in own.factories.items()
    },
    **{
        name: getattr(torch.optim, name)
        for name in ("ASGD", "Adadelta", "Adagrad", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop")
    },
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", ELEMENTWISE)
def test_elementwise_optimizers_pass(name, dtype):
    with does_not_raise():
        refuse(ELEMENTWISE[name], dtype=dtype)


def test_adamw_of_options_that_one_pass_lacks_is_torchs_on_cuda_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "AVAILABLE", True)
    monkeypatch.setattr(elementwise, "fused_adamw", lambda groups, **options: options)
    groups = [{"params": [SimpleNamespace(is_cuda=True, dtype=torch.float32)]}]
    assert default_adamw(lr=0.1, amsgrad=True)(groups) == {"lr": 0.1, "amsgrad": True}


class Ratio(torch.optim.SGD):
    """LAMB's and LARS's rule: a rate by the norms of the whole parameter."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(p.grad, alpha=float(group["lr"] * p.norm() / p.grad.norm()))


class Late(torch.optim.SGD):
    """As Shampoo and SOAP, which for the first steps are elementwise: a sum over rows from the tenth step on."""

    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                count = self.state[p]["count"] = self.state[p].get("count", 0) + 1
                if count > 10:
                    p.grad /= 1 + p.grad.square().sum(0, keepdim=True)
        super().step()


class Global(torch.optim.SGD):
    """As Prodigy: a norm over all parameters, which on every rank would be that of its own slices."""

    def step(self, closure=None):
        every = [p.grad for group in self.param_groups for p in group["params"]]
        norm = nn.utils.get_total_norm(every)
        for grad in every:
            grad /= norm
        super().step()


class Clipping(torch.optim.SGD):
    """Which shows where gradients are large only."""

    def step(self, closure=None):
        for group in self.param_groups:
            nn.utils.clip_grad_norm_(group["params"], 50.0)
        super().step()


class Noisy(torch.optim.SGD):
    @torch.no_grad()
    def step(self, closure=None):
        super().step()
        for group in self.param_groups:
            for p in group["params"]:
                p.add_(torch.randn_like(p), alpha=1e-3)


@pytest.mark.parametrize(
    "factory,word",
    [
        (Ratio, "norms"),
        (Late, "norms"),
        (Global, "norms"),
        (Clipping, "norms"),
        (torch.optim.Adafactor, "norms"),
        (torch.optim.Muon, "slice"),
        (torch.optim.LBFGS, "closure"),
        (torch.optim.SparseAdam, "dense"),
        (Noisy, "random numbers"),
    ],
)
def test_other_optimizers_are_refused_by_name(factory, word):
    groups = GROUPS[:1] if factory in (torch.optim.LBFGS, torch.optim.SparseAdam) else GROUPS
    with refused(factory.__name__, word, "nearest legal choices: AdamW"):
        refuse(factory, groups)


def test_one_group_that_is_not_elementwise_is_enough():
    def factory(groups):
        return Ratio(groups) if any("adapt" in g for g in groups) else torch.optim.SGD(groups)

    refuse(factory)
    with refused("Ratio"):
        refuse(factory, [(), (("adapt", True),)])


def test_the_users_own_mistakes_and_random_numbers_are_left_alone():
    with refused("learning rate", "-1"):
        refuse(partial(torch.optim.SGD, lr=-1))
    before = torch.get_rng_state()
    with refused("Noisy"):
        refuse(Noisy)
    assert torch.equal(before, torch.get_rng_state())


FROM_ZEROS = {
    **{
        name: own for name, own in ELEMENTWISE.items() if name.startswith(("--optimizer", "Adam", "Nesterov"))
    },
    **{name: getattr(torch.optim, name) for name in ("Adadelta", "Adamax", "RAdam", "RMSprop")},
    "momentum and decay": partial(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=0.1),
}
NOT_FROM_ZEROS = {
    "NAdam": torch.optim.NAdam,  # a product that starts at 1
    "Rprop": torch.optim.Rprop,  # step sizes that start at the rate
    "Adagrad": partial(torch.optim.Adagrad, initial_accumulator_value=0.1),
    "SGD": partial(torch.optim.SGD, lr=0.1, momentum=0.9, dampening=0.5),  # a first step without dampening
}


@pytest.mark.parametrize("name", FROM_ZEROS)
def test_a_state_of_zeros_made_before_the_first_step_changes_nothing(name):
    with does_not_raise():
        Probe(FROM_ZEROS[name], GROUPS, torch.float64, torch.device("cpu")).refuse_unless_from_zeros()


@pytest.mark.parametrize("name", NOT_FROM_ZEROS)
def test_a_state_that_starts_from_something_else_is_refused(name):
    with refused(name, "first step", "zeros"):
        Probe(NOT_FROM_ZEROS[name], GROUPS, torch.float64, torch.device("cpu")).refuse_unless_from_zeros()


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_table_counts_the_states_that_an_optimizer_holds(name):
    """plan/memory.py takes the count for its bytes."""
    weight = nn.Parameter(torch.ones(6))
    own = OPTIMIZERS[name]
    for factory in set(own.factories.values()):
        optimizer = resolve_name(factory)(
            [{"params": [weight]}], **OptimizerConfig(optimizer=name, lr=0.1).arguments
        )
        make_state(optimizer)
        held = [value for value in optimizer.state[weight].values() if isinstance(value, torch.Tensor)]
        assert sum(value.shape == weight.shape for value in held) == own.moments
        assert all(value.dtype == weight.dtype for value in held if value.shape == weight.shape)


def test_lion_is_the_rule_of_its_paper():
    """Algorithm 2 of Chen et al. 2023, one number after the other."""
    generator = torch.Generator().manual_seed(3)
    start = torch.randn(40, generator=generator, dtype=torch.float64)
    gradients = torch.randn(7, 40, generator=generator, dtype=torch.float64)
    gradients[2, :5] = 0
    rate, beta1, beta2, decay = 0.02, 0.9, 0.99, 0.3
    weight = nn.Parameter(start.clone())
    optimizer = Lion([weight], lr=rate, weight_decay=decay)  # betas are the paper's
    for gradient in gradients:
        weight.grad = gradient.clone()
        optimizer.step()
    expected = []
    for w, own in zip(start.tolist(), gradients.T.tolist(), strict=True):
        m = 0.0
        for g in own:
            c = beta1 * m + (1 - beta1) * g
            w = w - rate * ((c > 0) - (c < 0) + decay * w)
            m = beta2 * m + (1 - beta2) * g
        expected.append(w)
    torch.testing.assert_close(
        weight.detach(), torch.tensor(expected, dtype=torch.float64), rtol=0, atol=1e-14
    )
