"""This computes the bytes that one rank sends in a step, from sizes alone.

It is pure, and asks no counter, codec or chain of the engine. Axes are counted from the innermost. On axis j of size
a_j, a gather of a slice of m bytes per rank sends (a_j - 1) m bytes; an all-to-all of rows of m bytes sends as much.
Level l is the slice that is left after axes 1..l. ``formats`` give the bits and block of each hop, or None.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod

from megazero.config.wire import Coding
from megazero.mesh.grid import INTRA, AxisSpec, Grid
from megazero.pp.partition import StageSpec
from megazero.pp.schedules import Action, Kind, Schedule, sends

Bytes = Counter[tuple[str, str]]  # (hop kind, link) -> bytes
ALIGNED = 16  # bytes that parts of a quantised message are filled up to
SCALARS = 6 * 8  # squared norm, order hash, two sums of squares for weights and for gradients; fp64


@dataclass(frozen=True)
class UnitShape:
    """The sizes of one unit.

    coded, exact: how many elements the whole unit's regions have, padding included; exact is 0 where nothing is
    quantised. partial: how many elements of this rank's OS slice have gradients that tensor-parallel ranks sum. tied:
    the pipeline's other end holds the unit too.
    """

    coded: int
    exact: int
    quantised: bool
    partial: int = 0
    tied: bool = False


@dataclass(frozen=True)
class Formats:
    """What each hop sends; None means exact.

    width: the bytes of a parameter. sums: the bytes of a sum of gradients.
    """

    width: int
    sums: int
    weights: Coding | None = None
    gradients: Mapping[str, Coding | None] | None = None  # by link
    delta: bool = False


@dataclass(frozen=True)
class Copies:
    """How long copies live.

    ``uses`` gives, for each part, the units that its modules need, in order of the forward.
    """

    uses: Sequence[Sequence[Sequence[int]]]
    keep_gathered: bool = False


def message(coding: Coding | None, coded: int, exact: int, width: int, exact_width: int) -> int:
    """Return the bytes of a slice.

    Beside quantised elements, an exact element has ``exact_width`` bytes. If nothing is quantised, all elements have
    ``width`` bytes.
    """
    if coding is None:
        return (coded + exact) * width
    return _fill(coded * coding.bits // 8 + 2 * coded // coding.block) + _fill(exact * exact_width)


def _fill(size: int) -> int:
    return -(-size // ALIGNED) * ALIGNED


def model_state(
    units: Sequence[UnitShape],
    grid: Grid,
    formats: Formats,
    copies: Copies,
    program: Sequence[tuple[str, int]],
    micro_batches: int,
    ends_link: str | None = None,
) -> Bytes:
    """Return the bytes of refreshes, gathers and reductions of a step in which every unit is updated.

    ends_link: the link to the other end, if this rank holds one end of tied embeddings.
    """
    axes, levels = grid.data_axes, _levels(grid.data_axes)
    out: Bytes = Counter()
    gathered = gathers(copies, program)
    for index, unit in enumerate(units):
        out += _weights(unit, axes, levels, formats, gathered[index])
        out += _gradients(unit, axes, levels, formats, micro_batches)
        if unit.tied and ends_link is not None:
            coding = _coding(unit, formats, ends_link)
            parts = prod(a.size for a in axes[: levels[2]])
            out["reduce", ends_link] += message(
                coding, unit.coded // parts, unit.exact // parts, formats.sums, formats.sums
            )
    partial = sum(unit.partial for unit in units)
    out["tp", INTRA] += (grid.tp - 1) * partial * formats.sums
    link = INTRA if grid.ranks_per_node >= grid.world_size else "inter_node"
    out["scalar", link] += (grid.world_size - 1) * SCALARS
    return +out


def _levels(axes: Sequence[AxisSpec]) -> tuple[int, int, int, int]:
    """Return how many axes cut parameters, gradients and optimizer states, and how many axes there are."""
    roles = [axis.role for axis in axes]
    p = roles.count("p")
    g = p + roles.count("g")
    return p, g, g + roles.count("os"), len(roles)


def _coding(unit: UnitShape, formats: Formats, link: str) -> Coding | None:
    return (formats.gradients or {}).get(link) if unit.quantised else None


def _weights(
    unit: UnitShape, axes: Sequence[AxisSpec], levels: tuple[int, ...], formats: Formats, gathered: int
) -> Bytes:
    out: Bytes = Counter()
    p, _, os, _ = levels
    coding, width = (formats.weights if unit.quantised else None), formats.width
    parts = prod(a.size for a in axes[:os])
    own = message(coding, unit.coded // parts, unit.exact // parts, width, width)
    for level in range(p + 1, os + 1):  # what an OS slice became, of all that lie in the level's slice
        held = prod(a.size for a in axes[level:os])
        out["refresh", axes[level - 1].link] += (axes[level - 1].size - 1) * held * own
    if formats.delta and unit.quantised and p < os:
        parts = prod(a.size for a in axes[:p])
        own, inner = (unit.coded + unit.exact) // parts * width, p
    else:
        inner = os
    for level in range(1, p + 1):
        held = prod(a.size for a in axes[level:inner])
        out["gather", axes[level - 1].link] += gathered * (axes[level - 1].size - 1) * held * own
    return out


def _gradients(
    unit: UnitShape, axes: Sequence[AxisSpec], levels: tuple[int, ...], formats: Formats, micro_batches: int
) -> Bytes:
    out: Bytes = Counter()
    _, g, os, every = levels
    for level in range(1, every + 1):
        axis = axes[level - 1]
        coding = _coding(unit, formats, axis.link)
        raw = level == 1 and (g > 0 or micro_batches == 1)  # one micro-batch's gradients, not a sum
        parts = prod(a.size for a in axes[:level])
        width = formats.width if raw else formats.sums
        row = message(coding, unit.coded // parts, unit.exact // parts, width, formats.sums)
        times = micro_batches if level <= g else 1
        out["reduce", axis.link] += times * (axis.size - 1) * row
        if level > os:  # replicas: the owner's share goes back
            back = message(coding, unit.coded // parts, unit.exact // parts, formats.sums, formats.sums)
            out["reduce", axis.link] += (axis.size - 1) * back
    return out


def gathers(copies: Copies, program: Sequence[tuple[str, int]]) -> Counter[int]:
    """Return how often each unit is gathered over P in a step: once per use, less where it is still there.

    After a use a unit stays only if the next module needs it. With ``keep_gathered`` it stays as long as its part
    comes again.
    """
    visits = [(i, list(visit)) for i, segment in enumerate(program) for visit in _visits(copies, *segment)]
    out: Counter[int] = Counter()
    held: set[int] = set()
    for at, (segment, units) in enumerate(visits):
        kind, part = program[segment]
        out.update(unit for unit in units if unit not in held)
        held.update(units)
        again = {u for i, later in visits[at + 1 :] if i == segment and kind != "F" for u in later}
        following = visits[at + 1][1] if at + 1 < len(visits) else []
        returns = any(later == part and k != "W" for k, later in program[segment + 1 :])
        for unit in units:
            keep = copies.keep_gathered and returns
            if not (keep or unit in following or unit in again):
                held.discard(unit)
    return out


def _visits(copies: Copies, kind: str, part: int) -> Iterator[Sequence[int]]:
    if kind == "W":
        return iter(())
    modules = copies.uses[part]
    return iter(modules if kind == "F" else list(reversed(modules)))


# -- activations ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Activation:
    """The activation [length, samples, hidden] of a micro-batch between layers. An element has ``width`` bytes."""

    length: int
    samples: int
    hidden: int
    width: int
    tp: int = 1
    sequence_parallel: bool = False

    @property
    def whole(self) -> int:
        return self.length * self.samples * self.hidden * self.width

    @property
    def sent(self) -> int:
        """The bytes of a message between stages. Where it can be cut, this is one tensor-parallel rank's part."""
        elements = self.whole // self.width
        return elements // self.tp * self.width if elements % self.tp == 0 else self.whole


