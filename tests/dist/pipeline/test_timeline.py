"""What the executor records of a real run: every action once, in the schedule's order, after what it needs."""

from functools import cache
from itertools import pairwise

import pytest

from benchmarks.pipeline.sleeping import Case, take_turns
from benchmarks.pipeline.timelines import Timeline
from megazero.pp.schedules import SCHEDULES, done_by, make_schedule, needs, peak_activations
from megazero.pp.timeline import Times
from tests.dist.pool import run_ranks
from tests.pipeline_walk import check_schedule

MILLISECOND = Times(1e-3, 1e-3, 1e-3)
SIZES = {"gpipe": (3, 1, 4), "1f1b": (3, 1, 5), "interleaved": (3, 2, 6), "zb-h1": (3, 1, 5)}
CASES = [Case(name, *SIZES[name], MILLISECOND) for name in SCHEDULES]


@cache
def runs():
    """The one run of each case, as the first rank has it."""
    return {
        case.schedule: run for case, (run,) in zip(CASES, run_ranks(3, take_turns, CASES, 1)[0], strict=True)
    }


@pytest.mark.parametrize("case", CASES, ids=SCHEDULES)
def test_spans_are_the_schedule(case):
    spans = runs()[case.schedule].spans
    by_rank = [sorted((s for s in spans if s.rank == r), key=lambda s: s.start) for r in range(case.pp)]
    order = tuple(tuple(span.action for span in of_rank) for of_rank in by_rank)
    check_schedule(order, case.pp, case.virtual, case.micro_batches)
    assert order == make_schedule(case.schedule, case.pp, case.virtual, case.micro_batches)
    for of_rank in by_rank:
        assert all(span.start < span.stop for span in of_rank)
        assert all(before.stop <= after.start for before, after in pairwise(of_rank))
    ends = {done_by(span.action): span.stop for span in spans}
    for span in spans:
        assert all(ends[event] <= span.start for event in needs(span.action, case.pp * case.virtual)), span


@pytest.mark.parametrize("case", CASES, ids=SCHEDULES)
def test_activations_are_held_as_long_as_the_schedule_says(case):
    """Counted by what autograd and the deferred gradients keep alive, not by the order of spans."""
    run = runs()[case.schedule]
    expected = peak_activations(case.schedule, case.pp, case.virtual, case.micro_batches)
    assert run.held == Timeline(case.pp, run.spans).peak_activations() == expected
