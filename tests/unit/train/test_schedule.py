"""Learning rate and batch-size schedules against megatron-core's own objects."""

from __future__ import annotations

import itertools
import random
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megazero.config import make_config
from megazero.config.schedule.batch_sizes import BatchSizes, batch_steps, scheduled_steps
from megazero.train.schedule.learning_rate import LearningRate
from tests.oracle import megatron_batch_sizes

# Megatron's: a style that megazero alone has needs a test by hand.
STYLES = ("constant", "linear", "cosine", "inverse-square-root")
WSD_STYLES = ("exponential", "linear", "cosine", "minus_sqrt")
BASE = {
    **dict.fromkeys(("num_layers", "num_attention_heads", "micro_batch_size"), 1),
    **dict.fromkeys(("hidden_size", "seq_length", "vocab_size"), 8),
    "mock_data": True,
}


FLAG_SETS, PLACES = 1000, 12


def flag_set(draw: random.Random) -> dict[str, Any]:
    """The schedule's options of a run, by name, as Megatron takes them: anything that it does not assert against."""
    unit, total = draw.choice(("iters", "samples")), draw.randint(3, 300)
    values: dict[str, Any] = {
        f"train_{unit}": total,
        "global_batch_size": draw.choice((1, 3, 8, 512)),
        "lr": 6e-4,
    }
    decay = draw.choice((total, total, draw.randint(2, 400)))
    if decay != total:
        values[f"lr_decay_{unit}"] = decay
    kind = draw.choice(("none", "none", "whole", "fraction"))
    values |= {
        "whole": {f"lr_warmup_{unit}": draw.randrange(decay)},
        "fraction": {"lr_warmup_fraction": 0.0137},
    }.get(kind, {})
    values |= {"min_lr": draw.choice((0.0, 3e-5)), "lr_warmup_init": draw.choice((0.0, 1e-5))}
    values["lr_decay_style"] = draw.choice((*STYLES, "WSD"))
    if values["lr_decay_style"] == "WSD":  # longer than the decay, too
        values |= {
            f"lr_wsd_decay_{unit}": draw.randint(1, decay + 20),
            "lr_wsd_decay_style": draw.choice(WSD_STYLES),
        }
    return values


def megatron_scheduler(said: Mapping[str, Any], group: dict[str, float]) -> Any:
    """Megatron's scheduler of these options, as its training script makes it (get_optimizer_param_scheduler)."""
    module = pytest.importorskip("megatron.core.optimizer_param_scheduler")
    unit = "iters" if "train_iters" in said else "samples"
    batch = said["global_batch_size"] if unit == "iters" else 1
    decay = said.get(f"lr_decay_{unit}", said[f"train_{unit}"]) * batch
    warmup = said.get(f"lr_warmup_{unit}", 0) * batch
    if "lr_warmup_fraction" in said:
        warmup = said["lr_warmup_fraction"] * decay
    wsd = said.get(f"lr_wsd_decay_{unit}")
    return module.OptimizerParamScheduler(
        SimpleNamespace(param_groups=[group]), said["lr_warmup_init"], said["lr"], said["min_lr"], warmup, decay,
        said["lr_decay_style"], 0.01, 0.01, said[f"train_{unit}"] * batch, "constant",
        wsd_decay_steps=None if wsd is None else wsd * batch, lr_wsd_decay_style=said.get("lr_wsd_decay_style"),
    )  # fmt: skip


@pytest.mark.long
def test_schedules_equal_megatrons() -> None:
    """Bit for bit, of seeded flag sets, in iterations and in samples, with warm-ups of 0, past the end."""
    for seed in range(FLAG_SETS):
        draw, group = random.Random(seed), dict[str, float]()
        said = flag_set(draw)
        config = make_config({**BASE, **said})
        rate = LearningRate.of(config)
        theirs = megatron_scheduler(said, group)
        batch, last = config.lr_samples.batch, config.lr_lengths.total + 40
        places = {0, 1, 2, last, *(draw.randrange(last) for _ in range(PLACES))}
        for place in sorted(places):
            theirs.step(place * batch - theirs.num_steps)
            assert rate(place) == group["lr"], (seed, said, place)


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
    start, increment, samples, target, micro, ranks = ramp
    ours = BatchSizes(batch_steps(None, (start, increment, samples), target, 1), micro, ranks)
    same_sizes(ours, megatron_batch_sizes(target, micro, ranks, (start, increment, samples)))


@pytest.mark.parametrize(
    "words", ["0:8 40K:16 0.1M:32 1.5M:64", "0:64,50000:8,90000:96", "100K:24 0:8", "0:16 96:8 3071:32"]
)
def test_scheduled_batch_sizes_equal_megatron(words: str) -> None:
    core = pytest.importorskip("megatron.core.num_microbatches_calculator")
    if not hasattr(core, "StepBatchsizeNumMicroBatchesCalculator"):
        pytest.skip("this release of megatron-core has no steps")
    theirs = core.StepBatchsizeNumMicroBatchesCalculator(2, 4, False, 1, words, 32)
    for said in (words.split(), (words,)):  # a shell with and without quotes
        same_sizes(BatchSizes(scheduled_steps(said, 32), 2, 4), theirs)


def same_sizes(ours: BatchSizes, theirs: Any) -> None:
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
    grows=st.booleans(),
)
def test_batch_schedule_equals_walking_it(
    start: int, increment: int, steps: int, ramp: int, begin: int, limit: int, grows: bool
) -> None:
    """Closed forms against iterating one step at a time, from any position (as after a resume)."""
    ends = [-(-i * ramp // steps) for i in range(1, steps + 1)]
    sizes = [
        start + order * increment for order in (range(steps + 1) if grows else reversed(range(steps + 1)))
    ]
    schedule = BatchSizes(tuple(zip([0, *ends], sizes, strict=True)), 1, 1)
    positions = [begin]
    while positions[-1] <= limit:
        positions.append(positions[-1] + schedule.batch_size(positions[-1]))
    assert [schedule.consumed_after(i, begin) for i in range(len(positions))] == positions
    assert schedule.iterations_within(limit, begin) == max(0, len(positions) - 2)
    for one, other in itertools.pairwise(map(schedule.batch_size, positions)):
        assert one == other or (one < other) == grows
