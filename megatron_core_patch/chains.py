"""What moves for one bucket: chains of hops over Megatron's shards, for megazero's lanes.

A bucket of d * n elements has d rows, the shards of the d ranks of a group, in the group's order. With Y nodes of h
ranks it is seen as [Y, h, n]. A chain takes some elements of every row (``layout``), so that successive pieces move
side by side and take little memory.

Gradients take the hop inside the node first: local rank l receives the rows [:, l] of its node's ranks, and sums
them. Then the sums cross nodes. Weights take the same hops in the other order. On each hop the sender's format is
megazero's codec for it; sums are in at least fp32, the own row first, then the others by index; so every rank that
sums the same rows in the same order has the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from megatron_core_patch.layout import CodedBlocks, Columns, Exact
from megazero.comm.codec import Blockwise, Codec, Identity, at_least_fp32
from megazero.comm.hops import Channel, Leg, gather, reduce, route
from megazero.comm.lane import Chain
from megazero.comm.rows import Rows
from megazero.comm.watch import Watch
from megazero.comm.wire import Codecs
from megazero.kernels.arena import Take
from megazero.mesh.levels import INTER, INTRA


def reduce_rows(
    part: Columns | CodedBlocks,
    grads: torch.Tensor,
    codecs: Codecs[Codec],
    factor: float,
    channel: Channel,
    watches: Sequence[Watch] = (),
) -> Chain:
    """Sum a part of the bucket's gradients [d * n] into this rank's row, in place, and multiply by ``factor``.

    Other rows keep this rank's own gradients. Yields the Work of each hop.
    """
    hops = part.hops
    with channel.frame() as frame:
        rows, own = part.rows(grads, frame.take)
        sums = rows[own]
        if hops.intra.size > 1:
            codec = codecs.gradients.get(INTRA) or Identity(rows.dtype)
            sent = Rows([rows], own)
            out = sent.room(frame.take)
            yield from reduce(Leg(hops.intra, codec), sent, out, channel, watches=watches)
            sums = out[0].view(sums.shape)
        if hops.inter.size > 1:
            codec = codecs.gradients.get(INTER) or Identity(sums.dtype)
            sent = Rows([sums], hops.inter.index)
            out = sent.room(frame.take)
            yield from reduce(Leg(hops.inter, codec), sent, out, channel, watches=watches)
            sums = out[0]
        else:
            sums = sums[0]
        if factor != 1.0:  # before the sum is rounded to the gradients' dtype, in which it may overflow
            sums.mul_(factor)
        if hops.axes:
            part.store(sums, grads)


def gather_columns(part: Columns, params: torch.Tensor, channel: Channel) -> Chain:
    """Give every rank these columns of all rows, exactly, from each row's owner. Yields the Work of each hop."""
    hops = part.hops
    with channel.frame() as frame:
        own = part.own(params)
        every = yield from gather(hops.axes[::-1], own, "refresh", frame.take, channel)
        rows, _ = part.rows(params, frame.take)
        rows.copy_(every.view(rows.shape))


def gather_coded(
    part: CodedBlocks, params: torch.Tensor, codec: Blockwise, held: torch.Tensor | None, channel: Channel
) -> Chain:
    """Give every rank these blocks of all rows, quantised, from each row's owner.

    The owner, too, takes what it sent, so that all ranks have the same bits.
    held: what the other ranks hold of this rank's coded blocks, of all pieces. If given, the message is the
    difference to that, and all ranks add it to what they hold. Yields the Work of each hop.
    """
    with channel.frame() as frame:
        own = part.own(params)
        if held is not None:
            held = held[part.first : part.first + own.numel()]
        values = frame.take(part.width, at_least_fp32(own.dtype)).view(1, -1)
        values[0, own.numel() :].zero_()
        values[0, : own.numel()].copy_(own)
        if held is not None:
            values[0, : own.numel()].sub_(held)
        message = frame.take(codec.message_numel(part.width), codec.wire_dtype).view(1, -1)
        codec.encode(values, out=message)
        every = yield from gather(part.hops.axes[::-1], message.view(-1), "refresh", frame.take, channel)
        rows = frame.take(len(part.blocks) * part.width, params.dtype).view(-1, part.width)
        messages = every.view(len(rows), -1)
        if held is None:
            codec.decode(messages, rows)
        else:
            part.load_all(params, rows)
            rows[part.place(), : held.numel()].copy_(held)
            codec.decode_add(messages, rows)
        part.store_all(rows, params, frame.take)


def reduce_exact(part: Exact, grads: torch.Tensor, factor: float, channel: Channel) -> Chain:
    """Do as ``reduce_rows`` with what goes beside the codes. Ranks have different numbers of elements."""
    hops, numels = part.hops, part.numels
    local, node = hops.intra.index, hops.inter.index
    with channel.frame() as frame:
        sums = grads.index_select(0, part.all.index())
        if hops.intra.size > 1:
            sent, received = list(map(sum, numels)), [sum(numels[local])] * hops.intra.size
            sums = yield from route(hops.intra, sums, sent, received, "reduce", frame.take, channel)
            sums = _summed(sums, hops.intra.size, frame.take)
        if part.crosses:
            sent, received = numels[local], [numels[local][node]] * hops.inter.size
            sums = yield from route(hops.inter, sums, sent, received, "reduce", frame.take, channel)
            sums = _summed(sums, hops.inter.size, frame.take)
        grads.index_copy_(0, part.own.index(), sums.mul_(factor).to(grads.dtype))


def gather_exact(part: Exact, params: torch.Tensor, channel: Channel) -> Chain:
    """Do as ``gather_columns`` with what goes beside the codes: every rank sends the same message to all."""
    hops, numels = part.hops, part.numels
    by_axis = [(hops.inter, numels[hops.intra.index])] if part.crosses else []
    if hops.intra.size > 1:
        by_axis.append((hops.intra, list(map(sum, numels))))
    with channel.frame() as frame:
        own = params.index_select(0, part.own.index())
        for axis, received in by_axis:
            sent = [own.numel()] * axis.size
            own = yield from route(
                axis, own.repeat(axis.size), sent, received, "refresh", frame.take, channel
            )
        params.index_copy_(0, part.all.index(), own)


def _summed(received: torch.Tensor, size: int, take: Take) -> torch.Tensor:
    """Add up the messages [size * m] by index, in at least fp32."""
    sums = take(received.numel() // size, at_least_fp32(received.dtype))
    Identity(received.dtype).decode_sum(received.view(size, -1), sums, False)
    return sums
