"""Finds the fastest layouts that fit: every legal one, except those that a bound rules out.

The configuration's own rules decide legality: every base validates, and every layout's shards and wire resolve. Each
has a lower bound of its step time. The one with the least bound is simulated next, until ten results lie below all
remaining bounds. Layouts whose ranks share samples, inside a node, are tried where memory is short without: where no
other fits, or the fastest of them recomputes all.

Never better and therefore not tried: schedule gpipe (the time of 1f1b with more memory), tensor parallelism without
legal sequence parallelism (the same bytes with more memory), P copies that need not be resident.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from heapq import heappop, heappush
from itertools import count, groupby
from operator import attrgetter
from types import MappingProxyType
from typing import Any, NamedTuple

from megazero.config import RunConfig, World, unjudged
from megazero.config.layout.shards import AUTO, QUANTISED
from megazero.config.model.spec import model_spec
from megazero.config.nearest import common_divisors
from megazero.config.options.cluster import Cluster
from megazero.config.options.sections import ZeroConfig
from megazero.config.run import all_options
from megazero.config.validate import uneven_ranks
from megazero.plan.base_layout import BaseLayout, Partition
from megazero.plan.bounds import ChainWork, Shard, Widths, least_crossing, least_memory, least_state
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
LIFETIME, WHOLE = "zero_params_lifetime", "zero_gradients_lifetime"
OF_BATCH = ("recompute_granularity", "micro_batch_size", "global_batch_size")
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
        }
        return all(effect.get(name, True) for name in self.values)

    @cached_property
    def codes_weights(self) -> bool:
        """Whether weights may stay as they were received, in few bits: differences are added to what is there."""
        differences = "zero_quantized_weights_delta" in self.values
        return self == AS_GIVEN or "zero_quantized_weights" in self.values and not differences

    def least_widths(self, given: Mapping[str, Any], width: float, exact: float) -> Widths:
        """Return the bytes of an element at least. width, exact: of a weight and of a gradient without a format.
        given: options that stay."""
        asked = {**given, **self.values}
        quantised = "zero_quantized_gradients" in self.values
        there = (asked.get("zero_gradient_bits") or 4) / 8 if quantised else exact
        if "zero_quantized_weights_delta" in self.values:
            width = 0.5
        elif "zero_quantized_weights" in self.values:
            width = (asked.get("zero_weight_bits") or 8) / 8
        return Widths(there, there, width)


class Template:
    """A configuration whose options are changed many times, often to the same values: sections are made once."""

    def __init__(self, config: RunConfig) -> None:
        self.config, self._made = config, dict[object, Any]()

    def changed(self, values: Mapping[str, Any], of: RunConfig | None = None) -> RunConfig:
        """Do as ``RunConfig.changed``. of: the configuration, if not this one: its other sections differ."""
        sections = defaultdict[str, dict[str, Any]](dict)
        for name, value in values.items():
            sections[all_options()[name].section][name] = value
        made = {}
        for section, own in sections.items():
            key = section, tuple(own.items())
            if key not in self._made:
                self._made[key] = getattr(self.config.changed(own), section)
            made[section] = self._made[key]
        return replace(of or self.config, **made)


def given_formats(values: Mapping[str, Any]) -> list[str]:
    """Return the names of given options that choose the messages: of quantised ones, or a preset that has them."""
    preset = values.get("zero_preset") in QUANTISED
    return [name for name in values if "quantized" in name or preset and name == "zero_preset"]


def _apart_from_batch(choice: Mapping[str, Any]) -> object:
    """Return the choice of all options that decide where ranks lie, and what they hold."""
    return [value for name, value in choice.items() if name not in OF_BATCH]


EXACT, AS_GIVEN = FormatChoice("exact"), FormatChoice("as given")
_INT8 = FormatChoice("weights INT8", {"zero_quantized_weights": True})
_DELTA = FormatChoice("weights INT4 of differences", {"zero_quantized_weights_delta": True})
_SUMS_INT8 = FormatChoice("gradients INT8", {"zero_quantized_gradients": True, "zero_gradient_bits": 8})
_INT4 = FormatChoice("gradients INT4", {"zero_quantized_gradients": True})
_INSIDE = FormatChoice(
    "gradients INT8 inside nodes, INT4 across", {**_INT4.values, "zero_gradient_bits_intra_node": 8}
)
INT8 = (EXACT, _INT8, _SUMS_INT8, _INT8 + _SUMS_INT8)
ZEROPP = (EXACT, _INT8, _DELTA, _INT4, _INT8 + _INT4, _DELTA + _INT4)
AGGRESSIVE = (*ZEROPP, _INSIDE)
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


class Choice(NamedTuple):
    """A base layout with shard factors and wire formats. How long parameters live is still open."""

    base: BaseLayout
    shard: Shard
    formats: FormatChoice


class Unmade(NamedTuple):
    """A layout that is not made yet."""

    choice: Choice
    zero: ZeroConfig


class Refined(NamedTuple):
    """A layout that fits, whose bound follows its schedule."""

    layout: Layout


Waiting = BaseLayout | Choice | Unmade | Refined | Found


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
        self._works: dict[object, tuple[ChainWork, float] | None] = {}
        self._formats: dict[object, Sequence[FormatChoice]] = {}
        self._zeros: dict[object, Sequence[ZeroConfig]] = {}
        self._least_widths: dict[bool, Mapping[str, Widths]] = {}

    # -- bases ----------------------------------------------------------------------------------

    def bases(self) -> Iterator[BaseLayout]:
        """Yield every legal base."""
        return filter(self._legal, self.drafts())

    def drafts(self, tried: Collection[int] = ()) -> Iterator[BaseLayout]:
        """Yield a base for every choice of options that sizes allow. The rules are asked where one is promising.

        tried: context-parallel sizes that are left out.
        """
        computes: dict[object, Compute] = {}
        for _, alike in groupby(self._choices(tried), _apart_from_batch):
            choices = list(alike)
            first = self._template.changed(choices[0])
            if uneven := uneven_ranks(first, self.world):
                self._count(uneven, len(choices))
                continue
            parallel = first.parallel
            # The mesh decides where messages of a layer go, if ranks share samples, or experts of several nodes.
            spans = parallel.context_parallel_size > 1 or parallel.moe_dispatch_across_nodes != "no"
            beside = STAGES if spans else OF_STAGES
            place = tuple(value for name, value in choices[0].items() if name not in (*OF_BATCH, *beside))
            batches = [{name: choice[name] for name in OF_BATCH if name in choice} for choice in choices]
            keys = [(place, *batch.values()) for batch in batches]
            try:
                partition, known = self._partition_of(first), computes.get(keys[0])
                mesh = BaseLayout(first, self.world, self.cluster, self.collectives, partition, known)
            except ValueError as error:
                self._count([str(error)], len(choices))
                continue
            computes[keys[0]] = mesh.compute
            for batch, key in zip(batches, keys, strict=True):
                config = self._template.changed(batch, first)
                base = mesh.varied(config, self._partition_of(config), computes.get(key))
                computes[key] = base.compute
                yield base

    @cached_property
    def _template(self) -> Template:
        """The configuration of the values that are given. The choices replace some of them."""
        return Template(unjudged({"micro_batch_size": 1, **self.values, **self._no_shards}))

    def _legal(self, base: BaseLayout) -> bool:
        self._count(base.faults)
        return not base.faults

    def _count(self, errors: Iterable[str], times: int = 1) -> None:
        """Count what the rules refuse."""
        for line in errors:
            self.errors[line] = self.errors.get(line, 0) + times

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

    def _choices(self, tried: Collection[int] = ()) -> Iterator[dict[str, Any]]:
        """Yield the options of every base that sizes allow."""
        tensor, pipeline, mapping, sequence, experts, context = PARALLEL
        sizes = [
            (tp, cp, ep)
            for tp in self._free(tensor, common_divisors(self.cluster.ranks_per_node))
            for cp in self._free(context, self.contexts)
            if cp not in tried
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
                                    sequence: self.values.get(sequence, self._sequence_parallel(tp, cp)),
                                    **stages,
                                    "recompute_granularity": recompute,
                                    "micro_batch_size": size,
                                    **self._batch(size, tp * pp * cp),
                                    **self._no_shards,
                                }

    @property
    def _no_shards(self) -> dict[str, Any]:
        """The option that stands for a layout's own choice."""
        return {} if self.shards_given else {"zero_shard": (1, 1, 1)}

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

    def _sequence_parallel(self, tp: int, cp: int) -> bool:
        return tp > 1 and int(self.values.get("seq_length") or 1) % (tp * cp) == 0

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

    def choices(self, base: BaseLayout) -> Iterator[Choice]:
        """Yield every choice of shards and formats; the rules of the configuration judge them."""
        for shard in [self.given_shards(base)] if self.shards_given else self._shards(base):
            key = shard, base.d, base.h
            if key not in self._formats:
                self._formats[key] = [each for each in self.formats if each.has_effect(shard, base)]
            yield from (Choice(base, shard, each) for each in self._formats[key])

    def _promising(self, base: BaseLayout) -> Iterator[tuple[Choice, float]]:
        """Yield the choices whose model state could fit, each with a lower bound of its seconds."""
        widths, once = self._widths(base), self.values.get(WHOLE) == "step"
        for shard, alike in groupby(self.choices(base), attrgetter("shard")):
            fits = [least_memory(base, shard, coded) <= self.cluster.device.room for coded in (False, True)]
            for choice in alike:
                if fits[choice.formats.codes_weights]:
                    yield choice, least_crossing(base, widths[choice.formats.name], shard, once)

    def _widths(self, base: BaseLayout) -> Mapping[str, Widths]:
        """Return the bytes of an element at least, by the name of formats."""
        if not self._formats_free:
            return {AS_GIVEN.name: Widths(0.5, 0.5, 0.25)}  # four bits, and two
        width = base.compute.width
        raw = base.h == 1 or base.micro_batches == 1 or base.ep > 1  # no sums cross then
        if raw not in self._least_widths:
            exact = width if raw else max(width, 4)
            self._least_widths[raw] = {
                each.name: each.least_widths(self.values, width, exact) for each in self.policy
            }
        return self._least_widths[raw]

    def work_of(self, choice: Choice) -> tuple[ChainWork, float] | None:
        """Return the work of the links of a choice's layouts, and their weight; None: not legal.

        How long gathered units live makes no difference to one gather.
        """
        base, shard, formats = choice
        key = base.mesh, base.partition.kinds[0], base.micro_batches == 1, shard, formats.name
        if key not in self._works:
            try:
                layout = Layout(base, self._zeros_of(choice)[0])
                self._works[key] = ChainWork.of_layout(layout), self.weight(layout)
            except ValueError as error:
                self._count([str(error)])
                self._works[key] = None
        return self._works[key]

    def layouts(self, choice: Choice) -> Iterator[Layout]:
        """Yield every legal layout of a choice."""
        for zero in self._zeros_of(choice):
            try:
                yield Layout(choice.base, zero)
            except ValueError as error:
                self._count([str(error)])

    @property
    def shards_given(self) -> bool:
        return any(self.values.get(name) is not None for name in ZERO)

    def given_shards(self, base: BaseLayout) -> tuple[int, int, int]:
        return base.config.shards(base.world).factors

    @cached_property
    def _formats_free(self) -> bool:
        """Return whether the planner chooses the messages."""
        return not given_formats(self.values)

    @property
    def formats(self) -> Sequence[FormatChoice]:
        return self.policy if self._formats_free else (AS_GIVEN,)

    def _zeros_of(self, choice: Choice) -> Sequence[ZeroConfig]:
        """Return the ZeRO options of a choice's layouts: of each lifetime of parameters that makes a difference."""
        key = choice.shard, choice.formats.name
        if key not in self._zeros:
            zero = choice.base.config.zero
            given = {
                n: v
                for n, v in self.values.items()
                if n.startswith("zero_") and n not in ZERO and v is not None
            }
            kept = {n: getattr(zero, n) for n in ZERO} if self.shards_given else {"zero_shard": choice.shard}
            lives = [given.get(LIFETIME), *["gathered"] * (LIFETIME not in given and choice.shard[0] > 1)]
            options = {**given, **kept, **choice.formats.values}
            self._zeros[key] = [ZeroConfig(**{**options, LIFETIME: life}) for life in lives]
        return self._zeros[key]

    @staticmethod
    def _shards(base: BaseLayout) -> Iterator[Shard]:
        """Yield the (P, G, OS) of a base."""
        legal = [k for k in common_divisors(base.d) if base.h % k == 0 or k % base.h == 0]
        for os in legal:
            for g in (k for k in legal if os % k == 0):
                for p in (k for k in legal if g % k == 0):
                    yield p, g, os

    # -- search ----------------------------------------------------------------------------------

    def best(self, number: int = BEST, bases: Iterable[BaseLayout] | None = None) -> list[Found]:
        """Return the fastest layouts that fit, the best first. There may be fewer than ``number``.

        bases: those to choose from, if not every legal one.
        """
        if not self._could_fit:
            return []
        best = self._best(number, self.drafts() if bases is None else bases)
        recompute = "recompute_granularity" not in self.values
        short = not best or recompute and best[0].layout.config.training.recompute_granularity == "full"
        if bases is not None or not short or PARALLEL[-1] in self.values:
            return best
        for across in (False, True):
            tried = self.contexts
            self.share_samples(across)
            best = self._best(number, self.drafts(tried), best)
            if best:
                break
        return best

    @property
    def _could_fit(self) -> bool:
        """Return whether the model state could fit if all ranks of a replica had equal shares of it."""
        config = self._template.config
        ranks = config.replica_world(self.world).world_size
        width, matrices = WIDTHS[config.precision.params_dtype], model_spec(config.model).layer_matrices
        least = matrices / ranks * sum(least_state(config, self.world, width))
        return least <= self.cluster.device.room

    def share_samples(self, across: bool = False) -> None:
        """Try layouts in which ranks of a node share samples, or those of several nodes, beside those that have been
        tried.
        """
        inside, world = self.cluster.ranks_per_node, self.cluster.world_size
        found = common_divisors(world) if across else common_divisors(inside)
        self.contexts = [k for k in found if k < inside or k % inside == 0]

    def _unmade(self, choice: Choice) -> Iterator[tuple[Unmade, float]]:
        """Yield the layouts of a choice, each with a lower bound of its seconds times its weight."""
        if (known := self.work_of(choice)) is not None:
            for zero in self._zeros_of(choice):
                gathered = zero.zero_params_lifetime == "gathered"
                yield Unmade(choice, zero), known[0].least_seconds(choice.base, gathered) * known[1]

    def _refined(self, unmade: Unmade) -> tuple[Layout, float] | None:
        """Return a layout with a bound that follows its schedule; None: it is not legal, or does not fit."""
        (base, _, _), zero = unmade
        known = self.work_of(unmade.choice)
        try:
            layout = Layout(base, zero)
        except ValueError as error:
            self._count([str(error)])
            return None
        if known is None or not layout.fits:
            return None
        return layout, known[0].least_seconds(base, layout.shards.keep_gathered, exactly=True) * known[1]

    def _best(self, number: int, bases: Iterable[BaseLayout], found: Iterable[Found] = ()) -> list[Found]:
        """Do as ``best`` says. found: results of other bases.

        Base layouts, shard choices, layouts and results wait in one queue, ordered by their lower bound. The first is
        expanded: a base into its shard choices, a choice into its layouts, a layout, whose bound is refined before,
        into a result. So nothing is computed whose bound is above the last result's time.
        """
        order = count()
        queue: list[tuple[float, float, int, Waiting, str]] = []

        def put(bound: float, tie: float, item: Waiting, name: str = "") -> None:
            heappush(queue, (bound, tie, next(order), item, name))

        for base in bases:
            narrowest = min(self._widths(base).values(), key=lambda widths: widths.there_and_back)
            put(max(base.least_seconds, least_crossing(base, narrowest)), 0.0, base)
        for one in found:
            put(one.timing.seconds * self.weight(one.layout), one.layout.memory.total, one)
        best: list[Found] = []
        while queue and len(best) < number:
            bound, _, _, item, name = heappop(queue)
            if isinstance(item, Found):
                best.append(item)
            elif isinstance(item, Refined):
                one = Found(item.layout, simulate(item.layout), name)
                put(one.timing.seconds * self.weight(item.layout), item.layout.memory.total, one)
            elif isinstance(item, Unmade):
                if (refined := self._refined(item)) is not None:
                    put(max(bound, refined[1]), 0.0, Refined(refined[0]), name)
            elif isinstance(item, Choice):
                for unmade, least in self._unmade(item):
                    put(max(bound, least), 0.0, unmade, name)
            elif least_memory(item) <= self.cluster.device.room and self._legal(item):
                for choice, least in self._promising(item):
                    put(max(bound, least), 0.0, choice, choice.formats.name)
        return sorted(best, key=lambda one: (one.key[0] * self.weight(one.layout), one.key[1]))


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
        for layout in (one for each in search.formats for one in search.layouts(Choice(base, shard, each))):
            if best is None or layout.memory.total < best.memory.total:
                best = layout
    return best
