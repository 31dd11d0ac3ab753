"""The hops of a patch's messages: gathers and sums over an axis, whatever lies in a message.

Each is a generator, as chains of a lane are: it yields a collective's Work and is resumed when that has finished.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.distributed as dist

from megazero.comm.codec import Codec, Identity, Noise, at_least_fp32
from megazero.comm.hops import Traffic, other_rows, start_exchange, start_gather
from megazero.kernels.arena import Arena, Frame, Take
from megazero.mesh.mesh import Axis

T = TypeVar("T")
# (rows [k, ...] of each region, their messages [k, m], the place of the first among all messages)
Watch = Callable[[Sequence[torch.Tensor], torch.Tensor, int], None]


@dataclass(frozen=True)
class Passing:
    """What chains share: the counters of bytes, and the arena of their buffers on ``device``."""

    traffic: Traffic
    arena: Arena
    device: torch.device

    def frame(self) -> Frame:
        return self.arena.frame(self.device)


def noise_of(name: str, sender: int, step: int) -> Noise:
    """Return the noise of messages of this name.

    sender: this rank's index in its data-parallel group. So tensor-parallel ranks round alike what they replicate.
    """
    return Noise.named(0, step, f"{name} from {sender}")


def sum_over(
    axis: Axis,
    codec: Codec,
    regions: Sequence[torch.Tensor],
    passing: Passing,
    take: Take,
    *,
    noise: Noise,
    own: int | None = None,
    watch: Watch | None = None,
) -> Generator[dist.Work, None, list[torch.Tensor]]:
    """Take one hop: row i of every region [size, ...] goes to index i, and those received are added to the own row.

    noise: for a codec that rounds at random; another one for each sender. watch: is shown every message.
    own: the place of this rank's row, if the others are by index around another place than this rank's index.
    Returns the sums, at least fp32, [...] as the regions' rows, in buffers from ``take``. Rows of others are added by
    index, so ranks that sum the same rows have the same bits.
    """
    own = axis.index if own is None else own
    with passing.frame() as frame:
        m = codec.message_numel(*(region[0].numel() for region in regions))
        messages = frame.take((axis.size - 1) * m, codec.wire_dtype).view(-1, m)
        for at, to in other_rows(axis, own):
            rows, out = [region[at] for region in regions], messages[to]
            if isinstance(codec, Identity):  # of one region, which may lie in pieces
                out.view(rows[0].shape).copy_(rows[0])
                continue
            n = rows[0][0].numel()
            codec.encode(*(row.reshape(len(out), -1) for row in rows), noise=noise.at(to.start * n), out=out)
            if watch is not None:
                watch(rows, out, to.start)
        sums = [
            take(region[own].numel(), at_least_fp32(region.dtype)).view(region[own].shape)
            for region in regions
        ]
        for total, region in zip(sums, regions, strict=True):
            total.copy_(region[own])
        received = frame.take(messages.numel(), messages.dtype).view(messages.shape)
        yield start_exchange(axis, received, messages, passing.traffic)
        codec.decode_sum(received, sums[0].view(-1), True, *(total.view(-1) for total in sums[1:]))
    return sums


def refuse_capture(device: torch.device, patch: str) -> None:
    """Raise RuntimeError inside a CUDA graph's capture. patch: the name that says so."""
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            f"{patch}: a CUDA graph records a step's collectives once, but the host decides in every step what is "
            "sent: leave data-parallel messages out of the graph (torch.compile without mode='reduce-overhead'; "
            "Megatron-LM without CUDA graphs of a full iteration)"
        )


def gather_over(
    axes: Sequence[Axis], message: torch.Tensor, kind: str, take: Take, passing: Passing
) -> Generator[dist.Work, None, torch.Tensor]:
    """Gather every rank's message [m] over one axis after the other; return them flat, the last axis outermost.

    kind: the hop's kind for the counters. The result lies in a buffer from ``take``, or is the message itself.
    """
    for axis in axes:
        out = take(axis.size * message.numel(), message.dtype)
        yield start_gather(axis, out, message, kind, passing.traffic)
        message = out
    return message


def run_through(chain: Generator[dist.Work, None, T]) -> T:
    """Run a chain to its end, on the current stream, and return its result. On gloo the host waits for each hop."""
    while True:
        try:
            next(chain).wait()
        except StopIteration as end:
            return end.value
