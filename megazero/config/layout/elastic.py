"""--elastic: the same script on another number of ranks keeps the global batch.

Gradient accumulation adapts by itself where micro-batch size x data-parallel size divides the batch. Where it does
not, the largest micro-batch that does is found here. All else stays: another layout is another command line, which
loads the same checkpoints. The samples of a step do not depend on any of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import gcd

from megazero.config.run import RunConfig, World
from megazero.config.schedule.batch_sizes import BatchSizes
from megazero.config.validate import Verdict, batch_multiples, judge, uneven_ranks


def fit(config: RunConfig, world: World, consumed: int = 0) -> tuple[RunConfig, Verdict]:
    """Return the configuration for these ranks, and what is to be said of it.

    With --elastic it has the nearest legal micro-batch, with a note. Without, the error of a batch that
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
    if not multiples and not resized:
        return config, verdict
    sizes = BatchSizes.of(config, 1).sizes_from(consumed)  # the one in use first, the full one last
    found = _with_micro_batch(config, world, sizes) or _with_micro_batch(config, world, [sizes[0], sizes[-1]])
    batch = f"the global batch of {config.batch.global_batch_size} on {world.world_size} ranks"
    if found is None:
        if elastic and errors and _keeps_micro_batch(config):
            errors.append(
                f"--elastic: --micro-batch-size {config.batch.micro_batch_size} stays, because experts are balanced "
                "over micro-batches: --moe-router-load-balancing-type seq_aux_loss is over samples"
            )
        return config, verdict
    micro = found.batch.micro_batch_size
    changes = f"--micro-batch-size {micro}" if micro != config.batch.micro_batch_size else ""
    if not elastic:
        hint = f"; to keep {batch}: {changes}, as --elastic does"
        return config, Verdict([line + hint if line == multiples[0] else line for line in errors], [])
    notes = [*config.notes, *([f"--elastic keeps {batch}: {changes}"] if changes else [])]
    return replace(found, notes=tuple(notes)), judge(found, world)


def _keeps_micro_batch(config: RunConfig) -> bool:
    """Tell whether another micro-batch would be another loss."""
    return config.model.num_experts is not None and config.training.balances_micro_batches


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
