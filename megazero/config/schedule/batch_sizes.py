"""The global batch size is a pure function of the samples consumed: steps (--step-batch-size-schedule,
--rampup-batch-size, which is short for equal ones, and what --data-stages says).

The samples consumed before an iteration decide its batch. Megatron's ramp-up goes from `start` to `target` in steps
of `increment`, spread evenly over the first samples. It computes the step as int(consumed / (samples / steps)) in
floating point; here it is consumed * steps // samples in integers. The two are the same except where a float
quotient that should be whole falls just short of it.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from megazero.config.nearest import around, common_divisors
from megazero.config.options.fields import show
from megazero.config.run import RunConfig

Steps = tuple[tuple[int, int], ...]  # (samples consumed, global batch from there on), from 0 consumed samples
_THOUSANDS = {"K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}


def batch_steps(
    schedule: Sequence[str] | None, ramp: Sequence[int] | None, target: int, seq_length: int
) -> Steps:
    """Return the steps that the values of --step-batch-size-schedule or --rampup-batch-size mean, or the one of the
    global batch ``target``.

    Raises ValueError, with the nearest legal choice.
    """
    if schedule and ramp:
        raise ValueError(
            "--step-batch-size-schedule and --rampup-batch-size exclude each other; leave one out"
        )
    if schedule:
        return scheduled_steps(schedule, seq_length)
    return _ramp_steps(ramp, target) if ramp is not None else ((0, target),)


def scheduled_steps(words: Sequence[str], seq_length: int) -> Steps:
    """Return the steps of words such as 200B:768, from 200e9 tokens on 768 samples, in Megatron's order and rounding:
    thresholds ascend, and are whole samples of ``seq_length`` tokens. Raises ValueError.
    """
    flag, steps = "--step-batch-size-schedule", list[tuple[int, int]]()
    for word in " ".join(words).replace(",", " ").split():
        try:
            tokens, size = map(_count, word.split(":"))
        except (ValueError, OverflowError):
            raise ValueError(f"{flag} {word} must be TOKENS:SAMPLES, such as 200B:768") from None
        if size < 1:
            raise ValueError(
                f"{flag} {word} must have at least 1 sample; nearest: {word.partition(':')[0]}:1"
            )
        steps.append((tokens // seq_length, size))
    steps.sort(key=lambda step: step[0])
    if not steps or steps[0][0]:
        raise ValueError(
            f"{flag} {' '.join(words)} has no first batch; nearest: add 0:{steps[0][1] if steps else 1}"
        )
    for (one, _), (other, _) in pairwise(steps):
        if one == other:
            raise ValueError(
                f"{flag} {' '.join(words)} says two sizes after {one} samples of {seq_length} tokens; leave one out"
            )
    return tuple(steps)


def _count(text: str) -> int:
    """Return the number of a word such as 1.5B. Raises ValueError or OverflowError."""
    scale = _THOUSANDS.get(text[-1:].upper(), 1)
    return int(float(text[:-1] if scale > 1 else text) * scale)


def _ramp_steps(ramp: Sequence[int], target: int) -> Steps:
    if len(ramp) != 3 or min(ramp) < 1:
        raise ValueError(
            f"--rampup-batch-size {show(tuple(ramp))} must be START INCREMENT SAMPLES, three numbers of at least 1"
        )
    start, increment, samples = ramp
    if start > target:
        raise ValueError(
            f"--rampup-batch-size starts at {start}, above --global-batch-size {target}; nearest: {target}"
        )
    if (target - start) % increment:
        raise ValueError(
            f"--rampup-batch-size from {start} in steps of {increment} does not reach --global-batch-size {target}; "
            f"nearest steps: {around(common_divisors(target - start), increment)}"
        )
    count = (target - start) // increment
    return ((0, start), *((-(-i * samples // count), start + i * increment) for i in range(1, count + 1)))


@dataclass(frozen=True)
class BatchSizes:
    """The global batch, in sequences, over the course of a run. It is the same whatever the layout."""

    steps: Steps
    micro_batch: int
    data_parallel: int

    @classmethod
    def of(cls, config: RunConfig, data_parallel: int) -> BatchSizes:
        """Return the sizes of a configuration on ``data_parallel`` ranks. Raises ValueError: ``batch_steps``."""
        batch, target = config.batch, config.batch.samples_per_step(data_parallel)
        stages, schedule, ramp = (
            config.training_stages,
            batch.step_batch_size_schedule,
            batch.rampup_batch_size,
        )
        if schedule and len({stage.seq_length for stage in stages}) > 1:
            raise ValueError(
                "--step-batch-size-schedule counts tokens of samples of one length, and --data-stages has several; "
                "nearest: global-batch-size in --data-stages"
            )
        steps = batch_steps(schedule, ramp, target, config.model.seq_length)
        if any(stage.global_batch_size for stage in stages):
            if batch.resized_by:
                raise ValueError(
                    f"{batch.resized_by} and global-batch-size in --data-stages exclude each other; leave one out"
                )
            steps = tuple((stage.begin, stage.global_batch_size or target) for stage in stages)
        return cls(steps, batch.micro_batch_size, data_parallel)

    @property
    def quantum(self) -> int:
        """The samples of one micro-batch on every data-parallel rank."""
        return self.micro_batch * self.data_parallel

    def batch_size(self, consumed: int) -> int:
        """Return the global batch of the iteration that begins after `consumed` samples."""
        return self.steps[bisect_right(self.steps, consumed, key=lambda step: step[0]) - 1][1]

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
            if count is None or fit < count:
                break
        return iterations

    def reaching(self, samples: int, begin: int = 0) -> int:
        """Return the samples consumed by the first iteration after ``begin`` that reaches ``samples``."""
        return self.consumed_after(self.iterations_within(samples - 1, begin) + 1, begin)

    def uneven_stages(self, config: RunConfig, begin: int, end: int) -> Iterator[str]:
        """Yield an error for each stage that does not end with a global batch, or begins at or after the run's end.

        begin, end: the samples that are consumed, and that will be. Replicas' shares of them end anywhere.
        """
        for stage in config.training_stages:
            if stage.begin >= max(end, 1):
                yield f"--data-stages: one begins at sample {stage.begin}, and the run ends at {end}: leave it out"
            if (
                stage.end is not None
                and config.outer.outer_meet is None
                and begin < stage.end < end
                and self.reaching(stage.end, begin) != stage.end
            ):
                before = self.consumed_after(self.iterations_within(stage.end, begin), begin)
                near = [n for n in (before, self.reaching(stage.end, begin)) if n > stage.begin]
                yield (
                    f"--data-stages: until {stage.end} lies within a global batch of {self.batch_size(before)}; "
                    f"nearest: {' or '.join(map(str, near))}"
                )

    def sizes_from(self, begin: int) -> list[int]:
        """Return every size that comes after `begin` consumed samples, in order; the last one stays."""
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
        for (_, batch), (end, _) in pairwise(self.steps):
            if consumed < end:
                count = -(-(end - consumed) // batch)
                consumed += count * batch
                yield batch, count
        yield self.steps[-1][1], None
