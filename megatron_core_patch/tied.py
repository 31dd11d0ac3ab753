"""The exchange of tied embeddings' gradients between pipeline stages, of what is needed alone.

Megatron all-reduces the whole gradient of the shared weight over the stages that hold it. The sum over data-parallel
ranks has been made before that, and each rank's optimizer reads its shard alone: this rank's part of the weight's
bucket, which lies alike on both stages, as Megatron gives a shared weight a bucket of its own. So the patch hands
Megatron's function that part, a d-th of the bytes. Sums are exact.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch

from megatron_core_patch.names import FINALIZE
from megazero.comm.hops import Traffic
from megazero.patches.names import replaced
from megazero.patches.two_hops import TwoHops


def is_tied(bucket: Any) -> bool:
    """Tell whether the bucket is that of a weight which another pipeline stage holds, too."""
    return len(bucket.params_list) == 1 and getattr(bucket.params_list[0], "shared_embedding", False)


def exchange_parts(
    original: Callable[[], Any], tied: list[tuple[Any, TwoHops]], stages: int, traffic: Traffic, link: str
) -> Any:
    """Run Megatron's exchange of word embeddings' gradients with this rank's shards of the ``tied`` buckets.

    stages: how many hold the weight. A rank of k in an all-reduce sends 2 (k - 1) / k of its message.
    link: the link class between the stages, for the counters (kind 'tied').
    """
    finalize = importlib.import_module(FINALIZE)
    unshard, reshard = finalize._unshard_if_dtensor, finalize._reshard_if_dtensor

    def own(grad: torch.Tensor | None) -> torch.Tensor | None:
        for bucket, hops in tied:
            if grad is not None and grad.data_ptr() == bucket.grad_data.data_ptr():
                return bucket.grad_data.view(len(hops.ranks), -1)[hops.index]
        return None

    def part_of(grad: Any) -> Any:
        part = own(grad)
        if part is None:
            return unshard(grad)
        traffic.add("tied", link, part.nbytes * 2 * (stages - 1) // stages)
        return part

    def whole_again(part: Any, grad: Any) -> Any:
        return reshard(part, grad) if own(grad) is None else grad

    with replaced(finalize, _unshard_if_dtensor=part_of, _reshard_if_dtensor=whole_again):
        return original()
