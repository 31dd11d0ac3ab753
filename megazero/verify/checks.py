"""The checks of a certificate: figures from the ranks' records beside one rank, limits, verdicts."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from operator import itemgetter

import numpy as np

from megazero.comm.wire import Coding
from megazero.config import RunConfig
from megazero.config.layout.wire import Wire
from megazero.mesh.grid import Grid, own_spans
from megazero.plan.communication import ExpertRows
from megazero.verify.expected_bytes import ExpectedBytes, LayerRows, mismatches
from megazero.verify.full_tensors import Assembler, FullTensors, Piece
from megazero.verify.recorder import KEYS, RoundingRecord, UnitSlice, digest, rounded_name
from megazero.verify.reference import Curve, Reference, global_norm, relative_errors
from megazero.verify.training_run import RankRecord
from megazero.zero.rounding import GRADIENTS, WEIGHTS

# With products in fp8, which the reference has, too, inputs that differ in their last bits may be rounded to
# neighbours.
GRADIENT = {"fp8": 1e-2, "fp32": 1e-6, "fp64": 1e-10}
LOSS = {"fp8": 1e-3, "fp32": 1e-5, "fp64": 1e-10}  # and of the gradients' global norm
CLOSE = 0.05  # of a loss with quantised messages and 16-bit parameters to the exact one
RESHARDED = {"fp8": 1e-3, "fp32": 1e-6, "fp64": 1e-6}
# How far a chosen expert's score may be below the k-th largest: what rounding may turn around.
ROUTING = {"fp8": 1e-3, "fp32": 1e-5, "fp64": 1e-10}


@dataclass(frozen=True)
class Check:
    """One line of the certificate.

    figure and limit are written in words. good is true if the figure is within the limit. where names the worst
    place, or says why the check failed.
    """

    name: str
    figure: str
    limit: str
    good: bool
    where: str = ""


@dataclass
class Evidence:
    """The exact run beside one rank.

    losses: of all ranks together, by step. balance: the reference's balance loss and z loss at the ranks' masters, by
    step.
    """

    records: Sequence[RankRecord]
    reference: Reference
    losses: list[float]
    balance: list[tuple[float, float]]
    checks: list[Check]


def gather_evidence(assembler: Assembler, records: Sequence[RankRecord], data_parallel: int) -> Evidence:
    """Assemble the exact run and compute one rank's gradients at its masters, step by step."""
    config, steps = assembler.config, len(records[0].steps)
    reference = Reference(config, data_parallel)
    every = [[record.steps[step] for record in records] for step in range(steps)]
    reference.routed = [_routing(config, records, [each.routing for each in seen]) for seen in every]
    reference.plain = [_routing(config, records, [each.plain for each in seen]) for seen in every]
    found = _evidence(assembler, records, reference, reference.curve(steps))
    if config.model.num_experts is not None:
        found.checks += _balance_checks(found, LOSS[_products(config)])
    return found


def _routing(
    config: RunConfig, records: Sequence[RankRecord], chosen: Sequence[Mapping[tuple[int, int], np.ndarray]]
) -> dict[int, np.ndarray]:
    """Return the experts of a step's tokens by layer, [s, samples, k], of those that the ranks chose.

    Its samples are in the order of micro-batches, and in each of data-parallel ranks. Of these, neighbours that share
    samples have a part of the tokens each, which tensor-parallel ranks may cut again.
    """
    (heads, keys), length = config.context_levels(None), config.model.seq_length
    sharing = heads * keys
    micro, ranks = config.batch.micro_batch_size, (1 + max(record.dp for record in records)) // sharing
    found: dict[int, np.ndarray] = {}
    for record, routing in zip(records, chosen, strict=True):
        rounds = 1 + max((m for _, m in routing), default=0)
        for (layer, m), experts in routing.items():
            tokens, _, topk = experts.shape
            shape = (length, rounds * ranks * micro, topk)
            whole = found.setdefault(layer, np.full(shape, -1, experts.dtype))
            batch, part = divmod(record.dp, sharing)
            own = np.concatenate([np.array(span) for span in own_spans(length, part, heads, keys)])
            first, place = tokens * record.tp % len(own), (m * ranks + batch) * micro
            whole[own[first : first + tokens], place : place + micro] = experts
    return found


