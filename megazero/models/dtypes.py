"""The dtypes of weights by their words in options, and back."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import torch

from megazero.products import PLAIN

DTYPES: Mapping[str, torch.dtype] = MappingProxyType(
    {word: getattr(torch, name) for word, name in PLAIN.items()}
)
PRECISIONS: Mapping[torch.dtype, str] = MappingProxyType({dtype: word for word, dtype in DTYPES.items()})
