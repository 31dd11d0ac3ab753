"""An update in one pass trains as torch's, whatever comes between an update and its refresh.

So does an optimizer that counts steps as apex's."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from megazero import zero
from megazero.kernels.adamw import Rates, adamw
from megazero.mesh.levels import INTER
from megazero.zero.elementwise import OnePassAdamW
from tests.dist.pool import by_case
from tests.dist.quantised.cases import (
    ADAMW,
    Q2,
    Q4,
    Q8,
    Case,
    Leaves,
    drawn,
    full_masters,
    make,
    several,
    step_with,
)

BF16, FP64 = torch.bfloat16, torch.float64
ONE_PASS = partial(OnePassAdamW, lr=1e-2, weight_decay=0.1)
DELTA = zero.Codecs(weights=Q4, delta=True, gradients={INTER: Q4})
DELTA2 = zero.Codecs(weights=Q2, delta=True)
CODED = zero.Codecs(weights=Q8)
EXACT = zero.Codecs()
STEPS, DIRECT = 7, {"exact_numel": 0}


class CountsInGroups(torch.optim.Optimizer):
    """AdamW that counts steps in its groups, as apex's does."""

    def __init__(self, params):
        super().__init__(params, {"lr": 1e-2, "weight_decay": 0.1})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            rates = Rates.of(group["step"], group["lr"], (0.9, 0.999), 1e-8, group["weight_decay"], 1.0)
            for p in (p for p in group["params"] if p.grad is not None):
                for name in ("exp_avg", "exp_avg_sq"):
                    self.state[p].setdefault(name, torch.zeros_like(p))
                adamw(*(x.view(-1) for x in (p, p.grad, *self.state[p].values())), rates)


class Passed(Leaves):
    """Layers whose gradients are None are not used."""

    def forward(self, gradients):
        used = [(x, g) for x, g in zip(self.layers, gradients, strict=True) if g is not None]
        return torch.stack([x(g) for x, g in used]).sum()


def train(case: Case, optimizer, frozen: bool = False) -> dict:
    """Return the masters after steps with all that may come between an update and its refresh."""
    model = Passed(case)
    if frozen:
        model.layers[0].held[0].requires_grad_(False)
    model, engine = make(case, optimizer, model, clip_norm=0.5)
    dp = engine.mesh.dp_rank
    for step in range(STEPS):
        if step == 2:  # nothing is gathered ahead: the first unit's gradients come before its refresh
            engine.gatherer.prefetch = lambda: None
        engine.begin_step(case.micro_batches, 4.0)
        for index in range(case.micro_batches):
            gradients = drawn(case, dp, 0, index, step)
            if step in (2, 3):  # and the last is skipped: what it updated from is refreshed after all
                gradients[0] = None
            if step == 3:
                gradients[1] = [g * torch.inf for g in gradients[1]]
            model(gradients).backward()
        assert engine.step().skipped == (step == 3)
        if step == 4:
            with engine.gathered(write=True), torch.no_grad():
                model.layers[1].held[0].mul_(0.5)
        if step == 5:
            engine.invalidate()
        if step in (0, 5):
            engine.refresh()
    return full_masters(engine)


def apart(mine: dict, torchs: dict) -> float:
    return max(float((mine[n] - torchs[n]).abs().max()) for n in mine)


def compare(case: Case, frozen: bool = False) -> float:
    return apart(train(case, ONE_PASS, frozen), train(case, ADAMW, frozen))


def counted(case: Case):
    """How far the masters are from torch's; the step counts before a step, loaded, and after one more."""
    masters = train(case, CountsInGroups)
    model, engine = make(case, CountsInGroups, Passed(case))
    fresh = engine.optimizer
    fresh.ensure_state()
    counts = [fresh.scalars()]
    fresh.load_scalars({"step": 6.0})
    counts.append(fresh.scalars())
    step_with(case, model, engine)
    counts.append(fresh.scalars())
    return apart(masters, train(case, ADAMW)), counts


CASES = [
    Case("111", 2, EXACT, dtype=BF16, options=DIRECT),
    Case("111", 2, EXACT),
    Case("11d", 2, DELTA),
    Case("1dd", 2, DELTA2, 2, dtype=BF16),
    Case("hhd", 2, DELTA2, 2, dtype=FP64),
    Case("hhd", 2, DELTA, dtype=BF16, options={"chunk_numel": 60, **DIRECT}),
    Case("hhd", 2, CODED, dtype=BF16),
    Case("hhd", 2, EXACT, dtype=BF16, options={"lifetime": "resident", **DIRECT}),
    Case("ddd", 2, EXACT, 2, dtype=BF16, options=DIRECT),
]


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_updates_in_one_pass_are_those_of_torch(world):
    cases = [case for case in CASES if world > 2 or "h" not in case.letters]
    for case, ranks in by_case(world, several, compare, cases):
        assert max(ranks) < (1e-14 if case.dtype == FP64 else 1e-6), (case, ranks)


def test_a_unit_with_frozen_parameters_is_updated_as_by_torch():
    for _, ranks in by_case(2, several, compare, [Case("1dd", 2, DELTA, dtype=BF16)], True):
        assert max(ranks) < 1e-6


def test_apex_updates_slices_as_torch_does_and_its_count_is_saved():
    cases = [Case("11d", 2, EXACT, 2), Case("hhd", 2, DELTA, dtype=BF16)]
    for case, ranks in by_case(4, several, counted, cases):
        for difference, counts in ranks:
            assert difference < 1e-6, case
            assert counts == [{"step": 0.0}, {"step": 6.0}, {"step": 7.0}]
