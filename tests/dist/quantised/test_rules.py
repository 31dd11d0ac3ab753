"""What quantised messages leave behind: elements that arrive as 0, counted bytes."""

from __future__ import annotations

from math import prod

import pytest
import torch

from megazero import zero
from megazero.comm.codec import Blockwise
from megazero.mesh.levels import INTER, INTRA
from megazero.zero.rounding import GRADIENTS
from tests.dist.pool import by_case, run_ranks
from tests.dist.quantised.cases import (
    ADAMW,
    EIGHT_RANKS,
    EXACT,
    H4,
    Q4,
    Q8,
    Case,
    drawn,
    make,
    several,
    step_with,
    take_step,
)

BF16 = torch.bfloat16
DELTA = zero.Codecs(weights=Q4, delta=True, gradients={INTER: Q4})


def spikes(shape, dtype, rest) -> torch.Tensor:
    """Blocks in which all but one element are below half a step of 4 bits: a fifth and more is lost."""
    out = torch.full((shape[0] * shape[1],), rest)
    out[::16] = 15.0
    return out.view(shape).to(dtype)


# -- elements that arrive as 0 ----------------------------------------------------------------------


def zeroed(case: Case) -> list[tuple[float | None, float | None, str]]:
    """By step: the share that the engine tells, and that of all senders' messages, by those they show."""
    model, engine = make(case)
    rounding, found = engine.rounding, []

    def seen(unit, codec, kind, exact, sent):
        if kind == GRADIENTS and unit.name == rounding.sampled:
            counts[0] += int(((exact != 0) & (sent == 0)).sum())
            counts[1] += int((exact != 0).sum())

    rounding.observer = seen
    for step in range(3):
        counts = torch.zeros(2, dtype=torch.float64)
        info = step_with(case, model, engine, step)
        torch.distributed.all_reduce(counts)
        found.append((info.zeroed, float(counts[0] / counts[1]) if counts[1] else None, info.sampled))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("world,per_node,tp", [(4, 2, 1), EIGHT_RANKS])
def test_the_share_that_arrives_as_zero_is_that_of_all_senders(world, per_node, tp):
    both = zero.Codecs(gradients={INTRA: Q8, INTER: Q4})
    mixed = zero.Codecs(gradients={INTER: H4})
    cases = [Case(x, per_node, both, 2, tp) for x in ("hhd", "11d", "ddd", "hhh")]
    cases += [Case("hhd", per_node, codecs, tp=tp) for codecs in (mixed, DELTA, zero.Codecs())]
    for case, ranks in by_case(world, several, zeroed, cases):
        assert all(rank == ranks[0] for rank in ranks), case
        assert {name for *_, name in ranks[0]} == {"layers.0", "layers.1"}
        for told, counted, _ in ranks[0]:
            assert told == counted and (told is None) == case.codecs.exact, case
            assert told is None or 0.01 < told < 0.3, (case, told)


def zeroed_behind_outliers(case: Case) -> list[float | None]:
    model, engine = make(case)
    shapes = case.units[1]
    heavy = [drawn(case, 0, 0, 0)[0], [spikes(s, case.dtype, 0.75) for s in shapes]]
    return [take_step(case, model, engine, lambda _: heavy).zeroed for _ in range(2)]


def test_behind_outliers_all_but_they_arrive_as_zero():
    """Each element of 33 x 9 crosses once, from the other node. The rest of the last block is padding."""
    case = Case("hhd", 2, zero.Codecs(gradients={INTER: Q4}))
    for (_, share), *_ in run_ranks(4, several, zeroed_behind_outliers, [case]):
        assert share == pytest.approx(1 - 19 / (33 * 9))


# -- counted bytes --------------------------------------------------------------------------------

COUNTED = (((5, 9), (7, 13), (5,)), ((33, 9),), ((40,), (3,)))


def counted(case: Case):
    model, engine = make(case, ADAMW)
    for step in range(2):
        engine.traffic.take()
        step_with(case, model, engine, step)
    regions = [[n for _, n in u.layout.regions] for u in engine.units]
    axes = [(a.size, a.link, a.spec.role) for a in engine.mesh.data_axes]
    return engine.traffic.take(), regions, axes


