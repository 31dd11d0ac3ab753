"""fsdp2_patch over NCCL: exact messages change nothing, quantised ones little, and late data are waited for."""

from __future__ import annotations

import pytest
import torch

from tests.fsdp2.job import Case, train
from tests.gpu.patched_ranks import (
    DEVICE,
    EXACT,
    NEEDS_CARD,
    RANKS,
    Runs,
    all_runs,
    differ_when_late,
    lose_little,
)

pytestmark = [pytest.mark.gpu, NEEDS_CARD]
INT4 = {"gradients": "int4", "exact_numel": 0}
INT8_INT4 = {"weights": "int8", **INT4}
DELTA_INT4 = {"weights": "int4-delta", **INT4}
BF16 = (torch.bfloat16, torch.float32)
CASES = {
    "2d": (Case("2d", 4, device=DEVICE), (EXACT, INT4)),
    "1d": (Case("1d", 4, device=DEVICE), (EXACT, INT8_INT4, DELTA_INT4)),
    "1d, bf16": (Case("1d", 2, BF16, device=DEVICE), (EXACT, INT8_INT4)),
    "1d, experts": (
        Case("1d", 2, experts=2, divide=RANKS, device=DEVICE), (EXACT, INT8_INT4, DELTA_INT4),
    ),
}  # fmt: skip
each_case = pytest.mark.parametrize("name", CASES)


@pytest.fixture(scope="module")
def runs() -> Runs:
    return all_runs(train, CASES)


@each_case
def test_exact_messages_train_the_same(runs: Runs, name: str) -> None:
    plain, patched = runs[name, 0, False], runs[name, 1, False]
    for run, other in zip(patched, plain, strict=True):
        assert run.sent["inter_node_bytes"] > 0 and not run.warned  # it was on
        assert run.losses == pytest.approx(other.losses, rel=1e-5)
        assert run.norms == pytest.approx(other.norms, rel=1e-4)
    assert all(run.whole == patched[0].whole for run in patched)


@each_case
def test_quantised_messages_lose_little(runs: Runs, name: str) -> None:
    for place in range(2, 1 + len(CASES[name][1])):
        patched = runs[name, place, False]
        assert all(run.whole == patched[0].whole for run in patched)
        assert lose_little(patched[0].losses, runs[name, 0, False][0].losses)


@each_case
def test_late_data_are_waited_for(runs: Runs, name: str) -> None:
    assert not differ_when_late(runs, name)
