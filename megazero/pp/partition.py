"""Which layers each pipeline stage holds. Pure; no torch.

A model is the embedding, ``num_layers`` equal layers and the head (final norm, output projection, loss), cut into
``pp * virtual`` stages. The first and the last of several may have no layers. Layers behind the last one, which
predict further tokens, lie with the head. Placement is looped (Narayanan et al.
2021, section 2.2): stage i lies on rank i % pp.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

UNIFORM, BY_TYPE = "uniform", "type:transformer|embedding"
METHODS = ("balanced", UNIFORM, BY_TYPE)


@dataclass(frozen=True)
class StageSpec:
    """One virtual stage. ``layers`` are global layer numbers; the last ``further`` of them predict further tokens."""

    index: int
    rank: int
    layers: range
    embedding: bool
    head: bool
    further: int = 0

    @property
    def main(self) -> range:
        """The numbers of the other layers."""
        return self.layers[: len(self.layers) - self.further]

    @property
    def embeds(self) -> bool:
        """Whether the stage embeds tokens: the model's, or those that further predictions follow."""
        return self.embedding or self.further > 0


@dataclass(frozen=True)
class Costs:
    """The relative compute, forward and backward together, of the embedding, of one layer and of the head."""

    embedding: float = 0.0
    layer: float = 1.0
    head: float = 0.0

    def of(self, stage: StageSpec) -> float:
        return self.layer * len(stage.layers) + self.embedding * stage.embedding + self.head * stage.head


def partition(
    num_layers: int,
    pp: int,
    virtual: int = 1,
    *,
    costs: Costs = Costs(),  # noqa: B008 (frozen)
    method: str | tuple[int, ...] = "balanced",
    first: int | None = None,
    last: int | None = None,
    further: int = 0,
) -> tuple[StageSpec, ...]:
    """Return the stages in the order of the model.

    method: 'balanced' makes the largest cost of a stage the smallest possible. 'uniform' counts layers only.
    'type:transformer|embedding' (DeepSpeed's word for what BLOOM used) counts the embedding and the head as one layer
    each. A tuple gives the layers of every stage.
    first, last: the layers of the outer stages. The method spreads the rest. further: layers behind the last one,
    which none of these counts, and 'balanced' weighs as layers.
    Where stages tie, earlier ones get fewer layers, because under 1F1B they hold more activations.
    Raises ValueError with every fault, each with the nearest legal choice.
    """
    problems = partition_problems(num_layers, pp, virtual, method, first, last)
    if not (
        costs.layer > 0 and min(costs.embedding, costs.head) >= 0 and math.isfinite(sum(vars(costs).values()))
    ):
        problems.append(f"{costs}: a layer costs more than 0, embedding and head at least 0, all finite")
    if problems:
        raise ValueError("; ".join(problems))
    by_method = {UNIFORM: Costs(), BY_TYPE: Costs(1.0, 1.0, 1.0)}
    if isinstance(method, tuple):
        counts: Sequence[int] = method
    else:
        behind = replace(costs, head=costs.head + costs.layer * further)
        counts = _spread(num_layers, pp * virtual, by_method.get(method, behind), first, last)
    starts = [sum(counts[:i]) for i in range(len(counts))]
    *others, end = (
        StageSpec(i, i % pp, range(start, start + count), i == 0, i == len(counts) - 1)
        for i, (start, count) in enumerate(zip(starts, counts, strict=True))
    )
    layers = range(end.layers.start, end.layers.stop + further)
    return (*others, replace(end, layers=layers, further=further))


def _spread(num_layers: int, stages: int, costs: Costs, first: int | None, last: int | None) -> list[int]:
    """Return the layers per stage with the smallest largest cost, and of those with the smallest sum of squares.
    Layers cost the same, so costs depend on the counts only, and it is optimal to give each layer to the stage that
    costs the least with it (convex separable resource allocation)."""
    fixed = {0: first, stages - 1: last}
    counts = [fixed.get(i) or max(low, int(num_layers >= stages)) for i, low in enumerate(_least(stages))]
    extra = [costs.embedding * (i == 0) + costs.head * (i == stages - 1) for i in range(stages)]
    free = [i for i in reversed(range(stages)) if fixed.get(i) is None]  # min() takes the later stage
    for _ in range(num_layers - sum(counts)):
        counts[min(free, key=lambda i: costs.layer * (counts[i] + 1) + extra[i])] += 1
    return counts


def _least(stages: int) -> list[int]:
    """Return the layers that each stage needs: 1 between the first and the last, which hold more than layers."""
    return [int(0 < i < stages - 1) for i in range(stages)]


