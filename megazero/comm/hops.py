"""One hop is one collective over one mesh axis. It is started asynchronously, and ``Traffic`` counts its bytes.

The verbs are generators, for chains of a lane: each yields a collective's Work and is resumed when that has finished.

- ``gather``: every rank receives everyone's message, over one axis after the other.
- ``reduce``: every rank receives its row of the others, and sums. ``reduce_through`` does so over several axes, and
  makes the messages of the next axis straight from those received.
- ``give_back``: every rank sends the sums of its share to all. ``sum_all``: everyone sends everything, and sums.
- ``route``: ranks send each other parts of any sizes.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from megazero.comm.codec import Blockwise, Codec, Identity, encoded, row_numels
from megazero.comm.rows import RowRun, Rows, Views
from megazero.comm.watch import Watch
from megazero.kernels.arena import Arena, Frame, Take, part_of, view_of
from megazero.mesh.levels import links_of, short
from megazero.mesh.mesh import Axis, all_gather_flat
from megazero.mesh.waiting import waiting

Result = TypeVar("Result")
Moves = Generator[dist.Work, None, Result]  # a hop, or several: what it returns is there at its end


class Traffic:
    """Counters of the bytes that this rank sends, and of its messages, keyed by (hop kind, link class).

    A message is what a collective sends to all peers, or a send between stages. The hop kinds are 'refresh',
    'gather', 'reduce', 'update', 'tp', 'cp', 'ep', 'pp' and 'scalar'. The link classes are those of mesh/levels.py. A
    collective over an axis of size a with a message of m bytes per peer sends (a - 1) * m bytes.
    """

    def __init__(self, links: Sequence[str] = links_of()) -> None:
        """links: the mesh's (``Mesh.links``), each of which has a total."""
        self.links = links
        self.bytes: defaultdict[tuple[str, str], int] = defaultdict(int)
        self.messages: Counter[tuple[str, str]] = Counter()

    def add(self, kind: str, link: str, sent: int) -> None:
        self.bytes[kind, link] += sent
        self.messages[kind, link] += 1

    def total(self, link: str) -> int:
        return sum(n for (_, at), n in self.bytes.items() if at == link)

    def take(self) -> dict[str, int]:
        """Return the totals since the last take, by 'kind_link' and by link class, and start again at 0."""
        out = {f"{kind}_{link}_bytes": n for (kind, link), n in sorted(self.bytes.items())}
        out |= {f"{link}_bytes": self.total(link) for link in self.links}
        self.bytes.clear()
        self.messages.clear()
        return out


class HopSpec(NamedTuple):
    """One collective of a chain.

    axis: the mesh axis that it uses. hop: the name of its hop in bills ('refresh_inter', for example).
    """

    axis: str
    hop: str


def hop_spec(kind: str, axis: Axis) -> HopSpec:
    """Name a collective's axis, and its hop as bills name it: 'refresh_inter', 'gather_intra', ..."""
    return HopSpec(axis.name, f"{kind}_{short(axis.link)}")


def _group(axis: Axis, kind: str) -> dist.ProcessGroup | None:
    """Return the communicator of a hop of ``kind``: that of reductions for gradients and updates, else of gathers."""
    return axis.reduce_group if kind in ("reduce", "update") else axis.gather_group


def start_gather(axis: Axis, out: torch.Tensor, own: torch.Tensor, kind: str, traffic: Traffic) -> dist.Work:
    """Start an all-gather over one axis: out [size * m] receives each rank's own [m], by index along the axis.

    Both tensors have the same dtype, which may be any. ``own`` may be the part of ``out`` at this rank's
    index; then the gather is in place and nothing is copied.
    kind: the hop's kind, which counters and communicators go by: "reduce" is the way back of an all-reduce.
    """
    traffic.add(kind, axis.link, (axis.size - 1) * own.numel() * own.element_size())
    return _gathered(axis, out, own, _group(axis, kind))


def _gathered(axis: Axis, out: torch.Tensor, own: torch.Tensor, group: dist.ProcessGroup | None) -> dist.Work:
    """Start the gather. Two ranks on CPUs swap their messages by an all-to-all.

    gloo's all-gather receives into memory of its own and copies it out: 3.2 MB of each took 2.6 to 4.5 ms and 1.0 to
    1.4 of CPU time, the swap 1.0 to 1.4 and 0.3 to 0.9.
    """
    if axis.size == 2 and out.device.type == "cpu":
        rows = out.view(2, -1)
        if rows[axis.index].data_ptr() != own.data_ptr():
            rows[axis.index].copy_(own)
        splits = [0, 0]
        splits[1 - axis.index] = own.numel()
        other = rows[1 - axis.index]
        return dist.all_to_all_single(other, own, splits, splits, group=group, async_op=True)
    return all_gather_flat(out, own, group=group, async_op=True)


