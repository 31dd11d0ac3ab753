"""Do quantised messages under FSDP2 cost loss? Beside runs whose start differs by one bit of one weight.

    python -m benchmarks.patches.fsdp2_loss --work runs/fsdp2-loss [--seeds 3] [--nudges 3] [--steps 300]

A small model in bf16 with fp32 reductions and 2 micro-batches, on 4 gloo ranks as 2 nodes of 2 (tests/fsdp2); no
parameter is exact. What a run's loss is, and what is compared: loss.py.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from benchmarks import harness
from benchmarks.patches import loss
from tests.dist.pool import run_ranks
from tests.fsdp2.job import RANKS, Case, train

PLAIN = "FSDP2"
INT4 = {"gradients": "int4", "gradient_transform": "none", "exact_numel": 0}  # as documented figures have it
CONTESTANTS: dict[str, tuple[str, dict[str, Any] | None]] = {
    PLAIN: ("1d", None),
    "HSDP, int4": ("2d", INT4),
    "int8, int4": ("1d", {"weights": "int8", **INT4}),
    "int4-delta, int4": ("1d", {"weights": "int4-delta", **INT4}),
}
CASE = Case(micro_batches=2, dtypes=(torch.bfloat16, torch.float32))


def losses(case: Case, contestant: tuple[str, dict[str, Any] | None]) -> list[float]:
    mesh, words = contestant
    return run_ranks(RANKS, train, replace(case, mesh=mesh), words, timeout=400)[0].losses


def main() -> int:
    return loss.main(__doc__, PLAIN, CONTESTANTS, CASE, losses)


if __name__ == "__main__":
    harness.start(main)
