"""Pipelines of every kind compute what one rank does: a pairwise cover always, the product with -m slow."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest

from tests.dist.engine.test_parity import check
from tests.dist.parity import run_cases
from tests.dist.parity_cases import FEW_STEPS_OF_PIPELINES, STEPS_OF_PIPELINES, Case, pairs
from tests.dist.pipeline.cases import covered, pipeline_cover, pipeline_product

CHUNKS = 45  # slow tests, about a minute each

cover, everything = cache(pipeline_cover), cache(pipeline_product)


def test_the_cover_has_every_pair_of_the_product():
    wanted = {pair for case in everything() if covered(case) for pair in pairs(case)}
    assert wanted <= {pair for case in cover() for pair in pairs(case)}
    assert cover() == pipeline_cover()
    assert {(c.shards, c.lifetime) for c in cover()} == {(c.shards, c.lifetime) for c in everything()}


@pytest.mark.parametrize("world", [2, *(pytest.param(n, marks=pytest.mark.slow) for n in (4, 8))])
def test_cover(world):
    check([case for case in cover() if case.world == world], FEW_STEPS_OF_PIPELINES)


@pytest.mark.slow
@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_product(chunk):
    cases = everything()
    check(cases[len(cases) * chunk // CHUNKS : len(cases) * (chunk + 1) // CHUNKS], STEPS_OF_PIPELINES)


ONE = Case(
    1, 2, 2, "zero3", None, False, 3, True, "odd", "none", "fp32", "llama", 2, False, "1f1b", 1, layers=5
)
FOUR = replace(ONE, dp=4, shards="hpz")  # 2 ranks of a node share parameters, 4 all else


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_the_embedding_and_the_head_may_have_stages_of_their_own(world):
    """2 layers in 4 stages: 0, 1, 1, 0."""
    alone = replace(ONE, dp=1, per_node=1, layers=2, micro_batches=4, dtype="fp64")
    looped = replace(alone, schedule="interleaved", virtual=2)
    four = [replace(alone, pp=4, schedule=name, tied=name == "zb-h1") for name in ("1f1b", "zb-h1")]
    check({2: [looped, replace(looped, tied=False)], 4: four}[world], STEPS_OF_PIPELINES)


@pytest.mark.first(1)
@pytest.mark.parametrize(
    "one,others",
    [
        # One order of backwards on every stage, one sum over micro-batches.
        (ONE, [replace(ONE, schedule=name) for name in ("gpipe", "zb-h1")]),
        (ONE, [replace(ONE, lifetime="gathered"), replace(ONE, recompute="full")]),
        (FOUR, [replace(FOUR, shards="zero3"), replace(FOUR, lifetime="gathered")]),
    ],
    ids=["schedules", "when parameters are there", "hpz is zero3"],
)
def test_the_same_bits(one, others):
    first, *rest = run_cases([one, *others], STEPS_OF_PIPELINES)
    for case, outcomes in zip(others, rest, strict=True):
        for a, b in zip(first, outcomes, strict=True):
            assert (a.losses, a.norms, a.prints) == (b.losses, b.norms, b.prints), case.id
            for (name, low, x), (_, same, y) in zip(a.slices["final"], b.slices["final"], strict=True):
                assert low == same and (x == y).all(), (case.id, name)