def _evidence(
    assembler: Assembler, records: Sequence[RankRecord], reference: Reference, curve: Curve
) -> Evidence:
    """Compare what the ranks had in each step with what one rank computes at their masters."""
    dtype = _products(assembler.config)
    norms, regrets = list[tuple[float, str]](), list[tuple[float, str]]()
    errors = list[dict[str, float]]()
    initial, stale, crossed, faults = (list[str]() for _ in range(4))
    every_masters, every_got, balance = list[FullTensors](), list[FullTensors](), list[tuple[float, float]]()
    for step in range(len(records[0].steps)):
        own, at = [record.steps[step] for record in records], f"step {step + 1}"
        masters = assembler.assemble(_pieces(records, [s.masters for s in own]))
        got = assembler.assemble(_pieces(records, [s.gradients for s in own]))
        want = reference.gradients(masters.whole, step)
        if step == 0:
            initial = [n for n, w in curve.initial.items() if not np.array_equal(masters.whole[n], w)]
        errors.append(relative_errors(got.whole, want))
        norms += [(_relative(s.norm, global_norm(want)), at) for s in own]
        regrets.append((reference.regret, at))
        balance.append(reference.balance)
        names = sorted(set(_stale(assembler, records, masters, step)))
        stale += [f"{names[0]}, {at}"] if names else []
        crossed += _crossed(records, step)
        faults += [*masters.faults, *got.faults]
        every_masters.append(masters)
        every_got.append(got)
    losses = [step_loss(records, step) for step in range(len(records[0].steps))]
    rounding = partial(reference.rounding, [masters.whole for masters in every_masters])
    checks = [
        _none("initial weights", initial, "parameters: that differ from one rank's"),
        gradients_check(errors, GRADIENT[dtype], rounding if dtype != "fp64" else None),
        _worst("gradient norm", norms, LOSS[dtype]),
        _worst("loss curve", _apart(losses, curve.losses), LOSS[dtype]),
        _none("weights in use", stale, "steps: whose forwards read other weights than the masters"),
        _none("activations", crossed, "messages: between stages that are not what was sent"),
        _same_bits("master replicas", every_masters),
        _same_bits("gradient replicas", every_got),
        _none(
            "padding", faults, "parameters: with missing or infinite elements, or padding that is not zero"
        ),
    ]
    if assembler.config.model.num_experts is not None:
        # Every token went to its best experts, as far as rounding lets one tell.
        checks.append(_worst("routing", regrets, ROUTING[dtype]))
    return Evidence(records, reference, losses, balance, checks)


def gradients_check(
    every: Sequence[Mapping[str, float]], limit: float, rounding: Callable[[], Mapping[str, float]] | None
) -> Check:
    """Check the errors of every step by parameter. Where one is above the limit, twice what one rank has counts.

    rounding: returns that of each parameter; None: nothing is above the limit. It is asked only if it decides.
    """
    found = [(e, name, step) for step, own in enumerate(every, 1) for name, e in own.items()]
    above = {name for e, name, _ in found if not e <= limit}  # NaN is
    allowed = dict.fromkeys(every[0], limit)
    if above and rounding:
        allowed |= {name: max(limit, 2 * error) for name, error in rounding().items() if name in above}
    times = [math.inf if math.isnan(e) else e / allowed[name] for e, name, _ in found]
    error, name, step = found[times.index(max(times))]
    own = f"; with limits of their own: {', '.join(sorted(above))}" if above and rounding else ""
    where = f"{name}, step {step}{own}"
    return Check("gradients", f"{error:.2e}", f"{allowed[name]:.3g}", error <= allowed[name], where)