def start_route(
    axis: Axis,
    out: torch.Tensor,
    own: torch.Tensor,
    received: Sequence[int],
    sent: Sequence[int],
    kind: str,
    traffic: Traffic,
) -> dist.Work:
    """Start an all-to-all of parts of any sizes over one axis.

    Of ``own`` (1-D) the first sent[0] elements go to index 0, and so on; the first received[0] of ``out`` come from
    there. Both have the same dtype.
    kind: the hop's kind, which counters and communicators go by.
    """
    traffic.add(kind, axis.link, (sum(sent) - sent[axis.index]) * own.element_size())
    group = _group(axis, kind)
    return dist.all_to_all_single(out, own, list(received), list(sent), group=group, async_op=True)


def start_exchange(axis: Axis, out: torch.Tensor, messages: torch.Tensor, traffic: Traffic) -> dist.Work:
    """Start an all-to-all over one axis: row i of messages [size, m] goes to index i; out [size, m] is by source.

    Both tensors have the same dtype. With [size - 1, m] the own row is left out on both sides: nothing is
    sent from a rank to itself. The reduction sends this way for two reasons. On gloo it is 3 to 5 times
    faster than reduce_scatter_tensor (1M fp32 on 4 ranks: 10 ms against 54 ms). And the receiver sums at its
    own precision and in source order.
    """
    splits = [messages.shape[1]] * axis.size
    if messages.shape[0] < axis.size:
        splits[axis.index] = 0
    into, own = view_of(out, Tensor.view, -1), view_of(messages, Tensor.view, -1)
    return start_route(axis, into, own, splits, splits, "reduce", traffic)


@dataclass(frozen=True)
class Channel:
    """State that hops share: the counters of bytes, and the arena of transient buffers on ``device``."""

    traffic: Traffic
    arena: Arena
    device: torch.device

    def frame(self) -> Frame:
        """Return a new frame of transient buffers."""
        return self.arena.frame(self.device)


@dataclass(frozen=True)
class Leg:
    """One axis of a hop, and the format of its messages."""

    axis: Axis
    codec: Codec


def gather(
    axes: Sequence[Axis], message: torch.Tensor, kind: str, take: Take, on: Channel
) -> Moves[torch.Tensor]:
    """Gather every rank's message [m] over one axis after the other; return them flat, the last axis outermost.

    kind: the hop's kind, which counters and communicators go by. The result lies in a buffer from ``take``, or is the
    message itself.
    """
    for axis in axes:
        out = take(axis.size * message.numel(), message.dtype)
        yield start_gather(axis, out, message, kind, on.traffic)
        message = out
    return message


def route(
    axis: Axis,
    own: torch.Tensor,
    sent: Sequence[int],
    received: Sequence[int],
    kind: str,
    take: Take,
    on: Channel,
) -> Moves[torch.Tensor]:
    """Send ``sent[i]`` elements of ``own`` to each index i, its own too; return ``received[i]`` from each, flat.

    kind: the hop's kind, which counters and communicators go by. The result lies in a buffer from ``take``.
    """
    out = take(sum(received), own.dtype)
    yield start_route(axis, out, own, received, sent, kind, on.traffic)
    return out


def reduce(
    leg: Leg,
    rows: Rows,
    out: Views | None,
    on: Channel,
    *,
    accumulate: bool = False,
    whole: bool = False,
    watches: Sequence[Watch] = (),
) -> Moves[None]:
    """Sum this rank's row and those that the others send it into ``out`` [n] of each region, in at least fp32.

    First comes the own row, as it is, then the others by index; so ranks that sum the same rows have the same bits.

    out: None sums into the own row. accumulate: the sums are added to what ``out`` holds.
    whole: the own row is a message, too, and is summed by its index. So rows of one exact region need no copy.
    """
    with on.frame() as frame:
        runs = rows.every if whole else rows.others
        messages = _encoded(leg, runs, frame)
        received = yield from _exchange(leg, runs, messages, frame, on, watches)
        own = () if whole or out is None else rows.kept
        accumulate = accumulate or out is None and not whole
        total, *exact = rows.kept if out is None else out
        leg.codec.decode_sum(received, total, accumulate, *exact, own=own)


