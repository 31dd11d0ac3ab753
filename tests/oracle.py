"""transformers as an oracle in fp64; megatron-core's batch sizes, in the words of its release."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import pytest
import torch


@contextmanager
def in_fp64() -> Iterator[None]:
    """transformers hard-codes fp32 in its norms, softmax and rotary tables: inside this it runs in fp64 throughout.
    Models must be made inside, too. The default dtype is that of quotients of integers, and of Gemma's scale of
    embeddings."""
    double = torch.float64
    with (
        patch.multiple(torch, float32=double, float=double),
        patch.object(torch.Tensor, "float", torch.Tensor.double),
    ):
        before = torch.get_default_dtype()
        torch.set_default_dtype(double)
        try:
            yield
        finally:
            torch.set_default_dtype(before)


def megatron_batch_sizes(size: int, micro: int, ranks: int, ramp: tuple[int, int, int] | None) -> Any:
    """Return megatron-core's calculator of micro-batches; ``ramp`` is --rampup-batch-size. Releases that have steps
    at given samples instead (0.19) get those at which the batch grows."""
    module = pytest.importorskip("megatron.core.num_microbatches_calculator")
    if ramp is None:
        return module.ConstantNumMicroBatchesCalculator(size, micro, ranks, False, 1)
    if hasattr(module, "RampupBatchsizeNumMicroBatchesCalculator"):
        return module.RampupBatchsizeNumMicroBatchesCalculator(size, micro, ranks, False, 1, *ramp)
    start, increment, samples = ramp
    count = (size - start) // increment
    steps = [f"{-(-samples * i // count)}:{start + i * increment}" for i in range(count + 1)]
    return module.StepBatchsizeNumMicroBatchesCalculator(micro, ranks, False, 1, " ".join(steps))
