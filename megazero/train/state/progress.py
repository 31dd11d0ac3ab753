"""How far training has come, and the iterations that are left out: consumed without an update."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Self

from megazero.config.options.skipping import joined, range_around
from megazero.config.schedule.batch_sizes import BatchSizes
from megazero.train.schedule.loss_scaling import SKIPPED

NOT_RECORDED = "not recorded"  # in checkpoints of before the base model was kept


@dataclass(frozen=True)
class LeftOut:
    """The iterations ``first`` to ``last``, counted from 1, and their samples ``begin`` to ``end`` - 1, from 0."""

    first: int
    last: int
    begin: int
    end: int

    def __str__(self) -> str:
        return f"iterations {self.first} to {self.last} (samples {self.begin} to {self.end - 1})"

    def as_metrics(self) -> dict[str, Any]:
        return {"iterations": [self.first, self.last], "samples": [self.begin, self.end - 1]}


@dataclass(frozen=True)
class Progress:
    """How far training has come.

    run_id: the run's id at an outside logger, the same over restarts. notes: for the user, about the start.
    ordered_for: for each part of the data ("train", "valid", "test") the number of samples its order was made for, or
    0 if the order is the same for any number. It stays the same over restarts, so a longer run keeps the order.
    evaluation_pending: the run stopped before it could evaluate at this iteration. losses: the last ones, "lm_loss"
    of training, "eval_lm_loss" of an evaluation, and other results by their names, those of tasks as TASK/METRIC.
    left_out: iterations without an update. checkpoint: the path of the last one. tokens: those it was trained on,
    without those of iterations left out. base: the model whose weights the run began with, or "" for random ones.
    license: that model's, as model cards have it. source: where the source of samples stands (data/source.py:
    SampleSource.state); None: it is the number of consumed samples. meeting: where this replica stands among others
    (train/replicas.py: Standings), whose samples ``consumed_samples`` counts, too.
    """

    iteration: int = 0
    consumed_samples: int = 0
    run_id: str = ""
    notes: tuple[str, ...] = ()
    ordered_for: Mapping[str, int] = field(default_factory=dict)
    evaluation_pending: bool = False
    losses: Mapping[str, float] = field(default_factory=dict)
    left_out: tuple[LeftOut, ...] = ()
    checkpoint: str = ""
    tokens: int = 0
    base: str = ""
    license: Mapping[str, str] = field(default_factory=dict)
    source: Any = None
    meeting: Mapping[str, Any] | None = None

    def state(self) -> dict[str, Any]:
        """Return the state for a checkpoint, in JSON types: all but the notes and the checkpoint's own path."""
        return {
            "iteration": self.iteration,
            "consumed_samples": self.consumed_samples,
            **({} if self.source in (None, self.consumed_samples) else {"source": self.source}),
            **({} if self.meeting is None else {"meeting": self.meeting}),
            "run_id": self.run_id,
            "ordered_for": dict(self.ordered_for),
            "owes_evaluation": self.evaluation_pending,
            "losses": dict(self.losses),
            "left_out": [asdict(each) for each in self.left_out],
            "tokens": self.tokens,
            "base": self.base,
            "license": dict(self.license),
        }

    @classmethod
    def of_state(cls, state: Mapping[str, Any], checkpoint: str, seq_length: int) -> Self:
        """Return the progress that a checkpoint's ``state`` holds. Older checkpoints lack some of it.

        checkpoint: its path. seq_length: of its run. A checkpoint that does not count tokens was trained on all
        tokens of each sample.
        """
        left_out = tuple(
            LeftOut(*(each[name] for name in ("first", "last", "begin", "end")))
            for each in state.get("left_out", ())
        )
        trained = state["consumed_samples"] - sum(each.end - each.begin for each in left_out)
        return cls(
            iteration=state["iteration"],
            consumed_samples=state["consumed_samples"],
            source=state.get("source"),
            meeting=state.get("meeting"),
            run_id=state["run_id"],
            ordered_for=state.get("ordered_for", {}),
            evaluation_pending=state.get("owes_evaluation", False),
            losses=state.get("losses", {}),
            left_out=left_out,
            checkpoint=checkpoint,
            tokens=state.get("tokens", trained * seq_length),
            base=state.get("base", state.get("imported", NOT_RECORDED)),
            license=state.get("license", {}),
        )


def impossible_numbers(state: Mapping[str, Any], step: int) -> Iterator[str]:
    """Yield each number in the ``state`` of a checkpoint of iteration ``step`` that no run has written there."""
    scaling, left_out = state.get("loss_scaling", {}), state.get("left_out", ())
    counts = {name: state.get(name, 0) for name in ("consumed_samples", "tokens")}
    counts |= {f"loss_scaling {name}": scaling.get(name, 0) for name in ("growth_tracker", *SKIPPED)}
    counts["optimizer step"] = state.get("optimizer", {}).get("step", 0)
    counts |= {f"left_out {name}": value for each in left_out for name, value in each.items()}
    for name, value in counts.items():
        if not isinstance(value, int | float) or value < 0 or value % 1:
            yield f"{name} is {value!r}, and a count is a whole number of at least 0"
    if not 0 < (scale := scaling.get("scale", 1.0)) < math.inf:
        yield f"the loss scale is {scale!r}, and must be above 0 and finite"
    if state["iteration"] != step:
        yield f"iteration is {state['iteration']!r}, and the checkpoint is of iteration {step}"


def leave_out(progress: Progress, last: int, sizes: BatchSizes) -> Progress:
    """Return the progress after the iterations up to ``last`` are left out."""
    begin, count = progress.consumed_samples, last - progress.iteration
    out = LeftOut(progress.iteration + 1, last, begin, sizes.consumed_after(count, begin))
    return replace(progress, iteration=last, consumed_samples=out.end, left_out=(*progress.left_out, out))


def next_to_leave_out(
    ranges: tuple[tuple[int, int], ...], progress: Progress, last_iteration: int
) -> int | None:
    """Return the last iteration to leave out if the next one is in one of ``ranges``, else None."""
    found = range_around(ranges, progress.iteration + 1)
    return None if found is None else min(found[1], last_iteration)


def without_effect(
    ranges: tuple[tuple[int, int], ...], progress: Progress, last_iteration: int
) -> Iterator[str]:
    """Yield the ranges with iterations that the run cannot leave out any more, and has not left out."""
    done = joined((each.first, each.last) for each in progress.left_out)
    for first, last in ranges:
        why, trained = [], min(last, progress.iteration)
        around = range_around(done, first)
        if first <= trained and (around is None or around[1] < trained):
            why.append(
                f"this run begins after iteration {progress.iteration}; resume from a checkpoint before them"
            )
        if last > last_iteration:
            why.append(f"it ends with iteration {last_iteration}")
        if why:
            yield f"--skip-train-iteration-range {first}-{last} has no or not its whole effect: {'; '.join(why)}"


def just_before(progress: Progress, iteration: int) -> dict[str, Any]:
    """Return the metrics of ``iteration`` about iterations left out right before it, or none."""
    found = list(_just_before(progress, iteration))[::-1]
    return {"left_out": [out.as_metrics() for out in found]} if found else {}


def _just_before(progress: Progress, iteration: int) -> Iterator[LeftOut]:
    for out in reversed(progress.left_out):
        if out.last != iteration - 1:
            return
        yield out
        iteration = out.first
