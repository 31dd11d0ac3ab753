"""Losses and gradients of every layout equal one rank's: a pairwise cover always, the full product with -m slow."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from itertools import combinations

import pytest

from tests.dist.parity import Outcome, faults, run_cases
from tests.dist.parity_cases import Case, eight_ranks, full_product, pairwise_cover

SEED = 0
CHUNK = 48  # cases of one slow test: about 20 s


def check(cases: Sequence[Case]) -> None:
    """Every failure is reported, with the case's id."""
    found = {}
    for case, outcomes in zip(cases, run_cases(cases), strict=True):
        if bad := faults(case, outcomes):
            found[case.id] = bad
    lines = [f"{name}: " + "; ".join(bad[:6]) for name, bad in found.items()]
    assert not found, f"{len(found)} of {len(cases)} cases\n" + "\n".join(lines)


def by_mesh(cases: Sequence[Case], size: int) -> list[tuple[Case, ...]]:
    """Chunks of at most ``size`` cases of one world; neighbours share a mesh."""
    chunks: list[tuple[Case, ...]] = []
    for case in sorted(cases, key=lambda c: (c.world, c.mesh)):
        if chunks and chunks[-1][0].world == case.world and len(chunks[-1]) < size:
            chunks[-1] += (case,)
        else:
            chunks.append((case,))
    return chunks


def chunk_id(cases: Sequence[Case]) -> str:
    return f"{cases[0].world}ranks-{cases[0].id}"


PRODUCT = full_product()
COVER = pairwise_cover(PRODUCT, SEED)


def test_the_cover_has_every_pair_of_the_product():
    def pairs(cases):
        rows = [tuple(enumerate(dataclasses.astuple(c))) for c in cases]
        return {pair for row in rows for pair in combinations(row, 2)}

    assert pairs(COVER) == pairs(PRODUCT)
    assert pairwise_cover(PRODUCT, SEED) == COVER
    assert len(COVER) < 60


@pytest.mark.parametrize("cases", by_mesh(COVER, 16), ids=chunk_id)
def test_cover(cases):
    check(cases)


def test_eight_ranks():
    check(pairwise_cover(eight_ranks(), SEED)[:6])


CASE = Case(2, 2, 2, "zero2", None, True, 3, True, "odd", "full", "fp64", "llama")


@pytest.fixture(scope="module")
def outcomes() -> list[Outcome]:
    (outcomes,) = run_cases([CASE])
    assert not faults(CASE, outcomes)
    return outcomes


def changed(outcomes: Sequence[Outcome], event: str, change) -> list[Outcome]:
    """The same, but one rank's slices of an event went through ``change(name, values)``."""
    last = outcomes[-1]
    slices = {**last.slices, event: [(n, low, change(n, v)) for n, low, v in last.slices[event]]}
    return [*outcomes[:-1], dataclasses.replace(last, slices=slices)]


@pytest.mark.parametrize(
    "event,change,said",
    [
        ("first", lambda n, v: v * (1 + 1e-9), "first gradient"),
        ("last", lambda n, v: v * (1 + 1e-9), "last gradient"),
        ("initial", lambda n, v: v + 1e-15, "initial"),
        ("final", lambda n, v: v + 1e-15 if "norm" in n else v, "replicas differ"),
        ("final", lambda n, v: v + 1e-15 if "embedding" in n else v, "padding is not zero"),
        ("first", lambda n, v: v[:-1], "missing"),
    ],
)
def test_a_difference_is_seen(outcomes, event, change, said):
    assert any(said in line for line in faults(CASE, changed(outcomes, event, change)))


def test_a_wrong_loss_or_replica_is_seen(outcomes):
    first = outcomes[0]
    wrong = dataclasses.replace(first, losses=[x * (1 + 1e-9) for x in first.losses])
    assert any(line.startswith("loss") for line in faults(CASE, [wrong, *outcomes[1:]]))
    wrong = dataclasses.replace(first, prints=dict.fromkeys(first.prints, ""))
    assert any("same bits" in line for line in faults(CASE, [wrong, *outcomes[1:]]))


@pytest.mark.slow
@pytest.mark.parametrize("cases", by_mesh([*PRODUCT, *eight_ranks()], CHUNK), ids=chunk_id)
def test_full_product(cases):
    check(cases)
