"""A rank that is steadily slower than its peers is named, with what it is slower in.

tests/dist/failures/test_stragglers.py has a run of it.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from megazero.comm import timing
from megazero.comm.timing import Waits
from megazero.log.time_bill import TimeBill, items_over
from megazero.ops.stragglers import STEADY, WINDOW, RankSeconds, Stragglers
from tests.messages import names

HOSTS = ["n0", "n0", "n1", "n1"]
BILL = dict.fromkeys(items_over(), 0.0) | {"compute": 1.0, "exposed_reduce_inter": 0.8, "data": 0.2}
EVEN = RankSeconds(1.0, 0.2)


def judged(rows: list[Any], times: int, judge: Stragglers) -> tuple[list[dict[str, Any]], list[str]]:
    """Metrics and warnings of so many iterations of 2 s with the same rows."""
    out = [judge.take([RankSeconds(*row) for row in rows], BILL, 2.0) for _ in range(times)]
    return [metrics for metrics, _ in out], [line for _, lines in out for line in lines]


def stragglers(stages: list[list[int]]) -> Stragglers:
    judge = Stragglers(stages, HOSTS, judges=True)
    # Nothing is known of an iteration before the first.
    assert judge.take([RankSeconds()] * 4, BILL, 2.0) == ({}, [])
    return judge


SLOW = (1.5, 0.2)


@pytest.mark.parametrize(("kind", "row"), [("compute", SLOW), ("data", (1.0, 0.6))])
def test_a_steadily_slower_rank_is_named_once_with_its_kind(kind: str, row: tuple[float, ...]) -> None:
    judge = stragglers([[0, 1, 2, 3]])
    assert judged([EVEN, EVEN, EVEN, row], STEADY - 1, judge)[1] == []
    metrics, (line,) = judged([EVEN, EVEN, EVEN, row], WINDOW, judge)
    names(
        line, "rank 3 on n1", f"{STEADY} of the last {STEADY}", f"{kind} takes it {row[kind == 'data']:.3g} s"
    )
    want = {"least_s": 1.2, "most_s": sum(row), "slowest_rank": 3, "slowest_host": "n1"}
    assert metrics[-1] == {"rank_times": want}
    (line,) = judged([EVEN] * 4, 2 * WINDOW, judge)[1]
    names(line, "rank 3 on n1", "again")


ALL, PAIRS, ALONE = [[0, 1, 2, 3]], [[0, 1], [2, 3]], [[0], [1], [2], [3]]


@pytest.mark.parametrize(
    ("stages", "rows", "words"),
    [
        (ALL, [EVEN, (1.19, 0.2), EVEN, EVEN], ()),  # a little
        (PAIRS, [EVEN, EVEN, (1.9, 0.2), (1.9, 0.2)], ()),  # stages have other work, and are not compared
        (PAIRS, [EVEN, EVEN, (1.9, 0.2), (2.3, 0.2)], ("compute takes it 2.3 s", "them 1.9 s")),
        (ALONE, [EVEN, EVEN, EVEN, (1.9, 0.2)], ()),  # a rank alone in its stage is judged by its data
        (ALONE, [EVEN, EVEN, EVEN, (1.9, 0.6)], ("data takes it 0.6 s", "them 0.2 s")),
    ],
)
def test_a_rank_is_compared_with_its_peers(stages, rows, words) -> None:
    lines = judged(rows, 3 * WINDOW, stragglers(stages))[1]
    assert len(lines) == bool(words)
    names("".join(lines), *words, *(["rank 3 on n1"] if words else []))


def test_now_and_then_is_not_steady() -> None:
    judge = stragglers(ALL)
    for turn in range(5 * WINDOW):
        rows = [EVEN] * 4
        rows[turn % 4] = RankSeconds(*SLOW)
        assert judged(rows, 1, judge)[1] == []


def test_own_time_is_without_waits() -> None:
    judge = Stragglers(ALL, HOSTS, judges=False)
    assert judge.take([EVEN] * 4, BILL, 2.0) == ({}, [])
    assert judge.own == pytest.approx(RankSeconds(1.0, 0.2))
    assert judge.take([EVEN, EVEN, EVEN, RankSeconds(9.0)], BILL, 2.0) == ({}, [])  # another rank speaks


# -- what is measured -------------------------------------------------------------------------------


class FakeEvent:
    """An event of a stream whose time is a count."""

    now = 0.0
    reached = math.inf  # by the device

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing

    def record(self) -> None:
        self.at = FakeEvent.now

    def query(self) -> bool:
        return self.at <= FakeEvent.reached

    def elapsed_time(self, later: FakeEvent) -> float:
        assert self.query() and later.query(), "CUDA raises an error"
        return later.at - self.at


def test_waits_are_spans_on_a_cpu_and_events_on_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    bill = TimeBill(lambda: FakeEvent.now)
    with bill.span("compute"):
        FakeEvent.now += 2
        with Waits(torch.device("cpu"), bill.span)("exposed_tp_intra"):
            FakeEvent.now += 3
    assert bill.close(5.0) == dict.fromkeys(items_over(), 0.0) | {"compute": 2.0, "exposed_tp_intra": 3.0}
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    timer = Waits(torch.device("cuda"), bill.span)
    for _ in range(3 * timing.MOST):
        with timer("exposed_tp_intra"):
            FakeEvent.now += 1  # in milliseconds here
    assert len(timer.stalls.waits) <= timing.MOST
    assert timer.stalls.take() == pytest.approx({"exposed_tp_intra": 3e-3 * timing.MOST})
    assert timer.stalls.take() == {}
    with Waits(torch.device("cuda"))("exposed_tp_intra"):  # nobody watches
        pass


def test_a_wait_that_is_not_over_is_left_for_the_next_look(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(FakeEvent, "reached", FakeEvent.now)
    timer = Waits(torch.device("cuda"), TimeBill().span)
    with timer("exposed_tp_intra"):
        FakeEvent.now += 4
    assert timer.stalls.take() == {}
    monkeypatch.setattr(FakeEvent, "reached", FakeEvent.now)
    assert timer.stalls.take() == pytest.approx({"exposed_tp_intra": 4e-3})