def _dtype(config: RunConfig) -> str:
    """Return the dtype that decides limits, of masters."""
    return "fp64" if config.precision.params_dtype == "fp64" else "fp32"


def _products(config: RunConfig) -> str:
    """Return what decides limits of what products make."""
    return "fp8" if config.precision.fp8_format else _dtype(config)


def _balance_checks(seen: Evidence, limit: float) -> Iterator[Check]:
    """Check what was counted and averaged of the experts' tokens."""
    loads, biases, losses = list[str](), list[str](), list[tuple[float, str]]()
    for step, own in enumerate(zip(*(record.steps for record in seen.records), strict=True)):
        wanted = seen.reference.loads(step)
        moved = {name: bias.numpy().copy() for name, bias in seen.reference.take_biases(step).items()}
        balance = seen.balance[step]
        for rank, record in enumerate(own):
            told, where = record.balance, f"rank {rank}, step {step + 1}"
            assert told is not None
            loads += [where] if not np.array_equal(record.loads, wanted) else []
            biases += [f"{n}, {where}" for n, b in record.biases.items() if not np.array_equal(b, moved[n])]
            pairs = zip((told.mean.loss, told.mean.z_loss), balance, strict=True)
            losses += [(_relative(got, want), where) for got, want in pairs if want]
    yield _none("expert loads", loads, "counts: of tokens that are not those which the experts got")
    yield _none("expert bias", biases, "biases: that the experts' tokens do not make")
    yield _worst("balance losses", losses or [(0.0, "none is added")], limit)


def _pieces(records: Sequence[RankRecord], slices: Sequence[Sequence[UnitSlice]]) -> Iterator[Piece]:
    """Yield the pieces of all records. ``slices`` has one item per record."""
    for record, units in zip(records, slices, strict=True):
        yield from ((record.place, *piece) for unit in units for piece in unit.pieces())


def step_loss(records: Sequence[RankRecord], step: int) -> float:
    """Return the mean loss of a step over the batch of the ranks of these records.

    Tensor-parallel ranks hold the same loss, so one of them counts.
    """
    return sum(o.steps[step].loss for o in records if o.tp == 0 and o.last)


def _relative(got: float, want: float) -> float:
    return abs(got - want) / abs(want)


def _apart(got: Sequence[float], want: Sequence[float]) -> list[tuple[float, str]]:
    """Return by how much the losses of each step differ, and the step."""
    return [(_relative(a, b), f"step {step + 1}") for step, (a, b) in enumerate(zip(got, want, strict=True))]


def _worst(name: str, errors: Iterable[tuple[float, str]], limit: float) -> Check:
    """Check that there are errors, each with its place, and that none is above the limit. NaN is."""
    clean = [(math.inf if math.isnan(error) else error, where) for error, where in errors]
    worst, where = max(clean, key=itemgetter(0), default=(math.inf, "nothing was compared"))
    return Check(name, f"{worst:.2e}", f"{limit:g}", worst <= limit, where)


def _same_bits(name: str, steps: Iterable[FullTensors]) -> Check:
    """Check that replicas of no parameter differ."""
    found = [f"{parameter} over {over}" for step in steps for parameter, over in step.differing.items()]
    return _none(name, found, "replicas: that differ in a bit")


def _none(name: str, found: Sequence[str], what: str) -> Check:
    """Check that nothing was found.

    ``what`` is a noun and, after a colon, the fault of those found.
    """
    noun, _, wrong = what.partition(": ")
    return Check(name, f"{len(found)} {noun}", "0", not found, found[0] if found else f"{noun} {wrong}")


def _stale(
    assembler: Assembler, records: Sequence[RankRecord], masters: FullTensors, step: int
) -> Iterator[str]:
    """Yield the parameters of which a rank read something else than the assembled masters."""
    dtype = np.float64 if assembler.config.precision.params_dtype == "fp64" else np.float32
    for place in assembler.places:
        local = assembler.split(masters.whole, place)
        bits = {name: digest(values.astype(dtype)) for name, values in local.items()}
        for record in records:
            if record.place == place:
                read = record.steps[step].read
                yield from (
                    assembler.name(name) for name, seen in read.items() if seen != bits[assembler.name(name)]
                )


