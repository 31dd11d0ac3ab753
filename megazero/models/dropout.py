"""Dropout whose mask is a function of a key, not of a generator's history.

The key names the micro-batch, the layer and the site (and the tensor-parallel rank where the activation is sharded).
So a recompute draws the same mask, ranks that hold the same activation draw the same mask, and no other random stream
moves.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor

Key = tuple[int, ...]


@contextmanager
def keyed_randomness(device: torch.device, key: Key) -> Iterator[None]:
    """Seed the device's default generator from ``key`` inside the block, and put its state back after."""
    if device.type == "cuda":
        torch.cuda.init()
        index = device.index if device.index is not None else torch.cuda.current_device()
        generator = torch.cuda.default_generators[index]
    else:
        generator = torch.default_generator
    state = generator.get_state()
    digest = hashlib.blake2b(repr(key).encode(), digest_size=8).digest()
    generator.manual_seed(int.from_bytes(digest, "little") >> 1)
    try:
        yield
    finally:
        generator.set_state(state)


def keyed_dropout(x: Tensor, probability: float, key: Key | None) -> Tensor:
    """Return ``x`` (any shape and dtype) after dropout with the mask of ``key``. Without a key, or with probability
    0, return ``x`` itself.
    """
    if key is None or probability == 0:
        return x
    with keyed_randomness(x.device, key):
        return F.dropout(x, probability)
