"""The race of hpZ (Dai et al., ICML 2024 workshop) on real streams: stock order, the engine, and what its waits cost.

Stock hpZ copies a slice of the gathered parameters into its secondary partition on the compute stream, while a gather
on another stream may already read it. The engine runs as one rank of 2 nodes of 2 (tests/gpu/test_hpz_race.py), with
communicators whose data land late on streams of their own. The racing engine is the same one with every wait for a
collective left out: it is at least as fast as any that leaves out one.
"""

from __future__ import annotations

import importlib.util
import statistics
from typing import Any

import torch

from benchmarks.gpu_report.record import Record, Skip
from benchmarks.gpu_report.setting import Setting
from benchmarks.harness import ratios, spread, step_seconds, take_turns

LEAST = 0.98  # of the racing engine's throughput


def run(setting: Setting, record: Record) -> None:
    if importlib.util.find_spec("pytest") is None:
        record.row(what="the race", reason="the test that it is taken from needs pytest (pip install pytest)")
        return
    import pytest

    from tests.gpu import test_hpz_race as race

    for synchronised, name in ((True, "stock order with a wait"), (False, "stock order")):
        with record.attempt(what=name, expected="right" if synchronised else "wrong") as row:
            if setting.rehearsal:
                raise Skip("a race needs CUDA streams")
            if synchronised:
                race.stock_hpz(race.SLOW, synchronised=True)  # loading kernels may synchronise
            row["found"] = "right" if race.stock_hpz(race.SLOW, synchronised) else "wrong"
    for waits, name in ((True, "the engine"), (False, "the engine without waits")):
        with (
            record.attempt(what=name, expected="right" if waits else "wrong") as row,
            pytest.MonkeyPatch.context() as patch,
        ):
            cluster = race.Cluster(setting.device, 3, patch, wire_ms=race.QUICK)
            wrong = [cluster.step()]
            cluster.waits = waits
            wrong += [cluster.step() for _ in range(setting.pick(5, 1))]
            row |= {"found": "wrong" if any(wrong) else "right", "wrong elements": sum(wrong)}
    with record.attempt(what="throughput, the engine over itself without waits") as row:
        row |= throughput(race, setting)


def throughput(race: Any, setting: Setting) -> dict[str, Any]:
    """Measure steps with waits and without in turns. Nothing sleeps and nothing is compared meanwhile."""
    import pytest

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(race, "WIDTH", setting.pick(4096, 64))
        patch.setattr(race, "LAYERS", setting.pick(8, 2))
        cluster = race.Cluster(setting.device, 3, patch)
        patch.setattr(cluster, "_compute", lambda unit: None)
        shape = (setting.pick(8192, 8), setting.pick(4096, 64))
        cluster.inputs = torch.randn(shape, device=setting.device, dtype=torch.bfloat16)
        cluster.step()  # gives every unit its true values
        for true in cluster.truth.values():
            true.mul_(1 / setting.pick(128, 8))  # activations keep their size from layer to layer

        def step() -> None:
            cluster.engine.begin_step(race.MICRO_BATCHES)
            for _ in range(race.MICRO_BATCHES):
                cluster.module(cluster.inputs).sum().backward()
            cluster.engine.step()

        def turn(waits: bool) -> float:
            cluster.waits = waits
            _restore(cluster)
            return step_seconds(step, setting.device)

        turns = {"waits": lambda: turn(True), "races": lambda: turn(False)}
        taken = take_turns(turns, setting.pick(10, 2), warm_up=setting.pick(2, 0))
    found = ratios(taken["races"], taken["waits"])
    return {
        "expected": f"at least {LEAST}",
        "found": spread(found)
        + ("" if setting.rehearsal or statistics.median(found) >= LEAST else ", not met"),
    }


def _restore(cluster: Any) -> None:
    """Restore the same weights for every step, so that it refreshes all of them."""
    for unit in cluster.engine.units:
        (own,) = unit.layout.pieces(unit.axes.os)
        unit.master.value.copy_(cluster.truth[unit][own.start : own.start + own.numel])
    cluster.engine.invalidate()
