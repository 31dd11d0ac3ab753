"""--elastic: the same script on another number of ranks keeps the global batch.

Gradient accumulation adapts by itself where micro-batch size x data-parallel size divides the batch. Where it does
not, or where the ranks do not divide by tensor- and pipeline-parallel size, the nearest legal choice is found here:
first a smaller micro-batch, unless experts are balanced over micro-batches; then another number of pipeline stages,
then fewer tensor-parallel ranks. Shard factors and presets that these ranks do not have become the nearest ones. The
batch stays, and the samples of a step do not depend on the layout.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import islice
from math import gcd, log

from megazero.config.layout.shards import IN_NODE, PARTITIONED, QUANTISED
from megazero.config.options.fields import typed
from megazero.config.options.sections import ParallelConfig, ZeroConfig
from megazero.config.run import RunConfig, World, all_options
from megazero.config.schedule.batch_sizes import BatchSizeRampup
from megazero.config.validate import batch_multiples, find_errors, uneven_ranks
from megazero.mesh.grid import nearest_divisor, nearest_shards

MOST_WORLDS = 16  # other numbers of ranks that are tried for an error line, in each direction


def fit(config: RunConfig, world: World, consumed: int = 0) -> tuple[RunConfig, list[str]]:
    """Return the configuration for these ranks, and error lines.

    With --elastic it is the nearest legal one, with a note on what was changed. Without, the error of a batch or of
    ranks that do not divide ends with the flags of that one; other errors name their own nearest choice. A ramp-up
    takes the micro-batch that divides every size to come after ``consumed`` samples, if there is one.
    """
    errors, elastic = find_errors(config, world), config.batch.elastic
    ramped = elastic and config.batch.rampup_batch_size
    known = config.batch.global_batch_size is not None  # by now, unless the ranks do not divide
    if not known or not (errors or ramped) or find_errors(config, None):  # which no layout would mend
        return config, errors
    uneven = uneven_ranks(config, world) or list(batch_multiples(config, world))
    if not elastic and not uneven:
        return config, errors
    sizes = BatchSizeRampup.of(config, 1).sizes_from(consumed)  # the one in use first, the full one last
    found = next(_legal(config, world, sizes), None)
    batch = f"the global batch of {config.batch.global_batch_size} on {world.world_size} ranks"
    if found is None:
        near = list(_near(config, world, sizes)) if elastic and errors else []
        said = f"--elastic: nothing keeps {batch}; {'; '.join(near)}"
        return config, [*errors, *([said] if near else [])]
    changes = _changes(config, found)
    if not elastic:
        hint = f"; to keep {batch}: {changes}, as --elastic does"
        return config, [line + hint if line == uneven[0] else line for line in errors]
    notes = [*config.notes, *([f"--elastic keeps {batch}: {changes}"] if changes else [])]
    return replace(found, notes=tuple(notes)), []


def _changes(config: RunConfig, found: RunConfig) -> str:
    """Return the flags that turn ``config`` into ``found``."""
    changed = [(opt, found.get(opt.name)) for opt in all_options().values()]
    changed = [(opt, value) for opt, value in changed if value != config.get(opt.name)]
    return " ".join(typed(opt, value) for opt, value in changed)


def _near(config: RunConfig, world: World, sizes: Sequence[int]) -> Iterator[str]:
    """Yield what would keep the batch where these ranks do not."""
    if others := _other_worlds(config, world, sizes):
        yield f"nearest numbers of ranks: {' or '.join(map(str, others))}"
    if _keeps_micro_batch(config):
        yield (
            f"--micro-batch-size {config.batch.micro_batch_size} stays, because the loss that balances experts is "
            "over micro-batches (aux_loss): --moe-router-load-balancing-type seq_aux_loss is over samples"
        )


def _keeps_micro_batch(config: RunConfig) -> bool:
    """Tell whether another micro-batch would be another loss."""
    return config.model.num_experts is not None and config.training.balances_micro_batches


def _other_worlds(config: RunConfig, world: World, sizes: Sequence[int]) -> list[int]:
    """Return the nearest smaller and larger number of ranks, in whole nodes, for which there is a legal choice."""
    ranks, node = world.world_size, world.ranks_per_node
    one_node = node in (0, ranks)
    near: list[int] = []
    for step in (-1, 1) if one_node else (-node, node):
        others = (ranks + step * k for k in range(1, MOST_WORLDS + 1))
        worlds = (World(n, n if node == ranks else node) for n in others if n > 0)
        near += [
            other.world_size for other in islice((w for w in worlds if any(_legal(config, w, sizes))), 1)
        ]
    return near


def _legal(config: RunConfig, world: World, sizes: Sequence[int]) -> Iterator[RunConfig]:
    """Yield the legal choices, nearest first: of layouts, of their shards, of micro-batches for these batches."""
    for parallel in _layouts(config, world):
        arranged = replace(config, parallel=parallel)
        for zero in _shards(arranged, world):
            for divided in (sizes, [sizes[0], sizes[-1]]):
                choice = _with_micro_batch(replace(arranged, zero=zero), world, divided)
                if choice is not None and not find_errors(choice, world):
                    yield choice


def _layouts(config: RunConfig, world: World) -> list[ParallelConfig]:
    """Return the layouts whose ranks divide the world: as many tensor-parallel ranks as possible, then the number of
    stages nearest in ratio, the larger one of two. As many ranks share samples, and as many as can the experts."""
    given = config.parallel
    tp, pp = given.tensor_model_parallel_size, given.pipeline_model_parallel_size
    layers, cp = config.model.num_layers, given.context_parallel_size
    found = [
        (t, p)
        for t in range(tp, 0, -1)
        for p in range(1, min(layers, world.world_size) + 1)
        if tp % t == 0 and world.world_size % (t * p * cp) == 0
    ]
    found.sort(key=lambda each: (tp // each[0], round(abs(log(each[1] / pp)), 9), -each[1]))
    ep = given.expert_model_parallel_size
    return [
        replace(_with_layout(given, t, p), expert_model_parallel_size=e)
        for t, p in found
        for e in range(ep, 0, -1)
        if ep % e == 0 and (e == 1 or e % t == 0)
    ]


def _with_layout(given: ParallelConfig, tp: int, pp: int) -> ParallelConfig:
    changed = replace(given, tensor_model_parallel_size=tp, pipeline_model_parallel_size=pp)
    partition = given.pipeline_partition or ""
    if pp != given.pipeline_model_parallel_size and partition[:1].isdigit():  # layers of other stages
        return replace(changed, pipeline_partition=None)
    return changed


def _shards(config: RunConfig, world: World) -> Iterator[ZeroConfig]:
    """Yield the sharding that is asked for, then the nearest one that these ranks have."""
    zero = config.zero
    yield zero
    if not config.knows_nodes(world):
        return
    try:
        d, h = config.shard_ranks(world), config.data_ranks_per_node(world)
    except ValueError:
        return
    if zero.zero_shard:
        p, g, os = zero.zero_shard
        yield replace(zero, zero_shard=nearest_shards((p, g, os), d, h))
    elif zero.zero_preset in PARTITIONED and zero.zero_hpz_partition_size and h > 1:
        yield replace(zero, zero_hpz_partition_size=nearest_divisor(h, zero.zero_hpz_partition_size))
    elif zero.zero_preset in QUANTISED and zero.zero_hpz_partition_size:  # one rank a node
        yield replace(zero, zero_hpz_partition_size=None)
    elif zero.zero_preset in IN_NODE:
        yield replace(zero, zero_preset="zero3", zero_hpz_partition_size=None)


def _with_micro_batch(config: RunConfig, world: World, sizes: Sequence[int]) -> RunConfig | None:
    """Return the configuration with the largest micro-batch, up to its own, that divides all batches, or None.

    It is its own where a loss that balances experts is over micro-batches.
    """
    micro = config.batch.micro_batch_size
    least = micro if _keeps_micro_batch(config) else 1
    groups = config.data_parallel_size(world) * config.micro_batch_multiple
    whole = gcd(*sizes)
    legal = [size for size in range(least, micro + 1) if whole % (size * groups) == 0]
    return replace(config, batch=replace(config.batch, micro_batch_size=legal[-1])) if legal else None
