"""Quantised reductions on real ranks: within derived bounds, of any size; what is not finite is told."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from megazero import zero
from megazero.comm.codec import Blockwise
from megazero.mesh.levels import INTER, INTRA
from tests.dist.pool import by_case, run_ranks
from tests.dist.quantised.cases import (
    ADAMW,
    H4,
    H8,
    Q2,
    Q4,
    Q8,
    SGD,
    Case,
    bits_of,
    drawn,
    expected,
    flat,
    full_masters,
    make,
    owned,
    reduced,
    several,
    step_with,
    take_step,
)

# Nodes x ranks: world, ranks per node, tensor parallel size.
PLACES = {"2x2": (4, 2, 1), "3x2": (6, 2, 1), "2x3": (6, 3, 1), "2x4 tp 2": (8, 4, 2)}
RACK = "inter_rack"
LETTERS = ("hhd", "11d", "ddd", "hhh")
ACROSS = zero.Codecs(gradients={INTER: Q4})
CODECS = {
    "across": ACROSS,
    "both": zero.Codecs(gradients={INTRA: Q8, INTER: Q4}),
    "inside": zero.Codecs(gradients={INTRA: Q4}),
    "other blocks": zero.Codecs(gradients={INTRA: Q4, INTER: Q2}),
    "both, mixed": zero.Codecs(gradients={INTRA: H8, INTER: H4}),
    "one mixed": zero.Codecs(gradients={INTRA: Q8, INTER: H4}),
}


# -- sums ---------------------------------------------------------------------------------------


def against_the_bound(case: Case) -> float:
    """Largest |reduced - sum| / bound over this rank's slices; an exact step after it agrees to fp32."""
    model, engine = make(case)
    mesh, worst = engine.mesh, 0.0
    for exact in (False, True):
        engine.exact_gradients = exact
        step_with(case, model, engine)
        for u, unit in enumerate(engine.units):
            every = [
                [flat(unit, drawn(case, r, mesh.tp.index, m)[u]) for m in range(case.micro_batches)]
                for r in range(mesh.dp_size)
            ]
            rounded = expected(case, unit, mesh, every)[mesh.dp_rank]
            sums = (
                expected(case.but(codecs=zero.Codecs()), unit, mesh, every)[mesh.dp_rank]
                if exact
                else rounded
            )
            at, bound = owned(unit), sums.bound
            error, allowed = (reduced(unit) - sums.value[at]).abs(), (bound + sums.slack)[at]
            assert (error <= allowed).all(), (case, unit.name, exact, float((error - allowed).max()))
            if not exact and (bound[at] > 0).any():
                worst = max(worst, float((error / allowed)[bound[at] > 0].max()))
    return worst


@pytest.mark.slow
@pytest.mark.parametrize(
    "place, every",
    [("2x2", False), *(pytest.param(name, True, marks=pytest.mark.slow) for name in PLACES)],
)
def test_reductions_are_within_the_derived_bound(place, every):
    """Of 2 x 2 ranks always, each format on half of the layouts.

    All: pytest -m slow tests/dist/quantised/test_quantised.py.
    """
    world, per_node, tp = PLACES[place]
    names = list(CODECS) if world == 4 else ["across", "both"]
    cases = [
        Case(letters, per_node, CODECS[name], micro_batches=1 if name == "across" else 3, tp=tp)
        for i, letters in enumerate(LETTERS)
        for j, name in enumerate(names)
        if every or (i + j) % 2
    ]
    for case, worst in by_case(world, several, against_the_bound, cases):
        # Nothing is rounded inside a node unless asked for; what is, comes near its bound: it is not slack. 16 errors
        # that a transform adds up are not all at theirs.
        least = (
            0.05 if case.codecs.gradients.get(INTER) and case.codecs.gradients.get(INTER).transform else 0.3
        )
        assert least < max(worst) <= 1, (case, worst)


def test_each_level_has_its_own_bound():
    """2 racks of 2 nodes of 2 ranks: INT8 between nodes with every micro-batch, INT4 between racks once a step."""
    levels = {INTER: Q8, RACK: Q4}
    cases = [
        Case("hrd", 2, zero.Codecs(gradients=levels), micro_batches=2, rack=2),
        Case("hhd", 2, zero.Codecs(gradients={**levels, INTRA: H8, INTER: H8, RACK: H4}), rack=2),
        Case("hhh", 2, zero.Codecs(gradients={RACK: Q4}), rack=2),
    ]
    for case, worst in by_case(8, several, against_the_bound, cases):
        assert 0.05 < max(worst) <= 1, (case, worst)


# -- not finite -----------------------------------------------------------------------------------

# What is bad, in which parameter of unit 0 and where: the last of a block that padding fills up; the exact region.
BAD = [(math.nan, 1, 90), (math.inf, 1, 90), (-math.inf, 2, 3)]