def reduce_through(
    legs: Sequence[Leg],
    rows: Rows,
    out: Views,
    on: Channel,
    *,
    accumulate: bool = False,
    watches: Sequence[Watch] = (),
) -> Moves[None]:
    """Do as ``reduce`` over one axis after the other, whose codecs are Blockwise. Only ``out`` holds a sum.

    Between two axes the messages received become those of the next axis in one operation. Their sum is in no buffer,
    so this rank's own row is a message on every axis.
    """
    frame = on.frame()
    runs, numels = rows.every, row_numels(rows.regions)
    messages = _encoded(legs[0], runs, frame)
    for leg, following in pairwise(legs):
        received = yield from _exchange(leg, runs, messages, frame, on, watches)
        after = on.frame()  # for the next axis; what belongs to this one comes free
        messages = _pass_on(leg, following, received, numels, after)
        if watches:
            with on.frame() as passing:
                sums = [passing.take(numel, out[0].dtype) for numel in numels]
                leg.codec.decode_sum(received, sums[0], False, *sums[1:])
                summed = Rows([values.view(following.axis.size, -1) for values in sums], following.axis.index)
                _show(following, summed.every, messages, on, watches)
        frame.close()
        frame, runs = after, ()
        numels = [numel // following.axis.size for numel in numels]
    received = yield from _exchange(legs[-1], runs, messages, frame, on, watches)
    legs[-1].codec.decode_sum(received, out[0], accumulate, *out[1:])
    frame.close()


def give_back(
    leg: Leg, share: Views, out: Views, on: Channel, *, watches: Sequence[Watch] = ()
) -> Moves[None]:
    """Send this rank's share [1, n] of each region to all; ``out`` [size, n] receives the shares by index.

    The owner, too, takes the decoded values, so all ranks hold the same bits. ``share`` may be a row of ``out``.
    """
    with on.frame() as frame:
        messages = encoded(leg.codec, share, frame.take)
        received, *exact = out
        if exact or messages.dtype != received.dtype:  # else it lands in place
            received = _table(frame, leg.axis.size, messages.shape[1], messages.dtype)
        _show(leg, Rows(share, 0).every, messages, on, watches)
        yield start_gather(leg.axis, received.view(-1), messages.view(-1), "reduce", on.traffic)
        leg.codec.decode(received, *out)  # nothing where it landed in place


def sum_all(leg: Leg, rows: Views, out: Views, on: Channel, *, watches: Sequence[Watch] = ()) -> Moves[None]:
    """Sum what all ranks have, rows [1, n] of each region, into ``out`` [n]; it may be the same memory.

    Every rank sends everything to all and adds up the same decoded messages by index, so all hold the same bits.
    """
    with on.frame() as frame:
        own = encoded(leg.codec, rows, frame.take)
        _show(leg, Rows(rows, 0).every, own, on, watches)
        every = yield from gather([leg.axis], own.view(-1), "reduce", frame.take, on)
        leg.codec.decode_sum(every.view(leg.axis.size, -1), out[0], False, *out[1:])


def run_through(chain: Moves[Result]) -> Result:
    """Run a chain to its end, on the current stream, and return its result. On gloo the host waits for each hop."""
    while True:
        try:
            work = next(chain)
            with waiting:
                work.wait()
        except StopIteration as end:
            result: Result = end.value
            return result


# -- parts of a reduction --------------------------------------------------------------------------


def _encoded(leg: Leg, runs: Sequence[RowRun], frame: Frame) -> torch.Tensor:
    """Return the messages [k, m] of runs, in a buffer of the frame, or the rows themselves if they may be sent so."""
    if len(runs) == 1:
        return encoded(leg.codec, runs[0].rows, frame.take)
    m = leg.codec.message_numel(*row_numels(runs[0].rows))
    messages = _table(frame, runs[-1].to.stop, m, leg.codec.wire_dtype)
    for run in runs:
        leg.codec.encode(*run.rows, out=part_of(messages, run.to))
    return messages


def _exchange(
    leg: Leg,
    runs: Sequence[RowRun],
    messages: torch.Tensor,
    frame: Frame,
    on: Channel,
    watches: Sequence[Watch],
) -> Moves[torch.Tensor]:
    """Exchange messages, and return those received, in a buffer of the frame. Watches see the runs meanwhile."""
    received = _table(frame, len(messages), messages.shape[1], messages.dtype)
    work = start_exchange(leg.axis, received, messages, on.traffic)
    _show(leg, runs, messages, on, watches)
    yield work
    return received


def _pass_on(
    leg: Leg, following: Leg, received: torch.Tensor, numels: Sequence[int], frame: Frame
) -> torch.Tensor:
    """Return the next axis's messages, made straight from those received. numels: of each region of their sum."""
    assert isinstance(leg.codec, Blockwise) and isinstance(following.codec, Blockwise)
    rows, exact = following.axis.size, sum(numels[1:])
    m = following.codec.message_numel(numels[0] // rows, exact // rows)
    out = _table(frame, rows, m, following.codec.wire_dtype)
    return leg.codec.decode_sum_encode(received, numels[0], following.codec, rows, exact=exact, out=out)


def _show(
    leg: Leg, runs: Sequence[RowRun], messages: torch.Tensor, on: Channel, watches: Sequence[Watch]
) -> None:
    if not watches or isinstance(leg.codec, Identity):
        return
    for run in runs:
        for watch in watches:
            with on.frame() as frame:
                watch(leg.codec, run, messages[run.to], frame)


def _table(frame: Frame, rows: int, m: int, dtype: torch.dtype) -> torch.Tensor:
    """Take a buffer of messages [rows, m]."""
    table: torch.Tensor = view_of(frame.take(rows * m, dtype), Tensor.view, rows, m)
    return table
