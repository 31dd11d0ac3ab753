"""Quantised messages under a pipeline: bounds, equal ends, skipped steps and bytes on every stage."""

from __future__ import annotations

from collections import defaultdict
from typing import NamedTuple

import pytest
import torch

from megazero import zero
from megazero.mesh.levels import INTER, INTRA
from megazero.mesh.mesh import Mesh
from tests.dist.pipeline.staged import NAME, Staged, make, several, step_with, sums
from tests.dist.pool import by_case
from tests.dist.quantised.cases import (
    ADAMW,
    Q4,
    Q8,
    digest,
    owned,
    reduced,
)
from tests.dist.quantised.test_rules import formula, size_of

BF16 = torch.bfloat16


class Place(NamedTuple):
    """Ranks, of a node, pipeline ranks, order of the mesh; where the ends and the data-parallel ranks meet."""

    world: int
    per_node: int
    pp: int
    dp_outermost: bool
    ends: str
    data: set[str]


PLACES = {
    "a stage on each node": Place(4, 2, 2, False, INTER, {INTRA}),
    "pipelines in nodes": Place(4, 2, 2, True, INTRA, {INTER}),
    "a stage on two nodes": Place(8, 2, 2, False, INTER, {INTRA, INTER}),
    "two pipelines in each node": Place(8, 4, 2, True, INTRA, {INTRA, INTER}),
    "four stages on four nodes": Place(8, 2, 4, False, INTER, {INTRA}),
    "pipelines over two nodes": Place(8, 2, 4, True, INTER, {INTER}),
}
CODECS = {
    "across": zero.Codecs(weights=Q8, gradients={INTER: Q4}),
    "both": zero.Codecs(weights=Q8, gradients={INTRA: Q8, INTER: Q4}),
    "differences": zero.Codecs(weights=Q4, delta=True, gradients={INTER: Q4}),
}
LETTERS = ("hhd", "11d", "ddd", "hhh")


def staged(place: Place, letters: str, codecs: zero.Codecs, **changes) -> Staged:
    return Staged(letters, place.per_node, codecs, pp=place.pp, dp_outermost=place.dp_outermost, **changes)


def layouts(place: Place) -> list[str]:
    """Letters with shard factors of their own here."""
    found = {staged(place, x, zero.Codecs()).shards(place.world): x for x in reversed(LETTERS)}
    return list(found.values())


def everywhere(place: Place, names=tuple(CODECS), **changes) -> list[Staged]:
    """Every layout with every codec; on 8 ranks a third of them, each layout with others."""
    return [
        staged(place, letters, CODECS[name], micro_batches=1 + (i + j) % 2, **changes)
        for i, letters in enumerate(layouts(place))
        for j, name in enumerate(names)
        if place.world == 4 or (i + j) % 3 == 0
    ]


ALWAYS = ("pipelines over two nodes",)
places = pytest.mark.parametrize(
    "place",
    [pytest.param(p, id=n, marks=[] if n in ALWAYS else [pytest.mark.slow]) for n, p in PLACES.items()],
)


# -- sums ---------------------------------------------------------------------------------------


def against_the_bound(case: Staged, mesh: Mesh) -> tuple[float, set[str], str]:
    """Largest |reduced - sum| / bound of the tied unit; an exact step agrees to fp32. And links of the mesh."""
    model, engine = make(case, mesh)
    worst = 0.0
    for exact in (False, True):
        engine.exact_gradients = exact
        step_with(case, model, engine)
        wanted = sums(case, engine, zero.Codecs() if exact else case.codecs)
        for unit, sum_ in zip(engine.units, wanted, strict=True):
            at = owned(unit)
            allowed = (sum_.bound + sum_.slack)[at]
            error = (reduced(unit) - sum_.value[at]).abs()
            assert (error <= allowed).all(), (case, unit.name, exact, float((error - allowed).max()))
            if unit.tied and not exact and (sum_.bound[at] > 0).any():
                worst = max(worst, float((error / allowed)[sum_.bound[at] > 0].max()))
    return worst, {axis.link for axis in mesh.data_axes}, mesh.ends.link if mesh.ends else ""


