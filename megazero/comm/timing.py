"""Times communication: labels for a profiler's trace, spans of the time bill, and waits outside of chains.

The running code gives names; the profiler and the bill switch them on. A lane times the waits of its chains.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

# Entered around what is to have a name: called with what is done, and of what ('gather_inter', 'layers.3').
Label = Callable[[str, str], AbstractContextManager[object]]
_NOTHING: AbstractContextManager[None] = nullcontext()
MOST = 1024  # waits whose events are kept; of older ones that are over the seconds


def no_label(what: str, of: str) -> AbstractContextManager[object]:
    """Give no name: this is the label where no profiler records.

    It returns always the same object, because chains of hops advance often.
    """
    return _NOTHING


def no_timing(_: str) -> Any:
    """Time nothing: this is ``timed`` for engines that nobody watches."""
    return nullcontext()


class Waits:
    """Times waits for collectives where they are issued, by name: on a CPU the host's, as spans of ``timed``; on CUDA
    the compute stream's, by events.

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
