"""Losses and gradients of every layout equal one rank's: a pairwise cover always, the product with -m slow."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from functools import cache
from itertools import combinations

import pytest

from tests.dist.parity import Outcome, faults, run_cases
from tests.dist.parity_cases import (
    FEW_STEPS,
    MULTI_QUERY,
    STEPS,
    Case,
    eight_ranks,
    full_product,
    pairwise_cover,
    preset_product,
)

SEED = 0
CHUNKS = 45  # slow tests, about a minute each


def check(cases: Sequence[Case], steps: Mapping[int, int]) -> None:
    """Every failure is reported, with the case's id."""
    found = {}
    for case, outcomes in zip(cases, run_cases(cases, steps), strict=True):
        if bad := faults(case, outcomes):
            found[case.id] = bad
    lines = [f"{name}: " + "; ".join(bad[:6]) for name, bad in found.items()]
    assert not found, f"{len(found)} of {len(cases)} cases\n" + "\n".join(lines)


@cache
def cover() -> list[Case]:
    return pairwise_cover(full_product(), SEED)


@cache
def everything() -> list[Case]:
    """The product of presets and 6 more covers of all there is; neighbours share a mesh."""
    cases, rest = [*preset_product(), *eight_ranks()], full_product()
    for seed in range(1, 7):
        cases += pairwise_cover(rest, SEED + seed)
    return sorted(dict.fromkeys(cases), key=lambda c: c.mesh)


@pytest.mark.slow
def test_the_cover_has_every_pair_of_the_product():
    def pairs(cases):
        names = [field.name for field in dataclasses.fields(Case)]
        columns = {name: [getattr(case, name) for case in cases] for name in names}
        return {two: set(zip(*map(columns.get, two), strict=True)) for two in combinations(names, 2)}

    assert pairs(cover()) == pairs(full_product())
    few = full_product()[::50]
    assert pairwise_cover(few, SEED) == pairwise_cover(few, SEED)


@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize(
    "steps", [FEW_STEPS, pytest.param(STEPS, marks=pytest.mark.slow)], ids=["few steps", "all steps"]
)
def test_cover(world, steps):
    cases = [c for c in cover() if c.world == world]
    check(cases if steps is STEPS else cases[::3], steps)


@pytest.mark.slow
def test_eight_ranks():
    few = [c for c in eight_ranks() if c.tp == 2 and c.micro_batches == 1][::4]
    assert {c.per_node for c in few} == {2, 4}
    check(few, FEW_STEPS)


def test_states_cut_at_nodes_and_racks_equal_one_rank():
    """Of 8 ranks on 2 racks of 2 nodes of 2, P, G and OS are those of a node, of a rack, and all, or others."""
    rest = (True, "odd", "none", "fp32", "llama")
    cases = [
        Case(1, 8, 2, "2,4,8", None, False, 3, *rest, levels=(2,)),
        Case(1, 8, 2, "4,4,8", "gathered", False, 1, *rest, levels=(2,)),
        Case(1, 8, 2, "8,8,8", None, False, 1, *rest, levels=(2,)),
        Case(1, 8, 1, "2,4,4", None, False, 3, *rest, levels=(2, 4)),  # a rank, a rack of 2, a site of 4, all
        Case(2, 4, 2, "1,2,4", None, True, 1, *rest, levels=(2,)),
    ]
    check(cases, FEW_STEPS)


CASE = Case(2, 2, 2, "zero2", None, True, 3, True, "odd", "full", "fp64", "llama")


@pytest.fixture(scope="module")
def outcomes() -> list[Outcome]:
    (outcomes,) = run_cases([CASE], FEW_STEPS)
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
        ("first", lambda n, v: v * (1 + 1e-9) if "proj" in n else v, "first gradient"),
        ("last", lambda n, v: v * (1 + 1e-9) if "proj" in n else v, "last gradient"),
        ("initial", lambda n, v: v + 1e-15 if "proj" in n else v, "initial"),
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
@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_full_product(chunk):
    cases = everything()
    check(cases[len(cases) * chunk // CHUNKS : len(cases) * (chunk + 1) // CHUNKS], STEPS)


def test_ranks_that_share_a_key_head_equal_one_rank():
    """The norm counts the head once, its gradients are summed over the ranks that hold it, put off or not."""
    shared = [
        Case(4, 1, 4, "zero1", None, False, 2, False, "odd", "none", "fp32", MULTI_QUERY),
        Case(2, 2, 4, "zero3", None, True, 2, True, "odd", "selective", "fp32", MULTI_QUERY),
        Case(
            2, 1, 4, "zero1", None, True, 3, False, "odd", "full", "fp32", MULTI_QUERY, pp=2, schedule="zb-h1"
        ),
    ]
    check(shared, {case.world: 3 for case in shared})
