"""The bytes that a rank sends for parameters and gradients in a step: a formula that judges megazero.zero and
megazero.plan, and imports nothing of them.

Refreshes, gathers and reductions are counted axis by axis, from the sizes of parameters: without joined layers and
chunks, and with gathers that are not bounded or, on one stage, bounded by 0 bytes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from math import prod

from megazero.comm.wire import Codecs, Coding
from megazero.config import RunConfig, World
from megazero.config.layout.wire import Wire
from megazero.config.model.spec import ParameterSpec, padded_spec
from megazero.mesh.grid import AxisSpec, make_grid

Sent = Counter[tuple[str, str]]


def up(n: int, multiple: int) -> int:
    return (n + multiple - 1) // multiple * multiple


def message(coded: int, exact: int, coding: Coding | None, width: int, exact_width: int) -> int:
    """Of so many elements: digits and bf16 scales fill 16 bytes, and so do elements that are never rounded."""
    if coding is None:
        return (coded + exact) * width
    return up(coded * coding.bits // 8 + coded // coding.block * 2, 16) + up(exact * exact_width, 16)


def sent_for_unit(
    sizes: tuple[int, int],
    axes: Sequence[AxisSpec],
    codecs: Codecs[Coding],
    *,
    width: int,
    micro_batches: int,
    gathers: int = 0,
    whole: bool = False,
) -> Sent:
    """A unit's regions have these sizes. whole: gradients are reduced once. gathers: how often it is gathered."""
    out, sums, ranks, (coded, exact) = Sent(), max(width, 4), 1, sizes
    p, owners = (prod(a.size for a in axes if a.role in roles) for roles in (("p",), ("p", "g", "os")))
    own = message(coded // owners, exact // owners, codecs.weights, width, width)
    each_reduces = not whole and any(a.role in ("p", "g") for a in axes)
    for axis in axes:
        first, others = ranks == 1, axis.size - 1
        ranks *= axis.size
        parts, slices = (coded // ranks, exact // ranks), owners // ranks * own
        if axis.role in ("g", "os"):
            out["refresh", axis.link] += others * slices
        if axis.role == "p":
            kept = codecs.delta and p < owners
            out["gather", axis.link] += gathers * others * (sum(parts) * width if kept else slices)
        coding, raw = codecs.gradients.get(axis.link), first and (each_reduces or micro_batches == 1)
        times = micro_batches if axis.role in ("p", "g") and not whole else 1
        out["reduce", axis.link] += times * others * message(*parts, coding, width if raw else sums, sums)
        if axis.role == "replica":  # what it owns goes back
            out["reduce", axis.link] += others * message(*parts, coding, sums, sums)
    return out


def sent_in_step(config: RunConfig, world: World, rank: int) -> Sent:
    """The step of pipeline rank ``rank``."""
    shards, wire, parallel = config.shards(world), config.wire(world), config.parallel
    tp, pp = parallel.tensor_model_parallel_size, parallel.pipeline_model_parallel_size
    ep, order = parallel.expert_model_parallel_size, parallel.use_tp_pp_dp_mapping
    grid = make_grid(
        world.world_size,
        world.ranks_per_node,
        tp,
        pp,
        shards.factors,
        order,
        ep=ep,
        level_sizes=parallel.level_sizes,
    )
    spec, count = padded_spec(config.model, tp, ep), config.num_micro_batches(world)
    width = {"bf16": 2, "fp32": 4}[config.precision.params_dtype]
    stages = [stage for stage in config.stages() if stage.rank == rank]
    modules = [module for stage in stages for _, module in spec.of_stage(stage)]
    bounded = not config.zero.zero_prefetch_bytes and not shards.keep_gathered
    stays = {0: count + 1, len(modules) - 1: count}  # for the next forward, or for the backward
    total = Sent()
    for place, module in enumerate(modules):
        times = stays.get(place, 2 * count) if bounded else 1
        held = [p for p in module.parameters if pp > 1 or module is not modules[-1] or not p.tied]
        for unit in _units(held, tied=pp > 1, apart=ep > tp):
            axes = grid.expert_axes if unit[0].experts else grid.data_axes
            coded, exact = _regions(unit, tp, wire.block * prod(a.size for a in axes), wire)
            codecs, sizes = (wire, (coded, exact)) if coded else (type(wire)(), (exact, 0))
            rest = {"width": width, "micro_batches": count, "gathers": times, "whole": shards.whole_gradients}
            total += sent_for_unit(sizes, axes, codecs, **rest)
            if unit[0].tied and pp > 1:
                link, sums, parts = grid.axis("pp").link, max(width, 4), (n // grid.shards[2] for n in sizes)
                total["reduce", link] += message(*parts, codecs.gradients.get(link), sums, sums)
    return total


def _units(held: Sequence[ParameterSpec], tied: bool, apart: bool) -> list[list[ParameterSpec]]:
    """What both ends hold is alone, and so are experts that ranks share."""
    alone = [[p] for p in held if tied and p.tied]
    experts = [p for p in held if apart and p.experts]
    rest = [p for p in held if [p] not in alone and p not in experts]
    return [*alone, *(unit for unit in (rest, experts) if unit)]


def _regions(unit: Sequence[ParameterSpec], tp: int, slices: int, wire: Wire) -> tuple[int, int]:
    """Whole blocks of every rank: of what may be rounded, and of small parameters and those that ranks replicate."""
    sizes = [0, 0]
    for p in unit:
        replicated = not wire.exact and p.replicated(tp) and not p.experts
        sizes[p.local_numel(tp) <= wire.exact_numel or replicated] += up(p.local_numel(tp), wire.block)
    coded, exact = (up(size, slices) for size in sizes)
    return coded, exact
