"""Names the cause of failed checks where the evidence shows one: stale weights, or one factor of all gradients."""

from __future__ import annotations

import numpy as np

from megazero.verify.checks import GRADIENT, Evidence
from megazero.verify.reference import Tensors

SAME = 1e-4  # relative: the suspected factor is the one that was found


def diagnose(seen: Evidence) -> list[str]:
    """Return the likely cause of what is wrong with the exact run, or nothing."""
    wrong = _wrong_steps(seen)
    if any(seen.stale) and _first_stale(seen) <= min(wrong, default=len(seen.errors)):
        return [_stale(seen)]
    return _factor(seen, wrong[0]) if wrong else []


def _first_stale(seen: Evidence) -> int:
    return next(step for step, names in enumerate(seen.stale) if names)


def _wrong_steps(seen: Evidence) -> list[int]:
    """Return the steps with a gradient that is wrong at the masters of its ranks, or that replicas do not share."""
    limit = GRADIENT[seen.dtype]
    wrong = {step for step, errors in enumerate(seen.errors) if any(not e <= limit for e in errors.values())}
    return sorted(wrong | {step for step, got in enumerate(seen.got) if got.differing})


def _stale(seen: Evidence) -> str:
    first = _first_stale(seen)
    names = seen.stale[first]
    if first == 0:
        return f"forwards read other weights than the masters from the first step on ({names[0]}): a gather is wrong"
    return (
        f"step 1 is right and step {first + 1} computes with old weights ({len(names)} parameters, {names[0]} among "
        "them): a copy of the parameters is stale, its refresh was left out"
    )


def _factor(seen: Evidence, step: int) -> list[str]:
    """Name the one factor by which all gradients of a step differ, if there is one."""
    ratio = _ratio(seen.got[step].whole, seen.want[step])
    if ratio is None or abs(ratio - 1) <= SAME:
        return []
    d = seen.reference.data_parallel // seen.reference.replicas
    cause = "the divisor 1/d is missing" if abs(ratio / d - 1) < SAME else "the divisor is wrong"
    return [f"every gradient is {ratio:.6g} times what it is on one rank ({d} data-parallel ranks): {cause}"]


def _ratio(got: Tensors, want: Tensors) -> float | None:
    """Return the one factor by which all gradients differ, or None if there is no such factor."""
    names = list(want)
    mine, theirs = (np.concatenate([tree[n].ravel() for n in names]) for tree in (got, want))
    ratio = float(mine @ theirs / (theirs @ theirs))
    return ratio if np.linalg.norm(mine - ratio * theirs) <= SAME * np.linalg.norm(mine) else None
