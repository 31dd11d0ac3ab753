"""Durations, bytes and counts as people read them."""

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


def plural(count: int, noun: str) -> str:
    """Return a count with its noun: 1 rank, 2 ranks."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def human_bytes(count: float) -> str:
    """Decimal units, as networks are sold: 1 MB is 10**6 bytes."""
    return _scaled(count, ("B", "kB", "MB", "GB", "TB", "PB"), " ")


def human_count(count: float) -> str:
    """Three digits and a unit: 950, 12.3k, 4.56M."""
    return _scaled(count, ("", "k", "M", "G", "T", "P"), "")


def _scaled(count: float, units: tuple[str, ...], gap: str) -> str:
    power = 0
    while abs(count) >= 999.5 and power < len(units) - 1:
        count, power = count / 1000, power + 1
    digits = 0 if power == 0 or abs(count) >= 99.95 else 1 if abs(count) >= 9.995 else 2
    return f"{count:.{digits}f}{gap}{units[power]}"
