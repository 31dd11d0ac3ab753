"""megatron_core_patch over NCCL: exact messages change nothing, quantised ones little, late data are waited for."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest

from tests.gpu.patched_ranks import DEVICE, NEEDS_CARD, Runs, all_runs, differ_when_late, lose_little
from tests.megatron import cases
from tests.megatron.case import replicas_differ, step_losses
from tests.megatron.training import train

pytest.importorskip("megatron.core")
pytestmark = [pytest.mark.gpu, NEEDS_CARD]
CASES = {
    name: (replace(cases.CASES[name], device=DEVICE), (cases.EXACT, cases.INT8_INT4, cases.DELTA_INT4))
    for name in ("dp4 overlap", "tp2 sp overlap", "pp2 overlap", "moe ep2 overlap")
}
each_case = pytest.mark.parametrize("name", CASES)


@pytest.fixture(scope="module")
def runs() -> Runs:
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")  # Megatron asks for it
    return all_runs(train, CASES)


@each_case
def test_exact_messages_train_the_same(runs: Runs, name: str) -> None:
    case, plain, patched = CASES[name][0], runs[name, 0, False], runs[name, 1, False]
    assert step_losses(case, patched) == pytest.approx(step_losses(case, plain), rel=1e-5)
    for run, other in zip(patched, plain, strict=True):
        assert run.norms == pytest.approx(other.norms, rel=1e-4)
    assert not replicas_differ(patched) and all(sum(run.sent.values()) > 0 for run in patched)


@each_case
def test_quantised_messages_lose_little(runs: Runs, name: str) -> None:
    case = CASES[name][0]
    for place in (2, 3):
        patched = runs[name, place, False]
        assert not replicas_differ(patched)
        assert lose_little(step_losses(case, patched), step_losses(case, runs[name, 0, False]))


@each_case
def test_late_data_are_waited_for(runs: Runs, name: str) -> None:
    assert not differ_when_late(runs, name)
