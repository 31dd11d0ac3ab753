"""The race of hpZ (Dai et al., ICML 2024 workshop) on real streams: stock order, and the engine.

Stock hpZ copies a slice of the gathered parameters into its secondary partition on the compute stream, while a gather
on another stream may already read it. The engine runs as one rank of 2 nodes of 2 (tests/gpu/test_hpz_race.py), with
communicators whose data land late on streams of their own. The racing engine is the same one with every wait for a
collective left out.
"""

from __future__ import annotations

import importlib.util

from benchmarks.gpu_report.record import Record, Skip
from benchmarks.gpu_report.setting import Setting


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