def pipeline(schedule: Schedule, grid: Grid, rank: int, activation: Activation) -> Bytes:
    """Return the bytes of messages between stages.

    Where the messages are cut, the receivers gather them inside their tensor-parallel group.
    """
    out: Bytes = Counter()
    own, line = grid.axis("pp").index(rank), grid.axis("pp").ranks(rank)
    for (source, target), messages in sends(schedule, grid.pp).items():
        if source == own:
            out["pp", grid.link(rank, line[target])] += len(messages) * activation.sent
        elif target == own and not activation.sequence_parallel and activation.sent < activation.whole:
            out["tp", INTRA] += len(messages) * (grid.tp - 1) * activation.sent
    return out


def tensor_parallel(
    stages: Sequence[StageSpec],
    actions: Sequence[Action],
    activation: Activation,
    again: int,
    wide: int,
    norms: tuple[int, int] = (0, 0),
) -> Bytes:
    """Return the bytes of collectives inside layers.

    again: how many collectives of a layer's forward run again in its backward (see ``recomputed``). wide: the bytes
    of an element of the loss. norms: the bytes of a layer's norms of queries and keys, in its forward and in its
    backward (see ``split_norms``).

    A layer has two pairs of linears; in each, a column linear comes before a row linear. The forward sums the row's
    output; under sequence parallel it first gathers the column's input, and scatters the sum. The backward does the
    same with the gradients, and under sequence parallel gathers the column's input once more.
    """
    tp = activation.tp
    share = (tp - 1) * activation.whole // tp
    # a sum is a ring's all-reduce, or with sequence parallel one half of it
    unit = share if activation.sequence_parallel else 2 * share
    wire = 1 if activation.sequence_parallel else 0
    loss = (tp - 1) * 2 * activation.length * activation.samples * wide
    by_index = {stage.index: stage for stage in stages}
    total = 0
    for action in actions:
        stage = by_index[action.stage]
        layers = len(stage.layers)
        if action.kind == Kind.FORWARD:
            total += unit * (stage.embedding + layers * 2 * (1 + wire) + stage.head * wire)
            total += loss * stage.head + layers * norms[0]
        elif action.kind in (Kind.BACKWARD, Kind.INPUT):
            total += unit * (stage.embedding * wire + layers * (2 * (1 + 2 * wire) + again))
            total += unit * stage.head * (1 + wire) + layers * norms[1]
    return Counter({("tp", INTRA): total} if tp > 1 else {})


def split_norms(granularity: str, activation: Activation, wide: int) -> tuple[int, int]:
    """Return the bytes of norms over all heads of queries and keys, in a layer's forward and in its backward.

    Each is an all-reduce of two sums for each position, of ``wide`` bytes. A full recompute repeats the forward's.
    """
    tp = activation.tp
    once = 2 * (tp - 1) * (2 * activation.length * activation.samples * wide) // tp
    return once, once * (2 if granularity == "full" else 1)


def recomputed(granularity: str, sequence_parallel: bool, after: bool) -> int:
    """Return how many collectives of a layer's forward a recompute repeats.

    It repeats all but the last sum, unless something needs it: ``after`` says that dropout or a norm follows. Where
    attention alone is recomputed, it repeats none.
    """
    if granularity != "full":
        return 0
    return (4 if sequence_parallel else 2) - (0 if after else 1)
