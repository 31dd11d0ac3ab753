"""Which optimizers are taken for elementwise: found by running them, whatever their names."""

from __future__ import annotations

from contextlib import nullcontext as does_not_raise
from functools import partial
from pkgutil import resolve_name

import pytest
import torch
from torch import nn

from megazero.config.options.optimizers import OPTIMIZERS, OptimizerConfig
from megazero.zero.elementwise import refuse_unless_elementwise
from megazero.zero.optimizer import default_adamw

GROUPS = [(), (("weight_decay", 0.0),)]


def refuse(factory, groups=GROUPS, dtype=torch.float32):
    """Raise ValueError if the optimizer is not elementwise."""
    refuse_unless_elementwise(factory, groups, dtype, torch.device("cpu"))


ELEMENTWISE = {
    "AdamW, rate 0": default_adamw(lr=0.0, weight_decay=0.1),
    "Adam, foreach, amsgrad": partial(torch.optim.Adam, foreach=True, amsgrad=True),
    "Adam, rate a tensor": lambda groups: torch.optim.Adam(groups, lr=torch.tensor(0.0)),
    "Nesterov": partial(torch.optim.SGD, lr=1.0, momentum=0.9, nesterov=True),
    **{
        f"--optimizer {name}": partial(resolve_name(own.factory), **OptimizerConfig(name, lr=0.1).arguments)
        for name, own in OPTIMIZERS.items()
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
    with pytest.raises(ValueError, match=f"(?s){factory.__name__}.*{word}.*nearest legal choices: AdamW"):
        refuse(factory, groups)


def test_one_group_that_is_not_elementwise_is_enough():
    def factory(groups):
        return Ratio(groups) if any("adapt" in g for g in groups) else torch.optim.SGD(groups)

    refuse(factory)
    with pytest.raises(ValueError, match="Ratio"):
        refuse(factory, [(), (("adapt", True),)])


def test_the_users_own_mistakes_and_random_numbers_are_left_alone():
    with pytest.raises(ValueError, match="Invalid learning rate: -1"):
        refuse(partial(torch.optim.SGD, lr=-1))
    before = torch.get_rng_state()
    with pytest.raises(ValueError, match="Noisy"):
        refuse(Noisy)
    assert torch.equal(before, torch.get_rng_state())