def _crossed(records: Sequence[RankRecord], step: int) -> Iterator[str]:
    """Yield messages that a stage received although its neighbour did not send them for this micro-batch."""
    sent: dict[tuple[int, int, str, int, int], str] = {}
    for o in records:
        for (way, kind, stage, m), bits in o.steps[step].passed.items():
            if way == "sent":
                sent[o.dp, o.tp, kind, stage, m] = bits
    for o in records:
        for (way, kind, stage, m), bits in o.steps[step].passed.items():
            source = stage - 1 if kind == "activation" else stage + 1
            if way == "got" and sent.get((o.dp, o.tp, kind, source, m)) != bits:
                yield f"the {kind} of micro-batch {m} that stage {stage} got, step {step + 1}"


# -- pass 2: as configured -----------------------------------------------------------------------------


def configured_checks(
    assembler: Assembler,
    records: Sequence[RankRecord],
    exact: Sequence[float],
    wire: Wire,
    keys: Coding | None,
) -> list[Check]:
    """Check the losses, the bits of replicas, and the rounding of every quantised hop.

    exact: the losses of pass 1. wire: the formats of the hops. keys: that of gathered keys and values.
    """
    steps = range(len(records[0].steps))
    losses = [step_loss(records, step) for step in steps]
    dropout = max(assembler.config.model.attention_dropout, assembler.config.model.hidden_dropout)
    reads = [line for step in steps for line in _differing_reads(assembler, records, step)]
    slices = [*([o.steps[step].masters for o in records] for step in steps), [o.final for o in records]]
    masters = (assembler.assemble(_pieces(records, each)) for each in slices)
    limit = CLOSE + dropout  # masks move a loss by about as much as they drop
    return [
        _worst("loss beside the exact one", _apart(losses, exact), limit),
        _none("replicas in use", reads, "parameters: read by forwards that are not the same bits everywhere"),
        _same_bits("master replicas", masters),
        *_rounding_checks(records, wire, keys),
    ]


def _differing_reads(assembler: Assembler, records: Sequence[RankRecord], step: int) -> Iterator[str]:
    bits: defaultdict[tuple[str, int], set[str]] = defaultdict(set)
    replicated = assembler.replicated
    for o in records:
        for held, seen in o.steps[step].read.items():
            name = assembler.name(held)
            bits[name, -1 if name in replicated else assembler.part(name, o.place)].add(seen)
    yield from (f"{name}, step {step + 1}" for (name, _), seen in bits.items() if len(seen) > 1)


def _rounding_checks(records: Sequence[RankRecord], wire: Wire, keys: Coding | None) -> Iterator[Check]:
    gradients = ((GRADIENTS, coding) for coding in wire.gradients.values())
    sent = [(WEIGHTS, wire.weights), *gradients, (KEYS, keys)]
    # A format that no message had fails its check: nothing would have been proven.
    merged = {(kind, rounded_name(c.bits, c.block, c.hadamard)): RoundingRecord() for kind, c in sent if c}
    for o in records:
        for key, part in o.rounded.items():
            held = merged.setdefault(key, RoundingRecord())
            held.elements += part.elements
            held.worst = max(held.worst, part.worst)
            held.error += part.error
            held.norm += part.norm
    for (kind, form), r in sorted(merged.items()):
        relative = math.sqrt(r.error / r.norm) if r.norm else 0.0
        yield Check(
            f"rounding of {kind}, {form}",
            f"{r.worst:.3f} x bound",
            "1",
            r.worst <= 1 and r.elements > 0,
            f"{relative:.1%} of the norm, {r.elements} elements; bound of an element: half a scale to nearest, a "
            f"scale at random; the scale is the largest of its block / {2 ** (int(form[3]) - 1) - 1}",
        )


