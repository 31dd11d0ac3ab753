"""Figures in words, for people."""

from __future__ import annotations


def duration(seconds: float) -> str:
    """Return a time in words: 12.3 s, 4 min 05 s, 3 h 20 min, 2 d 04 h."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    for size, unit, smaller, part in (
        (86400, "d", 3600, "h"),
        (3600, "h", 60, "min"),
        (60, "min", 1, "s"),
    ):
        if whole >= size:
            return f"{whole // size} {unit} {whole % size // smaller:02d} {part}"
    raise AssertionError(seconds)
