"""Which pipelines the parity tests run: pipeline x tensor x data parallel on up to 8 ranks, with everything else.

The whole product has some 300 000 cases. ``pipeline_product`` has, on up to 4 ranks, every place of the model state
with every schedule, and with the usual lifetimes each of these with tied and untied embeddings and every recompute;
on 8 every place, with two schedules. All else is drawn.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product
from typing import Any, NamedTuple

from megazero.config import resolve_shards
from megazero.mesh.grid import data_ranks
from megazero.mesh.levels import make_levels
from tests.dist.parity_cases import (
    DTYPES,
    FAMILIES,
    LIFETIMES,
    LOSS_CHUNKS,
    PRESETS,
    RECOMPUTE,
    TIED,
    VOCABULARIES,
    Case,
    pairwise_cover,
)

SEED = 0
# pp, tp, dp. With dp 4, nodes of 2 data-parallel ranks and several of them: there mics and hpz are themselves.
UP_TO_FOUR = ((2, 1, 1), (2, 2, 1), (2, 1, 2), (4, 1, 1))
EIGHT = ((2, 2, 2), (4, 2, 1), (4, 1, 2), (2, 1, 4))
USUAL = (None, "gathered")
SCHEDULES = (("gpipe", 1), ("1f1b", 1), ("zb-h1", 1), ("interleaved", 2), ("interleaved", 3))


class Place(NamedTuple):
    """Where a pipeline's model state lies."""

    pp: int
    tp: int
    dp: int
    per_node: int
    dp_outermost: bool
    shards: str
    lifetime: str | None
    sequence_parallel: bool


def places(sizes: Sequence[tuple[int, int, int]]) -> Iterator[Place]:
    """Every legal node size, order of the mesh and preset; presets and lifetimes that come to the same, once."""
    for pp, tp, dp in sizes:
        world = pp * tp * dp
        nodes = [n for n in range(tp, world + 1) if world % n == 0 and n % tp == 0]
        for per_node, outermost in product(nodes, (False, True) if dp > 1 else (False,)):
            try:
                h = data_ranks(make_levels(world, per_node), tp, pp, outermost)[0]
            except ValueError:
                continue
            seen: set[Any] = set()
            for shards, lifetime in product(PRESETS, LIFETIMES):
                try:
                    resolved = resolve_shards(shards, dp, (h,), lifetime)
                except ValueError:
                    continue
                if resolved not in seen:
                    seen.add(resolved)
                    for sequence in (False, True) if tp > 1 else (False,):
                        yield Place(pp, tp, dp, per_node, outermost, shards, lifetime, sequence)


def micro_batches(pp: int, schedule: str) -> tuple[int, int]:
    """Fewer than stages and more, where the schedule takes that; else once and three times as many as ranks."""
    if schedule == "interleaved":
        return pp, 3 * pp
    return pp - 1, 3 * pp // 2


def layer_counts(pp: int, virtual: int) -> tuple[int, int]:
    """As many in each stage, and one more."""
    stages = pp * virtual
    return (stages, stages + 1) if stages > 2 else (2 * stages, 2 * stages + 1)


def pipeline_product() -> list[Case]:
    """About 1500 cases; everything that is not in the product is drawn, with a seed. By mesh."""
    draw = random.Random(SEED)
    found = []
    for place in places([*UP_TO_FOUR, *EIGHT]):
        # 3 stages on each of 4 ranks are 12 layers and more: long, and nothing new.
        schedules = [s for s in SCHEDULES if place.pp * s[1] <= 8]
        models = list(product(TIED, RECOMPUTE))
        if place[:3] in EIGHT:
            found += [_drawn(draw, place, s, *draw.choice(models)) for s in draw.sample(schedules, 2)]
        elif place.lifetime not in USUAL:
            found += [_drawn(draw, place, s, *draw.choice(models)) for s in schedules]
        else:
            found += [_drawn(draw, place, s, *model) for s, model in product(schedules, models)]
    turns = (replace(case, loss_chunk=LOSS_CHUNKS[i % 2]) for i, case in enumerate(dict.fromkeys(found)))
    return sorted(turns, key=lambda case: case.mesh)


def _drawn(draw: random.Random, place: Place, schedule: tuple[str, int], tied: bool, recompute: str) -> Case:
    name, virtual = schedule
    layers = draw.choice(layer_counts(place.pp, virtual))
    case = Case(
        **place._asdict(),
        micro_batches=draw.choice(micro_batches(place.pp, name)),
        tied=tied,
        vocabulary=draw.choice(list(VOCABULARIES)),
        recompute=recompute,
        dtype=draw.choice(DTYPES) if layers < 6 else "fp64",
        family=draw.choice(FAMILIES),
        schedule=name,
        virtual=virtual,
        layers=layers,
    )
    # In fp64 alone: 6 layers and more, and GPT. There one fp32 rank is itself 7e-7 (GPT of 4 layers) to 1.0e-6 (of 7)
    # from one in fp64, no room for a bound of 1e-6; Llama of 4 and 5 layers is 6e-7 from it. And 1e-10 in
    # fp64 sees more.
    return replace(case, dtype="fp64") if case.family == "gpt" else case


def covered(case: Case) -> bool:
    """Up to 2 data-parallel ranks and 8 layers: 9, in 8 stages, are long and as uneven as 5 in 4."""
    return case.dp <= 2 and case.layers < 9


def pipeline_cover() -> list[Case]:
    """Every pair of values that the ``covered`` part of the product has; what 4 ranks have, 8 need not: they are
    slow. Besides, each schedule on 2 ranks, which take more steps, and each preset and lifetime that needs 4
    data-parallel ranks."""
    cases = pipeline_product()
    found = list({(c.schedule, c.virtual): c for c in cases if c.world == 2}.values())
    for world in (4, 8):
        legal = [case for case in cases if case.world <= world and covered(case)]
        found += pairwise_cover(legal, SEED, chosen=found)
    others = {(c.shards, c.lifetime): c for c in cases if c.shards in ("mics", "hpz")}
    return [*found, *others.values()]
