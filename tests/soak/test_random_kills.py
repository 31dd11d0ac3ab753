"""One trial of tests/soak/random_kills.py, at moments that are named, and what it says of a wrong run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megazero.log.metrics import METRICS_FILE
from tests.soak import random_kills as kills


@pytest.mark.slow
def test_a_run_that_is_killed_in_saves_goes_on_bit_for_bit(tmp_path: Path) -> None:
    """Behind the training: one rank in the second save, then all of them a moment after."""
    (layout,) = {"zero3"} & set(kills.LAYOUTS)
    moments = [kills.Kill((1,), False, 0.0, 12), kills.Kill((0, 1), False, 0.01, 50)]
    row = kills.trial(1, 0, tmp_path, moments, [layout])
    assert row["async_save"] and not row["problems"], row
    assert json.loads(json.dumps(row)) == row | {"kills": json.loads(json.dumps(row["kills"]))}
    assert "2 of them" not in kills.summary([row]) and "wrong: none" in kills.summary([row])
    # What it must see: another loss, and an older checkpoint that a start went on from.
    reference = kills.reference_of(layout, tmp_path)
    values = kills.make_values(layout, reference, False)
    right = {"statuses": [0, 0], "newest": 4, "from": 4}
    assert not list(kills.problems(values, reference, [right]))
    assert "went on from 2" in next(kills.problems(values, reference, [right | {"from": 2}]))
    changed = tmp_path / "changed"
    (changed / "logs").mkdir(parents=True)
    (changed / "save").symlink_to(reference / "save")
    lines = (reference / "logs" / METRICS_FILE).read_text().splitlines()
    (changed / "logs" / METRICS_FILE).write_text("\n".join(lines[:3] + lines[2:]) + "\n")
    assert "metrics" in next(kills.problems(values, changed, [right]))


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["experts, zeropp"])
def test_what_lies_on_other_ranks_goes_on_bit_for_bit(layout: str, tmp_path: Path) -> None:
    """One rank is killed in the second save, then all of a node in the next, with a sum or experts of their own."""
    moments = [kills.Kill((3,), False, 0.0, 12), kills.Kill((0, 1), False, 0.01, 50)]
    row = kills.trial(0, 0, tmp_path, moments, [layout])
    assert not row["problems"] and row["attempts"][-1]["from"], row
