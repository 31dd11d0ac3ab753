"""What moves for one bucket: chains of hops over Megatron's shards, for megazero's lanes.

A bucket of d * n elements has d rows, the shards of the d ranks of a group, in the group's order. With Y nodes of h
ranks it is seen as [Y, h, n]. A chain takes some of its columns, so that successive pieces move side by side and
take little memory.

Gradients take the hop inside the node first: local rank l receives the rows [:, l] of its node's ranks, and sums
them. Then the sums cross nodes. Weights take the same hops in the other order. On each hop the sender's format is
megazero's codec for it; sums are in at least fp32, the own row first, then the others by index; so every rank that
sums the same rows in the same order has the same bits.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from megazero.kernels.arena import Arena, Frame, Take

from megatron_core_patch.two_hops import TwoHops
from megazero.comm.codec import Blockwise, Codec, Identity
from megazero.comm.hops import start_exchange, start_gather
from megazero.comm.lane import Chain
from megazero.comm.traffic import Traffic
from megazero.mesh.mesh import Axis
from megazero.zero.policy import Codecs
from megazero.zero.unit import at_least_fp32


@dataclass(frozen=True)
class Passing:
    """What chains share: the counters of bytes, and the arena of the buffers that pass, on ``device``."""

    traffic: Traffic
    arena: Arena
    device: torch.device

    def frame(self) -> Frame:
        return self.arena.frame(self.device)


def reduce_columns(
    grads: torch.Tensor, columns: slice, hops: TwoHops, codecs: Codecs, factor: float, passing: Passing
) -> Chain:
    """Sum these columns of a bucket's gradients [d * n] into this rank's row, in place, and multiply by ``factor``.

    Other rows keep this rank's own gradients. Yields the Work of each hop.
    """
    rows = grads.view(hops.inter.size, hops.intra.size, -1)[:, :, columns]
    target = rows[hops.inter.index, hops.intra.index]
    with passing.frame() as frame:
        sums, per_rank = rows[:, hops.intra.index], rows.transpose(0, 1)
        if hops.intra.size > 1:
            sums = yield from _sum_over(hops.intra, codecs.gradients_intra, per_rank, frame.take, passing)
        if hops.inter.size > 1:
            sums = yield from _sum_over(
                hops.inter, codecs.gradients_inter, sums[:, None], frame.take, passing
            )
        if hops.axes:
            target.copy_(sums[0])
    if factor != 1.0:
        target.mul_(factor)


def _sum_over(
    axis: Axis, codec: Codec | None, rows: torch.Tensor, take: Take, passing: Passing
) -> Generator[dist.Work, None, torch.Tensor]:
    """Take one hop: rows[i] [k, c] go to index i, and those received are added to this rank's own.

    codec: None sends the rows as they are. Returns the sums [k, c], at least fp32, in a buffer from ``take``.
    """
    codec = codec or Identity(rows.dtype)
    size, k, c = rows.shape
    width = _padded(codec, c)
    sums = take(k * width, at_least_fp32(rows.dtype)).view(k, width)
    _fill(sums, rows[axis.index])
    with passing.frame() as frame:
        m = codec.message_numel(k * width)
        messages = frame.take((size - 1) * m, codec.wire_dtype).view(-1, m)
        for first, last, to in ((0, axis.index, 0), (axis.index + 1, size, axis.index)):
            if last > first:
                _encode(codec, rows[first:last], messages[to : to + last - first], passing)
        received = frame.take(messages.numel(), messages.dtype).view(messages.shape)
        yield start_exchange(axis, received, messages, passing.traffic)
        codec.decode_sum(received, sums.view(-1), accumulate=True)
    return sums[:, :c]


def _encode(codec: Codec, rows: torch.Tensor, messages: torch.Tensor, passing: Passing) -> None:
    """Encode rows [r, k, c] into messages [r, m]; each of the k is filled up with zeros to whole blocks."""
    r, k, c = rows.shape
    if isinstance(codec, Identity):
        messages.view(r, k, c).copy_(rows)
        return
    width = _padded(codec, c)
    if c == width and rows.is_contiguous():
        codec.encode(rows.view(r, k * c), out=messages)
        return
    with passing.frame() as frame:
        filled = frame.take(r * k * width, rows.dtype).view(r, k, width)
        _fill(filled, rows)
        codec.encode(filled.view(r, k * width), out=messages)


def gather_columns(
    params: torch.Tensor,
    columns: slice,
    hops: TwoHops,
    codec: Blockwise | None,
    held: torch.Tensor | None,
    passing: Passing,
) -> Chain:
    """Give every rank these columns of all rows of a bucket's parameters [d * n], from each row's owner.

    codec: the format; None sends parameters as they are. The owner, too, takes what it sent, so that all ranks
    have the same bits.
    held: [n], what the other ranks hold of this rank's row. If given, the message is the difference to that, and
    all ranks add it to what they hold. Yields the Work of each hop.
    """
    nodes, size = hops.inter.size, hops.intra.size
    rows = params.view(nodes, size, -1)[:, :, columns]
    own = rows[hops.inter.index, hops.intra.index]
    with passing.frame() as frame:
        every = own if codec is None else _weights_message(codec, own, held, columns, frame.take, passing)
        m = every.numel()
        for axis in reversed(hops.axes):
            out = frame.take(axis.size * every.numel(), every.dtype)
            yield start_gather(axis, out, every, "refresh", passing.traffic)
            every = out
        messages = every.view(size, nodes, m)
        if codec is None:
            rows.transpose(0, 1).copy_(messages)
            return
        if held is not None:
            own.copy_(held[columns])
        for local in range(size):
            _decode(codec, messages[local], rows[:, local], held is not None, passing)


def _weights_message(
    codec: Blockwise,
    own: torch.Tensor,
    held: torch.Tensor | None,
    columns: slice,
    take: Take,
    passing: Passing,
) -> torch.Tensor:
    """Return this rank's message [m]: its parameters ``own`` [c], or their difference to ``held`` in fp32."""
    width = _padded(codec, own.numel())
    message = take(codec.message_numel(width), codec.wire_dtype)
    with passing.frame() as frame:
        values = frame.take(width, at_least_fp32(own.dtype)).view(1, width)
        _fill(values, own[None])
        if held is not None:
            values[0, : own.numel()].sub_(held[columns])
        codec.encode(values, out=message.view(1, -1))
    return message


def _decode(
    codec: Blockwise, messages: torch.Tensor, rows: torch.Tensor, add: bool, passing: Passing
) -> None:
    """Decode messages [k, m] into rows [k, c], or add them to what the rows hold."""
    k, c = rows.shape
    width = _padded(codec, c)
    decode = codec.decode_add if add else codec.decode
    if c == width:
        decode(messages, rows)
        return
    with passing.frame() as frame:
        filled = frame.take(k * width, rows.dtype).view(k, width)
        _fill(filled, rows)
        decode(messages, filled)
        rows.copy_(filled[:, :c])


def _padded(codec: Codec, c: int) -> int:
    block = codec.form.block if isinstance(codec, Blockwise) else 1
    return -(-c // block) * block


def _fill(out: torch.Tensor, rows: torch.Tensor) -> None:
    """Copy rows [..., c] to the first columns of ``out``; the other columns are zero."""
    c = rows.shape[-1]
    out[..., :c].copy_(rows)
    out[..., c:].zero_()
