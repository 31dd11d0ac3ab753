"""What ranks that share samples send between nodes is what the planner and ``verify`` say. Bytes, never times."""

from __future__ import annotations

import pytest

from benchmarks import harness
from benchmarks.links.contexts import WAYS, compare


@pytest.mark.slow
def test_bytes_between_nodes(netlab):
    found = harness.run(compare, 4096, 1, 2, ranks=2, lab=netlab(2), timeout=600)
    assert list(found) == list(WAYS)
    for each in found.values():
        for _, sent in each["turns"]:
            assert each["formula"] <= sent <= 1.01 * each["formula"]
