"""Checks of what a patch sends: against exact messages in the first steps, and by checksums of replicas.

Both cost time and memory only in the steps that they check. A CUDA graph's capture is refused.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from megazero.kernels.fingerprint import fingerprint


class Differences:
    """Adds up, by kind, what the messages of a step lost, and prints it on rank 0 under the name ``patch``."""

    def __init__(self, patch: str) -> None:
        self.patch = patch
        self.sums: dict[str, torch.Tensor] = {}  # kind -> squares of the differences, of the exact values
        self.steps: dict[str, int] = {}

    def note(self, kind: str, step: int, sent: torch.Tensor, exact: torch.Tensor, group: Any = None) -> None:
        """Add a message, as it arrived and as it would have been, exactly: any shape, the same for both.

        group: its ranks hold different parts, whose squares are added. This is collective over it.
        """
        pair = (sent.float() - exact.float(), exact.float())
        squares = torch.stack([x.square().sum(dtype=torch.float64) for x in pair])
        if group is not None:
            dist.all_reduce(squares, group=group)
        self.steps[kind] = step
        self.sums[kind] = self.sums[kind] + squares if kind in self.sums else squares

    def tell(self, kind: str) -> None:
        """Print on rank 0 the difference of this kind since the last call."""
        if kind in self.sums:
            lost, whole = self.sums.pop(kind).tolist()
            if dist.get_rank() == 0:
                error = (lost / whole) ** 0.5 if whole else lost**0.5
                print(
                    f"{self.patch}: step {self.steps[kind]}: {kind} differ from exact ones by {error:.2e} "
                    "(norm of the difference / norm)",
                    flush=True,
                )


def compare_replicas(patch: str, params: torch.Tensor, step: int, group: Any) -> None:
    """Raise RuntimeError on every rank of the group unless all hold the same bits of ``params`` [n]. Collective."""
    own = fingerprint(params).reshape(1)
    every = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
    dist.all_gather(every, own, group=group)
    sums = [int(x) for x in every]
    if len(set(sums)) > 1:
        ranks = dict(zip(dist.get_process_group_ranks(group), sums, strict=True))
        raise RuntimeError(
            f"{patch}: after step {step} data-parallel ranks hold different parameters (checksums by "
            f"rank: {ranks}): a message was lost or changed, or ranks began with different parameters"
        )


def refuse_capture(device: torch.device, patch: str) -> None:
    """Raise RuntimeError inside a CUDA graph's capture. patch: the name that says so."""
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            f"{patch}: a CUDA graph records a step's collectives once, but the host decides in every step what is "
            "sent: leave data-parallel messages out of the graph (torch.compile without mode='reduce-overhead'; "
            "Megatron-LM without CUDA graphs of a full iteration)"
        )
