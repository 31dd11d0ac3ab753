"""Two looks at what is sent: first steps with every message sent exactly, too, and checksums of replicas.

Both cost time and memory while they look, and nothing otherwise.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from megatron_core_patch.options import PatchOptions
from megatron_core_patch.two_hops import TwoHops

Check = Callable[[], None]  # to be called when the messages have arrived
GRADIENTS, WEIGHTS = "gradients", "weights"


class MessageChecks:
    """Compares what arrived with what Megatron's own collectives give, and ranks' parameters with each other."""

    def __init__(self, options: PatchOptions) -> None:
        self.first_steps = options.zero_verify_first_steps
        self.interval = options.zero_checksum_interval
        self.sums: dict[str, torch.Tensor] = {}  # kind -> squares of the differences, of the exact values
        self.steps: dict[str, int] = {}

    def gradients(
        self, bucket: Any, hops: TwoHops, updates: int, reduce: Any, group: Any, op: Any
    ) -> list[Check]:
        """Reduce a copy of the bucket's gradients exactly, now; return what compares. ``updates``: made so far."""
        if updates >= self.first_steps:
            return []
        whole = bucket.grad_data.clone()
        exact = whole.view(len(hops.ranks), -1)[hops.index]
        reduce(exact, whole, op=op, group=group)

        def compare() -> None:
            squares = self._squares(bucket.grad_data.view(len(hops.ranks), -1)[hops.index], exact)
            dist.all_reduce(squares, group=group)
            self._note(GRADIENTS, updates + 1, squares)

        return [compare]

    def weights(self, bucket: Any, hops: TwoHops, updates: int, gather: Any, group: Any) -> list[Check]:
        """Gather a copy of the bucket's parameters exactly, now; return what compares and what takes checksums."""
        checks: list[Check] = []
        if updates <= self.first_steps:
            exact = bucket.param_data.clone()
            gather(exact, exact.view(len(hops.ranks), -1)[hops.index].clone(), group=group)
            checks.append(lambda: self._note(WEIGHTS, updates, self._squares(bucket.param_data, exact)))
        if self.interval and updates % self.interval == 0:
            checks.append(lambda: compare_replicas(bucket.param_data, updates, group))
        return checks

    def tell(self, kind: str) -> None:
        """Print on rank 0 what was noted of this kind since the last call."""
        if kind in self.sums:
            lost, whole = self.sums.pop(kind).tolist()
            if dist.get_rank() == 0:
                error = (lost / whole) ** 0.5 if whole else lost**0.5
                print(
                    f"megatron_core_patch: step {self.steps[kind]}: {kind} differ from exact ones by {error:.2e} "
                    "(norm of the difference / norm)",
                    flush=True,
                )

    def _note(self, kind: str, step: int, squares: torch.Tensor) -> None:
        self.steps[kind] = step
        self.sums[kind] = self.sums[kind] + squares if kind in self.sums else squares

    @staticmethod
    def _squares(sent: torch.Tensor, exact: torch.Tensor) -> torch.Tensor:
        pair = (sent.float() - exact.float(), exact.float())
        return torch.stack([x.square().sum(dtype=torch.float64) for x in pair])


def compare_replicas(params: torch.Tensor, step: int, group: Any) -> None:
    """Raise RuntimeError on every rank of the group unless all hold the same bits of ``params`` [n]. Collective."""
    words = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[params.element_size()]
    own = params.view(words).sum(dtype=torch.int64).reshape(1)
    every = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
    dist.all_gather(every, own, group=group)
    sums = [int(x) for x in every]
    if len(set(sums)) > 1:
        ranks = dict(zip(dist.get_process_group_ranks(group), sums, strict=True))
        raise RuntimeError(
            f"megatron_core_patch: after step {step} data-parallel ranks hold different parameters (checksums by "
            f"rank: {ranks}): a message was lost or changed, or ranks began with different parameters"
        )
