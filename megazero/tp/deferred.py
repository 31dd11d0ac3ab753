"""Deferred weight gradients: the W of a backward split into I and W (Qi et al. 2023, section 2).

    I   is a backward inside ``recording(key)``. It computes gradients of the inputs, with their tensor-parallel
        reductions.
    W   is ``compute(key)``, any time later. It computes gradients of the linears' weights and biases and of the
        embedding.

An entry is what one call of an operator left behind: its input and the gradient of its output. It holds no
weights and no graph, so parameters may be dropped between I and W.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

from torch import Tensor, nn

# Begins what the gradients have to wait for (a gather) and returns the function that yields them.
Start = Callable[[], Callable[[], Iterator[Tensor]]]


class _Entry(NamedTuple):
    """``start()()`` yields one gradient for each of ``parameters``, in their order."""

    parameters: tuple[nn.Parameter, ...]
    start: Start


class DeferredGradients:
    """Queues of deferred weight gradients, by key (say, a micro-batch's number).

    While ``recording(key)`` is open, the linears and the embedding whose context holds this object enqueue in their
    backward instead of computing. Outside of it they compute everything. Parameters that need no gradient are never
    enqueued. Norms, and biases that are added after a reduction, get their gradients in I. In I torch calls the
    post-accumulate hooks of the parameters that wait, too, although nothing was added to their ``grad``.
    """

    def __init__(self) -> None:
        self._queues: dict[Hashable, deque[_Entry]] = {}
        self._open: Hashable | None = None
        self._queue: deque[_Entry] | None = None  # that of the open key

    @property
    def is_recording(self) -> bool:
        return self._queue is not None

    @contextmanager
    def recording(self, key: Hashable) -> Iterator[None]:
        """Backwards that run inside defer their weights' gradients to ``compute(key)``.

        If it is opened again for a key that is not computed yet, it adds to what is there.
        Raises RuntimeError inside another recording.
        """
        if self.is_recording:
            raise RuntimeError(
                f"recording({key!r}) inside recording({self._open!r}): close one before the other"
            )
        self._open, self._queue = key, self._queues.setdefault(key, deque())
        try:
            yield
        finally:
            self._open = self._queue = None

    def put_off(self, parameters: Iterable[Tensor], start: Start) -> None:
        """Defer the gradients of ``parameters``, which ``start()()`` will yield, one each, in their order.

        ``start`` is called once. What it returns is called after it, with at most one other entry's start between.
        """
        assert self._queue is not None, "put_off outside of a recording"
        owed = tuple(parameters)
        assert all(isinstance(p, nn.Parameter) for p in owed), "only gradients of Parameters can be put off"
        self._queue.append(_Entry(owed, start))  # type: ignore[arg-type]

    def compute(self, key: Hashable) -> Iterator[tuple[nn.Parameter, Tensor]]:
        """Yield the (parameter, gradient) pairs deferred under ``key``, each computed on demand.

        They come in the order in which they were enqueued, each parameter once. A parameter used several times comes
        with the sum, at the place of its last use. A gradient has its parameter's shape. An entry's tensors are free
        once the pair after its last is drawn. Every rank of a tensor-parallel group must draw the pairs in the same
        order of keys, because under sequence parallel each column-parallel entry gathers its input. Call it on the
        stream of the backward. Raises KeyError for a key that was not recorded (or is computed already), and
        RuntimeError inside its recording.
        """
        if key not in self._queues:
            raise KeyError(f"no weight gradients were put off under {key!r}; known: {list(self._queues)}")
        if self._queues[key] is self._queue:
            raise RuntimeError(f"compute({key!r}) inside recording({key!r}): its backward is not done")
        return _drain(self._queues.pop(key))

    def discard(self) -> None:
        """Forget all deferred gradients (of an aborted step), and close an open recording."""
        self._queues.clear()
        self._open = self._queue = None


def now_or_later(
    deferred: DeferredGradients | None, weight: Tensor, gradient: Callable[[], Tensor]
) -> Tensor | None:
    """Return ``gradient()`` of one weight, or put it off and return None while ``deferred`` is recording."""
    if deferred is None or not deferred.is_recording:
        return gradient()

    def gradients() -> Iterator[Tensor]:
        yield gradient()

    deferred.put_off((weight,), lambda: gradients)
    return None


def _drain(queue: deque[_Entry]) -> Iterator[tuple[nn.Parameter, Tensor]]:
    uses = Counter(p for entry in queue for p in entry.parameters)
    sums: dict[nn.Parameter, Tensor] = {}
    started: deque[tuple[tuple[nn.Parameter, ...], Callable[[], Iterator[Tensor]]]] = deque()
    while queue or started:
        while queue and len(started) < 2:  # the next entry's gather runs under this one's products
            entry = queue.popleft()
            started.append((entry.parameters, entry.start()))
            del entry
        parameters, gradients = started[0][0], started.popleft()[1]()
        for parameter in parameters:
            gradient = next(gradients)
            sums[parameter] = sums[parameter] + gradient if parameter in sums else gradient
            del gradient
            uses[parameter] -= 1
            if not uses[parameter]:
                yield parameter, sums.pop(parameter)
        del gradients  # and with it the entry's tensors, before another gather allocates