def size_of(codec, elements, exact_bytes, plain_bytes):
    """Bytes of a message of (coded, exact) elements; plain_bytes per element without a codec."""
    if codec is None:
        return sum(elements) * plain_bytes
    coded, exact = (*elements, 0)[:2]
    filled = lambda n: -(-n // 16) * 16  # noqa: E731
    return filled(coded * codec.bits // 8 + 2 * coded // codec.block) + filled(exact * exact_bytes)


def formula(case: Case, regions, axes) -> dict:
    """Bytes that a rank sends in a step: (size - 1) messages to the others of every axis it takes."""
    codecs, m, item, units = case.codecs, case.micro_batches, case.dtype.itemsize, len(regions)
    sizes = [a for a, _, _ in axes]
    p, g, o = (sum(role in names for _, _, role in axes) for names in (("p",), ("p", "g"), ("p", "g", "os")))
    out: dict[str, int] = {}

    def add(kind, link, count):
        for key in (f"{kind}_{link}_bytes", f"{link}_bytes"):
            out[key] = out.get(key, 0) + count

    def cut(elements, level):
        return [n // prod(sizes[:level]) for n in elements]

    for i, unit in enumerate(regions):
        message = size_of(codecs.weights, cut(unit, o), item, item)
        for j in range(p, o):  # whole OS messages, those that deeper axes brought included
            add("refresh", axes[j][1], (sizes[j] - 1) * message * prod(sizes[j + 1 : o]))
        # Forward and backward; the last unit stays for its backward, the first for the next micro-batch.
        # Within the bytes that may be held ahead all stay.
        often = m if i == units - 1 else m + 1 if i == 0 else 2 * m
        gathers = 1 if case.options.get("prefetch_bytes") else often
        for j in range(p):
            held = (
                sum(cut(unit, j + 1)) * item if codecs.delta and p < o else message * prod(sizes[j + 1 : o])
            )
            add("gather", axes[j][1], gathers * (sizes[j] - 1) * held)
        for j, (size, link, _) in enumerate(axes):
            codec = codecs.gradients.get(link)
            raw = j == 0 and (g > 0 or m == 1)
            sent = size_of(codec, cut(unit, j + 1), 4, item if raw else 4)
            add("reduce", link, (size - 1) * sent * (m if j < g else 1))
            if j >= o:  # the way back of replicas
                add("reduce", link, (size - 1) * size_of(codec, cut(unit, j + 1), 4, 4))
    # Norm, order hash, and squared errors and norms of two kinds, in fp64.
    nodes = prod(sizes) * case.tp // case.per_node
    told, rack = (
        8 * (2 + 6 * (not case.codecs.exact)),
        case.rack or nodes,
    )  # of a step, and of what rounding lost
    add("scalar", "intra_node", (case.per_node - 1) * nodes * told)
    add("scalar", "inter_node", (rack - 1) * nodes // rack * told)
    add("scalar", "inter_rack", (nodes // rack - 1) * told)
    return out


@pytest.mark.slow
@pytest.mark.parametrize(
    "world,per_node,tp", [pytest.param(4, 2, 1, marks=pytest.mark.slow), (6, 3, 1), EIGHT_RANKS, (8, 2, 1)]
)
def test_counters_equal_the_formula(world, per_node, tp):
    presets = [
        ("hhd", zero.Codecs(weights=Q8, gradients={INTER: Q4})),
        ("hhd", zero.Codecs(weights=Blockwise(8, 16), gradients={INTRA: Q8, INTER: Blockwise(4, 8)})),
        ("hhd", DELTA),
        ("11d", DELTA),
        ("11d", zero.Codecs(weights=Blockwise(2, 8), gradients={INTRA: Q8, INTER: Q4})),
        ("ddd", zero.Codecs(weights=Q8, gradients={INTRA: Q4, INTER: Q4})),
        ("hdd", zero.Codecs(weights=Q4)),
        ("hhh", zero.Codecs(gradients={INTER: Q4})),
        ("111", zero.Codecs(weights=Q8, gradients={INTRA: Q8, INTER: Q4})),
    ]
    cases = [
        Case(
            letters,
            per_node,
            codecs,
            m,
            tp,
            BF16 if i % 2 else torch.float32,
            COUNTED,
            {"prefetch_bytes": bound},
        )
        for i, (letters, codecs) in enumerate(presets)
        for m in ((1, 3) if world == 4 else (2,))
        for bound in ((0, 1 << 20) if i == 0 else (0,))
    ]
    if (world, per_node) == (8, 2):
        levels = {INTRA: Q8, INTER: Blockwise(8, 8), "inter_rack": Q4}
        three = [zero.Codecs(weights=Q4, delta=True, gradients={"inter_rack": Q4}), zero.Codecs(Q8, levels)]
        often = {"units": COUNTED, "options": {"prefetch_bytes": 0}, "rack": 2}
        cases = [Case(x, 2, codecs, 2, **often) for x in ("hrd", "hhd", "rrr") for codecs in three]
    for case, ranks in by_case(world, several, counted, cases):
        got, regions, axes = ranks[0]
        assert all(rank[0] == got for rank in ranks), case
        assert [len(r) for r in regions] == [2, 1, 2] and EXACT == 8
        assert {k: v for k, v in got.items() if v} == {
            k: v for k, v in formula(case, regions, axes).items() if v
        }, case
