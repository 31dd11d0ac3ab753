"""Do quantised messages under megatron-core cost loss? Beside runs whose start differs by one bit of one weight.

    python -m benchmarks.patches.megatron_loss --work runs/megatron-loss [--seeds 3] [--nudges 3] [--steps 300]

megatron-core's GPTModel, DistributedDataParallel and DistributedOptimizer in bf16 on 4 gloo ranks as 2 nodes of 2
(tests/megatron). What a run's loss is, and what is compared: loss.py.
"""

from __future__ import annotations

from benchmarks import harness
from benchmarks.patches import loss
from tests.dist.pool import run_ranks
from tests.megatron.case import Case, step_losses
from tests.megatron.cases import DELTA_INT4, INT8_INT4
from tests.megatron.training import Formats, train

PLAIN = "megatron-core"
CONTESTANTS: dict[str, Formats | None] = {
    PLAIN: None,
    # As documented figures have it.
    "int8, int4": {**INT8_INT4, "gradient_transform": "none"},
    "int4-delta, int4": {**DELTA_INT4, "gradient_transform": "none"},
}


def losses(case: Case, formats: Formats | None) -> list[float]:
    return step_losses(case, run_ranks(case.world, train, case, formats, timeout=400))


def main() -> int:
    return loss.main(__doc__, PLAIN, CONTESTANTS, Case(dp=4, bf16=True), losses)


if __name__ == "__main__":
    harness.start(main)
