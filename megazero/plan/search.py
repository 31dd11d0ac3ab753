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
from functools import cached_property
from heapq import heappop, heappush
from itertools import count
from types import MappingProxyType
from typing import Any, NamedTuple

from megazero.config import ConfigError, RunConfig, World, unjudged
from megazero.config.layout.shards import AUTO, QUANTISED
from megazero.config.model.spec import model_spec
from megazero.config.nearest import common_divisors
from megazero.config.options.cluster import Cluster
from megazero.config.options.sections import ZeroConfig
from megazero.config.validate import uneven_ranks
from megazero.plan.base_layout import BaseLayout, Partition
from megazero.plan.bounds import Works, least_crossing
from megazero.plan.compute import Compute
from megazero.plan.layout import Layout
from megazero.plan.seconds import Collectives
from megazero.plan.simulate import Timing, simulate
from megazero.plan.units import WIDTHS

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
OF_STAGES = ("pipeline_model_parallel_size", "use_tp_pp_dp_mapping", *STAGES)
CHOICES = (*PARALLEL, *STAGES, *ZERO, "recompute_granularity", "micro_batch_size")
LARGEST_MICRO_BATCH = 64
MOST_STAGES_PER_RANK = 8


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
        self._partitions: dict[tuple[int, int, str], Partition] = {}
        self._works: dict[object, tuple[Works, float] | None] = {}

    # -- bases ----------------------------------------------------------------------------------

    def bases(self) -> Iterator[BaseLayout]:
        """Yield every legal base."""
        return filter(self._legal, self.drafts())

    def drafts(self) -> Iterator[BaseLayout]:
        """Yield a base for every choice of options that sizes allow. Their rules are asked where they are promising."""
        computes: dict[object, Compute] = {}
        for choice in self._choices():
            config = self._template.changed(choice)
            if uneven := uneven_ranks(config, self.world):
                self._count(ConfigError(uneven))
                continue
            try:
                partition, spans = self._partition_of(config), config.parallel.context_parallel_size > 1
                # Stages and their order decide where messages of a layer go, if ranks share samples.
                alike = tuple(value for name, value in choice.items() if spans or name not in OF_STAGES)
                base = BaseLayout(
                    config, self.world, self.cluster, self.collectives, partition, computes.get(alike)
                )
            except ValueError as error:
                self._count(error)
                continue
            computes[alike] = base.compute
            yield base

    @cached_property
    def _template(self) -> RunConfig:
        """The configuration of the values that are given. The choices replace some of them."""
        return unjudged({"micro_batch_size": 1, **self.values})

    def _legal(self, base: BaseLayout) -> bool:
        if base.faults:
            self._count(ConfigError(base.faults))
        return not base.faults

    def _count(self, error: ValueError) -> None:
        """Count what the rules refuse."""
        for line in error.errors if isinstance(error, ConfigError) else [str(error)]:
            self.errors[line] = self.errors.get(line, 0) + 1

    def _partition_of(self, config: RunConfig) -> Partition:
        parallel = config.parallel
        key = (
            parallel.pipeline_model_parallel_size,
            config.virtual_stages,
            config.training.recompute_granularity,
        )
        if key not in self._partitions:
            stages, pp = config.stages(), parallel.pipeline_model_parallel_size
            self._partitions[key] = Partition(stages, pp, model_spec(config.model))
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
                                    **self._batch(size, tp * pp * cp),
                                    # a layout's own choice replaces it
                                    **({} if self.shards_given else {"zero_shard": (1, 1, 1)}),
                                }

    def _batch(self, micro_batch: int, ranks: int) -> dict[str, int]:
        """Return the global batch if none is given: a micro-batch for each of so many ranks."""
        given = self.values.get("global_batch_size")
        return {} if given else {"global_batch_size": micro_batch * (self.cluster.world_size // ranks)}

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
            gathered = shard[0] > 1 and self.values.get(LIFETIME) in (
                None,
                "gathered",
            )  # some layouts, at least
            works = [
                self._work_of(choice, zero, name) for zero, name in self._zero_choices(choice, gathered=False)
            ]
            if least := [one.least_seconds(base, gathered) * weight for one, weight in filter(None, works)]:
                yield choice, min(least)

    def _work_of(self, choice: ShardChoice, zero: ZeroConfig, formats: str) -> tuple[Works, float] | None:
        """Return the work of the links of a choice's layouts with these formats, and their weight; None: not legal.

        How long gathered units live makes no difference to one gather.
        """
        base, shard = choice
        key = base.mesh, base.partition.of(0), base.micro_batches == 1, shard, formats
        if key not in self._works:
            try:
                layout = Layout(base, zero)
                self._works[key] = Works.of_layout(layout), self.weight(layout)
            except ValueError as error:
                self._count(error)
                self._works[key] = None
        return self._works[key]

    def layouts(self, choice: ShardChoice, gathered: bool = True) -> Iterator[tuple[Layout, str]]:
        """Yield every legal layout of a choice, with the name of its formats.

        gathered: also those that gather a unit once per step, where the lifetime of parameters is not given.
        """
        for zero, name in self._zero_choices(choice, gathered):
            try:
                yield Layout(choice.base, zero), name
            except ValueError as error:
                self._count(error)

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
        best = self._best(number, self.drafts() if bases is None else bases)
        recompute = "recompute_granularity" not in self.values
        short = not best or recompute and best[0].layout.config.training.recompute_granularity == "full"
        if bases is not None or not short or PARALLEL[-1] in self.values:
            return best
        self.share_samples()
        best = self._best(number, self.drafts())
        if not best:
            self.share_samples(across=True)
            best = self._best(number, self.drafts())
        return best

    def _least_width(self, base: BaseLayout) -> float:
        """Return the bytes of an element at least, of a gradient across nodes and of what comes back."""
        if not self._formats_free:
            return 0.5  # of two bits each
        width = base.compute.width
        raw = base.h == 1 or base.micro_batches == 1 or base.ep > 1  # no sums cross then
        exact = width if raw else max(width, 4)
        found = []
        for choice in self.policy:
            given = {**self.values, **choice.values}
            bits = given.get("zero_gradient_bits") or 4
            there = min(exact, bits / 8) if "zero_quantized_gradients" in choice.values else exact
            weights = (
                min(
                    given.get("zero_weight_bits") or 8,
                    4 if "zero_quantized_weights_delta" in choice.values else 8,
                )
                / 8
            )
            coded = any("weights" in name for name in choice.values)
            found.append(there + min(there, width, weights if coded else width))
        return min(found)

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
            put(max(base.least_seconds, least_crossing(base, self._least_width(base))), 0.0, base)
        refined: set[int] = set()
        best: list[Found] = []
        while queue and len(best) < number:
            bound, _, _, item, name = heappop(queue)
            if isinstance(item, Found):
                best.append(item)
            elif isinstance(item, Layout):
                if item.fits:
                    found = Found(item, simulate(item), name)
                    put(found.timing.seconds * self.weight(item), item.memory.total, found)
            elif isinstance(item, ShardChoice):
                for layout, formats in self.layouts(item):
                    if (known := self._work_of(item, layout.given.zero, formats)) is not None:
                        least = known[0].least_seconds(item.base, layout.shards.keep_gathered)
                        put(max(bound, least * known[1]), 0.0, layout, formats)
            elif item.least_activations > self.cluster.device.room or not self._legal(item):
                continue
            elif id(item) not in refined:
                refined.add(id(item))
                put(max(bound, item.compute_only[0]), 0.0, item)
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
