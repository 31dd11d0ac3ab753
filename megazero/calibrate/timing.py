"""Times rounds of one operation on all ranks at once: seconds, spread, and the processor's share."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from megazero.mesh.mesh import all_gather_flat

ROUND_S = 0.06  # about how long a round is to take
MOST_REPEATS = 200


@dataclass(frozen=True)
class Timed:
    """Seconds of one operation, a value per round. busy: seconds of a processor that a rank spent on it."""

    seconds: tuple[float, ...]
    busy: float

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    @property
    def spread(self) -> float:
        """(slowest - fastest) / median."""
        return (max(self.seconds) - min(self.seconds)) / self.median


class Clock:
    """Times operations that all ranks of the world run at once."""

    def __init__(self, device: torch.device, rounds: int, crowd: float = 1.0) -> None:
        """crowd: how many ranks share a processor of the host."""
        self.device, self.rounds, self.crowd = device, rounds, max(1.0, crowd)
        self.world = dist.get_world_size() if dist.is_initialized() else 1

    def __call__(self, operation: Callable[[], Any], slowest: bool) -> Timed:
        """Time an operation. Collective.

        slowest: the slowest rank's time counts, as for a collective, whose ranks wait for each other. Else an
        operation is a rank's own, and the mean over ranks counts. On a CPU this is processor time, times the ranks
        that share a processor, so that other programs on the host do not count.
        """
        operation()  # buffers and connections
        took = self._round(operation, 1)[0].max()
        repeats = min(MOST_REPEATS, max(1, round(ROUND_S / max(took.item(), 1e-6))))
        seconds, busy = [], []
        for _ in range(self.rounds):
            wall, processor = self._round(operation, repeats)
            own = processor * self.crowd if self.device.type == "cpu" else wall
            seconds.append((wall.max() if slowest else own.mean()).item())
            busy.append(processor.mean().item())
        return Timed(tuple(seconds), statistics.median(busy) if self.device.type == "cpu" else 0.0)

    def _round(self, operation: Callable[[], Any], repeats: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return every rank's seconds of an operation, and of its processors."""
        self.settle()
        began, spent = time.perf_counter(), time.process_time()
        for _ in range(repeats):
            operation()
        self.settle(together=False)
        own = [(time.perf_counter() - began) / repeats, (time.process_time() - spent) / repeats]
        row = torch.tensor(own, dtype=torch.float64, device=self.device)
        every = row.new_empty(self.world * 2)
        if self.world > 1:
            all_gather_flat(every, row)
        else:
            every.copy_(row)
        wall, processor = every.view(-1, 2).unbind(1)
        return wall, processor

    def settle(self, together: bool = True) -> None:
        """Wait for the device and, together, for all ranks. Collective then."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        if together and self.world > 1:
            dist.barrier()
