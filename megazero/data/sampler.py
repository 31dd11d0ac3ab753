"""Which sample goes to which rank, and the batches. The position is one number: consumed samples.

A step of m micro-batches of b samples on each of d data-parallel ranks takes samples consumed .. consumed + m*b*d.
Micro-batch i gives rank r the b samples from consumed + (i*d + r)*b on, as Megatron does. So the samples of a step,
and the micro-batches that follow one another, do not depend on how steps are cut.
"""

from __future__ import annotations

from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import torch

from megazero.data.build import Dataset

Batch = dict[str, torch.Tensor]


def micro_batch_ids(consumed: int, micro_batch_size: int, rank: int, size: int) -> range:
    """Return sample ids of data-parallel rank ``rank`` of ``size`` in the micro-batch that begins at ``consumed``."""
    first = consumed + rank * micro_batch_size
    return range(first, first + micro_batch_size)


def replica_shares(member: np.ndarray[Any, Any], replicas: int, block: int) -> np.ndarray[Any, Any]:
    """Return the share of its samples that each outer replica takes from each member of a blend.

    It is fp64 [replicas, members].
    member: of each sample in order, int [samples] (data/blend.py). block: consecutive samples of a replica: a
    micro-batch on each of its ranks.
    """
    whole = len(member) // (replicas * block) * replicas * block
    dealt = member[:whole].reshape(-1, replicas, block)
    counts = [np.bincount(dealt[:, r].ravel(), minlength=member.max(initial=0) + 1) for r in range(replicas)]
    return np.stack(counts) * replicas / max(whole, 1)


class Batches:
    """Batches of one data-parallel rank, which a background thread makes one step ahead.

    ``consumed`` counts what ``next_step`` handed out, over all ranks. What the thread prepared beyond it is not in
    the position, so saving it and starting again there gives neither gap nor repeat. ``limit`` is the number of
    samples that may be consumed (by default len(dataset)).
    """

    def __init__(
        self,
        dataset: Dataset,
        *,
        micro_batch_size: int,
        rank: int = 0,
        size: int = 1,
        consumed: int = 0,
        limit: int | None = None,
        pin_memory: bool = False,
    ) -> None:
        if not 0 <= rank < size or micro_batch_size < 1 or consumed < 0:
            raise ValueError(
                f"rank {rank} of {size}, micro-batch size {micro_batch_size}, consumed samples {consumed}: "
                f"ranks count from 0, sizes from 1, samples from 0"
            )
        self.dataset, self.micro_batch_size, self.rank, self.size = dataset, micro_batch_size, rank, size
        self.consumed = consumed
        self.limit = len(dataset) if limit is None else min(limit, len(dataset))
        self._pin_memory = pin_memory
        self._ready: deque[Future[Batch]] = deque()  # the micro-batches from ``consumed`` on
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="batches")

    def sample_ids(self, micro_batches: int) -> list[list[int]]:
        """Return the ids [micro_batches][b] that ``next_step`` will give this rank."""
        return [list(self._ids(i)) for i in range(micro_batches)]

    def next_step(self, micro_batches: int) -> list[Batch]:
        """Return the step's batches. Each has tokens and labels int64 [b, s], loss_mask float32 [b, s], and whatever
        else the samples say.

        Raises ValueError when fewer samples are left than the step takes. The position then stays.
        """
        wanted = micro_batches * self._stride
        if self.consumed + wanted > self.limit:
            raise ValueError(
                f"the data has {self.limit} samples; {self.consumed} are consumed and the step takes {wanted}: "
                f"train for fewer samples or iterations, add data, or give the blend weights (they repeat data)"
            )
        self._prepare(micro_batches)
        batches = [self._ready[i].result() for i in range(micro_batches)]
        for _ in range(micro_batches):
            self._ready.popleft()
        self.consumed += wanted
        left = (self.limit - self.consumed) // self._stride
        self._prepare(min(micro_batches, left))
        return batches

    def seek(self, consumed: int) -> None:
        """Go on from another position. What the thread prepared is dropped."""
        for future in self._ready:
            future.cancel()
        self._ready.clear()
        self.consumed = consumed

    def close(self) -> None:
        """Stop the thread. The position stays readable."""
        self._ready.clear()
        self._thread.shutdown(wait=True, cancel_futures=True)

    def __enter__(self) -> Batches:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    @property
    def _stride(self) -> int:
        """Return the number of samples in a micro-batch over all ranks."""
        return self.micro_batch_size * self.size

    def _ids(self, ahead: int) -> range:
        return micro_batch_ids(
            self.consumed + ahead * self._stride, self.micro_batch_size, self.rank, self.size
        )

    def _prepare(self, micro_batches: int) -> None:
        for ahead in range(len(self._ready), micro_batches):
            self._ready.append(self._thread.submit(self._make, self._ids(ahead)))

    def _make(self, ids: range) -> Batch:
        samples = [self.dataset[i] for i in ids]
        return {name: self._stack([sample[name] for sample in samples]) for name in samples[0]}

    def _stack(self, rows: list[np.ndarray[Any, Any]]) -> torch.Tensor:
        tensor = torch.from_numpy(np.stack(rows))
        return tensor.pin_memory() if self._pin_memory else tensor
