"""Names in a profiler's trace. They cost nothing unless a profiler runs."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

# Entered around what is to have a name: called with what is done, and of what ('gather_inter', 'layers.3').
Label = Callable[[str, str], AbstractContextManager[object]]
_NOTHING: AbstractContextManager[None] = nullcontext()


def no_label(what: str, of: str) -> AbstractContextManager[object]:
    """The label while no profiler records: gives no name.

    Always returns the same object, because chains of hops advance often.
    """
    return _NOTHING
