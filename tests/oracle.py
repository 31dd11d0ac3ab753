"""transformers as an oracle in fp64."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

import torch


@contextmanager
def in_fp64() -> Iterator[None]:
    """transformers hard-codes fp32 in its norms, softmax and rotary tables, and a GELU constant of nine digits in
    BLOOM: inside this it runs in fp64 throughout. Models must be made inside, too."""
    from transformers.models.bloom.modeling_bloom import BloomGelu

    def gelu(_: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.gelu(x, approximate="tanh")

    double = torch.float64
    with (
        patch.multiple(torch, float32=double, float=double),
        patch.object(torch.Tensor, "float", torch.Tensor.double),
        patch.object(BloomGelu, "forward", gelu),
    ):
        yield
