"""The global batch size is a pure function of the samples consumed (--rampup-batch-size).

Megatron's rule: the size goes from `start` to `target` in steps of `increment`, and the steps are spread evenly over
the first `ramp_samples` samples. The samples consumed before an iteration decide its batch. Megatron computes the
step as int(consumed / (ramp_samples / steps)) in floating point; here it is consumed * steps // ramp_samples in
integers. The two are the same except where a float quotient that should be whole falls just short of it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from megazero.config import RunConfig

if TYPE_CHECKING:  # it needs torch, which the sizes do without
    from megazero.train.origin import Progress


# What divides a batch that the ranks can share.
RULE = "micro-batch size x data-parallel size, and x pipeline ranks with the interleaved schedule"


@dataclass(frozen=True)
class BatchSizeRampup:
    """The global batch, in sequences, over the course of a run. It is the same whatever the layout.

    start, increment, target: these make the global batch sizes in samples. If start == target, there is no ramp-up.
    The class trusts its sizes: config/rules.py says which are legal.
    """

    start: int
    increment: int
    ramp_samples: int
    target: int
    micro_batch: int
    data_parallel: int

    @classmethod
    def of(cls, config: RunConfig, data_parallel: int) -> BatchSizeRampup:
        """Return the sizes that a resolved configuration means on ``data_parallel`` ranks."""
        batch = config.batch
        assert batch.global_batch_size and batch.micro_batch_size, "unresolved configuration"
        start, increment, samples = batch.rampup_batch_size or (batch.global_batch_size, 0, 0)
        return cls(start, increment, samples, batch.global_batch_size, batch.micro_batch_size, data_parallel)

    @property
    def quantum(self) -> int:
        """The samples of one micro-batch on every data-parallel rank."""
        return self.micro_batch * self.data_parallel

    @property
    def _steps(self) -> int:
        return (self.target - self.start) // self.increment if self.start < self.target else 0

    def batch_size(self, consumed: int) -> int:
        """Return the global batch of the iteration that begins after `consumed` samples."""
        if consumed >= self.ramp_samples or not self._steps:
            return self.target
        return self.start + consumed * self._steps // self.ramp_samples * self.increment

    def micro_batches(self, consumed: int) -> int:
        """Return the number of micro-batches of that iteration on each data-parallel rank."""
        return self.batch_size(consumed) // self.quantum

    def consumed_after(self, iterations: int, begin: int = 0) -> int:
        """Return the samples consumed once `iterations` more have run, after `begin` consumed samples."""
        consumed, left = begin, iterations
        for batch, count in self._runs(begin):
            done = left if count is None else min(left, count)
            consumed, left = consumed + done * batch, left - done
            if not left:
                break
        return consumed

    def iterations_within(self, samples: int, begin: int = 0) -> int:
        """Return the most iterations that consume at most `samples` in all, after `begin` consumed samples.

        If samples = --train-samples, this is how many iterations the run still has from there. A last batch that
        would not be full is left out, in the ramp-up too (Megatron overshoots there).
        """
        iterations, consumed = 0, begin
        for batch, count in self._runs(begin):
            fit = max(samples - consumed, 0) // batch
            done = fit if count is None else min(fit, count)
            iterations, consumed = iterations + done, consumed + done * batch
            if done == fit:
                break
        return iterations

    def first_uneven(self, unit: int, begin: int) -> tuple[int, int] | None:
        """Return when, in iterations after `begin` samples, the first size comes that `unit` does not divide, and it.

        Return None if no such size comes.
        """
        done = 0
        for batch, count in self._runs(begin):
            if batch % unit:
                return done, batch
            done += count or 0
        return None

    def _runs(self, begin: int) -> Iterator[tuple[int, int | None]]:
        """Yield (batch, iterations at it) in order from `begin` samples. The last has None, because it has no end."""
        consumed = begin
        while (batch := self.batch_size(consumed)) < self.target:
            step = (batch - self.start) // self.increment
            end = -(-(step + 1) * self.ramp_samples // self._steps)  # first sample count of the next size
            count = -(-(end - consumed) // batch)
            consumed += count * batch
            yield batch, count
        yield self.target, None


@dataclass(frozen=True)
class RunLength:
    """How long a run is: its last iteration, the samples consumed by then, and the sizes of the batches up to there.

    by_samples: the length was given in samples, so positions of the run count samples instead of iterations.
    halt: the iteration after which the ramp-up reaches a batch that these ranks cannot share, and why; or None.
    """

    batch_sizes: BatchSizeRampup
    last_iteration: int
    samples: int
    by_samples: bool
    halt: tuple[int, str] | None = None

    def position(self, progress: Progress) -> int:
        """Return the iterations done or, where the length is in samples, the samples consumed."""
        return progress.consumed_samples if self.by_samples else progress.iteration

    def scheduled(self, progress: Progress) -> int:
        """Return the position in the learning rate's schedule, which waits while iterations are left out."""
        left_out = sum(
            each.end - each.begin if self.by_samples else each.last - each.first + 1
            for each in progress.left_out
        )
        return self.position(progress) - left_out


def run_length(config: RunConfig, data_parallel: int, begin: Progress) -> RunLength:
    """Return the length of a run on ``data_parallel`` ranks that begins at ``begin``.

    --train-iters counts iterations whatever their batch; --train-samples ends where the next whole batch would exceed
    it. Raises ValueError if these ranks cannot share the first batch, or if the samples do not fill it. A later one
    that they cannot share ends the run there, so that it goes on with other ranks: only the batch in use must divide.
    """
    training, sizes = config.training, BatchSizeRampup.of(config, data_parallel)
    wanted, done = training.train_samples, begin.iteration
    if wanted is None:
        last = training.train_iters or 0
    else:
        last = done + sizes.iterations_within(wanted, begin.consumed_samples)
    if last == 0:
        raise ValueError(
            f"--train-samples {wanted} does not fill the first global batch; nearest: {sizes.batch_size(0)}"
        )
    samples = sizes.consumed_after(max(0, last - done), begin.consumed_samples)
    unit = sizes.quantum * config.micro_batch_multiple
    uneven, halt = sizes.first_uneven(unit, begin.consumed_samples), None
    if uneven and done + uneven[0] < last:
        why = (
            f"--rampup-batch-size comes to a batch of {uneven[1]}, which is not a multiple of {unit} ({RULE})"
        )
        if uneven[0] == 0:
            raise ValueError(f"{why}; take a number of ranks or a --micro-batch-size for which it is")
        halt = done + uneven[0], f"{why}; go on with other ranks or another --micro-batch-size"
    return RunLength(sizes, last, samples, wanted is not None, halt)
