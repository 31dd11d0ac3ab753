"""Rules of context parallelism, and what is said of it at the start of a run."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from math import prod

from megazero.config.layout.context import BOTH, COMM_TYPES, RING, SWAP, comm_type, levels, parts
from megazero.config.model import rules as model_rules
from megazero.config.model.attention import refusal, wants_of
from megazero.config.nearest import misspelt, multiples_around
from megazero.config.options.fields import show
from megazero.config.run import RunConfig, World
from megazero.mesh.grid import context_problem


def context_notes(config: RunConfig, world: World | None) -> Iterator[str]:
    """Yield a note where ranks do something else than the words of --cp-comm-type say, or what is seldom wanted."""
    parallel, given = config.parallel, config.parallel.cp_comm_type
    if parallel.context_parallel_size == 1:
        return
    heads, keys = config.context_levels(world)
    if given and comm_type(parallel) in (RING, BOTH):
        swapped = f"{heads} ranks swap heads for sequence" if heads > 1 else ""
        gathered = (
            f"{keys} {'groups of these' if heads > 1 else 'ranks'} gather keys and values" if keys > 1 else ""
        )
        done = " and ".join(each for each in (swapped, gathered) if each)
        yield f"--cp-comm-type {show(given)}: instead of a ring, {done}, with the same result"
    if config.knows_nodes(world) and world is not None and keys == 1:
        near = config.data_ranks_per_node(world)
        if heads > near:
            yield (
                f"--cp-comm-type {SWAP}: heads cross nodes in every layer; without it {near} ranks of a node would "
                "swap heads, and keys and values alone cross"
            )


def mechanism(config: RunConfig) -> Iterator[str]:
    """Report ways to attend to whole samples that are unknown, or contradict each other."""
    parallel = config.parallel
    size, words = parallel.context_parallel_size, parallel.cp_comm_type or (RING,)
    sizes = parallel.hierarchical_context_parallel_sizes
    unknown = [word for word in words if word not in COMM_TYPES]
    if unknown:
        near = misspelt(unknown[0], COMM_TYPES) or f"; nearest: {SWAP}"
        yield f"--cp-comm-type {unknown[0]} is not one of {', '.join(COMM_TYPES)}{near}"
    elif size == 1:
        return
    elif len(set(words)) > 1:
        yield f"--cp-comm-type {show(words)}: a different value per layer is not supported; nearest: {words[0]}"
    elif words[0] == BOTH and (sizes is None or len(sizes) != 2 or min(sizes) < 1 or prod(sizes) != size):
        given = "it is missing" if sizes is None else f"it is {show(sizes)}"
        fits = " ".join(map(str, levels(replace(parallel, cp_comm_type=None), config.model)))
        yield (
            f"--cp-comm-type {BOTH} needs --hierarchical-context-parallel-sizes U G with U x G = "
            f"--context-parallel-size {size}, and {given}; nearest: {fits}"
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
    parallel = config.parallel
    if parallel.context_parallel_size == 1 or any(mechanism(config)):
        return
    heads, keys = levels(parallel, config.model)
    flag = (
        "--hierarchical-context-parallel-sizes" if comm_type(parallel) == BOTH else "--context-parallel-size"
    )
    tp, size = parallel.tensor_model_parallel_size, parallel.context_parallel_size
    yield from model_rules.context_parallel(config.model, tp, heads, size, flag)
    yield from _lengths(config, keys)


def over_nodes(config: RunConfig, world: World) -> Iterator[str]:
    """Report what the ranks of these nodes cannot do, where ``shares`` found nothing that no ranks can.

    Groups of ranks are equal, and straddle no nodes unevenly.
    """
    parallel = config.parallel
    if parallel.context_parallel_size == 1 or any(mechanism(config)) or any(shares(config)):
        return
    near, (_, keys), d = config.data_ranks(world), config.context_levels(world), config.shard_ranks(world)
    if problem := context_problem(parallel.context_parallel_size, d, near, keys):
        yield problem
    elif keys > levels(parallel, config.model)[1] == 1:
        yield from _lengths(config, keys)
        yield from backend(config, keys)
    elif parallel.cp_gather_bits and comm_type(parallel) != SWAP and not config.gathered_keys(world):
        yield (
            f"--cp-gather-bits {parallel.cp_gather_bits} is for keys and values that are gathered across nodes, and "
            f"none of the {parallel.context_parallel_size} ranks that share samples gather any there; nearest: leave "
            "it out"
        )


def _lengths(config: RunConfig, keys: int) -> Iterator[str]:
    parallel, length = config.parallel, config.model.seq_length
    size, tp, whole = (
        parallel.context_parallel_size,
        parallel.tensor_model_parallel_size,
        parts(parallel, keys),
    )
    if length % whole:
        words = f"--context-parallel-size {size}"
        words += f" x --tensor-model-parallel-size {tp}" if parallel.sequence_parallel and tp > 1 else ""
        of_ranks = size * (tp if parallel.sequence_parallel else 1)
        words = f"2 x {words} (ranks that gather keys have two chunks each)" if whole > of_ranks else words
        yield f"--seq-length {length} does not divide by {words}; nearest: {multiples_around(length, whole)}"


def backend(config: RunConfig, keys: int) -> Iterator[str]:
    """Report a backend that does not compute what the model, the data and the ranks need, on --device or on any."""
    device = None if config.training.device == "auto" else config.training.device
    bits = int(config.precision.params_dtype[2:])
    wants = wants_of(config.model, config.data.reset_attention_mask, chunks=keys > 1)
    if error := refusal(config.training.attention_backend, wants, bits, config.model.seq_length, device):
        yield error
