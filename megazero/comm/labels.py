"""Names for a profiler's trace, given by what runs and switched on by the profiler alone."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

# Entered around what is to have a name: called with what is done, and of what ('gather_inter', 'layers.3').
Label = Callable[[str, str], AbstractContextManager[object]]
_NOTHING: AbstractContextManager[None] = nullcontext()


def no_label(what: str, of: str) -> AbstractContextManager[object]:
    """Name nothing: the label where no profiler records. Always one object, because chains of hops advance often."""
    return _NOTHING
