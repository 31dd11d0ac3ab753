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

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from megazero.kernels.arena import Take

from megatron_core_patch.layout import CodedBlocks, Columns, Exact
from megatron_core_patch.rounding import Errors, Residual, lost_of
from megazero.comm.codec import Blockwise, Codec, Identity, Noise, at_least_fp32
from megazero.comm.hops import start_route
from megazero.comm.lane import Chain
from megazero.mesh.mesh import Axis
from megazero.patches.hops import Passing, Watch, gather_over, sum_over
from megazero.zero.policy import Codecs


@dataclass(frozen=True)
class BucketRounding:
    """How a chain's gradients are rounded: noise by a hop's name, a residual across nodes, errors that are noted."""

    noise: Callable[[str], Noise]
    residual: Residual | None = None
    errors: Errors | None = None


def reduce_rows(
    part: Columns | CodedBlocks,
    grads: torch.Tensor,
    codecs: Codecs,
    factor: float,
    passing: Passing,
    rounding: BucketRounding,
) -> Chain:
    """Sum a part of the bucket's gradients [d * n] into this rank's row, in place, and multiply by ``factor``.

    Other rows keep this rank's own gradients. Yields the Work of each hop.
    """
    hops = part.hops
    with passing.frame() as frame:
        rows, own = part.rows(grads, frame.take)
        sums = rows[own]
        if hops.intra.size > 1:
            codec = codecs.gradients_intra or Identity(rows.dtype)
            noise, watch = rounding.noise("inside"), _watch(codec, passing, None, rounding.errors)
            (sums,) = yield from sum_over(
                hops.intra, codec, [rows], passing, frame.take, own=own, noise=noise, watch=watch
            )
        if hops.inter.size > 1:
            codec = codecs.gradients_inter or Identity(sums.dtype)
            residual = rounding.residual if isinstance(codec, Blockwise) else None
            if residual is not None:
                sums = sums.to(at_least_fp32(sums.dtype))
                residual.add(sums, hops.inter.index)
            noise, watch = rounding.noise("across"), _watch(codec, passing, residual, rounding.errors)
            (sums,) = yield from sum_over(
                hops.inter, codec, [sums], passing, frame.take, noise=noise, watch=watch
            )
        else:
            sums = sums[0]
        if factor != 1.0:  # before the sum is rounded to the gradients' dtype, in which it may overflow
            sums.mul_(factor)
        if hops.axes:
            part.store(sums, grads)


def _watch(codec: Codec, passing: Passing, residual: Residual | None, errors: Errors | None) -> Watch | None:
    """Return what looks at the messages of one hop, if anything does."""
    if not isinstance(codec, Blockwise) or residual is errors is None:
        return None

    def watch(rows: Sequence[torch.Tensor], messages: torch.Tensor, to: int) -> None:
        with passing.frame() as frame:
            lost = lost_of(codec, rows, messages, frame)
            if errors is not None:
                errors.add(lost, rows[0])
            if residual is not None:
                residual.keep(lost, to)

    return watch


def gather_columns(part: Columns, params: torch.Tensor, passing: Passing) -> Chain:
    """Give every rank these columns of all rows, exactly, from each row's owner. Yields the Work of each hop."""
    hops = part.hops
    with passing.frame() as frame:
        own = part.own(params)
        every = yield from gather_over(hops.axes[::-1], own, "refresh", frame.take, passing)
        rows, _ = part.rows(params, frame.take)
        rows.copy_(every.view(rows.shape))


def gather_coded(
    part: CodedBlocks,
    params: torch.Tensor,
    codec: Blockwise,
    held: torch.Tensor | None,
    passing: Passing,
    errors: Errors | None,
) -> Chain:
    """Give every rank these blocks of all rows, quantised, from each row's owner.

    The owner, too, takes what it sent, so that all ranks have the same bits.
    held: what the other ranks hold of this rank's coded blocks, of all pieces. If given, the message is the
    difference to that, and all ranks add it to what they hold. Yields the Work of each hop.
    """
    with passing.frame() as frame:
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
        if errors is not None:
            errors.add(lost_of(codec, [values], message, frame), values)
        every = yield from gather_over(part.hops.axes[::-1], message.view(-1), "refresh", frame.take, passing)
        rows = frame.take(len(part.blocks) * part.width, params.dtype).view(-1, part.width)
        messages = every.view(len(rows), -1)
        if held is None:
            codec.decode(messages, rows)
        else:
            part.load_all(params, rows)
            rows[part.place(), : held.numel()].copy_(held)
            codec.decode_add(messages, rows)
        part.store_all(rows, params, frame.take)


def reduce_exact(part: Exact, grads: torch.Tensor, factor: float, passing: Passing) -> Chain:
    """Do as ``reduce_rows`` with what goes beside the codes. Ranks have different numbers of elements."""
    hops, numels = part.hops, part.numels
    local, node = hops.intra.index, hops.inter.index
    with passing.frame() as frame:
        sums = grads.index_select(0, part.all.index())
        if hops.intra.size > 1:
            mine = sum(numels[local])
            sent, received = list(map(sum, numels)), [mine] * hops.intra.size
            sums = yield from _exchange(hops.intra, "reduce", sums, sent, received, frame.take, passing)
            sums = _summed(sums, hops.intra.size, frame.take)
        if part.crosses:
            mine = numels[local][node]
            received = [mine] * hops.inter.size
            sums = yield from _exchange(
                hops.inter, "reduce", sums, numels[local], received, frame.take, passing
            )
            sums = _summed(sums, hops.inter.size, frame.take)
        grads.index_copy_(0, part.own.index(), sums.mul_(factor).to(grads.dtype))


def gather_exact(part: Exact, params: torch.Tensor, passing: Passing) -> Chain:
    """Do as ``gather_columns`` with what goes beside the codes."""
    hops, numels = part.hops, part.numels
    with passing.frame() as frame:
        own = params.index_select(0, part.own.index())
        if part.crosses:
            own = yield from _to_all(hops.inter, own, numels[hops.intra.index], frame.take, passing)
        if hops.intra.size > 1:
            own = yield from _to_all(hops.intra, own, list(map(sum, numels)), frame.take, passing)
        params.index_copy_(0, part.all.index(), own)


def _to_all(
    axis: Axis, own: torch.Tensor, numels: Sequence[int], take: Take, passing: Passing
) -> Generator[dist.Work, None, torch.Tensor]:
    """Gather messages of different lengths over an axis: ``numels`` by index."""
    sent = [own.numel()] * axis.size
    return _exchange(axis, "refresh", own.repeat(axis.size), sent, numels, take, passing)


def _exchange(
    axis: Axis,
    kind: str,
    messages: torch.Tensor,
    sent: Sequence[int],
    received: Sequence[int],
    take: Take,
    passing: Passing,
) -> Generator[dist.Work, None, torch.Tensor]:
    """Send ``sent[i]`` elements of messages to each index i, its own too; return ``received[i]`` from each, flat.

    kind: the hop's kind for the counters. The result lies in a buffer from ``take``.
    """
    out = take(sum(received), messages.dtype)
    yield start_route(axis, out, messages, received, sent, kind, passing.traffic)
    return out


def _summed(received: torch.Tensor, size: int, take: Take) -> torch.Tensor:
    """Add up the messages [size * m] by index, in at least fp32."""
    sums = take(received.numel() // size, at_least_fp32(received.dtype))
    Identity(received.dtype).decode_sum(received.view(size, -1), sums, False)
    return sums
