"""Wrong use, and what its error must say (tests only)."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any


def said_by(attempt: Callable[[], Any]) -> str:
    """The message of the error that a call ends in; 'nothing' if it ends well."""
    try:
        attempt()
    except (RuntimeError, ValueError) as error:
        return str(error)
    return "nothing"


def unsaid(pattern: str, attempt: Callable[[], Any]) -> list[str]:
    """Empty if the call's error matches the pattern; else the one line that says what it was instead."""
    said = said_by(attempt)
    return [] if re.search(pattern, said) else [f"{pattern!r} is not in {said!r}"]
