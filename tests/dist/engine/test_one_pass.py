"""An update in one pass leaves what the next refresh sends: the same bits as if that made it from the master."""

from __future__ import annotations

from functools import partial
from unittest.mock import patch

import pytest
import torch

from megazero import zero
from megazero.kernels.adamw import NOTHING
from megazero.train.nvidia_apex import fused_adam
from megazero.zero.elementwise import OnePassAdamW
from megazero.zero.weights import Weights
from tests.dist.pool import by_case
from tests.dist.quantised.cases import (
    ADAMW,
    Q2,
    Q4,
    Q8,
    Case,
    Leaves,
    bits_of,
    digest,
    drawn,
    full_masters,
    make,
    several,
    step_with,
)
from tests.unit.train.test_nvidia_apex import installed

BF16, FP64 = torch.bfloat16, torch.float64
ONE_PASS = partial(OnePassAdamW, lr=1e-2, weight_decay=0.1)
APEX = partial(fused_adam, lr=1e-2, weight_decay=0.1)
DELTA = zero.Codecs(weights=Q4, delta=True, gradients_inter=Q4)
DELTA2 = zero.Codecs(weights=Q2, delta=True)
CODED = zero.Codecs(weights=Q8)
EXACT = zero.Codecs()
STEPS, DIRECT = 7, {"exact_numel": 0}


class Passed(Leaves):
    """Layers whose gradients are None are not used."""

    def forward(self, gradients):
        used = [(x, g) for x, g in zip(self.layers, gradients, strict=True) if g is not None]
        return torch.stack([x(g) for x, g in used]).sum()


def train(case: Case, optimizer, frozen: bool) -> tuple[list, dict, list]:
    """Steps with all that may come between an update and its refresh. Returns what there was after each: digests of
    all states and parameters; the masters; and whether each unit was prepared."""
    model = Passed(case)
    if frozen:
        model.layers[0].held[0].requires_grad_(False)
    model, engine = make(case, optimizer, model, clip_norm=0.5)
    bits, prepared, dp = [], [], engine.mesh.dp_rank
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
        prepared.append([unit.weights.prepared == unit.master.version for unit in engine.units])
        if step == 4:
            with engine.gathered(write=True), torch.no_grad():
                model.layers[1].held[0].mul_(0.5)
        if step == 5:
            engine.invalidate()
        if step in (0, 5):
            engine.refresh()
        bits.append(bits_of(engine))
    with engine.gathered():
        bits.append([digest(unit.weights.full) for unit in engine.units])
    return bits, full_masters(engine), prepared


def compare(case: Case, frozen: bool = False):
    one, masters, prepared = train(case, ONE_PASS, frozen)
    with patch.object(Weights, "left_by_updates", lambda _: NOTHING):
        other, _, never = train(case, ONE_PASS, frozen)
    _, torchs, _ = train(case, ADAMW, frozen)
    apart = max(float((masters[n] - torchs[n]).abs().max()) for n in masters)
    return one == other, apart, prepared[0], any(map(any, never))


def with_apex(case: Case):
    """How far apex's masters are from torch's; the step counts before a step, loaded, and after one more."""
    with installed():
        _, masters, prepared = train(case, APEX, False)
        model, engine = make(case, APEX, Passed(case))
        fresh = engine.optimizer
        fresh.ensure_state()
        counts = [fresh.scalars()]
        fresh.load_scalars({"step": 6.0})
        counts.append(fresh.scalars())
        step_with(case, model, engine)
    counts.append(fresh.scalars())
    _, torchs, _ = train(case, ADAMW, False)
    return max(float((masters[n] - torchs[n]).abs().max()) for n in masters), counts, any(map(any, prepared))


# The layout's letters, codecs, dtype, how many units are prepared.
CASES = [
    (Case("111", 2, EXACT, dtype=BF16, options=DIRECT), 2),
    (Case("111", 2, EXACT), 0),
    (Case("11d", 2, EXACT, 2, dtype=BF16, options=DIRECT), 2),
    (Case("11d", 2, DELTA, 2, dtype=BF16), 2),
    (Case("11d", 2, DELTA), 2),
    (Case("1dd", 2, DELTA2, 2, dtype=BF16), 2),
    (Case("hhd", 2, DELTA, 2, dtype=BF16), 2),
    (Case("hhd", 2, DELTA2, 2, dtype=FP64), 2),
    (Case("hhd", 2, DELTA, dtype=BF16, options={"chunk_numel": 60, **DIRECT}), 4),
    (Case("hhd", 2, CODED, dtype=BF16), 0),
    (Case("hhd", 2, EXACT, dtype=BF16, options=DIRECT), 0),
    (Case("hhd", 2, EXACT, dtype=BF16, options={"lifetime": "resident", **DIRECT}), 2),
    (Case("ddd", 2, EXACT, 2, dtype=BF16, options=DIRECT), 2),
]


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_what_an_update_leaves_is_what_a_refresh_makes(world):
    cases = [(case, units) for case, units in CASES if world > 2 or "h" not in case.letters]
    answers = by_case(world, several, compare, [case for case, _ in cases])
    for (case, ranks), (_, units) in zip(answers, cases, strict=True):
        for equal, apart, _, never in ranks:
            assert equal and not never, case
            assert apart < (1e-14 if case.dtype == FP64 else 1e-6), (case, apart)
        assert sum(ranks[0][2]) == units, (case, ranks)  # a last rank may have nothing but padding


def test_a_unit_with_frozen_parameters_is_refreshed_from_its_master():
    case = Case("1dd", 2, DELTA, dtype=BF16)
    for _, ranks in by_case(2, several, compare, [case], True):
        assert all(equal for equal, *_ in ranks)
        assert [prepared for *_, prepared, _ in ranks] == [[True, True], [False, True]]  # it lies last


def test_apex_updates_slices_as_torch_does_and_its_count_is_saved():
    cases = [Case("11d", 2, EXACT, 2), Case("hhd", 2, DELTA, dtype=BF16)]
    for case, ranks in by_case(4, several, with_apex, cases):
        for apart, counts, prepared in ranks:
            assert apart < 1e-6 and not prepared, case
            assert counts == [{"step": 0.0}, {"step": 6.0}, {"step": 7.0}]
