"""Rules between the options of outer steps, and notes on what such steps leave out."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from megazero.config.layout.outer import last_arrival
from megazero.config.run import RunConfig
from megazero.config.schedule.batch_sizes import BatchSizes


def late(config: RunConfig) -> Iterator[str]:
    """Report a delay that is too long."""
    outer = config.outer
    if outer.outer_interval and outer.outer_delay >= outer.outer_interval:
        yield (
            f"--outer-delay {outer.outer_delay}: differences arrive before the next ones leave, --outer-interval "
            f"{outer.outer_interval} steps later; nearest: {outer.outer_interval - 1}"
        )


def outer_notes(config: RunConfig) -> list[str]:
    """Return notes on what outer steps leave out: steps at the run's end, and what replicas learn meanwhile."""
    outer = config.outer
    notes = _last_meeting(config)
    if outer.outer_interval and outer.outer_delay:
        notes.append(
            f"--outer-delay {outer.outer_delay}: what replicas learn while differences are on their way is dropped "
            "when they arrive"
        )
    return notes


def _last_meeting(config: RunConfig) -> list[str]:
    """Return a note if outer replicas do not meet at the run's end: the anchor then lacks the last steps."""
    training, outer = config.training, config.outer
    steps, said = training.train_iters, f"--train-iters {training.train_iters}"
    length: Callable[[int], int] = int
    if outer.outer_interval and training.train_samples is not None and config.batch.global_batch_size:
        sizes = BatchSizes.of(config, 1)
        steps, length = sizes.iterations_within(training.train_samples), sizes.consumed_after
        said = f"--train-samples {training.train_samples}, {steps} steps"
    if not outer.outer_interval or not steps:
        return []
    last = last_arrival(steps, outer)
    if last == steps:
        return []
    following = last_arrival(steps + outer.outer_interval, outer)
    nearest = " or ".join(str(length(at)) for at in (last, following) if at)
    return [
        f"{said}: outer replicas meet last at {last}, and that anchor is evaluated and exported at the end; nearest: "
        f"{nearest}"
    ]
