"""The harness itself: megatron-core, unpatched, trains on CPU ranks what it trains on one.

Some cases run always. All of them, two minutes on 2 cores:

    python -m pytest tests/megatron/test_harness.py -m "slow or not slow"
"""

from __future__ import annotations

from functools import cache

import pytest
import torch

from tests.dist.pool import run_ranks
from tests.megatron.case import Case, Run, replicas_differ, step_losses
from tests.megatron.cases import cases, of_one_rank
from tests.megatron.training import train

pytest.importorskip("megatron.core")


@cache
def trained(case: Case) -> list[Run]:
    return run_ranks(case.world, train, case, timeout=120)


@pytest.mark.first(1)
@pytest.mark.parametrize("case", cases("tp2 sp", "pp2 vpp2"))
def test_every_layout_trains_as_one_rank(case: Case) -> None:
    """Losses and norms of every step, which depend on the updates before, and replicas' bits."""
    one, runs = of_one_rank(case), trained(case)
    alone = trained(one)
    assert step_losses(case, runs) == pytest.approx(step_losses(one, alone), rel=1e-6)
    for run in runs:
        assert run.norms == pytest.approx(alone[0].norms, rel=1e-6)
    assert not replicas_differ(runs)
    parts = {name.partition("@")[0] for run in runs for name in run.digests}
    assert parts == {name.partition("@")[0] for name in alone[0].digests}


def test_the_shims_are_undone() -> None:
    before, after = run_ranks(1, names_around_a_run, Case(steps=1))[0]
    assert before == after


def names_around_a_run(case: Case) -> tuple[list[str], list[str]]:
    """Run a case on this rank; what the replaced names are before and after it."""
    before = _names()
    train(case)
    return before, _names()


def _names() -> list[str]:
    owners = (torch, torch.cuda, torch.distributed)
    words = ("compile", "current_device", "Stream", "manual_seed", "all_to_all_single", "get_rng_state")
    named = [f"{owner.__name__}.{word} {getattr(owner, word, None)}" for owner in owners for word in words]
    return [*named, torch.zeros(1).type()]
