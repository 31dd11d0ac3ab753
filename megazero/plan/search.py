"""Finds the fastest layouts that fit: every legal one, except those that a bound rules out.

The configuration's own rules decide legality: every base validates, and every layout's shards and wire resolve. Each
has a lower bound of its step time. The one with the least bound is simulated next, until ten results lie below all
remaining bounds. Layouts whose ranks share samples, inside a node, are tried where memory is short without: where no
other fits, or the fastest of them recomputes all.

Never better and therefore not tried: schedule gpipe (the time of 1f1b with more memory), tensor parallelism without
legal sequence parallelism (the same bytes with more memory), P copies that need not be resident.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import count
from types import MappingProxyType
from typing import Any, NamedTuple

from megazero.config import ConfigError, RunConfig, World, make_config
from megazero.config.layout.shards import AUTO, QUANTISED
from megazero.config.nearest import common_divisors
from megazero.config.options.cluster import Cluster
from megazero.config.options.sections import ZeroConfig
from megazero.mesh.grid import INTER, INTRA
from megazero.plan.base_layout import BaseLayout
from megazero.plan.layout import Chain, Layout
from megazero.plan.seconds import INTER_SITE, Collectives
from megazero.plan.simulate import Timing, simulate
from megazero.plan.units import WIDTHS
from megazero.pp.partition import StageSpec
from megazero.pp.schedules import Kind

BEST = 10
# The options that the planner chooses where they are not given.
PARALLEL = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "use_tp_pp_dp_mapping",
    "sequence_parallel",
    "expert_model_parallel_size",
    "context_parallel_size",
)
STAGES = (
    "num_layers_per_virtual_pipeline_stage",
    "num_virtual_stages_per_pipeline_rank",
    "pipeline_schedule",
)
ZERO = ("zero_shard", "zero_preset", "zero_stage", "zero_hpz_partition_size")
LIFETIME = "zero_params_lifetime"
CHOICES = (*PARALLEL, *STAGES, *ZERO, "recompute_granularity", "micro_batch_size")
LARGEST_MICRO_BATCH = 64
MOST_STAGES_PER_RANK = 8
ACROSS = (INTER, INTER_SITE)  # links between nodes
MODULES_HELD = 4  # from one segment to the next: the last one and the next one, each with a tied table


@dataclass(frozen=True)
class FormatChoice:
    """A choice of wire formats. values: options of the ZeRO section. What formats cost: docs/results/loss.md.

    Gradients of few bits are transformed, as by default: without that none are proposed.
    """

    name: str
    values: Mapping[str, Any] = field(default_factory=dict)

    def __add__(self, other: FormatChoice) -> FormatChoice:
        return FormatChoice(f"{self.name}, {other.name}", {**self.values, **other.values})

    def has_effect(self, shard: tuple[int, int, int], base: BaseLayout) -> bool:
        """Return whether all of it changes messages across nodes, so that it does not duplicate another choice."""
        p, g, os = shard
        effect = {
            "zero_quantized_weights": os > base.h,
            "zero_quantized_weights_delta": os > base.h and p < os,  # parameter shards that stay
            "zero_quantized_gradients": base.d > base.h,
            "zero_gradient_rounding": g <= base.h,  # feedback: gradients cross nodes once per step
        }
        return all(effect.get(name, True) for name in self.values)


EXACT = FormatChoice("exact")
_INT8 = FormatChoice("weights INT8", {"zero_quantized_weights": True})
_DELTA = FormatChoice("weights INT4 of differences", {"zero_quantized_weights_delta": True})
_SUMS_INT8 = FormatChoice("gradients INT8", {"zero_quantized_gradients": True, "zero_gradient_bits": 8})
_INT4 = FormatChoice("gradients INT4", {"zero_quantized_gradients": True})
_INSIDE = FormatChoice(
    "gradients INT8 inside nodes, INT4 across", {**_INT4.values, "zero_gradient_bits_intra_node": 8}
)
_INT2 = FormatChoice(
    "gradients INT2 with feedback",
    {**_INT4.values, "zero_gradient_bits": 2, "zero_gradient_rounding": "feedback"},
)
INT8 = (EXACT, _INT8, _SUMS_INT8, _INT8 + _SUMS_INT8)
ZEROPP = (EXACT, _INT8, _DELTA, _INT4, _INT8 + _INT4, _DELTA + _INT4)
AGGRESSIVE = (*ZEROPP, _INSIDE, _INT2, _DELTA + _INT2)
OUTER = "outer"  # of the policies: outer steps are proposed (slow_links.py), and messages inside a replica are exact
# By how much of the loss the planner may touch.
LOSS_POLICIES: Mapping[str, tuple[FormatChoice, ...]] = MappingProxyType(
    {"exact": (EXACT,), "int8": INT8, "zeropp": ZEROPP, "aggressive": AGGRESSIVE, OUTER: (EXACT,)}
)


@dataclass(frozen=True)
class Found:
    """A layout with its time."""

    layout: Layout
    timing: Timing
    formats: str = ""

    @property
    def key(self) -> tuple[float, float]:
        """Order by time; layouts whose times agree to four digits order by memory."""
        return float(f"{self.timing.seconds:.4g}"), self.layout.memory.total


class ShardChoice(NamedTuple):
    """A base layout and shard factors, whose wire formats are still open."""

    base: BaseLayout
    shard: tuple[int, int, int]


class Search:
    """A search over the layouts of one model on one cluster.

    values: the run's options by name, which stay as they are. ``loss_policy`` is one of LOSS_POLICIES. ``weight``:
    the fastest layout is the one with the least seconds times this.
    """

    def __init__(self, values: Mapping[str, Any], cluster: Cluster, loss_policy: str) -> None:
        self.values, self.cluster, self.policy = dict(values), cluster, LOSS_POLICIES[loss_policy]
        self.world = World(cluster.world_size, cluster.ranks_per_node)
        self.collectives = Collectives(cluster)
        self.contexts = [1]  # context-parallel sizes that are tried, where none is given
        self.weight: Callable[[Layout], float] = lambda layout: 1.0  # of a layout's seconds, at least 1
        self.errors: dict[str, int] = {}  # what the rules refused, and how often
        self._partitions: dict[tuple[int, int, str], tuple[StageSpec, ...]] = {}

    # -- bases ----------------------------------------------------------------------------------

    def bases(self) -> Iterator[BaseLayout]:
        """Yield every legal base."""
        for choice in self._choices():
            try:
                config = make_config({**self.values, **choice}, self.world, brief=True)
                base = BaseLayout(config, self.world, self.cluster, self.collectives, self._stages_of(config))
            except ConfigError as error:
                for line in error.errors:
                    self.errors[line] = self.errors.get(line, 0) + 1
                continue
            yield base

    def _stages_of(self, config: RunConfig) -> tuple[StageSpec, ...]:
        parallel = config.parallel
        key = (
            parallel.pipeline_model_parallel_size,
            config.virtual_stages,
            config.training.recompute_granularity,
        )
        if key not in self._partitions:
            self._partitions[key] = config.stages()
        return self._partitions[key]

    def _free(self, name: str, choices: Iterator[Any] | list[Any]) -> list[Any]:
        """Return the choices of an option, or the value that was given for it."""
        return [self.values[name]] if name in self.values else list(choices)

    def _choices(self) -> Iterator[dict[str, Any]]:
        """Yield the options of every base that sizes allow."""
        tensor, pipeline, mapping, sequence, experts, context = PARALLEL
        sizes = [
            (tp, cp, ep)
            for tp in self._free(tensor, common_divisors(self.cluster.ranks_per_node))
            for cp in self._free(context, self.contexts)
            for ep in self._free(experts, self._expert_sizes(tp))
        ]
        for tp, cp, ep in sizes:
            for pp in self._free(pipeline, self._pipeline_sizes(tp)):
                for order in self._free(
                    mapping, [False, True] if pp > 1 and tp * pp < self.cluster.world_size else [False]
                ):
                    for stages in self._stages(pp):
                        for recompute in self._free("recompute_granularity", ["none", "selective", "full"]):
                            for size in self._free("micro_batch_size", self._micro_batches(tp * pp * cp)):
                                yield {
                                    tensor: tp,
                                    context: cp,
                                    experts: ep,
                                    pipeline: pp,
                                    mapping: order,
                                    sequence: self.values.get(sequence, self._sequence_parallel(tp)),
                                    **stages,
                                    "recompute_granularity": recompute,
                                    "micro_batch_size": size,
                                    # a layout's own choice replaces it
                                    **({} if self.shards_given else {"zero_shard": (1, 1, 1)}),
                                }

    def _expert_sizes(self, tp: int) -> list[int]:
        """Return how many ranks may share the experts: of a node, or where it is asked for, of several."""
        count, way = self.values.get("num_experts"), self.values.get("moe_dispatch_across_nodes", "no")
        most = self.cluster.ranks_per_node if way == "no" else self.cluster.world_size
        sizes = common_divisors(most) if count else []
        return [1, *(k for k in sizes if k > 1 and k % tp == 0 and int(count or 0) % k == 0)]

    def _sequence_parallel(self, tp: int) -> bool:
        return tp > 1 and int(self.values.get("seq_length") or 1) % tp == 0

    def _pipeline_sizes(self, tp: int) -> list[int]:
        replicas = int(self.values.get("outer_replicas") or 1) if self.values.get("outer_interval") else 1
        layers, ranks = int(self.values.get("num_layers") or 1), self.cluster.world_size // (replicas * tp)
        return [k for k in common_divisors(ranks) if k <= layers]

    def _stages(self, pp: int) -> Iterator[dict[str, Any]]:
        given = {name: self.values[name] for name in STAGES if self.values.get(name) is not None}
        if given or pp == 1:
            yield given
            return
        yield {"pipeline_schedule": "1f1b"}
        yield {"pipeline_schedule": "zb-h1"}
        layers = int(self.values.get("num_layers") or 1)
        for virtual in range(2, min(layers // pp, MOST_STAGES_PER_RANK) + 1):
            yield {"num_virtual_stages_per_pipeline_rank": virtual}

    def _micro_batches(self, ranks: int) -> list[int]:
        batch, d = self.values.get("global_batch_size"), self.cluster.world_size // ranks
        if not batch or not d or batch % d:
            return [1] if not batch else []
        return [size for size in common_divisors(batch // d) if size <= LARGEST_MICRO_BATCH]

    # -- layouts ---------------------------------------------------------------------------------

    def shard_choices(self, base: BaseLayout) -> Iterator[tuple[ShardChoice, float]]:
        """Yield the shards of a base whose model state could fit, each with a lower bound over all formats.

        The bound is the least of the formats' own: which of them sends the fewest bits depends on the shards.
        """
        for shard in [self.given_shards(base)] if self.shards_given else self._shards(base):
            choice = ShardChoice(base, shard)
            once = shard[0] > 1 and self.values.get(LIFETIME) is None  # gathered layouts belong to it, too
            bounds = [
                least_seconds(layout, ACROSS, once) * self.weight(layout)
                for layout, _ in self.layouts(choice, gathered=False)
            ]
            if bounds:
                yield choice, min(bounds)

    def layouts(self, choice: ShardChoice, gathered: bool = True) -> Iterator[tuple[Layout, str]]:
        """Yield every legal layout of a choice, with the name of its formats.

        gathered: also those that gather a unit once per step, where the lifetime of parameters is not given.
        """
        for zero, name in self._zero_choices(choice, gathered):
            try:
                yield Layout(choice.base, zero), name
            except ValueError as error:
                self.errors[str(error)] = self.errors.get(str(error), 0) + 1

    @property
    def shards_given(self) -> bool:
        return any(self.values.get(name) is not None for name in ZERO)

    def given_shards(self, base: BaseLayout) -> tuple[int, int, int]:
        return base.config.shards(base.world).factors

    @property
    def _formats_free(self) -> bool:
        """Return whether the planner chooses the messages: neither a flag nor preset zeropp sets them."""
        quantised = any("quantized" in name for name in self.values)
        return not quantised and self.values.get("zero_preset") not in QUANTISED

    def _zero_choices(self, choice: ShardChoice, gathered: bool) -> Iterator[tuple[ZeroConfig, str]]:
        base, shard = choice
        plain = {
            n: v for n, v in self.values.items() if n.startswith("zero_") and n not in ZERO and v is not None
        }
        kept = (
            {name: getattr(base.config.zero, name) for name in ZERO}
            if self.shards_given
            else {"zero_shard": shard}
        )
        formats = self.policy if self._formats_free else (FormatChoice("as given"),)
        lives = [plain[LIFETIME]] if LIFETIME in plain else [None]
        if LIFETIME not in plain and shard[0] > 1 and gathered:
            lives.append("gathered")
        for chosen in formats:
            if chosen.has_effect(shard, base):
                for life in lives:
                    yield ZeroConfig(**{**plain, **kept, **chosen.values, LIFETIME: life}), chosen.name

    def _shards(self, base: BaseLayout) -> Iterator[tuple[int, int, int]]:
        """Yield the (P, G, OS) whose model state could fit; the rules of the configuration judge them."""
        model_bytes = base.least_parameters
        width = WIDTHS[base.config.precision.params_dtype]
        sums = max(width, 4)
        updated = sums + base.config.optimizer.moment_bytes(sums, 1.0)  # at least: all are matrices
        room = self.cluster.device.room - base.least_activations
        legal = [k for k in common_divisors(base.d) if base.h % k == 0 or k % base.h == 0]
        for os in legal:
            for g in (k for k in legal if os % k == 0):
                for p in (k for k in legal if g % k == 0):
                    copy = 0.0 if width == sums else 0.5 * width / p
                    if model_bytes * (copy + sums / g + updated / os) <= room:
                        yield p, g, os

    # -- search ----------------------------------------------------------------------------------

    def best(self, number: int = BEST, bases: Iterable[BaseLayout] | None = None) -> list[Found]:
        """Return the fastest layouts that fit, the best first. There may be fewer than ``number``.

        bases: those to choose from, if not every legal one.
        """
        best = self._best(number, self.bases() if bases is None else bases)
        recompute = "recompute_granularity" not in self.values
        short = not best or recompute and best[0].layout.config.training.recompute_granularity == "full"
        if bases is not None or not short or PARALLEL[-1] in self.values:
            return best
        self.share_samples()
        best = self._best(number, self.bases())
        if not best:
            self.share_samples(across=True)
            best = self._best(number, self.bases())
        return best

    def share_samples(self, across: bool = False) -> None:
        """Try layouts in which ranks of a node share samples, or those of several nodes, beside those that have been
        tried.
        """
        inside, world = self.cluster.ranks_per_node, self.cluster.world_size
        found = common_divisors(world) if across else common_divisors(inside)
        self.contexts = [k for k in found if k < inside or k % inside == 0]

    def _best(self, number: int, bases: Iterable[BaseLayout]) -> list[Found]:
        """Do as ``best`` says.

        Base layouts, shard choices, layouts and results wait in one queue, ordered by their lower bound. The first is
        expanded: a base into its shard choices, a choice into its layouts, a layout into a result. So nothing is
        computed whose bound is above the last result's time.
        """
        order = count()
        queue: list[tuple[float, float, int, BaseLayout | ShardChoice | Layout | Found, str]] = []

        def put(
            bound: float, tie: float, item: BaseLayout | ShardChoice | Layout | Found, name: str = ""
        ) -> None:
            heappush(queue, (bound, tie, next(order), item, name))

        for base in bases:
            put(base.least_seconds, 0.0, base)
        refined: set[int] = set()
        best: list[Found] = []
        while queue and len(best) < number:
            bound, _, _, item, name = heappop(queue)
            if isinstance(item, Found):
                best.append(item)
            elif isinstance(item, Layout):
                found = Found(item, simulate(item), name)
                put(found.timing.seconds * self.weight(item), item.memory.total, found)
            elif isinstance(item, ShardChoice):
                for layout, formats in self.layouts(item):
                    if layout.fits:
                        least = least_seconds(layout) * self.weight(layout)
                        put(max(bound, least), layout.memory.total, layout, formats)
            elif item.least_activations > self.cluster.device.room:
                continue
            elif id(item) not in refined:
                refined.add(id(item))
                put(item.compute_only[0], 0.0, item)
            else:
                for choice, least in self.shard_choices(item):
                    put(max(bound, least), 0.0, choice)
        return sorted(best, key=lambda found: (found.key[0] * self.weight(found.layout), found.key[1]))


def smallest_layout(values: Mapping[str, Any], cluster: Cluster) -> Layout | None:
    """Return the layout with the least memory, of those with small micro-batches and the largest shard factors."""
    most: dict[str, Any] = {
        "recompute_granularity": "full",
        "loss_chunk_tokens": AUTO,
        "micro_batch_size": 1,
        "use_tp_pp_dp_mapping": False,
    }
    search = Search({**most, **values}, cluster, "exact")
    search.share_samples(across=True)
    best: Layout | None = None
    for base in search.bases():
        shard = search.given_shards(base) if search.shards_given else (base.d, base.d, base.d)
        for layout, _ in search.layouts(ShardChoice(base, shard)):
            if best is None or layout.memory.total < best.memory.total:
                best = layout
    return best


def least_seconds(layout: Layout, links: tuple[str, ...] = (INTRA, *ACROSS), once: bool = False) -> float:
    """Return a lower bound of the layout's step time, from these links.

    The first forward cannot end before its weights are refreshed, nor the step before the last micro-batch's
    gradients of the first stage are summed. Only that forward or backward can hide them. A lane has one hop at a time
    on a link, and a link carries one message at a time. once: also for layouts that gather a unit once per step.
    """
    base = layout.base
    makespan, first_rank = base.compute_only
    work = [(layout.chains_of(unit), times) for unit, times in layout.units(0).counts_of(0)]
    refresh = max(sum(n * _on(one.refresh, link) for one, n in work) for link in links)
    reduce = max(sum(n * _on(one.last, link) for one, n in work) for link in links)
    first = base.stage_seconds[0]
    behind = first_rank + max(0.0, refresh - first[Kind.FORWARD]) + max(0.0, reduce - first[Kind.BACKWARD])
    return max(makespan, behind, *(_link_seconds(layout, link, once) for link in links))


def _on(chain: Chain, link: str) -> float:
    return sum(hop.seconds for hop in chain if hop.link == link)


def _occupied(chain: Chain, link: str) -> float:
    return sum(hop.seconds - hop.latency for hop in chain if hop.link == link)


def _link_seconds(layout: Layout, link: str, once: bool) -> float:
    """Return a lower bound of the seconds for which the first rank's weights and gradients occupy a link.

    Weights are gathered once per step, and again for each further forward and backward, except those that may stay
    from one to the next: the modules in use and around it, and the bytes that may be held ahead.
    """
    base, units, total, gather, dearest = layout.base, layout.units(0), 0.0, 0.0, 0.0
    again = base.micro_batches
    for unit, number in units.counts:
        one = layout.chains_of(unit)
        total += number * (_occupied(one.refresh, link) + _occupied(one.last, link))
        total += number * (again - 1) * _occupied(one.every, link)
        if one.gather:
            gather += number * _occupied(one.gather, link)
            dearest = max(dearest, _occupied(one.gather, link) / one.ahead_bytes)
    if once or layout.shards.keep_gathered:
        return total + gather
    module = max(units.modules.values()) * layout.formats.width
    stays = dearest * (layout.states.prefetch_bytes + MODULES_HELD * module)
    further = 2 * again * gather - gather - (2 * again * base.virtual - 1) * stays
    return total + gather + max(0.0, further)
