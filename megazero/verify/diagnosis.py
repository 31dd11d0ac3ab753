"""Names the likely cause of failed checks, or nothing if the evidence does not single one out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from megazero.verify.checks import GRADIENT, Check, Evidence
from megazero.verify.reference import Tensors, relative_errors

SAME = 1e-4  # relative: what was suspected is what was found


def diagnose(seen: Evidence, checks: Sequence[Check], configured: Sequence[Check]) -> list[str]:
    """Return likely causes; those with the most direct evidence come first.

    checks: the checks of the exact run. configured: the checks of the configured run.
    """
    failed = {check.name for check in checks if not check.good}
    lines = []
    crossed = [line for step in seen.crossed for line in step]
    if crossed:
        lines.append(f"a stage computes from the wrong message: {crossed[0]}")
    elif any(seen.stale) and _first_stale(seen) <= min(_wrong_steps(seen), default=len(seen.errors)):
        lines.append(_stale(seen))
    elif failed & {"gradients", "gradient norm", "gradient replicas"}:
        lines += _gradients(seen)
    if any(check.name.startswith("bytes") and not check.good for check in (*checks, *configured)):
        lines += _bytes([check for check in (*checks, *configured) if check.name.startswith("bytes")])
    differing = {check.name for check in configured if not check.good} & {
        "replicas in use",
        "master replicas",
    }
    if differing and not failed:
        lines.append(
            "with exact messages replicas agree, with rounded ones they do not: ranks that round the same slice draw "
            "different noise"
        )
    return lines


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


def _gradients(seen: Evidence) -> Iterator[str]:
    """Explain the first step with a wrong gradient, at the masters that the ranks have."""
    limit, wrong = GRADIENT[seen.dtype], _wrong_steps(seen)
    if not wrong:
        return
    step = wrong[0]
    got, want = seen.got[step], seen.want[step]
    bad = {name for name, error in seen.errors[step].items() if not error <= limit}
    ratio = _ratio(got.whole, want)
    d = seen.reference.data_parallel // seen.reference.replicas
    if ratio is not None and abs(ratio - 1) > SAME:
        cause = "the divisor 1/d is missing" if abs(ratio / d - 1) < SAME else "the divisor is wrong"
        yield f"every gradient is {ratio:.6g} times what it is on one rank ({d} data-parallel ranks): {cause}"
        return
    bad |= set(got.differing)
    if seen.assembler.tp > 1 and bad <= seen.assembler.replicated:
        yield _replicated(seen, bad, step)
    elif seen.assembler.tied and bad == {"embedding.tokens.weight"} and _ends(seen, step):
        yield (
            "only the tied embedding is wrong, and the pipeline's two ends hold different sums of it: they were not "
            "added up"
        )
    elif seen.reference.micro_batches(step) > 1 and _without_last(seen, step):
        yield "every gradient is that of all micro-batches but the last: the last one's reduction was skipped"
    elif swapped := _swapped(seen, step):
        yield swapped


def _ratio(got: Tensors, want: Tensors) -> float | None:
    """Return the one factor by which all gradients differ, or None if there is no such factor."""
    names = list(want)
    mine, theirs = (np.concatenate([tree[n].ravel() for n in names]) for tree in (got, want))
    ratio = float(mine @ theirs / (theirs @ theirs))
    return ratio if np.linalg.norm(mine - ratio * theirs) <= SAME * np.linalg.norm(mine) else None


def _replicated(seen: Evidence, bad: set[str], step: int) -> str:
    got, want, tp = seen.got[step].whole, seen.want[step], seen.assembler.tp
    shown = f"only parameters that the {tp} tensor-parallel ranks hold whole are wrong ({min(bad)}, ...)"
    if (
        _ratio({n: got[n] for n in bad}, {n: want[n] for n in bad}) is not None
        and not seen.got[step].differing
    ):
        return (
            f"{shown}, by one factor: their gradients are whole on every rank and were summed over the group"
        )
    return (
        f"{shown}, and the ranks hold different ones: their partial gradients were not summed over the group"
    )


def _ends(seen: Evidence, step: int) -> bool:
    return any("two ends" in over for over in seen.got[step].differing.values())


def _without_last(seen: Evidence, step: int) -> bool:
    partial = seen.reference.gradients(seen.masters[step].whole, step, without_last=True)
    errors = relative_errors(seen.got[step].whole, partial, seen.noisy)
    return max(errors.values()) <= SAME


def _swapped(seen: Evidence, step: int) -> str:
    """Name a rank whose slices of the gradient are another rank's."""
    places: dict[tuple[int, int, str], list[tuple[int, np.ndarray, np.ndarray]]] = {}
    local = {tp: seen.assembler.split(seen.want[step], tp) for tp in range(seen.assembler.tp)}
    for rank, record in enumerate(seen.records, seen.reference.replica * len(seen.records)):
        for unit in record.steps[step].gradients:
            wanted = np.zeros(len(unit.values))
            for name, low, high, at in unit.ranges:
                wanted[at : at + high - low] = local[record.tp][seen.assembler.name(name)][low:high]
            places.setdefault((record.pp, record.tp, unit.unit), []).append((rank, unit.values, wanted))
    for (_, _, name_of_unit), members in places.items():
        for rank, got, own in members:
            if _same(got, own):
                continue
            for other, _, wanted in members:
                if other != rank and wanted.any() and _same(got, wanted):
                    return (
                        f"rank {rank} holds rank {other}'s slice of the gradient of unit {name_of_unit}: two "
                        "ranks' slices are swapped"
                    )
    return ""


def _same(got: np.ndarray, want: np.ndarray) -> bool:
    return float(np.linalg.norm(got - want)) <= SAME * max(float(np.linalg.norm(want)), 1e-12)


def _bytes(checks: Sequence[Check]) -> Iterator[str]:
    wrong = next(check for check in checks if not check.good)
    yield f"what is sent is not what layout, schedule and codecs need: {wrong.where}"
