"""Ranks that share samples train as one rank does: a few cases always, one of every pair with -m slow."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from itertools import product

import pytest

from megazero.config import ConfigError
from tests.dist.engine.test_parity import check
from tests.dist.parity_cases import (
    DTYPES,
    FEW_STEPS_OF_PIPELINES,
    LOSS_CHUNKS,
    MULTI_QUERY,
    RECOMPUTE,
    Case,
    pairwise_cover,
)

SEED = 0
FAMILIES = ("llama", MULTI_QUERY, "gpt", "gemma2-documents", "qwen2-window")
# pp, schedule, layers.
PIPELINES = ((1, "1f1b", 2), (2, "1f1b", 4), (2, "zb-h1", 4))
# tp, sequence parallel.
TENSORS = ((1, False), (2, False), (2, True))
# The last is zeropp's, with exact messages.
SHARDS = ("zero1", "zero3", "hpz", "2,2,4")
# Ranks that share samples, and groups of them that gather keys: the others swap heads.
CONTEXTS = ((2, 1), (2, 2), (4, 1), (4, 2), (4, 4))
COMPILED = (None, "aot_eager")


def legal(world: int) -> Iterator[Case]:
    """Every legal case of so many ranks; some of the model's choices are drawn."""
    draw = random.Random(SEED)
    choices = product(CONTEXTS, (1, 2), (0, 1), PIPELINES, TENSORS, SHARDS, RECOMPUTE, FAMILIES)
    for (cp, keys), copies, split, pipeline, tensor, shards, recompute, family in choices:
        (pp, schedule, layers), (tp, sequence) = pipeline, tensor
        dp = cp * copies
        if pp * tp * dp != world:
            continue
        case = Case(
            tp,
            dp,
            world // 2 if split else world,  # two nodes, or one
            shards,
            None,
            sequence,
            micro_batches=3,
            tied=draw.random() < 0.5,
            vocabulary="odd",
            recompute=recompute,
            # As in the cover of pipelines: in fp32 a rank of GPT, or of Gemma's many norms, is itself 1e-6 from fp64.
            dtype=draw.choice(DTYPES)
            if layers == 2 and family not in ("gpt", "gemma2-documents")
            else "fp64",
            family=family,
            pp=pp,
            schedule=schedule,
            layers=layers,
            compiled=draw.choice(COMPILED),
            loss_chunk=draw.choice(LOSS_CHUNKS),
            cp=cp,
            keys=keys,
        )
        try:
            case.config()
        except ConfigError:
            continue
        yield case


@cache
def cover(world: int) -> list[Case]:
    return pairwise_cover(list(legal(world)), SEED)


# Two ranks, one family each, experts too; four with tensor parallelism, a pipeline, copies of key/value heads, two
# nodes.
BASE = Case(1, 2, 2, "zero1", None, False, 3, False, "odd", "none", "fp64", "llama", cp=2)
SMALL = (
    replace(BASE, family="llama", dtype="fp32", recompute="selective"),
    replace(BASE, family="gpt", recompute="full"),
    replace(BASE, family=MULTI_QUERY, loss_chunk=3, tied=True),
    replace(BASE, family="gpt", shards="zero3", per_node=1),
    replace(BASE, family="gemma2-documents", tied=True, shards="zero3", per_node=1),
    replace(BASE, family="qwen2-window", dtype="fp32", compiled="aot_eager"),
    replace(BASE, family="shared experts", shards="zero3", per_node=1, recompute="full"),
    replace(BASE, family="shared experts", dtype="fp32"),
    replace(BASE, family="gpt", tp=2, per_node=4, sequence_parallel=True, recompute="selective"),
    replace(BASE, family=MULTI_QUERY, dp=4, per_node=4, cp=4, shards="zero3"),
    replace(BASE, family="gemma2-documents", pp=2, per_node=2, schedule="zb-h1", layers=4, recompute="full"),
)


# Keys that ranks gather: of neighbours, across nodes with swaps inside, inside nodes and across.
FOUR = replace(BASE, dp=4, cp=4, keys=2)
GATHERED = (
    replace(FOUR, family="gemma2-documents", shards="hpz", recompute="full"),
    replace(BASE, keys=2, family="qwen2-window", dtype="fp32", recompute="selective", compiled="aot_eager"),
    replace(FOUR, family=MULTI_QUERY, keys=4, loss_chunk=3),
)


ALWAYS = (*SMALL[::4], GATHERED[0])


def test_small_cover():
    check(ALWAYS, FEW_STEPS_OF_PIPELINES)


@pytest.mark.slow
def test_the_rest_of_it():
    check([case for case in (*SMALL, *GATHERED) if case not in ALWAYS], FEW_STEPS_OF_PIPELINES)


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 4, 8])
def test_cover(world):
    check(cover(world), FEW_STEPS_OF_PIPELINES)
