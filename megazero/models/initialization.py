"""Initial weights. They depend on the seed and the model, not on the layout.

A stored tensor (in the family's Hugging Face shape, with the true vocabulary) is a stack of blocks of rows; one of
stacked experts, of the rows of all. Each block is drawn from its own generator, seeded by (seed, tensor name, block
number). A rank draws the blocks that its slice touches and no others, always in fp32.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping
from types import MappingProxyType

import torch
from torch import Tensor

from megazero.checkpoint.placement import Placement, Places
from megazero.config.model.parameters import DECAY, TIME_STEP, ParameterSpec

BLOCK_ROWS = 256


def _decay(share: Tensor) -> Tensor:
    """Return log A of A between 1 and 16, uniform (Gu and Dao 2023, arXiv 2312.00752; Megatron)."""
    return (1 + 15 * share).log()


def _time_step(share: Tensor) -> Tensor:
    """Return what softplus takes to steps between 0.001 and 0.1, whose logarithms are uniform (as there)."""
    step = (math.log(0.001) + math.log(100) * share).exp()
    return step + (-torch.expm1(-step)).log()


# By the law of a parameter: its values, of uniform ones between 0 and 1.
LAWS: Mapping[str, Callable[[Tensor], Tensor]] = MappingProxyType({DECAY: _decay, TIME_STEP: _time_step})


def _block(seed: int, name: str, block: int, shape: tuple[int, int]) -> Tensor:
    """Draw standard normal fp32 values of one block of rows."""
    digest = hashlib.blake2b(f"{seed}/{name}/{block}".encode(), digest_size=8).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)
    return torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu")


def _draw(seed: int, placement: Placement, out: Tensor) -> None:
    """Draw standard normal values of the local tensor, fp32 [r, c]. Rows in no segment stay as they are."""
    total, width = placement.shape[::-1] if placement.transposed else placement.shape
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


def init_tensor(seed: int, parameter: ParameterSpec, places: Places) -> Tensor:
    """Return the local fp32 tensor of a parameter. Rows that are not stored are zero."""
    drawn, constant = parameter.std or parameter.law, 0.0 if parameter.std else parameter.mean
    out = torch.full(places.local_shape, constant, dtype=torch.float32, device="cpu")
    for placement, local in places.held(out) if drawn else ():
        rows = placement.rows
        _draw(seed, rows, local.view(rows.local_shape))
    if parameter.law:
        return LAWS[parameter.law](torch.special.ndtr(out))
    return out.mul_(parameter.std) if parameter.std else out
