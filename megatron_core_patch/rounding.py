"""What quantised messages of gradients lose: kept, and sent with the next message."""

from __future__ import annotations

import torch

from megazero.comm.codec import Codec, decoded
from megazero.comm.rows import RowRun
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
