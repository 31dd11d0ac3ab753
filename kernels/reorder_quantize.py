"""Reorders and encodes: Algorithm 2 of ZeRO++ (section 4.1), fused with the quantisation.

It is for layouts given from outside, where rank r of nodes x node_size (rank = node * node_size + local) must end
with slice r of a flat tensor. (megazero's own layout needs no reordering.)

Each slice is cut in ``stages`` pieces, and stage s takes piece s of every slice through both hops. The first hop is
an all-to-all inside the node, so its messages lie by stage, then local rank, then node:

    piece (node * node_size + local) * stages + s  ->  (s * node_size + local) * nodes + node

With one stage this is [0 .. YX-1] -> [0, X, 2X .. (Y-1)X, 1, X+1 ..]. (As printed, Algorithm 2 takes the piece
modulo and by the number of devices where the stages are meant; with one stage it would not give that order.)

The one pass moves as many bytes per element as quantize. A separate reordering would move 8 more of fp32 (4 read, 4
written).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from megazero.kernels.dispatch import blocks_per_program, tl, use_kernel
from megazero.kernels.format import Format
from megazero.kernels.hadamard import forward_tile, transform_arguments
from megazero.kernels.noise import Noise, drawing_jit, launch_arguments, word_tile
from megazero.kernels.quantize import encode_rows, encode_tile, store_tile
from megazero.kernels.values import load_values, raw


@dataclass(frozen=True)
class Order:
    """nodes x node_size ranks, where rank = node * node_size + local.

    ``stages`` counts the stages of the pipeline of chunks.
    """

    nodes: int
    node_size: int
    stages: int = 1

    def __post_init__(self) -> None:
        if min(self.nodes, self.node_size, self.stages) < 1:
            raise ValueError(
                f"nodes {self.nodes}, node size {self.node_size}, stages {self.stages}: each at least 1"
            )

    @property
    def pieces(self) -> int:
        return self.nodes * self.node_size * self.stages

    def target(self, piece: int) -> int:
        """Return the message that this piece of the flat tensor becomes, by Algorithm 2."""
        rank, stage = divmod(piece, self.stages)
        node, local = divmod(rank, self.node_size)
        return (stage * self.node_size + local) * self.nodes + node

    def source(self, message: int) -> int:
        """Return the piece of the flat tensor that is in this message. This is the inverse of ``target``."""
        group, node = divmod(message, self.nodes)
        stage, local = divmod(group, self.node_size)
        return (node * self.node_size + local) * self.stages + stage


def reorder_quantize(
    x: torch.Tensor, messages: torch.Tensor, form: Format, order: Order, noise: Noise | None = None
) -> None:
    """Encode x into the coded part of ``messages``, in the order's places.

    x is [pieces * n] of any float dtype and contiguous. ``messages`` is uint8 [pieces, m] and contiguous. ``noise``
    means the same as in quantize; its start is the global index of x[0], whatever the order.
    """
    if x.numel() % order.pieces:
        raise ValueError(
            f"{x.numel()} elements do not cut into {order.pieces} pieces: pad them to "
            f"{-(-x.numel() // order.pieces) * order.pieces}"
        )
    if noise is not None:
        noise.check(x.numel())
    if not x.numel():
        return
    if use_kernel(messages, x):
        _launch(x, messages, form, order, noise)
    else:
        reference(x, messages, form, order, noise)


def reference(
    x: torch.Tensor, messages: torch.Tensor, form: Format, order: Order, noise: Noise | None = None
) -> None:
    """Do the same as ``reorder_quantize`` in torch, on any device."""
    n = x.numel() // order.pieces
    pieces = x.view(order.pieces, n)

    def load(row: int, low: int, high: int, out: torch.Tensor) -> torch.Tensor:
        piece = pieces[order.source(row), low:high]
        return piece if x.dtype == torch.float32 else out.copy_(piece)

    encode_rows(load, messages, n, form, noise, origin=lambda row: order.source(row) * n)


@drawing_jit
def _kernel(
    x: tl.tensor, messages: tl.tensor, halves: tl.tensor, total: tl.tensor, row_blocks: tl.tensor,
    row_bytes: tl.tensor, nodes: tl.tensor, node_size: tl.tensor, stages: tl.tensor, word0: tl.tensor,
    key0: tl.tensor, key1: tl.tensor, sign0: tl.tensor, sign1: tl.tensor, SIZE: tl.constexpr,
    BITS: tl.constexpr, BLOCK: tl.constexpr, CLIP: tl.constexpr, STOCHASTIC: tl.constexpr,
    LARGEST: tl.constexpr, R: tl.constexpr,
) -> None:  # fmt: skip
    PACK: tl.constexpr = 8 // BITS
    PART: tl.constexpr = BLOCK // PACK
    g = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R)
    valid = g < total
    row = g // row_blocks
    group, node = row // nodes, row % nodes
    stage, local = group // node_size, group % node_size
    source = ((node * node_size + local) * stages + stage) * row_blocks + g % row_blocks
    p = tl.arange(0, PACK)[None, :, None]
    at = source[:, None, None] * BLOCK + p * PART + tl.arange(0, PART)[None, None, :]
    values = forward_tile(load_values(x, at, valid[:, None, None]), sign0, sign1, SIZE)
    word = word_tile(source, word0, PACK, PART)
    payload, scale = encode_tile(values, word, key0, key1, BITS, CLIP, STOCHASTIC, LARGEST)
    store_tile(payload, scale, g, valid, messages, halves, row_bytes, row_blocks, PART)


def _launch(x: torch.Tensor, messages: torch.Tensor, form: Format, order: Order, noise: Noise | None) -> None:
    row_blocks = form.blocks(x.numel() // order.pieces)
    total, r = row_blocks * order.pieces, blocks_per_program(form.block)
    _kernel[(-(-total // r),)](
        raw(x), messages.view(torch.int8), messages.view(torch.int16),
        total, row_blocks, messages.shape[1], order.nodes, order.node_size, order.stages,
        *launch_arguments(noise), *transform_arguments(form.transform),
        form.bits, form.block, form.clip, noise is not None, form.largest_scale, r,
        enable_fp_fusion=False,
    )  # fmt: skip
