"""Simulated timelines against closed forms; the trace and the picture."""

import pytest

from benchmarks.pipeline.timelines import Timeline
from megazero.pp.schedules import SCHEDULES, Action, Kind, make_schedule, peak_activations, schedule_problem
from megazero.pp.timeline import Span, Times, ideal_bubble, simulate

SIZES = [
    (name, pp, virtual, m)
    for name in SCHEDULES
    for pp in (1, 2, 3, 4, 6)
    for virtual in (1, 2, 3)
    for m in (1, 2, 3, 4, 6, 8, 12)
    if not schedule_problem(name, pp, virtual, m)
]
UNIT = Times()
RATIOS = [UNIT, Times(2, 3, 1), Times(1, 1, 4), Times(5, 1, 2)]


def timeline(name, pp, virtual, m, time_of=UNIT.of, latency=0.0):
    return Timeline(pp, simulate(make_schedule(name, pp, virtual, m), pp, time_of=time_of, latency=latency))


@pytest.mark.parametrize("name, pp, virtual, m", SIZES)
@pytest.mark.parametrize("times", RATIOS)
def test_bubbles_are_the_closed_forms(name, pp, virtual, m, times):
    run = timeline(name, pp, virtual, m, times.of)
    assert run.bubble == pytest.approx(ideal_bubble(name, pp, virtual, m, times), abs=1e-12)
    assert run.peak_activations() == peak_activations(name, pp, virtual, m)


def test_closed_forms_of_the_papers():
    assert ideal_bubble("1f1b", 4, 1, 8) == ideal_bubble("gpipe", 4, 1, 8) == 3 / 11
    assert ideal_bubble("interleaved", 4, 2, 8) == 3 / 19
    for times in (Times(1, 1, 1), Times(2, 3, 1)):
        idle = 3 * (times.forward + times.backward_input - times.backward_weight)
        busy = 8 * (times.forward + times.backward_input + times.backward_weight)
        assert ideal_bubble("zb-h1", 4, 1, 8, times) == pytest.approx(idle / (busy + idle))
    assert timeline("zb-h1", 4, 1, 8).idle == (3, 3, 3, 3)  # units: (pp - 1)(1 + 1 - 1)
    assert timeline("1f1b", 4, 1, 8).idle == (9, 9, 9, 9)


def test_spans_respect_ranks_needs_and_latency():
    run = timeline("1f1b", 2, 1, 1, time_of=Times(1, 2, 3).of, latency=0.5)
    expected = [(0, Kind.FORWARD, 0, 1), (1, Kind.FORWARD, 1.5, 2.5), (1, Kind.BACKWARD, 2.5, 7.5)]
    expected.append((0, Kind.BACKWARD, 8, 13))
    assert [(s.rank, s.action.kind, s.start, s.stop) for s in run.spans] == expected
    assert run.makespan == 13 and run.busy == (6, 6) and run.idle == (7, 7)
    assert timeline("1f1b", 1, 1, 4, latency=9.0).bubble == 0


def test_times_may_differ_between_stages():
    per_stage = [Times(1, 1, 1), Times(2, 2, 2)]
    run = timeline("1f1b", 2, 1, 3, lambda action: per_stage[action.stage].of(action))
    assert run.busy == (9, 18)


def test_measured_spans_need_not_start_at_zero():
    spans = [Span(0, Action(Kind.FORWARD, 0, 0), 10, 11), Span(0, Action(Kind.BACKWARD, 0, 0), 12, 14)]
    run = Timeline(1, tuple(reversed(spans)))
    assert run.makespan == 4 and run.bubble == 0.25 and run.peak_activations() == (1,)
