"""benchmarks/features/host_time.py: every contestant takes a step without a card, by the paths that a card takes."""

from __future__ import annotations

from benchmarks import harness
from benchmarks.features import host_time


def test_contestants_step_on_streams_that_do_nothing() -> None:
    layers = 2
    found = harness.run(host_time.measure, list(host_time.BUILDERS), layers, 16, 1, 1, ranks=1, world=False)
    counts = {name: each["counts"] for name, each in found.items()}
    units = layers + 2  # embedding, head
    # Scalars once; of every unit a gather and a reduction, and in zero3 a second gather of all but the last one.
    assert counts["zero1"]["collectives"] == 1 + 2 * units
    assert counts["zero3"]["collectives"] == 1 + 3 * units - 1
    for preset in host_time.PRESETS:
        assert counts[preset]["kernels"] and counts[preset]["events"], preset
    assert counts["zeropp"]["kernels"] > counts["hpz"]["kernels"] > 0, "quantised messages take more"
    assert len(host_time.rows(found)) == len(host_time.BUILDERS)
