"""What moves for one bucket: chains of hops over Megatron's shards, for megazero's lanes.

A bucket of d * n elements has d rows, the shards of the d ranks of a group, in the group's order. With Y nodes of h
ranks it is seen as [Y, h, n]. A chain takes some of its columns, so that successive pieces move side by side and
take little memory.

Gradients take the hop inside the node first: local rank l receives the rows [:, l] of its node's ranks, and sums
them. Then the sums cross nodes. Weights take the same hops in the other order. On each hop the sender's format is
megazero's codec for it; sums are in at least fp32, the own row first, then the others by index; so every rank that
sums the same rows in the same order has the same bits.

Blocks of a quantised format lie on the bucket's grid, not on the shards': Megatron starts parameters at multiples of
64 elements, but ends shards where it likes. So no block holds elements of two parameters, of which tensor-parallel
ranks may replicate one and split the other. A row that begins inside a block is moved to its place in it
(``Tile.offset``), and what is left of its first and last block is zero.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from megazero.kernels.arena import Take

from megazero.comm.codec import Blockwise, Codec, Identity
from megazero.comm.lane import Chain
from megazero.mesh.mesh import Axis
from megazero.patches.hops import Passing, add_others, gather_over
from megazero.patches.two_hops import TwoHops
from megazero.zero.policy import Codecs
from megazero.zero.unit import at_least_fp32


@dataclass(frozen=True)
class Tile:
    """Some columns of a bucket's [Y, h, n], and where they lie in blocks of a codec.

    tensor: the bucket's parameters or gradients [Y * h * n]. columns: their start is a multiple of every block.
    """

    tensor: torch.Tensor
    columns: slice
    hops: TwoHops

    @property
    def rows(self) -> torch.Tensor:
        """Return the view [Y, h, c] of the columns."""
        return self.tensor.view(self.hops.inter.size, self.hops.intra.size, -1)[:, :, self.columns]

    @property
    def own(self) -> torch.Tensor:
        """Return the columns [c] of this rank's shard."""
        return self.rows[self.hops.inter.index, self.hops.intra.index]

    def offsets(self, codec: Codec, node: int | None, local: int | None) -> list[int]:
        """Return how far rows begin behind a block's start: those of a node and a local index, or of all."""
        nodes = range(self.hops.inter.size) if node is None else [node]
        locals_ = range(self.hops.intra.size) if local is None else [local]
        n = self.tensor.numel() // len(self.hops.ranks)
        return [(y * self.hops.intra.size + i) * n % _block(codec) for y in nodes for i in locals_]

    def width(self, codec: Codec) -> int:
        """Return how many elements of whole blocks hold any row's columns."""
        block = _block(codec)
        c = self.columns.stop - self.columns.start
        return -(-(c + max(self.offsets(codec, None, None))) // block) * block


def reduce_columns(tile: Tile, codecs: Codecs, factor: float, passing: Passing) -> Chain:
    """Sum the tile's gradients into this rank's row, in place, and multiply by ``factor``.

    Other rows keep this rank's own gradients. Yields the Work of each hop.
    """
    hops, rows, target = tile.hops, tile.rows, tile.own
    with passing.frame() as frame:
        sums = rows[:, hops.intra.index]
        if hops.intra.size > 1:
            codec = codecs.gradients_intra or Identity(rows.dtype)
            starts = [tile.offsets(codec, None, local) for local in range(hops.intra.size)]
            hop = _Hop(hops.intra, codec, starts, tile.width(codec))
            sums = yield from _sum_over(hop, rows.transpose(0, 1), frame.take, passing)
        if hops.inter.size > 1:
            codec = codecs.gradients_inter or Identity(sums.dtype)
            starts = [tile.offsets(codec, node, hops.intra.index) for node in range(hops.inter.size)]
            hop = _Hop(hops.inter, codec, starts, tile.width(codec))
            sums = yield from _sum_over(hop, sums[:, None], frame.take, passing)
        if factor != 1.0:  # before the sum is rounded to the gradients' dtype, in which it may overflow
            sums[0].mul_(factor)
        if hops.axes:
            target.copy_(sums[0])


@dataclass(frozen=True)
class _Hop:
    """One hop of gradients. Messages are of k rows of ``width`` elements; row j to index i begins at starts[i][j]."""

    axis: Axis
    codec: Codec
    starts: Sequence[Sequence[int]]
    width: int


def _sum_over(
    hop: _Hop, rows: torch.Tensor, take: Take, passing: Passing
) -> Generator[dist.Work, None, torch.Tensor]:
    """Take one hop: rows[i] [k, c] go to index i, and those received are added to this rank's own.

    Returns the sums [k, c], at least fp32, in a buffer from ``take``.
    """
    size, k, c = rows.shape
    own, codec = hop.axis.index, hop.codec
    dtype = at_least_fp32(rows.dtype)
    with passing.frame() as frame:
        m = codec.message_numel(k * hop.width)
        messages = frame.take((size - 1) * m, codec.wire_dtype).view(-1, m)
        others = [i for i in range(size) if i != own]
        for message, i in zip(messages, others, strict=True):
            _encode(codec, rows[i], hop.starts[i], hop.width, message, passing)
        sums = take(k * hop.width, dtype).view(k, hop.width)
        _fill(sums, rows[own], hop.starts[own])
        yield from add_others(hop.axis, codec, messages, [sums.view(-1)], passing)
    if not any(hop.starts[own]):
        return sums[:, :c]
    compact = take(k * c, dtype).view(k, c)
    _empty(sums, compact, hop.starts[own])
    return compact


def _encode(
    codec: Codec,
    rows: torch.Tensor,
    starts: Sequence[int],
    width: int,
    message: torch.Tensor,
    passing: Passing,
) -> None:
    """Encode rows [k, c] into one message [m], each behind ``starts`` zeros and filled up to ``width``."""
    k, c = rows.shape
    if isinstance(codec, Identity):
        message.view(k, c).copy_(rows)
    elif c == width and rows.is_contiguous():
        codec.encode(rows.view(1, k * c), out=message.view(1, -1))
    else:
        with passing.frame() as frame:
            filled = frame.take(k * width, rows.dtype).view(k, width)
            _fill(filled, rows, starts)
            codec.encode(filled.view(1, -1), out=message.view(1, -1))


def gather_columns(tile: Tile, codec: Blockwise | None, held: torch.Tensor | None, passing: Passing) -> Chain:
    """Give every rank the tile's parameters of all rows, from each row's owner.

    codec: the format; None sends parameters as they are. The owner, too, takes what it sent, so that all ranks
    have the same bits.
    held: [n], what the other ranks hold of this rank's row. If given, the message is the difference to that, and
    all ranks add it to what they hold. Yields the Work of each hop.
    """
    hops, rows, own = tile.hops, tile.rows, tile.own
    nodes, size = hops.inter.size, hops.intra.size
    with passing.frame() as frame:
        message = own if codec is None else _weights_message(tile, codec, held, frame.take, passing)
        every = yield from gather_over(hops.axes[::-1], message, "refresh", frame.take, passing)
        messages = every.view(size, nodes, message.numel())
        if codec is None:
            rows.transpose(0, 1).copy_(messages)
            return
        if held is not None:
            own.copy_(held[tile.columns])
        for local in range(size):
            starts, width = tile.offsets(codec, None, local), tile.width(codec)
            _decode(codec, messages[local], rows[:, local], starts, width, held is not None, passing)


def _weights_message(
    tile: Tile, codec: Blockwise, held: torch.Tensor | None, take: Take, passing: Passing
) -> torch.Tensor:
    """Return this rank's message [m]: its parameters, or their difference to ``held`` in fp32."""
    own, width = tile.own, tile.width(codec)
    message = take(codec.message_numel(width), codec.wire_dtype)
    with passing.frame() as frame:
        values = frame.take(own.numel(), at_least_fp32(own.dtype)).view(1, -1)
        values.copy_(own)
        if held is not None:
            values.sub_(held[tile.columns])
        starts = tile.offsets(codec, tile.hops.inter.index, tile.hops.intra.index)
        _encode(codec, values, starts, width, message, passing)
    return message


def _decode(
    codec: Blockwise,
    messages: torch.Tensor,
    rows: torch.Tensor,
    starts: Sequence[int],
    width: int,
    add: bool,
    passing: Passing,
) -> None:
    """Decode messages [k, m] into rows [k, c], or add them to what the rows hold."""
    k, c = rows.shape
    decode = codec.decode_add if add else codec.decode
    if c == width:
        decode(messages, rows)
        return
    with passing.frame() as frame:
        filled = frame.take(k * width, rows.dtype).view(k, width)
        _fill(filled, rows, starts)
        decode(messages, filled)
        _empty(filled, rows, starts)


def _block(codec: Codec) -> int:
    return codec.form.block if isinstance(codec, Blockwise) else 1


def _fill(filled: torch.Tensor, rows: torch.Tensor, starts: Sequence[int]) -> None:
    """Copy rows [k, c] into filled [k, width], each to its start; the rest is zero."""
    c = rows.shape[1]
    if not any(starts):
        filled[:, :c].copy_(rows)
        filled[:, c:].zero_()
        return
    filled.zero_()
    for out, row, start in zip(filled, rows, starts, strict=True):
        out[start : start + c].copy_(row)


def _empty(filled: torch.Tensor, rows: torch.Tensor, starts: Sequence[int]) -> None:
    """Copy rows [k, c] back out of filled [k, width]."""
    c = rows.shape[1]
    for out, row, start in zip(filled, rows, starts, strict=True):
        row.copy_(out[start : start + c])
