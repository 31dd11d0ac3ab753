"""How the ranks that share samples attend to whole ones: how many swap heads, and how many groups gather keys."""

from __future__ import annotations

from math import gcd, lcm

from megazero.comm.wire import Coding
from megazero.config.layout.wire import MIXED
from megazero.config.model.rules import head_shares
from megazero.config.model.section import ModelConfig
from megazero.config.options.sections import ParallelConfig

SWAP, BOTH, RING = "a2a", "a2a+p2p", "p2p"
GATHER = ("all_gather", "allgather")
COMM_TYPES = (SWAP, *GATHER, RING, BOTH)


def comm_type(parallel: ParallelConfig) -> str:
    """Return the word of --cp-comm-type. Megatron's scripts say p2p where they choose nothing: it is its default."""
    return (parallel.cp_comm_type or (RING,))[0]


def levels(parallel: ParallelConfig, model: ModelConfig, near: int | None = None) -> tuple[int, int]:
    """Return u, g: of u x g ranks that share samples, u swap heads for sequence, and g groups of these gather keys.

    As --cp-comm-type says. By default as many swap heads as the model has heads for and as share a node: a swap sends
    fewer bytes than a gather, and needs no second copy of keys and values; across nodes a gather with swaps inside
    sends the least. ``near``: the data-parallel ranks of a node; None where it is not known.
    """
    size, word = parallel.context_parallel_size, comm_type(parallel)
    if size == 1 or word == SWAP:
        return size, 1
    if word in GATHER:
        return 1, size
    if word == BOTH:
        heads, keys = parallel.hierarchical_context_parallel_sizes or (size, 1)
        return heads, keys
    room = size if near is None else gcd(size, near)
    heads = max(k for k in head_shares(model, parallel.tensor_model_parallel_size) if room % k == 0)
    return heads, size // heads


def gather_coding(parallel: ParallelConfig) -> Coding | None:
    """Return the format of keys and values that are gathered across nodes, as --cp-gather-bits asks; None is exact.

    Some channels of keys are many times larger than others, and a transform spreads them over their block, a head or
    two of one token: of SmolLM2-135M it halves the error of attention's output (docs/results/loss.md).
    They are rounded to nearest, so that a recompute gathers the same bits.
    """
    bits = parallel.cp_gather_bits
    return None if bits is None else Coding(bits, hadamard=MIXED)


def parts(parallel: ParallelConfig, keys: int) -> int:
    """Return the number that the length of a sequence must be a multiple of: ranks cut it between the layers'
    linears, and where there are several groups each has two chunks."""
    of_tensor = parallel.tensor_model_parallel_size if parallel.sequence_parallel else 1
    return lcm(parallel.context_parallel_size * of_tensor, 2 * keys if keys > 1 else 1)
