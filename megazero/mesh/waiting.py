"""Whether this process waits for other ranks: set where it waits, read by the watchdog from its own thread."""

from __future__ import annotations

from contextlib import ContextDecorator


class Waiting(ContextDecorator):
    """A context, or a decorator, in which this process waits for other ranks. It may be entered again inside itself.

    One thread at a time: autograd's may wait while the main thread is in a backward, which is no wait.
    """

    def __init__(self) -> None:
        self.depth = 0  # of the contexts that are open

    def __bool__(self) -> bool:
        return self.depth > 0

    def __enter__(self) -> None:
        self.depth += 1

    def __exit__(self, *_: object) -> None:
        self.depth -= 1


waiting = Waiting()  # this process's
