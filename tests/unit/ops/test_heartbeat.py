"""Who is missing, in words, from the heartbeats of the ranks."""

from __future__ import annotations

from megazero.ops.heartbeat import Heartbeat, missing_ranks


def beat(rank: int, waiting: bool = True) -> Heartbeat:
    return Heartbeat(rank, 3, "n0", 40 + rank, 5.0 - rank, waiting, {"phase": "iteration 7"}, "x.py:1 f")


def test_who_is_silent_or_busy_is_missing() -> None:
    text = missing_ranks([beat(1)], [beat(2, waiting=False)], [3], [beat(0)])
    assert text.startswith("missing: rank 1 on n0 (process 41), last heard in iteration 7: no answer")
    assert "rank 2 on n0 (process 42), in iteration 7: not in a collective but at x.py:1 f" in text
    assert "rank 3: it never came" in text and "rank 0" not in text
    text = missing_ranks([], [], [], [beat(0), beat(1)])
    assert text.startswith("missing: none, all wait in collectives, longest rank 0")
