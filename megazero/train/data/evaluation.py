"""The mean loss over the same global batches of a data set each time: there is no sampling noise."""

from __future__ import annotations

from collections.abc import Callable

import torch

from megazero.data.build import Dataset
from megazero.pp.executor import Pipeline
from megazero.train.data.feeding import Feeding
from megazero.train.parallelize import MicroBatch
from megazero.zero import Engine


def mean_loss(
    engine: Engine,
    pipeline: Pipeline,
    feeding: Feeding,
    data_set: Dataset,
    steps: int,
    micro_batches: int,
    broken_off: Callable[[], bool],
) -> float | None:
    """Return the loss over the first ``steps`` global batches of so many micro-batches on each rank. Collective.

    broken_off: asked between two batches on every rank, with the same answer on all. If it is yes, the loss is None.
    """
    mesh = feeding.mesh
    sums = torch.zeros(2, dtype=torch.float64, device=mesh.device)
    left = 0
    with feeding.batches(data_set) as batches, engine.evaluation():
        for left in reversed(range(steps)):
            step = [MicroBatch(**feeding.to_device(batch)) for batch in batches.next_step(micro_batches)]
            losses = pipeline.evaluate(step)
            if losses is not None:
                sums[0] += losses.sum()
            sums[1] += sum(batch.loss_mask.sum(dtype=torch.float64) for batch in step)
            if left and broken_off():
                break
    rows = mesh.stage_rows(mesh.gather_rows(sums), pipeline.loss_rank).sum(0)
    engine.traffic.take()  # of no iteration
    return float(rows[0] / rows[1].clamp(min=1)) if left == 0 else None
