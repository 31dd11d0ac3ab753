"""The length of a run: its last iteration and samples, and where these ranks cannot share a ramp-up's next batch."""

from __future__ import annotations

from dataclasses import dataclass

from megazero.config import RunConfig
from megazero.config.options.data_stages import DataStage
from megazero.config.schedule.batch_sizes import BatchSizes
from megazero.train.state.progress import Progress

# What divides a batch that the ranks can share.
RULE = "micro-batch size x data-parallel size, and x pipeline ranks with the interleaved schedule"


@dataclass(frozen=True)
class RunLength:
    """How long a run is: its last iteration, the samples consumed by then, and the sizes of the batches up to there.

    by_samples: the length was given in samples, so positions of the run count samples instead of iterations.
    stages: those of training, with their lengths in tokens.
    halt: the iteration after which the ramp-up reaches a batch that these ranks cannot share, and why; or None.
    """

    batch_sizes: BatchSizes
    last_iteration: int
    samples: int
    by_samples: bool
    stages: tuple[DataStage, ...]
    halt: tuple[int, str] | None = None

    def tokens_left(self, consumed: int) -> int:
        """Return the tokens of the samples that are to be consumed after so many."""
        ends = (min(stage.end or self.samples, self.samples) for stage in self.stages)
        return sum(
            max(0, end - max(stage.begin, consumed)) * stage.seq_length
            for end, stage in zip(ends, self.stages, strict=True)
        )

    def position(self, progress: Progress) -> int:
        """Return the iterations done or, where the length is in samples, the samples consumed."""
        return progress.consumed_samples if self.by_samples else progress.iteration

    def scheduled(self, progress: Progress) -> int:
        """Return the position in the learning rate's schedule, which does not count iterations that are left out."""
        left_out = sum(
            each.end - each.begin if self.by_samples else each.last - each.first + 1
            for each in progress.left_out
        )
        return self.position(progress) - left_out


def run_length(config: RunConfig, data_parallel: int, begin: Progress) -> RunLength:
    """Return the length of a run on ``data_parallel`` ranks that begins at ``begin``.

    --train-iters counts iterations of any batch size. --train-samples ends before the batch that would exceed it.
    Raises ValueError if these ranks cannot share the first batch, if the samples do not fill it, or if a stage ends
    within a batch. The run stops before a later batch that they cannot share, and can go on with other ranks: only
    the batch in use must divide.
    """
    training, sizes = config.training, BatchSizes.of(config, data_parallel)
    wanted, done = training.train_samples, begin.iteration
    if wanted is None:
        last = config.lr_lengths.total
    else:
        last = done + sizes.iterations_within(wanted, begin.consumed_samples)
    if last == 0:
        raise ValueError(
            f"--train-samples {wanted} does not fill the first global batch; nearest: {sizes.batch_size(0)}"
        )
    samples = sizes.consumed_after(max(0, last - done), begin.consumed_samples)
    if wanted is not None and config.outer.outer_meet:  # of all replicas, whatever the batch of each
        samples = wanted
    if faults := list(sizes.uneven_stages(config, begin.consumed_samples, samples)):
        raise ValueError("; ".join(faults))
    unit = sizes.quantum * config.micro_batch_multiple
    uneven, halt = sizes.first_uneven(unit, begin.consumed_samples), None
    if uneven and done + uneven[0] < last:
        flag = config.batch.resized_by or "--data-stages"
        why = f"{flag} comes to a batch of {uneven[1]}, which is not a multiple of {unit} ({RULE})"
        if uneven[0] == 0:
            raise ValueError(f"{why}; take a number of ranks or a --micro-batch-size for which it is")
        halt = done + uneven[0], f"{why}; go on with other ranks or another --micro-batch-size"
    return RunLength(sizes, last, samples, wanted is not None, config.training_stages, halt)