def poisoned(case: Case) -> None:
    """Steps with one bad element on rank 1 leave nothing behind; compared with an engine that did not have them."""
    (model, engine), (plain, plain_engine) = make(case, ADAMW), make(case, ADAMW)
    rank, unit = engine.mesh.dp_rank, engine.units[0]
    for step, (value, parameter, element) in enumerate([*BAD, (0.0, 0, 0)]):
        one = step_with(case, model, engine, step, divisor=2.0)
        other = step_with(case, plain, plain_engine, step, divisor=2.0)
        # A bad step takes the sampled errors of the weights that it refreshed with; the rest is the same.
        assert not one.skipped and one.grad_norm == other.grad_norm, (case, step, one, other)
        if not value:
            break

        def bad(index, value=value, parameter=parameter, element=element):
            gradients = drawn(case, rank, 0, index, 7)
            if rank == 1 and index == 0:
                gradients[0][parameter].view(-1)[element] = value
            return gradients

        engine.refresh()  # R advances at the first use of a master version, bad step or not
        before = bits_of(engine)
        info = take_step(case, model, engine, bad, divisor=3.0)
        assert info.skipped and not math.isfinite(info.grad_norm), (case, value)
        assert bits_of(engine) == before, (case, value)
        hit = owned(unit)[~reduced(unit).isfinite()].tolist()
        at = unit.slots[f"layers.0.held.{parameter}"].start + element
        assert (at in hit) == (at in owned(unit)), (case, value, hit)
        assert all(at // 16 == other // 16 for other in hit), (case, value, hit)
    assert bits_of(engine) == bits_of(plain_engine), case


FINITE = [
    zero.Codecs(weights=Q4, gradients={INTRA: Q8, INTER: Q4}),
    zero.Codecs(weights=Q4, gradients={INTER: Q4}, delta=True),
    zero.Codecs(weights=H4, gradients={INTRA: H8, INTER: H4}, delta=True),
]


@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_what_is_not_finite_reaches_the_norm_and_nothing_else(every):
    """Always each format on half of the layouts; all: pytest -m slow tests/dist/quantised/test_quantised.py."""
    cases = [
        Case(letters, 2, codecs, micro_batches=2, dtype=torch.bfloat16)
        for i, letters in enumerate(LETTERS)
        for j, codecs in enumerate(FINITE)
        if every or (i + j) % 3 == 1
    ]
    run_ranks(4, several, poisoned, cases, timeout=300)


# -- any size -------------------------------------------------------------------------------------


def refreshed_within_the_bound(case: Case) -> None:
    """Full parameters against the masters they were encoded from; padding is zero."""
    model, engine = make(case, SGD)
    half = 2**-8 if case.dtype == torch.bfloat16 else 2**-24
    held: dict = {}
    for step in range(3):
        if step:
            step_with(case, model, engine, step)
        masters = full_masters(engine)
        with engine.gathered():
            for unit in engine.units:
                now, master = unit.weights.full.double(), masters[unit.name]
                wanted, lost = master.to(case.dtype).double(), torch.zeros_like(master)
                codec, coded = unit.codecs.weights, unit.layout.regions[0][1]
                if codec is not None and not (unit.delta and not step):
                    sent = wanted - held[unit] if unit.delta else master
                    wanted = wanted if unit.delta else master
                    bound = codec.error_bound(sent[:coded].float()[None])[0].double() * (1 + 2**-20)
                    lost[:coded] = bound.repeat_interleave(codec.block)
                allowed = lost + half * (wanted.abs() + lost)
                assert ((now - wanted).abs() <= allowed).all(), (case, unit.name, step)
                assert all((now[a:b] == 0).all() for a, b in unit.layout.gaps()), (case, unit.name, step)
                held[unit] = now


def any_size(cases) -> None:
    torch.use_deterministic_algorithms(True, warn_only=True)  # fills new memory with NaN
    try:
        for case in cases:
            against_the_bound(case)
            refreshed_within_the_bound(case)
    finally:
        torch.use_deterministic_algorithms(False)


def codec_of(block: int):
    bits, inner = st.sampled_from([2, 4, 8]), st.sampled_from([b for b in (8, 16, 32) if block % b == 0])
    hadamard = st.sampled_from([0, 8])
    return st.none() | st.builds(Blockwise, bits, inner, hadamard=hadamard)


@st.composite
def odd_cases(draw) -> Case:
    block = draw(st.sampled_from([8, 16, 32]))
    weights, *sums = (draw(codec_of(block)) for _ in range(3))
    gradients = {link: codec for link, codec in zip((INTRA, INTER), sums, strict=True) if codec is not None}
    codecs = zero.Codecs(weights, gradients, weights is not None and draw(st.booleans()))
    shapes = st.lists(st.tuples(st.integers(1, 99)), min_size=1, max_size=4)
    return Case(
        draw(st.sampled_from([*LETTERS, "hdd", "1hd", "111"])),
        draw(st.sampled_from([1, 2])),
        codecs,
        draw(st.integers(1, 2)),
        dtype=draw(st.sampled_from([torch.float32, torch.bfloat16])),
        units=draw(st.lists(shapes, min_size=1, max_size=2)),
        options={"block": block, "exact_numel": draw(st.sampled_from([0, 3, 20]))},
    )


# The first example is the least one; the second has several cases.
@settings(max_examples=2, deadline=None, phases=[Phase.generate], suppress_health_check=list(HealthCheck))
@given(st.lists(odd_cases(), min_size=4, max_size=12))
def test_any_size(cases):
    run_ranks(4, any_size, cases, timeout=300)
