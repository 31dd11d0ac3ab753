"""Iterations that are left out: what names them, what they consume, where the schedule goes on."""

from __future__ import annotations

from itertools import product

import pytest

from megazero.config import ConfigError, make_config
from megazero.config.options.skipping import due, iteration_ranges, range_around
from megazero.config.schedule.batch_sizes import BatchSizes, batch_steps
from megazero.train.schedule.run_length import RunLength
from megazero.train.state.progress import (
    LeftOut,
    Progress,
    just_before,
    leave_out,
    next_to_leave_out,
    without_effect,
)
from tests.sizes import TINY


def test_ranges_are_sorted_and_joined() -> None:
    assert iteration_ranges(()) == ()
    assert iteration_ranges(("40-45", "10-20", "15-30", "7", "31", "8")) == ((7, 8), (10, 31), (40, 45))
    ranges = iteration_ranges(("10-20", "40"))
    assert [range_around(ranges, at) for at in (9, 10, 20, 21, 40)] == [
        None,
        (10, 20),
        (10, 20),
        None,
        (40, 40),
    ]


@pytest.mark.parametrize(
    "word, cure",
    [("20-10", "nearest: 10-20"), ("0-5", "nearest: 1-5"), ("5-", "FIRST-LAST"), ("-3", "FIRST")],
)
def test_what_is_no_range_is_refused(word: str, cure: str) -> None:
    with pytest.raises(ConfigError, match=f"--skip-train-iteration-range {word}.*{cure}"):
        make_config({**TINY, "skip_train_iteration_range": (word,)})


def test_samples_follow_the_ramp_up_and_the_schedule_waits() -> None:
    sizes = BatchSizes(batch_steps(None, (4, 4, 24), 12, 1), 1, 1)  # 4, 4, 4, 8, 8, 12 from 28 on
    begin = Progress(iteration=2, consumed_samples=8)
    after = leave_out(begin, 4, sizes)
    assert (after.iteration, after.consumed_samples) == (4, 20)
    assert after.left_out == (LeftOut(3, 4, 8, 20),)
    by_iterations, by_samples = (RunLength(sizes, 9, 100, by_samples, ()) for by_samples in (False, True))
    assert (by_iterations.scheduled(after), by_samples.scheduled(after)) == (2, 8)
    twice = leave_out(after, 6, sizes)
    assert by_iterations.scheduled(twice) == 2 and by_iterations.position(twice) == 6
    assert next_to_leave_out(((3, 8),), begin, 100) == 8 and next_to_leave_out(((3, 8),), begin, 5) == 5
    assert next_to_leave_out(((4, 8),), begin, 100) is None


def test_a_multiple_that_is_passed_over_is_due() -> None:
    for interval, since, iteration in product(range(1, 9), range(20), range(20)):
        passed = any(at % interval == 0 for at in range(since + 1, iteration + 1))
        assert due(interval, since, iteration) == passed or iteration < since
    assert not due(None, 0, 100)


def test_ranges_without_effect_are_said() -> None:
    progress = Progress(iteration=20, left_out=(LeftOut(3, 4, 8, 20), LeftOut(5, 6, 20, 40)))
    assert not [*without_effect(((3, 6), (4, 5), (21, 30)), progress, 30)]
    ranges = ((2, 5), (8, 9), (18, 25), (28, 40), (50, 60))
    lines = [*without_effect(ranges, progress, 30)]
    assert [line.split()[1] for line in lines] == ["2-5", "8-9", "18-25", "28-40", "50-60"]
    assert ["begins after iteration 20; resume from" in line for line in lines] == [True] * 3 + [False] * 2
    assert ["ends with iteration 30" in line for line in lines] == [False] * 3 + [True] * 2


def test_the_next_line_of_metrics_tells() -> None:
    one, two = LeftOut(3, 4, 8, 20), LeftOut(5, 6, 20, 40)
    progress = Progress(iteration=7, left_out=(one, two))
    said = just_before(progress, 7)
    assert said == {
        "left_out": [{"iterations": [3, 4], "samples": [8, 19]}, {"iterations": [5, 6], "samples": [20, 39]}],
    }
    assert just_before(progress, 8) == {} == just_before(Progress(), 1)
    assert f"{one}" == "iterations 3 to 4 (samples 8 to 19)"
