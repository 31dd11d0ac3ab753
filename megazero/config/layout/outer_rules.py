"""Rules between the options of outer steps, and notes on what such steps leave out."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress

from megazero.config.layout.outer import LOCAL, local_replicas, meeting_point
from megazero.config.run import RunConfig, World
from megazero.mesh.grid import nearest_multiple


def meets(config: RunConfig) -> Iterator[str]:
    """Report what replicas cannot meet by, and a delay that is too long."""
    outer, training = config.outer, config.training
    if outer.outer_meet is None:
        return
    replicas = local_replicas(outer)
    if replicas is None:
        try:
            meeting_point(outer)
        except ValueError as error:
            yield str(error)
    elif replicas < 2 or outer.outer_name or outer.outer_secret_file:
        yield (
            f"--outer-meet {outer.outer_meet} starts at least 2 replicas, which have names of their own and no "
            f"secret; nearest: {LOCAL}:{max(replicas, 2)} without --outer-name and --outer-secret-file"
        )
    if training.train_samples is None and training.train_iters:
        yield (
            f"--train-iters {training.train_iters} with --outer-meet: replicas come and go, so a run is as long as "
            "the samples of all; nearest: --train-samples, or one --global-batch-size, by which these are samples"
        )
    if config.skipping.skip_train_iteration_range:
        yield "--skip-train-iteration-range with --outer-meet: replicas share samples, not iterations; leave it out"
    with suppress(ValueError):  # stages that are none are reported elsewhere
        if len(lengths := {stage.seq_length for stage in config.training_stages}) > 1:
            yield (
                f"--data-stages with seq-length {' and '.join(map(str, sorted(lengths)))} and --outer-meet: a step's "
                "samples have one length, and a replica's lie on both sides of a stage's end; nearest: one seq-length"
            )
    if outer.outer_delay >= outer.outer_interval:
        yield (
            f"--outer-delay {outer.outer_delay}: differences arrive before the next ones leave, --outer-interval "
            f"{outer.outer_interval} steps later; nearest: {outer.outer_interval - 1}"
        )


def shares_of_ranks(config: RunConfig, world: World) -> Iterator[str]:
    """Report data-parallel ranks by which the largest replica's do not divide, and experts that these would share."""
    most, d, ep = (
        config.outer.outer_ranks,
        config.shard_ranks(world),
        config.parallel.expert_model_parallel_size,
    )
    if most is not None and most % d:
        yield (
            f"--outer-ranks {most} is not a multiple of this replica's {d} data-parallel ranks; nearest: "
            f"{nearest_multiple(most, d)}"
        )
    elif most not in (None, d) and ep > 1:
        yield (
            f"--outer-ranks {most} with --expert-model-parallel-size {ep}: replicas whose ranks share experts have "
            f"as many data-parallel ranks; nearest: {d}"
        )


def outer_notes(config: RunConfig) -> list[str]:
    """Return a note on what replicas learn meanwhile."""
    delay = config.outer.outer_delay
    said = "what replicas learn while differences are on their way is dropped when they arrive"
    return [f"--outer-delay {delay}: {said}"] if config.outer.outer_meet and delay else []
