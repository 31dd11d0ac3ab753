"""The dtypes of weights by their words in options, and back."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import torch

DTYPES: Mapping[str, torch.dtype] = MappingProxyType(
    {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "fp64": torch.float64}
)
PRECISIONS: Mapping[torch.dtype, str] = MappingProxyType({dtype: word for word, dtype in DTYPES.items()})
