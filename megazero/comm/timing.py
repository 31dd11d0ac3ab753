"""Times communication: labels for a profiler's trace, spans of the time bill, and waits outside of chains.

The running code gives names; the profiler and the bill switch them on. A lane times the waits of its chains.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

from megazero.mesh.waiting import waiting

if TYPE_CHECKING:
    import torch

# A context that names the work inside. It is called with the deed and its object ('gather_inter', 'layers.3').
Label = Callable[[str, str], AbstractContextManager[object]]
_NOTHING: AbstractContextManager[None] = nullcontext()
MOST = (
    1024  # waits that keep their events; older ones that have ended become seconds, in case nobody takes them
)


def no_label(what: str, of: str) -> AbstractContextManager[object]:
    """Give no name: this is the label where no profiler records.

    It returns always the same object, because chains of hops advance often.
    """
    return _NOTHING


def no_timing(_: str) -> Any:
    """Time nothing: this is ``timed`` for engines that nobody watches."""
    return nullcontext()


class Stalls:
    """The seconds that CUDA's compute stream has waited, by name.

    No host waits for the events: ``take`` reads them after the step's own wait for the device.
    """

    def __init__(self) -> None:
        self.waits: deque[tuple[Sequence[str], Sequence[Any]]] = deque()
        self.stood: defaultdict[str, float] = defaultdict(float)

    def add(self, names: Sequence[str], events: Sequence[Any]) -> None:
        """Note a wait for these, one after the other. events: one before the wait, and one at the end of each."""
        self.waits.append((names, events))
        if len(self.waits) > MOST:
            self._add_up()

    def take(self) -> dict[str, float]:
        """Return the seconds since the last call, by name. Waits that are not over are left for the next."""
        self._add_up()
        out = dict(self.stood)
        self.stood.clear()
        return out

    def _add_up(self) -> None:
        while self.waits and all(event.query() for event in self.waits[0][1]):
            names, (before, *ends) = self.waits.popleft()
            stood = 0.0
            for name, end in zip(names, ends, strict=True):
                until = max(stood, before.elapsed_time(end) / 1e3)  # negative: was over before the wait
                self.stood[name] += until - stood
                stood = until


class Waits:
    """Times waits for collectives where they are issued, by name: on a CPU the host's, as spans of ``timed``; on CUDA
    the compute stream's, by events. Inside, the watchdog sees this rank as ``waiting``.
    """

    def __init__(self, device: torch.device | None = None, timed: Callable[[str], Any] = no_timing) -> None:
        self.timed = timed
        self.by_events = device is not None and device.type == "cuda" and timed is not no_timing
        self.stalls = Stalls()

    def __call__(self, name: str) -> AbstractContextManager[Any]:
        """Time the waits inside under ``name``, an item of the time bill ('exposed_tp_intra')."""
        return _Wait(self._between_events(name) if self.by_events else self.timed(name))

    @contextmanager
    def _between_events(self, name: str) -> Iterator[None]:
        import torch  # not at the top: the time bill reads this module without torch

        before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        before.record()
        yield
        after.record()
        self.stalls.add((name,), (before, after))


class _Wait:
    """``timed``, and ``waiting`` set inside it."""

    __slots__ = ("timed",)

    def __init__(self, timed: AbstractContextManager[Any]) -> None:
        self.timed = timed

    def __enter__(self) -> None:
        waiting.depth += 1
        self.timed.__enter__()

    def __exit__(self, *error: Any) -> None:
        waiting.depth -= 1
        self.timed.__exit__(*error)
