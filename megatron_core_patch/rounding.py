"""What quantised messages lose: measured, and for gradients kept and sent with the next message."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from megazero.kernels.arena import Frame

from megazero.comm.codec import Blockwise


class Residual:
    """What rounding a message lost, which the next one adds (error feedback, Seide et al. 2014).

    With ``beta`` it is an average: beta times what it was plus 1 - beta times what the message lost (LoCo, Xie et al.
    2024). A block with NaN or Inf leaves nothing.
    """

    def __init__(self, beta: float) -> None:
        self.beta = beta
        self.lost: torch.Tensor | None = None  # [others, n], fp32

    def add(self, rows: torch.Tensor, own: int) -> None:
        """Add it to the rows [size, n] of all but this rank, in place."""
        if self.lost is None:
            self.lost = torch.zeros(len(rows) - 1, rows.shape[1], dtype=torch.float32, device=rows.device)
        rows[:own].add_(self.lost[:own])
        rows[own + 1 :].add_(self.lost[own:])

    def keep(self, lost: torch.Tensor, to: int) -> None:
        """Take what messages [k, n] lost, those to others from the ``to``-th on."""
        assert self.lost is not None
        lost.nan_to_num_(0.0, 0.0, 0.0)
        self.lost[to : to + len(lost)].lerp_(lost, 1.0 - self.beta)


class Errors:
    """Squares of what messages lost, and of what they were, since the last look."""

    def __init__(self) -> None:
        # fp64 [2] each: chains on several streams add none to another's.
        self.squares: list[torch.Tensor] = []

    def add(self, lost: torch.Tensor, exact: torch.Tensor) -> None:
        self.squares.append(torch.stack([x.square().sum(dtype=torch.float64) for x in (lost, exact)]))

    def take(self, device: torch.device) -> torch.Tensor:
        """Return them, fp64 [2], and begin anew."""
        squares = [torch.zeros(2, dtype=torch.float64, device=device), *self.squares]
        self.squares = []
        return torch.stack(squares).sum(0)


def lost_of(
    codec: Blockwise, rows: Sequence[torch.Tensor], messages: torch.Tensor, frame: Frame
) -> torch.Tensor:
    """Return what the messages [k, m] lost of the coded rows [k, ...]: fp32 [k, n], in a buffer of the frame."""
    k = len(messages)
    lost = frame.take(rows[0].numel(), torch.float32).view(k, -1)
    codec.decode(messages, lost)
    return torch.sub(rows[0].reshape(k, -1), lost, out=lost)
