"""A rank's batches on their way from a data set to the device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from megazero.cp import ContextParallel
from megazero.data.sampler import Batches
from megazero.data.source import SampleSource
from megazero.mesh.mesh import Mesh
from megazero.models.multi_token import further_tokens

Batch = Mapping[str, Any]  # of tensors


def own_tokens(batch: Batch, mesh: Mesh, further: int = 0) -> Batch:
    """Return a context-parallel rank's part of each sequence [b, s]: [b, s / ranks]; and of labels of so many further
    tokens, which are those of whole sequences.

    ``document_starts`` are of the tokens whose queries the rank has in attention.
    """
    cp = ContextParallel.of(mesh)
    if further:
        ahead = further_tokens(batch["labels"], batch["loss_mask"], further)
        batch = {**batch, "further_labels": ahead.labels, "further_mask": ahead.weights}
    return {
        name: (cp.own_queries if name == "document_starts" else cp.own)(tensor, 1).contiguous()
        for name, tensor in batch.items()
    }


@dataclass(frozen=True)
class Feeding:
    """Makes a rank's batches.

    loss_rank: the pipeline's stage that computes the loss. masked: whether some tokens do not count in it.
    """

    mesh: Mesh
    micro_batch_size: int
    loss_rank: int
    masked: bool

    def batches(self, source: SampleSource, **position: int) -> Batches:
        """Return this rank's batches, which lie in pinned memory if they go to CUDA: the copy waits otherwise.

        position: the number of consumed samples, where the source does not stand at its beginning.
        """
        mesh = self.mesh
        return Batches(
            source,
            micro_batch_size=self.micro_batch_size,
            rank=mesh.batch_rank,
            size=mesh.batch_ranks,
            pin_memory=self.mesh.device.type == "cuda",
            **position,
        )

    def to_device(self, batch: Batch) -> dict[str, Any]:
        """Start the copy to the device. Nobody waits: torch keeps pinned memory until copies from it are done.
        ``document_starts`` stays on the host, where attention's tables are made of it.
        """
        return {
            name: tensor if name == "document_starts" else tensor.to(self.mesh.device, non_blocking=True)
            for name, tensor in batch.items()
        }

    def valid_tokens(self, step: Sequence[Batch]) -> float:
        """Return how many tokens of the global batch count in the loss, at least 1. Collective if masked.

        step: this rank's part, on the host, where the number is exchanged, too: the device is not waited for.
        """
        if not self.masked:
            return float(sum(batch["loss_mask"].numel() for batch in step) * self.mesh.dp_size)
        own = torch.stack([batch["loss_mask"].sum(dtype=torch.float64) for batch in step]).sum()
        rows = self.mesh.gather_rows(own.reshape(1))
        return max(1.0, float(self.mesh.stage_rows(rows, self.loss_rank).sum()))
