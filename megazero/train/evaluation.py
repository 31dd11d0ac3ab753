"""The mean loss over the batches of an evaluation."""

from __future__ import annotations

from collections.abc import Callable

import torch

from megazero.data.build import Dataset
from megazero.pp.executor import Pipeline
from megazero.train.data.feeding import Feeding, own_tokens
from megazero.train.parallelize import MicroBatch
from megazero.zero import Engine


def mean_loss(
    engine: Engine,
    pipeline: Pipeline,
    feeding: Feeding,
    data_set: Dataset,
    *,
    steps: int,
    micro_batches: int,
    interrupted: Callable[[], bool],
    replica: bool = False,
) -> float | None:
    """Return the loss over the first ``steps`` global batches of so many micro-batches on each rank. Collective.

    The batches are the same each time, so there is no sampling noise. interrupted: asked between two batches on every
    rank, with the same answer on all. If it says yes, the loss is None. replica: the first outer replica evaluates
    its own weights, on all of the batches, while the others wait.
    """
    mesh = feeding.mesh
    rounds, waits = micro_batches * (mesh.grid.outer if replica else 1), replica and mesh.replica > 0
    sums = torch.zeros(2, dtype=torch.float64, device=mesh.device)
    left = 0
    with feeding.batches(data_set, replica) as batches, engine.evaluation(anchor=not replica):
        for left in reversed(range(steps)):
            own = () if waits else batches.next_step(rounds)
            step = [MicroBatch(**own_tokens(feeding.to_device(batch), mesh)) for batch in own]
            losses = pipeline.evaluate(step) if step else None
            if losses is not None:
                sums[0] += losses.sum()
            sums[1] += sum(batch.loss_mask.sum(dtype=torch.float64) for batch in step)
            if left and interrupted():
                break
    rows = mesh.stage_rows(mesh.gather_rows(sums), pipeline.loss_rank).sum(0)
    engine.traffic.take()  # of no iteration
    return float(rows[0] / rows[1].clamp(min=1)) if left == 0 else None
