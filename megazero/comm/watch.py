"""What looks at quantised messages: measures what rounding lost, and warns of it."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from statistics import median
from typing import Any

import torch

from megazero.comm.codec import Codec, at_least_fp32, decoded
from megazero.comm.rows import RowRun
from megazero.comm.wire import Codecs, Coding
from megazero.kernels.add_to import add_to
from megazero.kernels.arena import Frame
from megazero.mesh.levels import INTRA

# A hop calls it with every run of rows [k, n] that it quantised, and their messages [k, m], while these are on their
# way. It takes buffers from the frame.
Watch = Callable[[Codec, RowRun, torch.Tensor, Frame], None]


def write_squares(
    sent: torch.Tensor,
    exact: torch.Tensor,
    out: torch.Tensor,
    frame: Frame,
    zeroed: torch.Tensor | None = None,
) -> None:
    """Write ||sent - exact||^2 and ||exact||^2 to ``out``, fp64 [2]. ``sent`` has at least exact's precision.

    zeroed: fp64 [2], takes how many elements are not 0 and arrive as 0, and how many are not 0. That costs 1.4
    times what the squares do (1M fp32 on one core: 2.5 and 1.8 ms), in their memory.
    """
    numel = sent.numel()
    error = frame.take(numel, sent.dtype)
    wide = frame.take(numel, torch.float64)
    add_to(error.view(sent.shape).copy_(sent), exact, alpha=-1.0)
    for values, square in zip((error, exact), out, strict=True):
        wide.view(values.shape).copy_(values)
        torch.sum(wide.square_(), 0, out=square)
    if zeroed is None:
        return
    given, gone = error.view(torch.bool)[: 2 * numel].view(2, numel)  # the error is not needed any more
    torch.ne(exact, 0, out=given.view(exact.shape))
    torch.eq(sent, 0, out=gone.view(sent.shape))
    gone.logical_and_(given)
    for mask, count in zip((gone, given), zeroed, strict=True):
        torch.sum(wide.copy_(mask), 0, out=count)  # a sum of bool takes memory


class Errors:
    """Squares of what messages lost, and of what they were, since the last look."""

    def __init__(self) -> None:
        # fp64 [2] each: chains on several streams add none to another's.
        self.squares: list[torch.Tensor] = []

    def sent(self, codec: Codec, run: RowRun, messages: torch.Tensor, frame: Frame) -> None:
        """Add those of these messages."""
        rows = run.rows[0]
        (arrived, *_) = decoded(codec, messages, run.rows, frame.take, at_least_fp32(rows.dtype))
        self.squares.append(rows.new_empty(2, dtype=torch.float64))
        write_squares(arrived, rows, self.squares[-1], frame)

    def take(self, device: torch.device) -> torch.Tensor:
        """Return them, fp64 [2], and begin anew."""
        squares = [torch.zeros(2, dtype=torch.float64, device=device), *self.squares]
        self.squares = []
        return torch.stack(squares).sum(0)


class LossyGradients:
    """Warns once if gradients lose too much by rounding: if half of the last WINDOW measurements are above LIMIT.

    A measurement is a module's ||sent - exact|| / ||exact||, another module's each time. One of them says little: in
    young models modules lie between 0.08 and 0.17 in INT4 in blocks of 64, with a median of 0.107 to 0.12. A trained
    model loses 0.17 in that format, where its step keeps 0.88 of an exact step's gain in loss, and 0.09 with a
    Hadamard transform, where it keeps 0.98 (docs/results/loss.md). LIMIT lies between.
    """

    LIMIT, WINDOW = 0.15, 16

    def __init__(self, codecs: Codecs[Any]) -> None:
        """Take the formats of a run; exact ones lose nothing."""
        self.codecs = codecs
        self.last = deque[float](maxlen=self.WINDOW)
        self.told = False

    def take(self, error: float | None) -> str | None:
        """Take a measurement, or None where nothing was measured. Return the warning when it is due."""
        if self.told or error is None or not math.isfinite(error):
            return None
        self.last.append(error)
        usual = median(self.last)
        if len(self.last) < self.WINDOW or usual <= self.LIMIT:
            return None
        self.told = True
        return (
            f"gradients lose {usual:.2f} of their norm by rounding (median of {self.WINDOW} modules; limit "
            f"{self.LIMIT:g}), which may cost loss: use {less_lossy(self.codecs)}"
        )


def less_lossy(codecs: Codecs[Any]) -> str:
    """Return the flag, with its value, under which these formats' gradients lose less by rounding."""
    rounded = ((c.bits, link == INTRA, c) for link, c in codecs.gradients.items() if isinstance(c, Coding))
    bits, inside, coarse = min(rounded, key=lambda each: each[:2], default=(8, False, None))
    if coarse is None or bits >= 8:
        return "--no-zero-quantized-gradients"
    if bits == 4 and not coarse.hadamard:
        return "--zero-gradient-transform hadamard"
    return "--zero-gradient-bits-intra-node 8" if inside else "--zero-gradient-bits 8"
