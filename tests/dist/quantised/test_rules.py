"""What quantised messages leave behind: residuals, checkpoints, fallbacks, counted bytes."""

from __future__ import annotations

import json
from math import prod

import pytest
import torch

from megazero import zero
from megazero.comm.codec import Blockwise
from megazero.mesh.grid import INTRA
from megazero.zero.rounding import GRADIENTS
from tests.dist.pool import by_case, run_ranks
from tests.dist.quantised.cases import (
    ADAMW,
    EIGHT_RANKS,
    EXACT,
    H4,
    Q4,
    Q8,
    S4,
    S8,
    Case,
    Leaves,
    drawn,
    flat,
    full_masters,
    make,
    owed_by,
    owned,
    reduced,
    several,
    step_with,
    take_step,
)

BF16 = torch.bfloat16
FED = zero.Codecs(gradients_inter=Q4, feedback=True)
DELTA = zero.Codecs(weights=Q4, delta=True, gradients_inter=Q4, feedback=True)


# -- error feedback -------------------------------------------------------------------------------

DIVISORS = (1.0, 1.0, 4.0, 16.0)  # powers of two: the raw gradients are exact


def fed_back(case: Case, steps: int = 16) -> float:
    """Equal gradients in every step, divisors that change, a bad step: largest drift / one step's rounding."""
    model, engine = make(case)
    mesh, h = engine.mesh, case.per_node // case.tp
    # A message's residual r: |r| <= c (|gradient| + |r|), c half a step of a scale that is rounded up to bf16.
    c = (0.5 * (1 + 2**-7) / 7) * (1 + 2**-10)
    nodes, applied, worst = {}, {}, 0.0
    for u, unit in enumerate(engine.units):
        raw = [
            sum(flat(unit, drawn(case, r, mesh.tp.index, m)[u]) for m in range(case.micro_batches))
            for r in range(mesh.dp_size)
        ]
        nodes[unit] = [sum(raw[k : k + h]) for k in range(0, mesh.dp_size, h)]
        applied[unit] = 0

    def step(index, divisor, bad=False):
        engine.begin_step(case.micro_batches, divisor)
        for m in range(case.micro_batches):
            gradients = drawn(case, mesh.dp_rank, mesh.tp.index, m)
            if bad and mesh.dp_rank == 1:
                gradients[0][0][1, 2] = torch.inf
            model([[g * divisor for g in unit] for unit in gradients]).backward()
        assert engine.step().skipped == bad
        for unit in engine.units:
            applied[unit] += 0 if bad else reduced(unit)

    for t in range(1, steps + 1):
        if t == 3:
            step(t, 2.0, bad=True)
        step(t, DIVISORS[t % len(DIVISORS)])
        for unit in engine.units:
            at, sums = owned(unit), nodes[unit]
            coded = unit.layout.regions[0][1] if unit.codecs.feedback else 0
            limit = torch.zeros(len(sums), unit.layout.numel, dtype=torch.float64)
            for k, value in enumerate(sums):
                largest = value[:coded].abs().view(-1, 16).amax(1).repeat_interleave(16)
                limit[k, :coded] = c / (1 - c) * largest
            drift, owed = applied[unit] - t * sum(sums)[at], owed_by(unit, mesh)
            slack = t * 2**-20 * torch.stack(sums).abs().sum(0) + 1e-30
            assert (owed.abs() <= limit.sum(0) + slack).all(), (case, unit.name, t)
            if unit.axes.all == unit.axes.os:
                # What has not been applied is owed, and the receiver's own node owes nothing.
                assert ((drift + owed[at]).abs() <= slack[at]).all(), (case, unit.name, t)
                others = limit.sum(0)[at] - limit[mesh.dp_rank // h][at]
                assert (drift.abs() <= others + slack[at]).all(), (case, unit.name, t)
                if (others > 0).any():
                    worst = max(worst, float((drift.abs() / others)[others > 0].max()))
    engine.exact_gradients = True
    for t in (steps + 1, steps + 2):
        step(t, 1.0)
        for unit in engine.units:
            assert unit.feedback.residual is None or not unit.feedback.residual.any()
            exact = t * sum(nodes[unit])[owned(unit)]
            slack = t * 2**-20 * torch.stack(nodes[unit]).abs().sum(0)[owned(unit)]
            assert unit.axes.all > unit.axes.os or ((applied[unit] - exact).abs() <= slack).all(), (
                case,
                t,
            )
    return worst


@pytest.mark.slow
def test_errors_that_are_fed_back_do_not_add_up():
    cases = [
        Case("hhd", 2, FED, micro_batches=2),
        Case("11d", 2, FED),
        Case("11d", 1, FED, dtype=BF16),
        Case("hhh", 2, FED),
        Case("111", 2, FED, micro_batches=2),
    ]
    for case, worst in by_case(4, several, fed_back, cases):
        assert max(worst) > 0.5 or case.letters in ("hhh", "111"), (case, "the bound is not slack")


@pytest.mark.slow
@pytest.mark.parametrize("world,per_node,tp", [(6, 2, 1), EIGHT_RANKS])
def test_errors_are_fed_back_on_other_grids(world, per_node, tp):
    run_ranks(
        world, several, fed_back, [Case(x, per_node, FED, tp=tp) for x in ("hhd", "11d")], 5, timeout=300
    )


# -- fallback -------------------------------------------------------------------------------------


def spikes(shape, dtype, rest) -> torch.Tensor:
    """Blocks in which all but one element are below half a step of 4 bits: a fifth and more is lost."""
    out = torch.full((shape[0] * shape[1],), rest)
    out[::16] = 15.0
    return out.view(shape).to(dtype)


def gradients_fall_back(case: Case):
    model, engine = make(case)

    def heavy(index):
        even = [g.sign() for g in drawn(case, 0, engine.mesh.tp.index, index)[0]]  # hardly anything is lost
        return [even, [spikes(s, case.dtype, 0.75) for s in case.units[1]]]

    def exact(engine):
        unit = engine.units[1]
        want = flat(unit, heavy(0)[1])[owned(unit)] * engine.mesh.dp_size
        return bool(((reduced(unit) - want).abs() <= 1e-6 * want.abs()).all())

    infos, seen = [], []
    for _ in range(4):
        infos.append(take_step(case, model, engine, heavy))
        seen.append(exact(engine))
    state = json.loads(json.dumps(engine.state()))
    model, engine = make(case)
    engine.load_state(state)
    take_step(case, model, engine, heavy)
    return infos, [*seen, exact(engine)], state["fallen_back"]


@pytest.mark.slow
@pytest.mark.parametrize("world,per_node,tp", [(4, 2, 1), EIGHT_RANKS])
def test_gradients_above_the_bound_fall_back_on_every_rank(world, per_node, tp):
    rounded = zero.Codecs(gradients_intra=Q8, gradients_inter=Q4)
    bound = {"gradient_error_bound": 0.08}
    cases = [Case(x, per_node, rounded, tp=tp, options=bound) for x in ("hhd", "11d", "ddd", "hhh")]
    cases.append(Case("hhd", per_node, FED, tp=tp, options=bound))
    lossy_inside = zero.Codecs(gradients_intra=Q4, gradients_inter=Q8)
    cases += [Case(x, per_node, lossy_inside, tp=tp, options=bound) for x in ("11d", "ddd")]
    for case, ranks in by_case(world, several, gradients_fall_back, cases):
        infos, seen, fallen = ranks[0]
        assert all(rank[0] == infos and rank[2] == fallen for rank in ranks), case
        assert [len(info.fallbacks) for info in infos] == [0, 1, 0, 0], (case, infos)
        assert "gradients of unit 'layers.1'" in infos[1].fallbacks[0] and "0.08" in infos[1].fallbacks[0]
        assert [info.sampled for info in infos] == ["layers.0", "layers.1"] * 2
        assert "gradients" not in infos[3].errors and infos[2].errors["gradients"] < 0.02
        assert fallen == {"layers.1": ["gradients"]}
        feedback = case.codecs.feedback  # the first exact message carries what was owed
        wanted = [False, False, not feedback, True, True]
        assert all(exact[2:] == wanted[2:] for _, exact, _ in ranks), (case, seen)
        assert not all(exact[0] for _, exact, _ in ranks), case


def weights_fall_back(case: Case, skipped: bool = False):
    """skipped: a step that finds an error is not finite, so no update makes the copies stale."""
    bad = (2 if case.codecs.delta else 1) if skipped else -1
    model = Leaves(case)
    with torch.no_grad():
        for p in model.layers[1].parameters():
            p.copy_(spikes(p.shape, case.dtype, 1.05))
    model, engine = make(case, ADAMW, model)

    def exact(engine):
        masters = full_masters(engine)
        with engine.gathered():
            return [torch.equal(u.weights.full, masters[u.name].to(case.dtype)) for u in engine.units]

    def gradients(step):
        out = drawn(case, engine.mesh.dp_rank, engine.mesh.tp.index, 0, step)
        if step == bad:
            out[0][1][0, 0] = torch.inf
        return out

    infos, seen = [], []
    for step in range(4):
        infos.append(take_step(case, model, engine, lambda _, step=step: gradients(step), divisor=1000.0))
        assert infos[-1].skipped == (step == bad)
        seen.append(exact(engine))
    return infos, seen, engine.state()["fallen_back"]


@pytest.mark.parametrize("skipped", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_weights_above_the_bound_fall_back_whatever_holds_them(skipped):
    rounded = zero.Codecs(weights=Q4)
    bound = {"weight_error_bound": 0.18}
    layouts = [
        ("hhd", "step", BF16),
        ("hhd", "resident", torch.float32),
        ("11d", None, BF16),
        ("11d", "step", torch.float32),
        ("ddd", None, BF16),
        ("hhh", None, torch.float32),
    ]
    cases = [
        Case(x, 2, rounded, dtype=dtype, options={**bound, "lifetime": lifetime})
        for x, lifetime, dtype in layouts
    ]
    # R is as near as bf16: at a bound below that, each unit falls back when it is looked at.
    cases += [Case(x, 2, DELTA, dtype=BF16, options={"weight_error_bound": 1e-4}) for x in ("hhd", "11d")]
    for case, ranks in by_case(4, several, weights_fall_back, cases, skipped, timeout=300):
        infos, seen, fallen = ranks[0]
        assert all(str(rank) == str(ranks[0]) for rank in ranks), case  # NaN is not NaN
        lines = [line.split(":")[0] for info in infos for line in info.fallbacks]
        if case.codecs.delta:  # R starts as the weights: nothing is sent before the first update
            assert lines == ["weights of unit 'layers.1'", "weights of unit 'layers.0'"], (case, infos)
            assert seen[1][1] and seen[2:] == [[True, True]] * 2, (case, seen)
        else:
            assert lines == ["weights of unit 'layers.1'"] and infos[1].fallbacks, (case, infos)
            assert seen == [[False, False], [False, True], [False, True], [False, True]], (case, seen)
            assert fallen == {"layers.1": ["weights"]}


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
    both = zero.Codecs(gradients_intra=Q8, gradients_inter=Q4)
    mixed = zero.Codecs(gradients_inter=H4)
    cases = [Case(x, per_node, both, 2, tp) for x in ("hhd", "11d", "ddd", "hhh")]
    cases += [Case("hhd", per_node, codecs, tp=tp) for codecs in (FED, mixed, DELTA, zero.Codecs())]
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
    case = Case("hhd", 2, zero.Codecs(gradients_inter=Q4), options={"gradient_error_bound": None})
    for (_, share), *_ in run_ranks(4, several, zeroed_behind_outliers, [case]):
        assert share == pytest.approx(1 - 19 / (33 * 9))


# -- noise ----------------------------------------------------------------------------------------


def streams(case: Case):
    """Every draw of two steps on this rank, and of the same two steps of another engine."""
    out = []
    for _ in range(2):
        model, engine = make(case, ADAMW)
        noise, made = engine.rounding.noise, []
        engine.rounding.noise = lambda *args, noise=noise, made=made: made.append(noise(*args)) or made[-1]
        for step in range(2):
            step_with(case, model, engine, step)
        out.append(sorted(made, key=str))  # what is sent when depends on timing
    return out


def test_no_two_messages_draw_the_same_noise():
    """Of units, ranks, hops, micro-batches and steps; another run draws the same, with another seed others."""
    codecs = zero.Codecs(weights=S8, gradients_intra=S8, gradients_inter=S4)
    case = Case("ddd", 2, codecs, micro_batches=2, options={"seed": 5})
    every = run_ranks(4, several, streams, [case, case.but(options={"seed": 6})])
    assert all(first == again for rank in every for first, again in rank)
    drawn = [noise for rank in every for case in rank for noise in case[0]]
    assert len(drawn) == 2 * 4 * 2 * 2 * (1 + 2 * 2) and len(set(drawn)) == len(drawn)


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
            codec = codecs.gradients_intra if link == INTRA else codecs.gradients_inter
            raw = j == 0 and (g > 0 or m == 1)
            sent = size_of(codec, cut(unit, j + 1), 4, item if raw else 4)
            add("reduce", link, (size - 1) * sent * (m if j < g else 1))
            if j >= o:  # the way back of replicas
                add("reduce", link, (size - 1) * size_of(codec, cut(unit, j + 1), 4, 4))
    # Norm, order hash, and squared errors and norms of two kinds, in fp64.
    nodes = prod(sizes) * case.tp // case.per_node
    told = 8 * (2 + 6 * (not case.codecs.exact))  # of a step, and of what rounding lost
    add("scalar", "intra_node", (case.per_node - 1) * nodes * told)
    add("scalar", "inter_node", (nodes - 1) * told)
    return out


@pytest.mark.slow
@pytest.mark.parametrize(
    "world,per_node,tp", [pytest.param(4, 2, 1, marks=pytest.mark.slow), (6, 3, 1), EIGHT_RANKS]
)
def test_counters_equal_the_formula(world, per_node, tp):
    presets = [
        ("hhd", zero.Codecs(weights=Q8, gradients_inter=Q4)),
        ("hhd", zero.Codecs(weights=Blockwise(8, 16), gradients_intra=Q8, gradients_inter=Blockwise(4, 8))),
        ("hhd", DELTA),
        ("11d", DELTA),
        ("11d", zero.Codecs(weights=Blockwise(2, 8), gradients_intra=Q8, gradients_inter=Q4)),
        ("ddd", zero.Codecs(weights=Q8, gradients_intra=Q4, gradients_inter=Q4)),
        ("hdd", zero.Codecs(weights=Q4)),
        ("hhh", zero.Codecs(gradients_inter=Q4, feedback=True)),
        ("111", zero.Codecs(weights=Q8, gradients_intra=Q8, gradients_inter=Q4)),
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
    for case, ranks in by_case(world, several, counted, cases):
        got, regions, axes = ranks[0]
        assert all(rank[0] == got for rank in ranks), case
        assert [len(r) for r in regions] == [2, 1, 2] and EXACT == 8
        assert {k: v for k, v in got.items() if v} == {
            k: v for k, v in formula(case, regions, axes).items() if v
        }, case
