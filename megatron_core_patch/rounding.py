"""What quantised messages lose: measured, and for gradients kept and sent with the next message."""

from __future__ import annotations

import torch

from megazero.comm.codec import Codec, at_least_fp32, decoded
from megazero.comm.rows import RowRun
from megazero.comm.watch import write_squares
from megazero.kernels.arena import Frame


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

    def sent(self, codec: Codec, run: RowRun, messages: torch.Tensor, frame: Frame) -> None:
        """Keep what these messages lost, those to others from the first of ``run.to`` on."""
        assert self.lost is not None
        (arrived,) = decoded(codec, messages, run.rows, frame.take)
        lost = torch.sub(run.rows[0], arrived, out=arrived).nan_to_num_(0.0, 0.0, 0.0)
        self.lost[run.to].lerp_(lost, 1.0 - self.beta)


class Errors:
    """Squares of what messages lost, and of what they were, since the last look."""

    def __init__(self) -> None:
        # fp64 [2] each: chains on several streams add none to another's.
        self.squares: list[torch.Tensor] = []

    def sent(self, codec: Codec, run: RowRun, messages: torch.Tensor, frame: Frame) -> None:
        """Add those of these messages."""
        rows = run.rows[0]
        (arrived,) = decoded(codec, messages, run.rows, frame.take, at_least_fp32(rows.dtype))
        self.squares.append(rows.new_empty(2, dtype=torch.float64))
        write_squares(arrived, rows, self.squares[-1], frame)

    def take(self, device: torch.device) -> torch.Tensor:
        """Return them, fp64 [2], and begin anew."""
        squares = [torch.zeros(2, dtype=torch.float64, device=device), *self.squares]
        self.squares = []
        return torch.stack(squares).sum(0)
