"""Which sample goes to which rank, and the batches.

A step of m micro-batches of b samples on each of d data-parallel ranks takes samples consumed .. consumed + m*b*d.
Micro-batch i gives rank r the b samples from consumed + (i*d + r)*b on, as Megatron does. So the samples of a step,
and the micro-batches that follow one another, do not depend on how steps are cut, and a source's state not on d.
"""

from __future__ import annotations

from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from typing import Any

import numpy as np
import torch

from megazero.data.source import SampleSource

Batch = dict[str, torch.Tensor]


def micro_batch_ids(consumed: int, micro_batch_size: int, rank: int, size: int) -> range:
    """Return sample ids of data-parallel rank ``rank`` of ``size`` in the micro-batch that begins at ``consumed``."""
    first = consumed + rank * micro_batch_size
    return range(first, first + micro_batch_size)


class Batches:
    """Batches of one data-parallel rank, which a background thread makes one step ahead.

    ``consumed`` counts the samples of all ranks: those before the source's place at first, and what ``next_step``
    handed out. ``state`` is the source's behind them. What the thread prepared beyond is in neither, so to start from
    both gives neither gap nor repeat.
    """

    def __init__(
        self,
        source: SampleSource,
        *,
        micro_batch_size: int,
        rank: int = 0,
        size: int = 1,
        consumed: int = 0,
        pin_memory: bool = False,
    ) -> None:
        if not 0 <= rank < size or micro_batch_size < 1 or consumed < 0:
            raise ValueError(
                f"rank {rank} of {size}, micro-batch size {micro_batch_size}, consumed samples {consumed}: "
                f"ranks count from 0, sizes from 1, samples from 0"
            )
        self.source, self.micro_batch_size, self.rank, self.size = source, micro_batch_size, rank, size
        self.consumed, self.state = consumed, source.state()
        self._stride = micro_batch_size * size  # samples of a micro-batch over all ranks
        self._pin_memory = pin_memory
        # The micro-batches from ``consumed`` on, each with the state behind it.
        self._ready: deque[Future[tuple[Batch, Any]]] = deque()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="batches")

    def sample_ids(self, micro_batches: int) -> list[list[int]]:
        """Return the ids [micro_batches][b] that ``next_step`` will give this rank."""
        numbers = self.source.numbers(self.state, self.consumed)
        every = list(islice(numbers, micro_batches * self._stride))
        begins = range(0, len(every), self._stride)
        own = (micro_batch_ids(at, self.micro_batch_size, self.rank, self.size) for at in begins)
        return [every[ids.start : ids.stop] for ids in own]

    def next_step(self, micro_batches: int) -> list[Batch]:
        """Return the step's batches. Each has tokens and labels int64 [b, s], loss_mask float32 [b, s], and whatever
        else the samples say.

        Raises ValueError when fewer samples are left than the step takes. The position then stays.
        """
        self._prepare(micro_batches)
        made = [self._ready[i].result() for i in range(micro_batches)]
        for _ in made:
            self._ready.popleft()
        self.consumed += micro_batches * self._stride
        self.state = made[-1][1]
        self._prepare(micro_batches)
        return [batch for batch, _ in made]

    def skip(self, count: int) -> None:
        """Consume ``count`` samples of all ranks unread. What the thread prepared is dropped."""
        self.go_to(self.state, count)
        self.consumed += count

    def go_to(self, state: Any, over: int = 0) -> None:
        """Go on ``over`` samples behind another state of the source. What the thread prepared is dropped."""
        for future in self._ready:
            future.cancel()
        self._ready.clear()
        self.state = self._thread.submit(self._pass_over, state, over).result()  # after what the thread is at

    def close(self) -> None:
        """Stop the thread. The position stays readable."""
        self._ready.clear()
        self._thread.shutdown(wait=True, cancel_futures=True)

    def __enter__(self) -> Batches:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _prepare(self, micro_batches: int) -> None:
        for _ in range(len(self._ready), micro_batches):
            self._ready.append(self._thread.submit(self._make))

    def _make(self) -> tuple[Batch, Any]:
        own = micro_batch_ids(0, self.micro_batch_size, self.rank, self.size)
        samples = self.source.batch(self._stride, own)
        batch = {name: self._stack([sample[name] for sample in samples]) for name in samples[0]}
        return batch, self.source.state()

    def _pass_over(self, state: Any, count: int) -> Any:
        """Leave the source ``count`` samples behind ``state``, and return where that is."""
        self.source.load_state(state)
        self.source.batch(count, range(0))
        return self.source.state()

    def _stack(self, rows: list[np.ndarray[Any, Any]]) -> torch.Tensor:
        tensor = torch.from_numpy(np.stack(rows))
        return tensor.pin_memory() if self._pin_memory else tensor
