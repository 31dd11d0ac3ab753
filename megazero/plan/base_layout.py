"""A base layout: a configuration on a world, with its stages, schedule and module times but without sharding.

Many layouts share one base.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import cached_property, lru_cache
from itertools import pairwise
from typing import Any, TypeVar

from megazero.config import RunConfig, World
from megazero.config.model.spec import HEAD, ModelSpec
from megazero.config.options.cluster import Cluster
from megazero.config.validate import judge
from megazero.mesh.grid import Grid, make_grid
from megazero.mesh.levels import INTER, INTRA, Level, link_between
from megazero.plan import communication
from megazero.plan.activations import MicroBatchActivations, loss_chunks
from megazero.plan.communication import Bytes
from megazero.plan.compute import Compute
from megazero.plan.seconds import Collectives
from megazero.pp.partition import StageSpec
from megazero.pp.schedules import (
    SCHEDULES,
    Action,
    Kind,
    Schedule,
    done_by,
    in_order,
    make_schedule,
    needs,
    peak_activations,
)

Shared = TypeVar("Shared")
SAMPLED = 8  # micro-batches, about, that are run on a clock where a step has many more
# Rank, action, the number of its event, and of those that it needs with their ranks.
Step = tuple[int, Action, int, tuple[tuple[int, int], ...]]


# All ranks and layouts of a base ask for one schedule: making it anew each time was 3/4 of a search's seconds.
schedule_of = lru_cache(maxsize=64)(make_schedule)
peaks_of = lru_cache(maxsize=4096)(peak_activations)
_made_grid = lru_cache(maxsize=4096)(make_grid)


@lru_cache(maxsize=256)
def ordered_steps(name: str, pp: int, virtual: int, micro_batches: int) -> tuple[Schedule, tuple[Step, ...]]:
    """Return a schedule and all its actions, each after what it needs."""
    schedule = schedule_of(name, pp, virtual, micro_batches)
    stages, numbers = pp * virtual, dict[Action, int]()
    steps = []
    for rank, action in in_order(schedule, stages):
        needed = tuple((numbers[event], event.stage % pp) for event in needs(action, stages))
        steps.append((rank, action, numbers.setdefault(done_by(action), len(numbers)), needed))
    return schedule, tuple(steps)


@lru_cache(maxsize=256)
def ring_of(grid: Grid, levels: tuple[Level, ...]) -> tuple[str, ...]:
    """Return the link from each pipeline rank to the next; the last one's is that to the first.

    levels: the cluster's. Some pipelines may cross to another rack or site where others do not. All wait for those.
    """
    axis, links = grid.axis("pp"), [level.link for level in levels]
    slowest = [0] * grid.pp
    for rank in range(grid.world_size) if len(levels) > 2 else axis.ranks(0):
        own = axis.index(rank)
        target = rank + axis.stride * ((own + 1) % grid.pp - own)
        slowest[own] = max(slowest[own], links.index(link_between(levels, rank, target)))
    return tuple(links[each] for each in slowest)


@lru_cache(maxsize=4096)
def _key(content: Hashable) -> object:
    """Return an object that stands for all that are equal to this: it is hashed at once."""
    return object()


class Partition:
    """The stages of a pipeline. modules: how many modules of each kind a stage has, stage by stage.

    of: the modules of each rank's stages. keys, kinds: objects that stand for a rank's stages, and for its modules.
    """

    def __init__(self, stages: Sequence[StageSpec], pp: int, spec: ModelSpec) -> None:
        self.stages = stages
        self.of_rank = [stages[rank::pp] for rank in range(pp)]
        counts = (Counter(module.kind for _, module in spec.of_stage(stage)) for stage in stages)
        self.modules = [tuple(each.items()) for each in counts]
        self.of = [tuple(self.modules[stage.index] for stage in own) for own in self.of_rank]
        self.keys, self.kinds = [_key(tuple(own)) for own in self.of_rank], [_key(own) for own in self.of]


class BaseLayout:
    """A configuration on a world, without shards and wire formats, and its costs on a cluster."""

    def __init__(
        self,
        config: RunConfig,
        world: World,
        cluster: Cluster,
        collectives: Collectives,
        partition: Partition | None = None,
        compute: Compute | None = None,
    ) -> None:
        """partition, compute: those of the configuration, if they are known.

        Raises ValueError if the cluster's devices do not compute in the run's dtype, or sizes are not legal.
        """
        self.world, self.cluster, self.collectives = world, cluster, collectives
        parallel = config.parallel
        self.tp, self.pp = parallel.tensor_model_parallel_size, parallel.pipeline_model_parallel_size
        self.virtual, self.schedule_name = config.virtual_stages, config.pipeline_schedule
        self.d, self.near = config.shard_ranks(world), config.data_ranks(world)
        self.h = self.near[0]
        self.cp, self.ep = parallel.context_parallel_size, parallel.expert_model_parallel_size
        self.batch_ranks = config.data_parallel_size(world)  # shares of a global batch
        self.whole = grid_of(config, world, (1, 1, 1))  # nothing is sharded
        self._ring = ring_of(self.whole, cluster.levels)
        compute = compute or Compute(config, cluster, collectives, self.whole)
        # What is equal wherever all is equal that decides units and messages beside the ZeRO section and the stages.
        mesh = (
            (world, parallel.ranks_per_node, self.tp, self.pp, self.ep, self.cp),
            (parallel.cp_comm_type, parallel.hierarchical_context_parallel_sizes),
            (parallel.use_tp_pp_dp_mapping, parallel.sequence_parallel, compute.width, parallel.level_sizes),
            (config.outer, config.optimizer, config.model),
        )
        self.mesh: object = collectives.known.setdefault(mesh, object())
        partition = partition or Partition(config.stages(), self.pp, compute.spec)
        self.config, self.partition, self.compute = config, partition, compute
        self.stages, self.of_rank = partition.stages, partition.of_rank
        self.spec, self.activation = compute.spec, compute.activation
        self.micro_batches = config.num_micro_batches(self.world)

    def shared(self, key: Any, make: Callable[[], Shared]) -> Shared:
        """Return what layouts of the same mesh compute alike, made once: ``key`` has all else that it depends on."""
        known, whole = self.collectives.known, (self.mesh, key)
        if whole not in known:
            known[whole] = make()
        found: Shared = known[whole]
        return found

    @cached_property
    def faults(self) -> Sequence[str]:
        """What the configuration's rules refuse."""
        return judge(self.config, self.world).errors

    @cached_property
    def stage_seconds(self) -> list[dict[Kind, float]]:
        """Return the seconds of each action of each stage, without waits."""
        times = self.compute.action_seconds
        alike = {
            modules: {kind: sum(n * times[name][kind] for name, n in modules) for kind in Kind}
            for modules in set(self.partition.modules)
        }
        return [alike[modules] for modules in self.partition.modules]

    @property
    def split(self) -> bool:
        """Whether weight gradients are computed apart, which no other rank waits for."""
        return SCHEDULES[self.schedule_name].splits_backward and self.pp > 1

    @cached_property
    def pipeline_seconds(self) -> float:
        """The estimated seconds of a step in which nothing waits for weights or gradients.

        The last rank begins when the first forward arrives, and ends so much before the first rank. In between, ranks
        keep pace with the slowest of each turn, and with messages, each of which waits for the one before. Nor can
        the first rank have more micro-batches on their way to the last stage and back than the schedule lets in at
        once.
        """
        seconds, pp = self.stage_seconds, self.pp
        back = Kind.INPUT if self.split else Kind.BACKWARD
        sends = [self.message_seconds[link] for link in self._ring]
        turns = [seconds[first : first + pp] for first in range(0, len(seconds), pp)]
        pace = sum(max(one[Kind.FORWARD] + one[Kind.BACKWARD] for one in turn) for turn in turns)
        pace = max(pace, len(turns) * max(sends, default=0.0))
        apart = 0.0
        for one, send in zip(seconds[: pp - 1], sends, strict=False):
            apart += one[Kind.FORWARD] + send + (0.0 if self.split else one[back] + send)
        away = on_way = 0.0
        for stage in reversed(range(len(self.stages))):
            away += seconds[stage][Kind.FORWARD] + seconds[stage][back]
            on_way += away if stage % pp == 0 else 0.0
            away += 2 * sends[(stage - 1) % pp]
        return max(self.micro_batches * pace + apart, self.micro_batches * on_way / max(self.peaks[0], 1))

    @cached_property
    def sampled(self) -> tuple[int, ...]:
        """Return the numbers of micro-batches to simulate: the step's, or two smaller ones if it has many.

        Once its pipeline is full, a schedule repeats with a period of pp micro-batches, so from there the step time
        is linear in them.
        """
        few = max(SAMPLED // self.pp, 2) * self.pp
        period = max(1, SAMPLED // 2 // self.pp) * self.pp
        if self.micro_batches <= few + period:
            return (self.micro_batches,)
        return few, few + period

    def extrapolated(self, values: Sequence[float]) -> float:
        """Extrapolate ``values``, taken at the micro-batches of ``sampled``, to the step's micro-batches."""
        if len(values) == 1:
            return values[0]
        few, more = self.sampled
        return values[1] + (values[1] - values[0]) * (self.micro_batches - more) / (more - few)

    def steps_of(self, micro_batches: int) -> tuple[Schedule, tuple[Step, ...]]:
        return ordered_steps(self.schedule_name, self.pp, self.virtual, micro_batches)

    @cached_property
    def own_seconds(self) -> Mapping[Kind, list[float]]:
        """The seconds of the first rank's forwards and backwards of a micro-batch, part by part."""
        kinds = Kind.FORWARD, Kind.BACKWARD
        return {k: [self.stage_seconds[stage.index][k] for stage in self.of_rank[0]] for k in kinds}

    @cached_property
    def least_activations(self) -> Mapping[int, float]:
        """Return the activation bytes of each of the ``distinct_ranks``; model state has only the rest."""
        chunks = loss_chunks(self.config)
        moments = {
            r: [self.activation_memory(r, chunk).values() for chunk in chunks] for r in self.distinct_ranks
        }
        return {r: min(max(sum(n.values()) for n in one) for one in each) for r, each in moments.items()}

    def elements_of(self, rank: int) -> Sequence[tuple[int, int]]:
        """Return the elements of all parameters of a rank, beside how many data-parallel ranks hold others."""
        return self.shared(("elements", self.partition.kinds[rank]), lambda: self._elements_of(rank))

    def _elements_of(self, rank: int) -> Sequence[tuple[int, int]]:
        found = Counter[int]()
        for kind, number in (pair for part in self.partition.of[rank] for pair in part):
            for p in self.spec.modules[kind].parameters:
                if not (kind == HEAD and p.tied):  # of one rank, it is the embedding's
                    found[self.whole.ep_data if p.experts else 1] += number * p.local_numel(self.tp)
        return tuple(found.items())

    @cached_property
    def message_seconds(self) -> Mapping[str, float]:
        """Return the seconds of an activation's way to the next stage by link, all ranks of a node sending at once.

        Of the stages on a node only the last one's ranks send across nodes.
        """
        return self.shared(("messages", self.activation), self._message_seconds)

    def _message_seconds(self) -> Mapping[str, float]:
        sent, link = self.activation.sent, self.cluster.inter_node
        across = self._message(INTER, sent / self._stages_on(self.config.ranks_per_node(self.world)))
        if link.rank_gbits_per_s is not None:
            across = max(across, sent / (link.rank_gbits_per_s * link.efficiency * 1e9 / 8))
        above = {link: self._message(link, sent) for link in self.cluster.above}
        return {INTRA: self._message(INTRA, sent), INTER: across, **above}

    def _stages_on(self, ranks: int) -> int:
        """Return how many pipeline ranks the first ``ranks`` of the world hold. One of them sends to others."""
        return min(self.pp, -(-ranks // self.whole.axis("pp").stride))

    def link(self, source: int, target: int) -> str:
        """Return the link between two pipeline ranks that are neighbours; the last one and the first are, too."""
        return self._ring[source if (source + 1) % self.pp == target else target]

    def _message(self, link: str, sent: float) -> float:
        activation, parts = self.activation, pairwise(self.cluster.levels)
        ranks = {high.link: low.size for low, high in parts}.get(link, 1)  # of the part that sends
        seconds = self.collectives.message(link, sent, ranks // self._stages_on(ranks)).seconds
        cut = not activation.sequence_parallel and activation.sent < activation.whole
        if self.tp > 1 and cut:  # the receivers gather it
            seconds += self.collectives.cost("gather", self.tp, 1, (self.tp - 1) * activation.sent).seconds
        return seconds

    @cached_property
    def peaks(self) -> tuple[int, ...]:
        return peaks_of(self.schedule_name, self.pp, self.virtual, self.micro_batches)

    @cached_property
    def distinct_ranks(self) -> list[int]:
        """Return one pipeline rank of each kind: of those with like modules, that with the most activations."""
        found: dict[object, int] = {}
        for rank in sorted(range(self.pp), key=lambda rank: -self.peaks[rank]):  # stable
            found.setdefault(self.partition.kinds[rank], rank)
        return sorted(found.values())

    def activation_memory(self, rank: int, loss_chunk: int | None) -> dict[str, dict[str, float]]:
        """Return a pipeline rank's bytes of activations and head, by moment of a backward.

        loss_chunk: the tokens whose logits are held at once. None: all.
        """
        known, peak = self.compute.known, self.peaks[rank]
        key = loss_chunk, self.partition.kinds[rank], peak
        if key not in known:
            if MicroBatchActivations not in known:
                width, on_host = self.compute.width, self.cluster.on_host
                known[MicroBatchActivations] = MicroBatchActivations(self.config, width, on_host, self.world)
            known[key] = known[MicroBatchActivations].moments(self.of_rank[rank], peak, loss_chunk)
        found: dict[str, dict[str, float]] = known[key]
        return found

    @cached_property
    def other_bytes(self) -> list[Bytes]:
        """Return the bytes between stages and inside layers that one rank of each stage sends in a step."""
        schedule = schedule_of(self.schedule_name, self.pp, self.virtual, self.micro_batches)
        grid, out = self.whole, []
        rows = communication.even_rows(self.config, grid, self.activation) if grid.ep > 1 else None
        for rank, own in enumerate(self.of_rank):
            world_rank = grid.rank_of(rank, 0, 0)
            total = communication.pipeline(schedule, grid, world_rank, self.activation)
            total += communication.inside_modules(
                self.config, own, schedule[rank], grid, self.activation, rows
            )
            out.append(total)
        return out


def grid_of(config: RunConfig, world: World, shards: tuple[int, int, int]) -> Grid:
    """Return the grid of a run with these shard factors (P, G, OS)."""
    parallel = config.parallel
    return _made_grid(
        world.world_size,
        config.ranks_per_node(world),
        parallel.tensor_model_parallel_size,
        parallel.pipeline_model_parallel_size,
        shards,
        parallel.use_tp_pp_dp_mapping,
        parallel.context_parallel_size,
        config.context_levels(world)[1],
        parallel.expert_model_parallel_size,
        parallel.level_sizes,
    )
