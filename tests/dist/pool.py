"""One pool of long-lived rank processes, shared by every distributed test."""

from __future__ import annotations

import atexit
import math
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

from megazero.mesh.local_ranks import GRACE_S, LocalRanks


class RankError(RuntimeError):
    """A rank raised: the message holds every rank's traceback that arrived."""


@cache
def pool() -> LocalRanks:
    """Its processes; ranks of verify's runs are loaded in their server."""
    ranks = LocalRanks(preload=["megazero.verify.training_run"])
    atexit.register(ranks.close)
    return ranks


def run_ranks(
    world_size: int,
    function: Callable,
    *args: Any,
    timeout: float = 60.0,
    return_errors: bool = False,
    **kwargs: Any,
) -> list:
    """Call a top-level function on every rank of a fresh gloo world; return what each rank returned.

    timeout: seconds, for the call and for each collective. With ``return_errors`` ranks' Answers instead of a
    RankError here, and nobody is hurried when one fails.
    """
    grace = math.inf if return_errors else GRACE_S
    answers = pool().ask(partial(function, **kwargs), *args, world=world_size, timeout=timeout, grace=grace)
    if return_errors:
        return answers
    failed = [f"--- rank {r}: {a.error}: {a.text}\n{a.trace}" for r, a in enumerate(answers) if a.error]
    if failed:
        raise RankError("\n".join(failed))
    return [answer.value for answer in answers]


def by_case(
    world_size: int,
    several: Callable,
    function: Callable,
    cases: Sequence[Any],
    *args: Any,
    timeout: float = 300,
) -> list[tuple[Any, list]]:
    """Each case with what ``function(case, *args)`` returned, by rank. One call, which ``several`` deals out."""
    every = run_ranks(world_size, several, function, cases, *args, timeout=timeout)
    return [(case, list(ranks)) for case, ranks in zip(cases, zip(*every, strict=True), strict=True)]
