"""Who is missing, in words, from the heartbeats of the ranks."""

from __future__ import annotations

from megazero.ops.heartbeat import Heartbeat, missing_ranks, starved


def beat(rank: int, awaits: tuple[int, str, float] | None = None, **values: object) -> Heartbeat:
    where = {"phase": "iteration 7"}
    made = Heartbeat(
        rank, 3, "n0", 40 + rank, 5.0 - rank, waiting=True, where=where, stack="x.py:1 f", awaits=awaits
    )
    return Heartbeat(**{**vars(made), **values})


def test_who_is_silent_or_busy_is_missing() -> None:
    text = missing_ranks([beat(1)], [beat(2, waiting=False)], [3], [beat(0)])
    assert text.startswith("missing: rank 1 on n0 (process 41), in iteration 7: no answer")
    assert "rank 2 on n0 (process 42), in iteration 7: not in a collective but at x.py:1 f" in text
    assert "rank 3: it never came" in text and "rank 0" not in text
    text = missing_ranks([], [], [], [beat(0), beat(1)])
    assert text.startswith("missing: none, all wait in collectives, longest rank 0")


def test_a_stage_that_never_sent_is_found_though_all_wait() -> None:
    # Stage 1 sent no activation to stage 2 and went on until it needed a gradient of it. Stage 3 has waited longest.
    ring = [beat(0, (1, "gradient of micro-batch 1", 10.4)), beat(1, (2, "gradient of micro-batch 1", 10.2))]
    ring += [
        beat(2, (1, "activation of micro-batch 3", 10.1)),
        beat(3, (2, "activation of micro-batch 3", 9.9)),
    ]
    for turned in (ring, ring[::-1], ring[2:] + ring[:2]):
        found = starved(turned)
        assert found and [each.rank for each in found] == [2, 1]
    text = missing_ranks([], [], [], ring)
    assert text.startswith(
        "missing: rank 1 on n0 (process 41), in iteration 7: it waits, too, at x.py:1 f, but has not sent rank 2"
    )
    assert text.endswith("the activation of micro-batch 3")


def test_a_stage_that_needs_a_gradient_should_have_sent_the_activation_whoever_waited_first() -> None:
    """The last stage was held up between its last message and its wait."""
    ring = [
        beat(1, (2, "gradient of micro-batch 5", 10.1)),
        beat(2, (1, "activation of micro-batch 5", 10.2)),
    ]
    for turned in (ring, ring[::-1]):
        found = starved(turned)
        assert found and [each.rank for each in found] == [2, 1]


def test_a_stage_that_waits_elsewhere_has_not_sent_the_message() -> None:
    found = starved(
        [beat(0), beat(1, (0, "activation of micro-batch 0", 3.0)), beat(2, (1, "activation", 2.0))]
    )
    assert found and [each.rank for each in found] == [1, 0]
    assert starved([beat(0), beat(1)]) is None
    assert starved([beat(1, (5, "activation", 1.0))]) is None  # of whom nothing is known
