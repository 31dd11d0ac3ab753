"""megatron_core_patch with exact messages trains what megatron-core trains without it.

Some cases run always. All of them, four minutes on 2 cores:

    python -m pytest tests/megatron/test_exact.py -m "slow or not slow"
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.dist.pool import run_ranks
from tests.megatron.case import Case, replicas_differ, step_losses
from tests.megatron.cases import CASES, EXACT, cases
from tests.megatron.training import train

pytest.importorskip("megatron.core")
pytest.importorskip("megatron_core_patch")


BF16 = [
    pytest.param(replace(CASES[name], bf16=True), id=f"{name} bf16", marks=pytest.mark.slow)
    for name in ("dp4", "dp4 overlap", "tp2 sp overlap", "pp2 vpp2 overlap", "moe ep2")
]


@pytest.mark.first(2)
@pytest.mark.parametrize("case", [*cases("dp4 overlap", "tp2 sp", "moe ep2"), *BF16])
def test_exact_messages_change_nothing(case: Case) -> None:
    """Bit for bit where at most two ranks are summed; 1e-6 in fp32 where gloo sums in another order.

    With bf16 parameters, too, gradients are summed in fp32.
    """
    plain = run_ranks(case.world, train, case, timeout=120)
    runs = run_ranks(case.world, train, case, EXACT, timeout=120)
    if case.dp == 2:
        assert [replace(run, sent={}) for run in runs] == plain
    near = 1e-3 if case.bf16 else 1e-6
    assert step_losses(case, runs) == pytest.approx(step_losses(case, plain), rel=near)
    for run, other in zip(runs, plain, strict=True):
        assert case.bf16 or run.norms == pytest.approx(other.norms, rel=near)
    assert not replicas_differ(runs)
    assert all(sum(run.sent.values()) > 0 for run in runs)  # it was on
