"""The sequence length is a pure function of the iteration (--rampup-seq-length).

DeepSpeed's curriculum learning by length (Li, Zhang and He, 2022): every sample is read at --seq-length, and the
tokens behind the iteration's length are dropped. An iteration takes as many samples as without it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from megazero.config.options.fields import show
from megazero.config.schedule.batch_sizes import BatchSizes


def growth_fault(ramp: tuple[int, ...]) -> str:
    """Return what is wrong with the words of --rampup-seq-length, or ''."""
    if len(ramp) != 4 or min(ramp) < 1:
        said = show(ramp)
        return f"--rampup-seq-length {said} must be START END MULTIPLE ITERATIONS, four numbers of at least 1"
    if not ramp[2] <= ramp[0] <= ramp[1]:
        return (
            f"--rampup-seq-length {show(ramp)} must have MULTIPLE <= START <= END: the first length is START "
            "rounded down to a multiple"
        )
    return ""


@dataclass(frozen=True)
class SequenceLengths:
    """The tokens of a sample over the course of a run. It is the same whatever the layout.

    full: --seq-length, which evaluations have throughout. ramp: (start, end, multiple, iterations), or none. It
    trusts its values: ``growth_fault`` says which are legal.
    """

    full: int
    ramp: tuple[int, ...] | None = None

    @property
    def settled(self) -> int:
        """Return the iteration from which on the length stays as it is."""
        if not self.ramp or self.ramp[0] == self.ramp[1]:
            return 1
        start, end, multiple, iterations = self.ramp
        # Where END is no multiple, the length comes to it from the multiple above, which is later than ITERATIONS.
        above = -(-end // multiple) * multiple
        first = math.ceil(iterations * ((above - start) / (end - start)))
        return first if self.at(first) >= min(end, self.full) else first + 1  # of rounding

    def at(self, iteration: int) -> int:
        """Return the tokens of each sample in an iteration, counted from 1."""
        if not self.ramp:
            return self.full
        start, end, multiple, iterations = self.ramp
        wanted = math.floor(iteration / iterations * (end - start) + start)
        return min(wanted - wanted % multiple, end, self.full)

    def samples_reaching(self, tokens: int, sizes: BatchSizes) -> int:
        """Return the samples consumed by the first iteration, from the beginning, that reaches ``tokens``."""
        iteration = samples = done = 0
        while done < tokens and iteration < self.settled:
            iteration, batch = iteration + 1, sizes.batch_size(samples)
            samples, done = samples + batch, done + batch * self.at(iteration)
        if done >= tokens:
            return samples
        return sizes.reaching(samples - (done - tokens) // self.at(self.settled), samples)
