"""What looks at quantised messages: measures what rounding lost, or keeps it."""

from __future__ import annotations

from collections.abc import Callable

import torch

from megazero.comm.codec import Codec, decoded
from megazero.comm.rows import RowRun, Views
from megazero.kernels.add_to import add_to
from megazero.kernels.arena import Frame

# A hop calls it with every run of rows [k, n] that it quantised, and their messages [k, m], while these are on their
# way. It takes buffers from the frame.
Watch = Callable[[Codec, RowRun, torch.Tensor, Frame], None]


def write_lost(out: Views, codec: Codec, run: RowRun, messages: torch.Tensor, frame: Frame) -> None:
    """Write what the messages lost, row - decoded message, to the same places of ``out`` [size, n] per region."""
    arrived = decoded(codec, messages, run.rows, frame.take)
    for row, gone, lost in zip(run.rows, arrived, out, strict=True):
        torch.sub(row, gone, out=lost[run.at])


def write_squares(sent: torch.Tensor, exact: torch.Tensor, out: torch.Tensor, frame: Frame) -> None:
    """Write ||sent - exact||^2 and ||exact||^2 to ``out``, fp64 [2]. ``sent`` has at least exact's precision."""
    error = frame.take(sent.numel(), sent.dtype).view(sent.shape)
    wide = frame.take(sent.numel(), torch.float64)
    add_to(error.copy_(sent), exact, alpha=-1.0)
    for values, square in zip((error, exact), out, strict=True):
        wide.view(values.shape).copy_(values)
        torch.sum(wide.square_(), 0, out=square)
