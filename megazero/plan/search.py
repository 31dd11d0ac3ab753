"""Finds the fastest layouts that fit: enumerates the legal ones, estimates each in closed form, simulates the best.

The configuration's own rules decide legality. Estimates (estimate.py) are of step time and memory; the layouts with
the least times that fit are simulated, SIMULATED of them. Layouts whose ranks share samples, inside a node, are tried
where memory is short without: where no other fits, or the fastest of them recomputes all.

Never better and therefore not tried: schedule gpipe (the time of 1f1b with more memory), tensor parallelism without
legal sequence parallelism (the same bytes with more memory), P copies that need not be resident.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from operator import attrgetter
from types import MappingProxyType
from typing import Any, NamedTuple

from megazero.config import RunConfig, World, unjudged
from megazero.config.layout.pipeline import virtual_stages
from megazero.config.layout.shards import AUTO, QUANTISED
from megazero.config.model.spec import model_spec
from megazero.config.nearest import common_divisors
from megazero.config.options.cluster import Cluster
from megazero.config.options.sections import RECOMPUTE, ParallelConfig, ZeroConfig
from megazero.config.validate import uneven_ranks
from megazero.mesh.grid import whole_parts
from megazero.plan.base_layout import BaseLayout, Partition
from megazero.plan.compute import Compute
from megazero.plan.estimate import Messages, Shard, least_memory
from megazero.plan.layout import Layout
from megazero.plan.seconds import Collectives
from megazero.plan.simulate import Timing, simulate

BEST = 10
SIMULATED = 64  # layouts, those with the least estimated times
# The options that the planner chooses where they are not given.
PARALLEL = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "use_tp_pp_dp_mapping",
    "sequence_parallel",
    "expert_model_parallel_size",
    "context_parallel_size",
)
LEVELS = "level_sizes"
STAGES = (
    "num_layers_per_virtual_pipeline_stage",
    "num_virtual_stages_per_pipeline_rank",
    "pipeline_schedule",
)
ZERO = (
    *("zero_shard", "zero_preset", "zero_stage", "zero_hpz_partition_size"),
    "num_distributed_optimizer_instances",
)
LIFETIME, WHOLE = "zero_params_lifetime", "zero_gradients_lifetime"
OF_STAGES = ("pipeline_model_parallel_size", "use_tp_pp_dp_mapping", *STAGES)
CHOICES = (*PARALLEL, LEVELS, *STAGES, *ZERO, "recompute_granularity", "micro_batch_size")
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

    def has_effect(self, shard: Shard, base: BaseLayout) -> bool:
        """Return whether all of it changes messages across nodes, so that it does not duplicate another choice."""
        p, g, os = shard
        effect = {
            "zero_quantized_weights": os > base.h,
            "zero_quantized_weights_delta": os > base.h and p < os,  # parameter shards that stay
            "zero_quantized_gradients": base.d > base.h,
        }
        return all(effect.get(name, True) for name in self.values)


def given_formats(values: Mapping[str, Any]) -> list[str]:
    """Return the names of given options that choose the messages: of quantised ones, or a preset that has them."""
    preset = values.get("zero_preset") in QUANTISED
    return [name for name in values if "quantized" in name or preset and name == "zero_preset"]


EXACT, AS_GIVEN = FormatChoice("exact"), FormatChoice("as given")
_INT8 = FormatChoice("weights INT8", {"zero_quantized_weights": True})
_DELTA = FormatChoice("weights INT4 of differences", {"zero_quantized_weights_delta": True})
_SUMS_INT8 = FormatChoice("gradients INT8", {"zero_quantized_gradients": True, "zero_gradient_bits": (8,)})
_INT4 = FormatChoice("gradients INT4", {"zero_quantized_gradients": True})
_INSIDE = FormatChoice(
    "gradients INT8 inside nodes, INT4 across", {**_INT4.values, "zero_gradient_bits_intra_node": 8}
)
INT8 = (EXACT, _INT8, _SUMS_INT8, _INT8 + _SUMS_INT8)
ZEROPP = (EXACT, _INT8, _DELTA, _INT4, _INT8 + _INT4, _DELTA + _INT4)
AGGRESSIVE = (*ZEROPP, _INSIDE)
OUTER_POLICY = "outer"  # outer steps are proposed (compare.py), and messages inside a replica are exact
# By how much of the loss the planner may touch.
LOSS_POLICIES: Mapping[str, tuple[FormatChoice, ...]] = MappingProxyType(
    {"exact": (EXACT,), "int8": INT8, "zeropp": ZEROPP, "aggressive": AGGRESSIVE, OUTER_POLICY: (EXACT,)}
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
    """Shard factors with wire formats. zeros: their options, for each lifetime of parameters that matters."""

    shard: Shard
    formats: str
    zeros: tuple[ZeroConfig, ...]


class Estimated(NamedTuple):
    """A layout that fits. seconds: its estimated step time, times the search's weight. formats: their name."""

    seconds: float
    layout: Layout
    formats: str


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
        self._choices: dict[object, Sequence[Choice]] = {}
        self._messages: dict[object, tuple[Messages, float] | None] = {}

    # -- bases ----------------------------------------------------------------------------------

    def bases(self) -> Iterator[BaseLayout]:
        """Yield every legal base."""
        return filter(self._legal, self.drafts())

    def drafts(self, tried: Collection[int] = ()) -> Iterator[BaseLayout]:
        """Yield a base for every choice of options that sizes allow. The rules are asked where one is promising.

        tried: context-parallel sizes that are left out.
        """
        computes: dict[object, Compute] = {}
        for options in self.options(tried):
            config = self._template.changed(options)
            if uneven := uneven_ranks(config, self.world):
                self._count(uneven)
                continue
            # The mesh decides where messages of a layer go, if ranks share samples, or experts of several nodes.
            spans = (
                config.parallel.context_parallel_size > 1 or config.parallel.moe_dispatch_across_nodes != "no"
            )
            beside = STAGES if spans else OF_STAGES
            key = tuple(value for name, value in options.items() if name not in beside)
            try:
                base = BaseLayout(
                    config,
                    self.world,
                    self.cluster,
                    self.collectives,
                    self._partition_of(config),
                    computes.get(key),
                )
            except ValueError as error:
                self._count([str(error)])
                continue
            computes[key] = base.compute
            yield base

    @cached_property
    def _template(self) -> RunConfig:
        """The configuration of the values that are given. The choices replace some of them."""
        return unjudged({"micro_batch_size": 1, **self.values, **self._no_shards})

    def _legal(self, base: BaseLayout) -> bool:
        self._count(base.faults)
        return not base.faults

    def _count(self, errors: Iterable[str]) -> None:
        """Count what the rules refuse."""
        for line in errors:
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

    def options(self, tried: Collection[int] = ()) -> Iterator[dict[str, Any]]:
        """Yield the options of every base that sizes allow."""
        tensor, pipeline, mapping, sequence, experts, context = PARALLEL
        sizes = [
            (tp, cp, ep, levels)
            for levels in self._free(LEVELS, list(dict.fromkeys(((), self.cluster.level_sizes))))
            for tp in self._free(tensor, common_divisors(self.cluster.ranks_per_node))
            for cp in self._free(context, self.contexts)
            if cp not in tried
            for ep in self._free(experts, self._expert_sizes(tp))
        ]
        for tp, cp, ep, levels in sizes:
            for pp in self._free(pipeline, self._pipeline_sizes(tp)):
                for order in self._free(
                    mapping, [False, True] if pp > 1 and tp * pp < self.cluster.world_size else [False]
                ):
                    for stages in self._stages(pp):
                        for recompute in self._free("recompute_granularity", list(RECOMPUTE)):
                            for size in self._free("micro_batch_size", self._micro_batches(tp * pp * cp)):
                                yield {
                                    tensor: tp,
                                    context: cp,
                                    experts: ep,
                                    LEVELS: levels,
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
        layers, ranks = int(self.values.get("num_layers") or 1), self.cluster.world_size // tp
        return [k for k in common_divisors(ranks) if k <= layers]

    def _stages(self, pp: int) -> Iterator[dict[str, Any]]:
        given = {name: self.values[name] for name in STAGES if self.values.get(name) is not None}
        layers, said = int(self.values.get("num_layers") or 1), self.values.get("pipeline_partition")
        listed = ParallelConfig(pipeline_model_parallel_size=pp, pipeline_partition=said)
        if given or pp == 1 or virtual_stages(listed, layers) > 1:
            yield given
            return
        yield {"pipeline_schedule": "1f1b"}
        yield {"pipeline_schedule": "zb-h1"}
        for virtual in range(2, min(layers // pp, MOST_STAGES_PER_RANK) + 1):
            yield {"num_virtual_stages_per_pipeline_rank": virtual}

    def _micro_batches(self, ranks: int) -> list[int]:
        batch, d = self.values.get("global_batch_size"), self.cluster.world_size // ranks
        if not batch or not d or batch % d:
            return [1] if not batch else []
        return [size for size in common_divisors(batch // d) if size <= LARGEST_MICRO_BATCH]

    # -- layouts ---------------------------------------------------------------------------------

    def choices(self, base: BaseLayout) -> Sequence[Choice]:
        """Return every choice of shards and formats; the rules of the configuration judge them."""
        given = base.config.shards(base.world).factors if self.shards_given else None
        key = base.d, base.near, given
        if key not in self._choices:
            self._choices[key] = [
                Choice(shard, formats.name, tuple(self._zeros(shard, formats)))
                for shard in ([given] if given else self._shards(base))
                for formats in self.formats
                if formats.has_effect(shard, base)
            ]
        return self._choices[key]

    def layout(self, base: BaseLayout, zero: ZeroConfig) -> Layout | None:
        """Return the layout of a choice; None: it is not legal."""
        try:
            return Layout(base, zero)
        except ValueError as error:
            self._count([str(error)])
            return None

    def layouts(self, base: BaseLayout, choice: Choice) -> list[Layout]:
        """Return every legal layout of a choice."""
        return [layout for zero in choice.zeros if (layout := self.layout(base, zero)) is not None]

    def messages_of(self, base: BaseLayout, choice: Choice) -> tuple[Messages, float] | None:
        """Return the messages of a choice's layouts, and their weight; None: not legal.

        How long gathered units live makes no difference to one gather.
        """
        key = base.mesh, base.partition.kinds[0], base.micro_batches == 1, choice.shard, choice.formats
        if key not in self._messages:
            layout = self.layout(base, choice.zeros[0])
            known = None if layout is None else (Messages.of(layout), self.weight(layout))
            self._messages[key] = known
        return self._messages[key]

    @property
    def shards_given(self) -> bool:
        return any(self.values.get(name) is not None for name in ZERO)

    @cached_property
    def formats(self) -> Sequence[FormatChoice]:
        """The choices of messages: one where they are given."""
        return (AS_GIVEN,) if given_formats(self.values) else self.policy

    def _zeros(self, shard: Shard, formats: FormatChoice) -> Iterator[ZeroConfig]:
        """Yield the ZeRO options of a choice, for each lifetime of parameters that makes a difference."""
        given = {
            n: v for n, v in self.values.items() if n.startswith("zero_") and n not in ZERO and v is not None
        }
        kept = (
            {n: getattr(self._template.zero, n) for n in ZERO} if self.shards_given else {"zero_shard": shard}
        )
        lives = [given.get(LIFETIME), *["gathered"] * (LIFETIME not in given and shard[0] > 1)]
        for life in lives:
            yield ZeroConfig(**{**given, **kept, **formats.values, LIFETIME: life})

    @staticmethod
    def _shards(base: BaseLayout) -> Iterator[Shard]:
        """Yield the (P, G, OS) of a base."""
        legal = whole_parts(base.d, base.near)
        for os in legal:
            for g in (k for k in legal if os % k == 0):
                for p in (k for k in legal if g % k == 0):
                    yield p, g, os

    # -- search ----------------------------------------------------------------------------------

    def best(self, number: int = BEST, bases: Iterable[BaseLayout] | None = None) -> list[Found]:
        """Return the fastest layouts that fit, the best first. There may be fewer than ``number``.

        bases: those to choose from, if not every legal one.
        """
        best = self._fastest(number, self.drafts() if bases is None else bases)
        recompute = "recompute_granularity" not in self.values
        short = not best or recompute and best[0].layout.config.training.recompute_granularity == "full"
        if bases is not None or not short or PARALLEL[-1] in self.values:
            return best
        for across in (False, True):
            tried = self.contexts
            self.share_samples(across)
            best = self._fastest(number, self.drafts(tried), best)
            if best:
                break
        return best

    def _fastest(self, number: int, bases: Iterable[BaseLayout], found: Iterable[Found] = ()) -> list[Found]:
        """Return the fastest of the promising layouts of these bases, and of what was found among others."""
        simulated = (Found(one.layout, simulate(one.layout), one.formats) for one in self.promising(bases))
        every = [*found, *simulated]
        return sorted(every, key=lambda one: (one.key[0] * self.weight(one.layout), one.key[1]))[:number]

    def promising(self, bases: Iterable[BaseLayout]) -> list[Estimated]:
        """Return the SIMULATED layouts that fit with the least estimates, the least first."""
        kept: list[Estimated] = []
        room = self.cluster.device.room

        def beaten(seconds: float) -> bool:
            return len(kept) == SIMULATED and seconds >= kept[-1].seconds

        for base in sorted(bases, key=attrgetter("pipeline_seconds")):
            if beaten(base.pipeline_seconds):  # as are those after it
                break
            if least_memory(base) > room or self.shards_given and not self._legal(base):
                continue  # given shards have no numbers where they are not legal
            for seconds, choice, zero in self._estimates(base):
                if beaten(seconds) or least_memory(base, choice.shard) > room:
                    continue
                if not self._legal(base):
                    break
                layout = self.layout(base, zero)
                if layout is not None and layout.fits:
                    insort(kept, Estimated(seconds, layout, choice.formats), key=attrgetter("seconds"))
                    del kept[SIMULATED:]
        return kept

    def _estimates(self, base: BaseLayout) -> Iterator[tuple[float, Choice, ZeroConfig]]:
        """Yield the estimate of each of a base's layouts, times its weight."""
        for choice in self.choices(base):
            if (known := self.messages_of(base, choice)) is not None:
                for zero in choice.zeros:
                    gathered = zero.zero_params_lifetime == "gathered"
                    yield known[1] * known[0].step_seconds(base, gathered), choice, zero

    def share_samples(self, across: bool = False) -> None:
        """Try layouts in which ranks of a node share samples, or those of several nodes, beside those that have been
        tried.
        """
        inside, world = self.cluster.ranks_per_node, self.cluster.world_size
        found = common_divisors(world) if across else common_divisors(inside)
        self.contexts = [k for k in found if k < inside or k % inside == 0]


def smallest_layout(values: Mapping[str, Any], cluster: Cluster) -> Layout | None:
    """Return the layout with the least memory, of those with small micro-batches and the largest shard factors."""
    most: dict[str, Any] = {
        "recompute_granularity": "full",
        "loss_chunk_tokens": AUTO,
        "micro_batch_size": 1,
        "use_tp_pp_dp_mapping": False,
        LEVELS: (),
    }
    search = Search({**most, **values}, cluster, "exact")
    search.share_samples(across=True)
    layouts = (
        layout
        for base in search.bases()
        for choice in search.choices(base)
        if search.shards_given or choice.shard == (base.d, base.d, base.d)
        for layout in search.layouts(base, choice)
    )
    return min(layouts, key=lambda layout: layout.memory.total, default=None)
