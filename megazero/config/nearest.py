"""Finds the nearest legal choice, for error lines."""

from __future__ import annotations

import re
from collections.abc import Iterable
from difflib import get_close_matches
from math import gcd
from os.path import commonprefix


def closest(word: str, known: Iterable[str], alike: float) -> str | None:
    """Return the known word that is most like ``word``, if it is at least ``alike`` (0 to 1, difflib's ratio)."""
    return next(iter(get_close_matches(word, list(known), n=1, cutoff=alike)), None)


def did_you_mean(word: str, known: Iterable[str], prefix: str = "") -> str:
    """Return '; nearest: X' for the known word that is most like ``word``, or '' if none is near."""
    near = closest(word, known, 0.5)
    return f"; nearest: {prefix}{near}" if near else ""


def misspelt(word: str, legal: Iterable[str]) -> str:
    """Return '; nearest: X' for the legal value that ``word`` is a misspelling of, or ''.

    Values that are merely alike mean other things, so likeness is judged without what all of them end with, and
    digits must agree.
    """
    values, typed = list(legal), word.lower()
    shared = len(commonprefix([value[::-1].lower() for value in values])) if len(values) > 1 else 0
    stems = {value.lower()[: len(value) - shared]: value for value in values}
    if shared and typed.endswith(values[0][-shared:].lower()):
        typed = typed[:-shared]
    else:
        stems |= {value.lower(): value for value in values}
    near = closest(typed, stems, 0.75)
    alike = near is not None and re.sub(r"\D", "", word) == re.sub(r"\D", "", stems[near])
    return f"; nearest: {stems[near]}" if near is not None and alike else ""


def around(legal: Iterable[int], wanted: int) -> str:
    """Return the largest legal number below ``wanted`` and the smallest above: '4 or 6', or the one that exists."""
    numbers = sorted(legal)
    below = [k for k in numbers if k < wanted][-1:]
    above = [k for k in numbers if k > wanted][:1]
    return " or ".join(map(str, below + above))


def common_divisors(*numbers: int) -> list[int]:
    """Return all numbers that divide each of ``numbers``."""
    common = gcd(*numbers)
    return [k for k in range(1, common + 1) if common % k == 0]


def nearest_power_of_two(n: int, low: int, high: int) -> int:
    """Return the power of two nearest to n from ``low`` to ``high``, which are powers of two themselves."""
    legal = [low << e for e in range((high // low).bit_length())]
    return min(legal, key=lambda power: abs(power - n))


def multiples_around(n: int, base: int) -> str:
    """Return the multiples of ``base`` just below and above n, which are at least ``base``, as '24 or 30'."""
    low = n // base * base
    return f"{low} or {low + base}" if low else str(base)
