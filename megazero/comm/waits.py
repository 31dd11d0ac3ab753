"""Timed waits for a collective at the place where it is issued. Lanes time the waits of chains."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch

from megazero.comm.lane import no_timing

MOST = 1024  # waits whose events are kept; of older ones that are over the seconds


class Waits:
    """Times such waits by name: on a CPU the host's, as spans of ``timed``; on CUDA the compute stream's, by events.

    No host waits for the events: ``take_stalls`` reads them after the step's own wait for the device.
    """

    def __init__(self, device: torch.device | None = None, timed: Callable[[str], Any] = no_timing) -> None:
        self.timed = timed
        self.by_events = device is not None and device.type == "cuda" and timed is not no_timing
        self.pairs: deque[tuple[str, Any, Any]] = deque()
        self.stood: defaultdict[str, float] = defaultdict(float)

    def __call__(self, name: str) -> AbstractContextManager[Any]:
        """Time the waits inside under ``name``, an item of the time bill ('exposed_tp_intra')."""
        return self._between_events(name) if self.by_events else self.timed(name)

    def take_stalls(self) -> dict[str, float]:
        """Return the seconds of CUDA's waits since the last call, by name; those not over are left for the next."""
        self._add_up()
        out = dict(self.stood)
        self.stood.clear()
        return out

    @contextmanager
    def _between_events(self, name: str) -> Iterator[None]:
        before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        before.record()
        yield
        after.record()
        self.pairs.append((name, before, after))
        if len(self.pairs) > MOST:
            self._add_up()

    def _add_up(self) -> None:
        while self.pairs and self.pairs[0][2].query():
            name, before, after = self.pairs.popleft()
            self.stood[name] += before.elapsed_time(after) / 1e3
