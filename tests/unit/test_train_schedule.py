"""Learning rate and batch-size schedules against megatron-core's own objects."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megazero.config.layout.batch_sizes import BatchSizeRampup
from megazero.train.schedule.learning_rate import LearningRate
from tests.oracle import megatron_batch_sizes

# Megatron's: a style that megazero alone has needs a test by hand.
STYLES = ("constant", "linear", "cosine", "inverse-square-root")
WSD_STYLES = ("exponential", "linear", "cosine", "minus_sqrt")


@pytest.mark.parametrize(
    ("style", "wsd_style"), [(s, "exponential") for s in STYLES] + [("WSD", w) for w in WSD_STYLES]
)
@pytest.mark.parametrize(("warmup", "init"), [(0, 0.0), (1, 0.0), (37, 1e-5), (4.22, 0.0)])
@pytest.mark.parametrize("minimum", [0.0, 3e-5])
def test_learning_rate_equals_megatron(
    style: str, wsd_style: str, warmup: float, init: float, minimum: float
) -> None:
    module = pytest.importorskip("megatron.core.optimizer_param_scheduler")
    decay, wsd_decay = 211, 60
    optimizer = SimpleNamespace(param_groups=[{}])
    theirs = module.OptimizerParamScheduler(
        optimizer, init, 6e-4, minimum, warmup, decay, style, 0.1, 0.1, 0, "constant",
        wsd_decay_steps=wsd_decay, lr_wsd_decay_style=wsd_style,
    )  # fmt: skip
    ours = LearningRate(
        peak=6e-4, minimum=minimum, warmup=warmup, warmup_init=init, decay=decay, style=style,
        wsd_decay=wsd_decay, wsd_style=wsd_style,
    )  # fmt: skip
    for step in range(decay + 40):
        assert ours(step) == optimizer.param_groups[0]["lr"], step
        theirs.step(1)


def test_learning_rate_by_hand() -> None:
    rate = LearningRate(peak=1.0, minimum=0.1, warmup=10, decay=110, style="cosine")
    assert rate(0) == 0.0
    assert rate(5) == 0.5
    assert rate(10) == 1.0
    assert rate(60) == pytest.approx(0.55)
    assert rate(110) == pytest.approx(0.1)
    assert rate(10_000) == 0.1
    flat = LearningRate(peak=1.0, minimum=0.0, decay=100, style="WSD", wsd_decay=20, wsd_style="minus_sqrt")
    assert [flat(c) for c in (0, 80, 85, 100, 101)] == [1.0, 1.0, 0.5, 0.0, 0.0]


RAMPS = [(8, 8, 100, 32, 2, 4), (192, 16, 9765, 2048, 2, 8), (4, 4, 37, 16, 1, 4), (2, 2, 1000, 4, 1, 1)]


@pytest.mark.parametrize("ramp", RAMPS)
def test_batch_size_equals_megatron(ramp: tuple[int, ...]) -> None:
    ours = BatchSizeRampup(*ramp)
    theirs = megatron_batch_sizes(
        ours.target, ours.micro_batch, ours.data_parallel, (ours.start, ours.increment, ours.ramp_samples)
    )
    consumed = 0
    for iteration in range(400):
        theirs.update(consumed, consistency_check=True)
        assert ours.batch_size(consumed) == theirs.get_current_global_batch_size()
        assert ours.micro_batches(consumed) == theirs.get()
        assert ours.consumed_after(iteration) == consumed
        consumed += theirs.get_current_global_batch_size()


@settings(max_examples=150, deadline=None)
@given(
    start=st.integers(1, 12),
    increment=st.integers(1, 9),
    steps=st.integers(0, 7),
    ramp=st.integers(0, 400),
    begin=st.integers(0, 500),
    limit=st.integers(0, 900),
)
def test_batch_schedule_equals_walking_it(
    start: int, increment: int, steps: int, ramp: int, begin: int, limit: int
) -> None:
    """Closed forms against iterating one step at a time, from any position (as after a resume)."""
    schedule = BatchSizeRampup(start, increment, ramp, start + steps * increment, 1, 1)
    positions = [begin]
    while positions[-1] <= limit:
        positions.append(positions[-1] + schedule.batch_size(positions[-1]))
    assert [schedule.consumed_after(i, begin) for i in range(len(positions))] == positions
    assert schedule.iterations_within(limit, begin) == max(0, len(positions) - 2)
    for earlier, later in itertools.pairwise(positions):
        assert schedule.batch_size(earlier) <= schedule.batch_size(later) <= schedule.target


def test_batch_schedule_length_and_layout() -> None:
    """The run does not depend on the data-parallel size, and its length is that of train_samples."""
    wide = BatchSizeRampup(16, 16, 256, 64, 2, 8)
    narrow = BatchSizeRampup(16, 16, 256, 64, 2, 1)
    assert [wide.consumed_after(i) for i in range(50)] == [narrow.consumed_after(i) for i in range(50)]
    assert narrow.micro_batches(0) == 8 * wide.micro_batches(0)
    constant = BatchSizeRampup(32, 0, 0, 32, 2, 4)
    assert constant.iterations_within(1000) == 31 and constant.micro_batches(12345) == 4