# -- bytes, resume, reshard ------------------------------------------------------------------------------


def bytes_check(name: str, expected: ExpectedBytes, records: Sequence[RankRecord], saved: int) -> Check:
    """Compare the byte counters of every hop kind and link with the formula, on every rank, from the second step on.

    The first step is left out: it records the order of use, and gathers more. saved: the step after which the run
    saved.
    """
    wrong, counted = list[str](), 0
    experts = expected.config.model.num_experts or 0
    for rank, record in enumerate(records):
        for step in range(1, len(record.steps)):
            rows = list(_expert_rows(expected.grid, experts, records, rank, step))
            want = Counter(expected.bytes_of(rank, step, after_save=step == saved + 1, rows=rows))
            got = Counter(record.steps[step].traffic)
            counted += want.total()
            for key, (formula, counter) in mismatches(want, got).items():
                hop = key.removesuffix("_bytes")
                wrong.append(f"rank {rank}, step {step + 1}: {hop} counted {counter}, formula {formula}")
    where = "; ".join(wrong[:3]) or f"off the formula; {counted} bytes in all"
    return Check(name, f"{len(wrong)} counters", "0", not wrong, where)


def _expert_rows(
    grid: Grid, experts: int, records: Sequence[RankRecord], rank: int, step: int
) -> Iterator[LayerRows]:
    """Yield the rows that a rank exchanged in a step with those that share the experts, as the records route them."""
    if grid.ep == 1:
        return
    inside, across = grid.ep_axes
    here, share, (nodes, places) = across.index(rank), experts // grid.ep, (across.size, inside.size)

    def routed(other: int, key: tuple[int, int]) -> np.ndarray:
        """Return how many experts of each holder each token of a rank chose, [T, node, place in it]."""
        holders = records[other].steps[step].routing[key] // share  # [s, b, k]
        return (holders[..., None] == np.arange(grid.ep)).sum(2).reshape(-1, nodes, places)

    own = inside.index(rank)
    for key in records[rank].steps[step].routing:
        chosen = {other: routed(other, key) for other in grid.ep_axis.ranks(rank)}
        # Of the rows that are at each rank of this node, how many go to each of its ranks.
        moved = [
            sum(chosen[source][:, here].sum(0) for source in across.ranks(mate))
            for mate in inside.ranks(rank)
        ]
        visits = {source: chosen[source].any(2).sum(0) for source in across.ranks(rank)}  # of each node
        rows = ExpertRows(
            sent=int(sum(moved[own]) - moved[own][own]),
            received=int(sum(n[own] for n in moved) - moved[own][own]),
            sent_across=int(sum(visits[rank]) - visits[rank][here]),
            received_across=int(sum(n[here] for n in visits.values()) - visits[rank][here]),
        )
        yield LayerRows(key[0], rows)


def resume_check(
    name: str, straight: Sequence[RankRecord], resumed: Sequence[RankRecord], after: int
) -> Check:
    """Compare the resumed run's losses, norms and final masters with the uninterrupted run's, bit for bit."""
    wrong = []
    for rank, (whole, rest) in enumerate(zip(straight, resumed, strict=True)):
        pairs = zip(whole.steps[after:], rest.steps, strict=True)
        if any((a.loss, a.norm) != (b.loss, b.norm) for a, b in pairs):
            wrong.append(f"rank {rank}: losses or norms differ")
        same = zip(whole.final, rest.final, strict=True)
        wrong += [f"rank {rank}: {a.unit}" for a, b in same if not np.array_equal(a.values, b.values)]
    return _none(name, wrong, "slices: of losses, norms or masters that differ in a bit")


def reshard_check(name: str, config: RunConfig, loss: float, stayed: float) -> Check:
    error = _relative(loss, stayed), f"loss {loss:.6f}, stayed {stayed:.6f}"
    return _worst(name, [error], RESHARDED[_products(config)])
