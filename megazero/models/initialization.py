"""Initial weights. They depend on the seed and the model, not on the layout.

A stored tensor (in the family's Hugging Face shape, with the true vocabulary) is a stack of blocks of rows. Each
block is drawn from its own generator, seeded by (seed, tensor name, block number). A rank draws the blocks that its
slice touches and no others, always in fp32.
"""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

from megazero.checkpoint.placement import Placement
from megazero.config.model.spec import ParameterSpec

BLOCK_ROWS = 256


def _block(seed: int, name: str, block: int, shape: tuple[int, int]) -> Tensor:
    """Draw standard normal fp32 values of one block of rows."""
    digest = hashlib.blake2b(f"{seed}/{name}/{block}".encode(), digest_size=8).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)
    return torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu")


def _normal(seed: int, placement: Placement) -> Tensor:
    """Draw standard normal values of the local tensor, fp32 [r, c]. Rows in no segment are zero."""
    stored = placement.shape[::-1] if placement.transposed else placement.shape
    total, width = stored
    out = torch.zeros(placement.local_shape, dtype=torch.float32, device="cpu")
    drawn = -1
    for ours, (theirs, columns) in placement.slices():
        for number in range(theirs.start // BLOCK_ROWS, -(-theirs.stop // BLOCK_ROWS)):
            first = number * BLOCK_ROWS
            if number != drawn:  # neighbouring heads of a fused tensor share a block
                rows = min(BLOCK_ROWS, total - first)
                values, drawn = _block(seed, placement.name, number, (rows, width)), number
            at, end = max(theirs.start, first), min(theirs.stop, first + BLOCK_ROWS)
            shift = ours.start - theirs.start
            out[at + shift : end + shift] = values[at - first : end - first, columns]
    return out


def init_tensor(seed: int, parameter: ParameterSpec, placement: Placement) -> Tensor:
    """Return the local fp32 tensor of a parameter."""
    if parameter.std == 0:
        return torch.full(placement.local_shape, parameter.mean, dtype=torch.float32, device="cpu")
    return _normal(seed, placement).mul_(parameter.std)
