"""Ranks as threads of one process (benchmarks/rank_threads.py) train to the bits of gloo's ranks."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.loss import data
from benchmarks.loss.run import Run, Settings, ranks_of, train
from benchmarks.loss.variants import VARIANTS
from benchmarks.rank_threads import run_threads
from megazero.data.text import stdlib_sources
from megazero.mesh.mesh import create_mesh
from tests.dist.pool import run_ranks

TINY = Settings(
    layers=1, hidden=32, ffn=64, heads=2, vocabulary=384, sequence=16, micro_batch=2, steps=3, warmup=1,
    evaluation=128, exact=256,
)  # fmt: skip
# Gathers and quantised hops inside nodes too; differences, one rank a node; all that is exact.
CASES = [("sdp4bit", 2, 3), ("zeropp-hadamard", 1, 3), ("zero3", 2, 3), ("hpz", 2, 3)]
# Replicas of two ranks, and of one, side by side in each process.
CASES += [("outer-8-0.7-4bit", 2, 9), ("outer-8-1-2bit", 1, 8), ("outer-8-1-muon", 2, 8)]
# Ranks of several nodes share the experts.
CASES += [("dispatch-int8", 1, 3)]


def settings(name: str, node: int, steps: int) -> Settings:
    size = replace(TINY, hidden=64, experts=8) if VARIANTS[name].dispatch else TINY
    return replace(size, node=node, steps=steps)


def by_gloo(folder: Path, cases: list[tuple[str, int, int]]) -> list[dict[str, Any]]:
    return [
        train(create_mesh, folder, settings(name, node, steps), Run(name, 1)) for name, node, steps in cases
    ]


@pytest.mark.slow
def test_threads_train_to_gloos_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data, "sources", lambda name: stdlib_sources()[:12])
    folder = data.prepare(tmp_path, "stdlib", TINY.vocabulary)
    same = ("loss", "errors", "digest", "sent", "skipped")
    for name, node, steps in CASES:
        ranks = ranks_of(settings(name, node, steps), Run(name, 1))
        (gloo,) = run_ranks(ranks, by_gloo, folder, [(name, node, steps)], timeout=300)[0]
        here = run_threads(ranks, train, folder, settings(name, node, steps), Run(name, 1))[0]
        assert {key: here[key] for key in same} == {key: gloo[key] for key in same}, name
