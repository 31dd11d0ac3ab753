"""--profile writes a trace on the ranks asked for, in which hops and compute have their names."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from tests.dist.runs import train_each

ITERATIONS = 2  # traced ones
MICRO_BATCHES = 2
UNITS = ("embedding", "layers.0", "layers.1", "head")


def names(path: Path) -> list[str]:
    """What has a name of ours in a trace, as often as it ran."""
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    return [event["name"] for event in events if event.get("cat") == "user_annotation"]


@pytest.mark.slow
def test_a_trace_names_hops_and_compute_by_unit(tmp_path: Path) -> None:
    values = {"zero_shard": (2, 2, 2), "global_batch_size": 2 * MICRO_BATCHES, "log_dir": str(tmp_path)}
    profiled = {
        "profile": True,
        "profile_step_start": 2,
        "profile_step_end": 2 + ITERATIONS,
        "profile_ranks": (1,),
    }
    refreshed = {**values, "zero_shard": (1, 1, 2), "log_dir": str(tmp_path / "refreshed")}
    never = {**values, "log_dir": str(tmp_path / "never"), "profile": True, "train_iters": 3}
    seen = train_each(
        {
            "plain": (2, values),
            "traced": (2, {**values, **profiled}),
            "refreshed": (2, {**refreshed, **profiled}),
            "never": (2, never),
        }
    )
    assert seen["traced"][0].losses == seen["plain"][0].losses
    assert [file.name for file in (tmp_path / "profile").iterdir()] == ["rank_1.json.gz"]
    assert not (tmp_path / "never" / "profile").exists()

    found = names(tmp_path / "profile" / "rank_1.json.gz")
    for unit in UNITS:
        assert found.count(f"forward {unit}") == ITERATIONS * MICRO_BATCHES
        assert f"gather_intra {unit}" in found and f"reduce_intra {unit}" in found
    for kind in "FB":
        for micro_batch in range(MICRO_BATCHES):
            assert found.count(f"compute {kind}(stage 0, micro-batch {micro_batch})") == ITERATIONS
    assert found.count("data") == ITERATIONS
    assert found.count("optimizer") == 2 * ITERATIONS  # before and after the exchange of the norm
    found = names(tmp_path / "refreshed" / "profile" / "rank_1.json.gz")
    assert all(f"refresh_intra {unit}" in found for unit in UNITS)
