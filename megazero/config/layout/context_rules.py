"""Rules of context parallelism that hold whatever the size of the world."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod

from megazero.config.model import rules as model_rules
from megazero.config.nearest import around, misspelt
from megazero.config.options.fields import Condition, show
from megazero.config.options.sections import ParallelConfig
from megazero.config.run import RunConfig

BUILT, BOTH = "a2a", "a2a+p2p"
COMM_TYPES = (BUILT, "all_gather", "allgather", "p2p", BOTH)


def context_conditions(parallel: ParallelConfig) -> Iterator[Condition]:
    """Yield what the options of context parallelism need to have an effect."""
    several = parallel.context_parallel_size > 1
    yield ["cp_comm_type"], several, "--context-parallel-size above 1"
    both = several and BOTH in (parallel.cp_comm_type or ())
    yield ["hierarchical_context_parallel_sizes"], both, f"--cp-comm-type {BOTH}"


def mechanism(config: RunConfig) -> Iterator[str]:
    """Report ways to attend to whole samples that are unknown, contradict each other, or are not built."""
    parallel = config.parallel
    size, words = parallel.context_parallel_size, parallel.cp_comm_type or (BUILT,)
    levels = parallel.hierarchical_context_parallel_sizes
    unknown = [word for word in words if word not in COMM_TYPES]
    if unknown:
        near = misspelt(unknown[0], COMM_TYPES) or f"; nearest: {BUILT}"
        yield f"--cp-comm-type {unknown[0]} is not one of {', '.join(COMM_TYPES)}{near}"
    elif size == 1:
        return
    elif len(set(words)) > 1:
        yield f"--cp-comm-type {show(words)}: other words for other layers are not built; nearest: {BUILT}"
    elif words[0] == BOTH and (levels is None or len(levels) != 2 or prod(levels) != size):
        given = "is missing" if levels is None else show(levels)
        yield (
            f"--cp-comm-type {BOTH} needs --hierarchical-context-parallel-sizes U G with U x G = "
            f"--context-parallel-size {size}, and it {given if levels is None else f'is {given}'}; nearest: "
            f"--cp-comm-type {BUILT}"
        )
    elif words[0] not in (BUILT, BOTH) or words[0] == BOTH and levels is not None and levels[1] > 1:
        yield (
            f"--cp-comm-type {words[0]}: ranks that send each other keys and values are not built; nearest: "
            f"--cp-comm-type {BUILT}, which swaps heads for sequence, with the same result"
        )


def order(config: RunConfig) -> Iterator[str]:
    """Report an order of ranks in which those that share samples would lie outside of the pipeline."""
    parallel = config.parallel
    several = parallel.context_parallel_size > 1 and parallel.pipeline_model_parallel_size > 1
    if several and parallel.use_tp_pp_dp_mapping:
        yield (
            f"--context-parallel-size {parallel.context_parallel_size} does not go with --use-tp-pp-dp-mapping, in "
            "which data-parallel ranks lie outside of the pipeline; nearest: leave that out"
        )


def shares(config: RunConfig) -> Iterator[str]:
    """Report heads and lengths that the ranks cannot share evenly."""
    model, parallel = config.model, config.parallel
    size, tp = parallel.context_parallel_size, parallel.tensor_model_parallel_size
    if size == 1:
        return
    yield from model_rules.context_parallel(model, tp, size)
    parts = size * (tp if parallel.sequence_parallel else 1)
    if model.seq_length % parts:
        ranks = f" x --tensor-model-parallel-size {tp}" if parts > size else ""
        fits = [k for k in range(1, model.seq_length) if model.seq_length % (k * parts // size) == 0]
        yield (
            f"--seq-length {model.seq_length} does not divide by --context-parallel-size {size}{ranks}; nearest size "
            f"that fits: {around(fits, size)}"
        )