@places
def test_sums_are_within_the_derived_bound_on_every_stage(place):
    cases = everywhere(place)
    for case, ranks in by_case(place.world, several, against_the_bound, cases):
        worst, links, ends = zip(*ranks, strict=True)
        assert set(ends) - {""} == {place.ends} and links[0] == place.data
        rounds = place.ends == INTER or case.codecs.gradients.get(INTRA) or INTER in place.data
        # What is rounded comes near its bound: it is not slack.
        assert 0.2 < max(worst) <= 1 if rounds else not any(worst), (case, worst)


# -- replicas of the ends -----------------------------------------------------------------------


def after_updates(case: Staged, mesh: Mesh, updates: int = 4) -> dict:
    """Digests by what they are slices of: gathered weights, P copies (R among them), masters with moments."""
    model, engine = make(case, mesh, ADAMW)
    found = defaultdict(list)
    for step in range(updates):
        assert not step_with(case, model, engine, step, divisor=4.0).skipped
        with engine.gathered():
            for unit in engine.units:
                found["full", unit.name].append(digest(unit.weights.full))
    for unit in engine.units:
        axes, at = unit.axes, unit.layout.pieces
        states = [engine.optimizer.torch.state[r.leaf] for r in engine.optimizer.runs if r.unit is unit]
        moments = [s[k] for s in states for k in ("exp_avg", "exp_avg_sq")]
        found["copy", unit.name, at(axes.p)].append(
            digest(unit.weights.copy) if unit.weights.copy_present else ""
        )
        found["master", unit.name, at(axes.os)].append(digest(unit.master.value, *moments))
    return dict(found)


@pytest.mark.slow
@places
def test_both_ends_and_their_replicas_are_equal(place):
    cases = everywhere(place, dtype=BF16)
    for case, ranks in by_case(place.world, several, after_updates, cases):
        seen = defaultdict(list)
        for results in ranks:
            for key, value in results.items():
                seen[key].append(str(value))
        assert all(len(set(values)) == 1 for values in seen.values()), (case, seen)
        holders = [len(values) for key, values in seen.items() if key[:2] == ("full", NAME)]
        assert holders == [2 * place.world // place.pp], "both ends have it, the stages between do not"


# -- the norm -----------------------------------------------------------------------------------


# -- what is not finite -------------------------------------------------------------------------


# -- counted bytes ------------------------------------------------------------------------------


def counted(case: Staged, mesh: Mesh) -> tuple:
    model, engine = make(case, mesh, ADAMW)
    for step in range(2):
        engine.traffic.take()
        step_with(case, model, engine, step)
    regions = [[n for _, n in u.layout.regions] for u in engine.units]
    tied = [[p.numel for p in u.layout.pieces(u.axes.os)] for u in engine.units if u.tied]
    axes = [(a.size, a.link, a.spec.role) for a in mesh.data_axes]
    ends = mesh.ends.link.removesuffix("_node") if mesh.ends else ""
    return engine.traffic.take(), regions, axes, tied, ends


@places
@pytest.mark.parametrize(
    "name", ["both", *(pytest.param(n, marks=pytest.mark.slow) for n in ("across", "differences"))]
)
def test_the_ends_send_one_message_of_a_slice_each_in_a_step(place, name):
    cases = [
        staged(place, letters, CODECS[name], micro_batches=m) for letters in layouts(place) for m in (1, 3)
    ]
    for case, ranks in by_case(place.world, several, counted, cases):
        for got, regions, axes, tied, ends in ranks:
            plain = formula(case, regions, axes)
            for link in ("intra", "inter"):
                key = f"reduce_{link}_node_bytes"
                joined = got.get(key, 0) - plain.get(key, 0)
                codec = case.codecs.gradients.get(f"{link}_node")
                want = size_of(codec, tied[0], 4, 4) if tied and link == ends else 0
                assert joined == want, (case, link)
            nodes = place.world // place.per_node
            assert got["scalar_intra_node_bytes"] == (place.per_node - 1) * nodes * 8 * 8
            assert got["scalar_inter_node_bytes"] == (nodes - 1) * 8 * 8
