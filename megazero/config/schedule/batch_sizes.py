"""The global batch size is a pure function of the samples consumed (--rampup-batch-size).

Megatron's rule: the size goes from `start` to `target` in steps of `increment`, and the steps are spread evenly over
the first `ramp_samples` samples. The samples consumed before an iteration decide its batch. Megatron computes the
step as int(consumed / (ramp_samples / steps)) in floating point; here it is consumed * steps // ramp_samples in
integers. The two are the same except where a float quotient that should be whole falls just short of it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from megazero.config.nearest import around, common_divisors
from megazero.config.options.fields import show
from megazero.config.run import RunConfig


def ramp_fault(ramp: tuple[int, ...], target: int) -> str:
    """Return what is wrong with --rampup-batch-size on the way to the global batch ``target``, or ''."""
    if len(ramp) != 3 or min(ramp) < 1:
        return (
            f"--rampup-batch-size {show(ramp)} must be START INCREMENT SAMPLES, three numbers of at least 1"
        )
    start, increment, _ = ramp
    if start > target:
        return f"--rampup-batch-size starts at {start}, above --global-batch-size {target}; nearest: {target}"
    if (target - start) % increment:
        return (
            f"--rampup-batch-size from {start} in steps of {increment} does not reach --global-batch-size {target}; "
            f"nearest steps: {around(common_divisors(target - start), increment)}"
        )
    return ""


@dataclass(frozen=True)
class BatchSizeRampup:
    """The global batch, in sequences, over the course of a run. It is the same whatever the layout.

    start, increment, target: these make the global batch sizes in samples. If start == target, there is no ramp-up.
    The class trusts its sizes: ``ramp_fault`` says which are legal.
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
        batch, target = config.batch, config.batch.samples_per_step(data_parallel)
        start, increment, samples = batch.rampup_batch_size or (target, 0, 0)
        return cls(start, increment, samples, target, batch.micro_batch_size, data_parallel)

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

    def reaching(self, samples: int, begin: int = 0) -> int:
        """Return the samples consumed by the first iteration after ``begin`` that reaches ``samples``."""
        return self.consumed_after(self.iterations_within(samples - 1, begin) + 1, begin)

    def sizes_from(self, begin: int) -> list[int]:
        """Return every size that comes after `begin` consumed samples, in order; the last one is the target."""
        return [batch for batch, _ in self._runs(begin)]

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
