"""A rank's batches on their way from a data set to the device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from megazero.data.build import Dataset
from megazero.data.sampler import Batches
from megazero.mesh.mesh import Mesh

Batch = Mapping[str, Any]  # of tensors


@dataclass(frozen=True)
class Feeding:
    """loss_rank: the pipeline's stage that computes the loss. masked: whether some tokens do not count in it."""

    mesh: Mesh
    micro_batch_size: int
    loss_rank: int
    masked: bool

    def batches(self, data_set: Dataset, **position: int) -> Batches:
        """Return this rank's batches, which lie in pinned memory if they go to CUDA: the copy waits otherwise."""
        return Batches(
            data_set,
            micro_batch_size=self.micro_batch_size,
            rank=self.mesh.dp_rank,
            size=self.mesh.dp_size,
            pin_memory=self.mesh.device.type == "cuda",
            **position,
        )

    def to_device(self, batch: Batch) -> dict[str, Any]:
        """Start the copy to the device. Nobody waits: torch keeps pinned memory until copies from it are done."""
        return {name: tensor.to(self.mesh.device, non_blocking=True) for name, tensor in batch.items()}

    def valid_tokens(self, step: Sequence[Batch]) -> float:
        """Return the number of tokens of the global batch that count in the loss, at least 1. Collective if masked.

        step: on the host, where the number is exchanged, too: the device is not waited for.
        """
        if not self.masked:
            return float(sum(batch["loss_mask"].numel() for batch in step) * self.mesh.dp_size)
        own = torch.stack([batch["loss_mask"].sum(dtype=torch.float64) for batch in step]).sum()
        rows = self.mesh.gather_rows(own.reshape(1))
        return max(1.0, self.mesh.stage_rows(rows, self.loss_rank).sum().item())
