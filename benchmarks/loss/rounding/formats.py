"""The formats that are compared, and the hop of gradients across nodes that each is sent over."""

from __future__ import annotations

import torch

from megazero.comm.codec import Blockwise
from megazero.zero.layout import UnitLayout

BLOCK = 2048  # the largest: parameters start on it in every format
EXACT = "exact"
# In order of value: training on leaves out from the end what does not fit into its time.
GRADIENTS: dict[str, Blockwise | None] = {
    EXACT: None,
    "INT4 64": Blockwise(4, 64),
    "INT4 64 + H64": Blockwise(4, 64, 64),
    "INT4 2048": Blockwise(4, 2048),
    "INT4 128 + H128": Blockwise(4, 128, 128),
    "INT4 128": Blockwise(4, 128),
    "INT4 2048 + H128": Blockwise(4, 2048, 128),
    "INT8 128": Blockwise(8, 128),
    "INT4 128 + H32": Blockwise(4, 128, 32),
}
WEIGHTS = {"INT8 128": Blockwise(8, 128), "INT4 64": Blockwise(4, 64), "INT4 64 + H64": Blockwise(4, 64, 64)}
DIFFERENCES = WEIGHTS | {
    "INT4 128 + H128": Blockwise(4, 128, 128),
    "INT4 2048": Blockwise(4, 2048),
    "2 bits 64": Blockwise(2, 64),
}


def bytes_of(codec: Blockwise | None) -> float:
    """Return the bytes that an element takes."""
    return 4.0 if codec is None else codec.bits / 8 + 2 / codec.block


class Hop:
    """Rounds the gradients of S senders. The layout's first region is coded, the rest exact.

    Each sender owns 1/S of the sum, as the engine's ranks do, and its own part of its gradient is not sent.
    """

    def __init__(self, codec: Blockwise | None, layout: UnitLayout) -> None:
        self.codec, self.layout = codec, layout
        self.senders, self.coded = layout.sizes[0], layout.regions[0][1]

    def mean(self, gradients: torch.Tensor) -> torch.Tensor:
        """Return the mean fp32 [n] of gradients fp32 [S, n]. Coded parts travel as messages."""
        codec, senders = self.codec, self.senders
        if codec is None:
            return gradients.mean(0)
        rows = gradients[:, : self.coded].unflatten(1, (senders, -1))  # by sender, then by owner
        messages = [codec.encode(row) for row in rows]
        total = torch.empty_like(gradients[0])
        sums = total[: self.coded].view(senders, -1)
        for owner in range(senders):
            sent = torch.stack([messages[s][owner] for s in range(senders) if s != owner])
            codec.decode_sum(sent, sums[owner], False, own=(rows[owner, owner],))
        total[self.coded :] = gradients[:, self.coded :].sum(0)
        return self._cleared(total.div_(senders))

    def decoded(self, values: torch.Tensor) -> torch.Tensor:
        """Return what rows fp32 [m, n], all of them coded, decode to if every element is sent."""
        if self.codec is None:
            return values.clone()
        out = torch.empty_like(values)
        for at, row in enumerate(values):
            self.codec.decode(self.codec.encode(row[None].contiguous()), out[at][None])
        return self._cleared(out)

    def _cleared(self, values: torch.Tensor) -> torch.Tensor:
        for low, high in self.layout.gaps(0):
            values[..., low:high].zero_()
        return values