def partition_problems(
    num_layers: int,
    pp: int,
    virtual: int = 1,
    method: str | tuple[int, ...] = "balanced",
    first: int | None = None,
    last: int | None = None,
) -> list[str]:
    """Return every rule that a partition breaks, each with the nearest legal choice, or [] if it is legal."""
    if min(num_layers, pp, virtual) < 1:
        return [f"{num_layers} layers, {pp} ranks and {virtual} stages per rank must each be at least 1"]
    if isinstance(method, str) and method not in METHODS:
        return [
            f"partition method {method!r} is not one of {', '.join(METHODS)} or layers per stage; nearest: balanced"
        ]
    stages, ends = pp * virtual, 2 if first is last is None else 0  # stages that need no layer
    if num_layers < max(stages - ends, 1):
        most = num_layers + ends
        nearest = f"{most} ranks" if virtual == 1 else f"{max(1, most // pp)} stages per rank"
        if virtual > 1 and most < pp:
            nearest = f"{most} ranks of 1 stage"
        return [
            f"{num_layers} layers cannot fill {stages} stages ({pp} ranks x {virtual} each), each at least one"
            f"{' but the first and last' * bool(ends)}; nearest: {nearest}, or {stages - ends} layers"
        ]
    if isinstance(method, tuple):
        return _tuple_problems(num_layers, stages, method, first, last)
    return _outer_problems(num_layers, stages, first, last)


def _tuple_problems(
    num_layers: int, stages: int, layers: tuple[int, ...], first: int | None, last: int | None
) -> list[str]:
    problems = []
    if first is not None or last is not None:
        problems.append(
            f"layers per stage {_show(layers)} say those of the first and last stage too; leave one out"
        )
    faults = []
    if len(layers) != stages:
        faults.append(f"{len(layers)} numbers for {stages} stages")
    if any(count < low for count, low in zip(layers, _least(len(layers)), strict=True)):
        faults.append("a stage between the first and the last holds at least one layer")
    if sum(layers) != num_layers:
        faults.append(f"their sum is {sum(layers)}, the model has {num_layers} layers")
    if faults:
        nearest = _show(nearest_layers(num_layers, stages, layers))
        problems.append(f"layers per stage {_show(layers)}: {', '.join(faults)}; nearest: {nearest}")
    return problems


def nearest_layers(num_layers: int, stages: int, wanted: Sequence[int]) -> tuple[int, ...]:
    """Return legal layers per stage near ``wanted``: the largest lose the surplus, the smallest gain the deficit."""
    if len(wanted) != stages:
        return tuple(_spread(num_layers, stages, Costs(), None, None))
    least = _least(stages)
    layers = [min(max(low, count), num_layers) for low, count in zip(least, wanted, strict=True)]
    while sum(layers) > num_layers:
        layers[max(range(stages), key=lambda i: (layers[i] > least[i], layers[i]))] -= 1
    while sum(layers) < num_layers:
        layers[max(i for i in range(stages) if layers[i] == min(layers))] += 1
    return tuple(layers)


def _outer_problems(num_layers: int, stages: int, first: int | None, last: int | None) -> list[str]:
    given = [count for count in (first, last) if count is not None]
    if not given:
        return []
    if stages == 1:
        return ["one stage holds every layer; leave the layers of the first and last stage out"]
    room = num_layers - (stages - len(given))  # for the given stages, with one layer for each of the others
    nearest = [min(max(given[0], 1), room - len(given) + 1)]
    if len(given) == 2:
        nearest.append(room - nearest[0] if stages == 2 else min(max(given[1], 1), room - nearest[0]))
    if given == nearest:
        return []
    names = " and ".join(name for name, count in (("first", first), ("last", last)) if count is not None)
    said, legal = (" and ".join(map(str, numbers)) for numbers in (given, nearest))
    return [
        f"{said} layers for the {names} stage leave {num_layers - sum(given)} of {num_layers} for the other "
        f"{stages - len(given)}, and every stage holds at least one; nearest: {legal}"
    ]


def _show(layers: Sequence[int]) -> str:
    return ",".join(map(str, layers))


def partition_table(stages: Sequence[StageSpec], costs: Costs) -> str:
    """Return a readable table: stage, rank, layers, what else it holds, cost, share of the largest cost."""
    largest = max(costs.of(stage) for stage in stages)
    lines = ["stage  rank  layers        holds                       cost in layers  of the largest"]
    for stage in stages:
        count, further = len(stage.main), [f"{stage.further} further"] * bool(stage.further)
        layers = [f"{count} layer{'s' * (count > 1)}"] * bool(count)
        holds = ["embedding"] * stage.embeds + layers + further + ["head"] * stage.head
        cost, numbers = (
            costs.of(stage),
            f"{stage.layers[0]} to {stage.layers[-1]}" if stage.layers else "none",
        )
        lines.append(
            f"{stage.index:5}  {stage.rank:4}  {numbers:12}  {', '.join(holds):26}  {cost / costs.layer:14.2f}  "
            f"{cost / largest:14.0%}"
        )
    return "\n".join(lines)
