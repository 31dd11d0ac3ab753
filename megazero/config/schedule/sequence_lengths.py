"""The sequence length is a pure function of the iteration (--rampup-seq-length, --seq-length-steps).

DeepSpeed's curriculum learning by length (Li, Zhang and He, 2022): every sample is read at --seq-length, and the
tokens behind the iteration's length are dropped. An iteration takes as many samples as without it.
"""

from __future__ import annotations

import math
import operator
from dataclasses import dataclass

from megazero.config.options.fields import show
from megazero.config.options.sections import BatchConfig
from megazero.config.schedule.batch_sizes import BatchSizeRampup


def growth_fault(ramp: tuple[int, ...] | None, steps: tuple[int, ...] | None) -> str:
    """Return what is wrong with --rampup-seq-length and --seq-length-steps, or ''."""
    if ramp and steps:
        return "--rampup-seq-length and --seq-length-steps exclude each other; leave one out"
    if ramp and (len(ramp) != 4 or min(ramp) < 1):
        said = show(ramp)
        return f"--rampup-seq-length {said} must be START END MULTIPLE ITERATIONS, four numbers of at least 1"
    if ramp and not ramp[2] <= ramp[0] <= ramp[1]:
        return (
            f"--rampup-seq-length {show(ramp)} must have MULTIPLE <= START <= END: the first length is START "
            "rounded down to a multiple"
        )
    if steps and (len(steps) % 2 == 0 or min(steps) < 1 or any(map(operator.ge, steps, steps[2:]))):
        return (
            f"--seq-length-steps {show(steps)} must be LENGTH LAST_ITERATION ... LENGTH, with lengths and "
            "iterations that grow"
        )
    return ""


@dataclass(frozen=True)
class SequenceLengths:
    """The tokens of a sample over the course of a run. It is the same whatever the layout.

    full: --seq-length, which evaluations have throughout. ramp: (start, end, multiple, iterations), or none.
    root: the degree of the ramp's root; 1 is a straight line. steps: (length, last iteration of it) of each but the
    last, and the last length with no end. It trusts its values: ``growth_fault`` says which are legal.
    """

    full: int
    ramp: tuple[int, ...] = ()
    root: float = 1.0
    steps: tuple[tuple[int, float], ...] = ()

    @classmethod
    def of(cls, full: int, batch: BatchConfig) -> SequenceLengths:
        """Return the lengths of a run whose samples have ``full`` tokens."""
        words = batch.seq_length_steps or ()
        steps = tuple(zip(words[::2], (*words[1::2], math.inf), strict=True)) if words else ()
        return cls(full, batch.rampup_seq_length or (), batch.rampup_seq_length_root, steps)

    @property
    def settled(self) -> int:
        """Return the iteration from which on the length stays as it is."""
        if not self.ramp:
            return int(self.steps[-2][1]) + 1 if self.steps[1:] else 1
        start, end, multiple, iterations = self.ramp
        if start == end:
            return 1
        # Where END is no multiple, the length comes to it from the multiple above, which is later than ITERATIONS.
        above = -(-end // multiple) * multiple
        first = math.ceil(iterations * ((above - start) / (end - start)) ** self.root)
        return first if self.at(first) >= min(end, self.full) else first + 1  # of rounding

    def at(self, iteration: int) -> int:
        """Return the tokens of each sample in an iteration, counted from 1."""
        if self.steps:
            return min(next(length for length, last in self.steps if iteration <= last), self.full)
        if not self.ramp:
            return self.full
        start, end, multiple, iterations = self.ramp
        wanted = math.floor((iteration / iterations) ** (1 / self.root) * (end - start) + start)
        return min(wanted - wanted % multiple, end, self.full)

    def samples_reaching(self, tokens: int, sizes: BatchSizeRampup) -> int:
        """Return the samples consumed by the first iteration, from the beginning, that reaches ``tokens``."""
        iteration = samples = done = 0
        while done < tokens and iteration < self.settled:
            iteration, batch = iteration + 1, sizes.batch_size(samples)
            samples, done = samples + batch, done + batch * self.at(iteration)
        if done >= tokens:
            return samples
        return sizes.reaching(samples - (done - tokens) // self.at(self.settled), samples)
