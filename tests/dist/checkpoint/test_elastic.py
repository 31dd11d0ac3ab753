"""The same script on 4 ranks, on 2 and on 4 again: the curve and the samples of the run that stayed on 4.

All layouts: pytest -m slow tests/dist/checkpoint/test_elastic.py
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megazero.log.metrics import read_metrics
from tests.dist.runs import samples, train_each

NODES = {"ranks_per_node": 2}
# values, and how far a loss may be from the one that stayed: one node of 2 sends nothing quantised
LAYOUTS: dict[str, tuple[dict[str, Any], float]] = {
    "zero1": ({"zero_preset": "zero1"}, 1e-5),
    "zero3, micro-batch 3": ({"zero_preset": "zero3", "micro_batch_size": 3}, 1e-5),
    "hpz, ramp-up": (
        {"zero_preset": "hpz", **NODES, "rampup_batch_size": (4, 4, 16), "micro_batch_size": 2},
        1e-5,
    ),
    "zeropp": ({"zero_preset": "zeropp", **NODES, "zero_gradient_bits": 8, "zero_exact_numel": 40}, 2e-3),
    "tp 2, micro-batch 12": ({"tensor_model_parallel_size": 2, "micro_batch_size": 12}, 1e-5),
}
FEW = ("zeropp", "tp 2, micro-batch 12")


@pytest.mark.slow
@pytest.mark.parametrize(
    "names", [FEW, pytest.param(tuple(LAYOUTS), marks=pytest.mark.slow)], ids=["few", "all"]
)
def test_four_ranks_two_and_four_again(tmp_path: Path, names: tuple[str, ...]) -> None:
    jobs: dict[Any, tuple[int, dict[str, Any]]] = {}
    for number, name in enumerate(names):
        base = {"global_batch_size": 12, "elastic": True, "train_iters": 6, **LAYOUTS[name][0]}
        folder = tmp_path / f"{number}"
        run = {"save": str(folder / "run"), "load": str(folder / "run"), "log_dir": str(folder / "logs")}
        jobs["stayed", name] = 4, {**base, "log_dir": str(folder / "stayed")}
        for leg, (ranks, stop) in enumerate(((4, 2), (2, 4), (4, None))):
            jobs[leg, name] = ranks, {**base, **run, "exit_interval": stop}
    seen = train_each({key: job for key, job in jobs.items() if key[0] == "stayed"})
    for leg in range(3):
        seen |= train_each({key: job for key, job in jobs.items() if key[0] == leg})
    for number, name in enumerate(names):
        stayed, legs = seen["stayed", name], [seen[leg, name] for leg in range(3)]
        assert [leg[0].start for leg in legs] == [0, 2, 4], name
        assert sum(map(samples, legs), []) == samples(stayed), name
        assert [sample for sample, _ in samples(stayed)] == list(range(len(samples(stayed)))), name
        losses = sum((leg[0].losses for leg in legs), ())
        limit = LAYOUTS[name][1]
        for (at, got), (same, wanted) in zip(losses, stayed[0].losses, strict=True):
            assert at == same and abs(got - wanted) <= limit * wanted, (name, losses, stayed[0].losses)
        curves = [read_metrics(tmp_path / f"{number}" / folder) for folder in ("logs", "stayed")]
        for key in ("iteration", "learning_rate", "consumed_samples", "batch_size"):
            assert len({tuple(line[key] for line in curve) for curve in curves}) == 1, (name, key)
