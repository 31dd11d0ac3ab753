"""--elastic: the same script on another number of ranks keeps the global batch.

Gradient accumulation adapts by itself where micro-batch size x data-parallel size divides the batch. Where it does
not, the largest micro-batch that does is found here. Shard factors, presets and numbers of ranks that share experts
become the nearest that these data-parallel ranks have. Tensor-, pipeline- and context-parallel sizes stay: another
layout is another command line, which loads the same checkpoints. The samples of a step do not depend on any of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import gcd

from megazero.config.layout.shards import IN_NODE, PARTITIONED, QUANTISED
from megazero.config.options.fields import typed
from megazero.config.options.sections import ZeroConfig
from megazero.config.run import RunConfig, World, all_options
from megazero.config.schedule.batch_sizes import BatchSizes
from megazero.config.validate import Verdict, batch_multiples, judge, uneven_ranks
from megazero.mesh.grid import nearest_shards, whole_parts


def fit(config: RunConfig, world: World, consumed: int = 0) -> tuple[RunConfig, Verdict]:
    """Return the configuration for these ranks, and what is to be said of it.

    With --elastic it is the nearest legal one, with a note on what was changed. Without, the error of a batch that
    does not divide ends with the flags of that one; other errors name their own nearest choice. A ramp-up takes the
    micro-batch that divides every size to come after ``consumed`` samples, if there is one.
    """
    verdict, elastic = judge(config, world), config.batch.elastic
    errors = verdict.errors
    resized = elastic and (config.batch.resized_by or config.data.data_stages)
    known = config.batch.global_batch_size is not None  # by now, unless the ranks do not divide
    if not known or not (errors or resized) or judge(config, None).errors or uneven_ranks(config, world):
        return config, verdict  # no micro-batch would mend the last two
    multiples = list(batch_multiples(config, world))
    if not elastic and not multiples:
        return config, verdict
    sizes = BatchSizes.of(config, 1).sizes_from(consumed)  # the one in use first, the full one last
    found = next(_legal(config, world, sizes), None)
    batch = f"the global batch of {config.batch.global_batch_size} on {world.world_size} ranks"
    if found is None:
        if elastic and errors and _keeps_micro_batch(config):
            errors.append(
                f"--elastic: --micro-batch-size {config.batch.micro_batch_size} stays, because experts are balanced "
                "over micro-batches: --moe-router-load-balancing-type seq_aux_loss is over samples"
            )
        return config, verdict
    changes = _changes(config, found)
    if not elastic:
        hint = f"; to keep {batch}: {changes}, as --elastic does"
        return config, Verdict([line + hint if line == multiples[0] else line for line in errors], [])
    notes = [*config.notes, *([f"--elastic keeps {batch}: {changes}"] if changes else [])]
    return replace(found, notes=tuple(notes)), judge(found, world)


def _changes(config: RunConfig, found: RunConfig) -> str:
    """Return the flags that turn ``config`` into ``found``."""
    changed = [(opt, found.get(opt.name)) for opt in all_options().values()]
    changed = [(opt, value) for opt, value in changed if value != config.get(opt.name)]
    return " ".join(typed(opt, value) for opt, value in changed)


def _keeps_micro_batch(config: RunConfig) -> bool:
    """Tell whether another micro-batch would be another loss."""
    return config.model.num_experts is not None and config.training.balances_micro_batches


def _legal(config: RunConfig, world: World, sizes: Sequence[int]) -> Iterator[RunConfig]:
    """Yield the legal choices, nearest first: of ranks that share experts, of shards, of micro-batches for these
    batches.
    """
    tp, ep = config.parallel.tensor_model_parallel_size, config.parallel.expert_model_parallel_size
    for shared in (e for e in range(ep, 0, -1) if ep % e == 0 and (e == 1 or e % tp == 0)):
        arranged = replace(config, parallel=replace(config.parallel, expert_model_parallel_size=shared))
        for zero in _shards(arranged, world):
            for divided in (sizes, [sizes[0], sizes[-1]]):
                choice = _with_micro_batch(replace(arranged, zero=zero), world, divided)
                if choice is not None and not judge(choice, world).errors:
                    yield choice


def _shards(config: RunConfig, world: World) -> Iterator[ZeroConfig]:
    """Yield the sharding that is asked for, then the nearest one that these ranks have."""
    zero = config.zero
    yield zero
    if not config.knows_nodes(world):
        return
    try:
        d, near = config.shard_ranks(world), config.data_ranks(world)
    except ValueError:
        return
    if zero.zero_shard:
        p, g, os = zero.zero_shard
        yield replace(zero, zero_shard=nearest_shards((p, g, os), d, near))
    elif (instances := zero.num_distributed_optimizer_instances) > 1:
        yield replace(zero, num_distributed_optimizer_instances=gcd(instances, d))
    elif zero.zero_preset in PARTITIONED and (wanted := zero.zero_hpz_partition_size) and near[-1] > 1:
        legal = whole_parts(near[-1], near)
        yield replace(zero, zero_hpz_partition_size=min(legal, key=lambda k: (abs(k - wanted), k)))
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
    whole = gcd(*sizes, config.batch.eval_global_batch_size or 0)
    legal = [size for size in range(least, micro + 1) if whole % (size * groups) == 0]
    return replace(config, batch=replace(config.batch, micro_batch_size=legal[-1])) if legal else None
