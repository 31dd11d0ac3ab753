"""The hops of a patch's messages: what its gathers and sums have in common, whatever lies in a message.

Each is a generator that yields a collective's Work and goes on when that has finished, as chains of a lane do.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.distributed as dist

from megazero.comm.codec import Codec
from megazero.comm.hops import Traffic, start_exchange, start_gather
from megazero.kernels.arena import Arena, Frame, Take
from megazero.mesh.mesh import Axis

T = TypeVar("T")


@dataclass(frozen=True)
class Passing:
    """What chains share: the counters of bytes, and the arena of the buffers that pass, on ``device``."""

    traffic: Traffic
    arena: Arena
    device: torch.device

    def frame(self) -> Frame:
        return self.arena.frame(self.device)


def add_others(
    axis: Axis, codec: Codec, messages: torch.Tensor, sums: Sequence[torch.Tensor], passing: Passing
) -> Generator[dist.Work, None, None]:
    """Send messages [size - 1, m] to the axis's other ranks, by index, and add theirs to ``sums``.

    sums: this rank's own values, at least fp32, 1-D, one per region of the messages. Those of others are added by
    index: so ranks that sum the same values in the same order have the same bits.
    """
    with passing.frame() as frame:
        received = frame.take(messages.numel(), messages.dtype).view(messages.shape)
        yield start_exchange(axis, received, messages, passing.traffic)
        codec.decode_sum(received, sums[0], True, *sums[1:])


def gather_over(
    axes: Sequence[Axis], message: torch.Tensor, kind: str, take: Take, passing: Passing
) -> Generator[dist.Work, None, torch.Tensor]:
    """Gather every rank's message [m] over the axes, one after the other; return them flat, the last axis outermost.

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
