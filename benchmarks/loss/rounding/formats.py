"""The formats that are compared, and the hop of gradients across nodes that each is sent over."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch

from megazero.comm.codec import Blockwise
from megazero.kernels.arena import SCRATCH
from megazero.kernels.hadamard import Hadamard, Mixing
from megazero.zero.layout import UnitLayout

BLOCK = 2048  # the largest: parameters start on it in every format
FLOOR = 1e-3  # of the largest column's rms: a column of zeros is scaled by this


@dataclass(frozen=True)
class Emulated:
    """A format of any number of bits that no message has yet: what it would decode to, sent in fp32.

    Symmetric codes with a bf16 scale per block, rounded up, as kernels/format.py; always with a Hadamard transform.
    """

    bits: int
    block: int
    hadamard: int

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        """Return what x [k, n] decodes to."""
        with SCRATCH.frame(x.device) as frame:
            mixing = Mixing.of(frame, Hadamard(self.hadamard), x.numel(), x.dtype)
            mixed = mixing.forward(x.contiguous().view(-1)).view(-1, self.block)
            most = (1 << self.bits - 1) - 1
            scale = mixed.abs().amax(1, keepdim=True) / most
            scale = ((scale.view(torch.int32) + 0xFFFF) & ~0xFFFF).view(torch.float32)
            digits = (mixed / scale.clamp(min=2.0**-126)).round_().clamp_(-most, most)
            values = digits.mul_(scale).view(-1)
            mixing.inverse(values, out=values)
            return values.view(x.shape)

    def decode(self, messages: torch.Tensor, out: torch.Tensor) -> None:
        out.copy_(messages)

    def decode_sum(
        self, messages: torch.Tensor, out: torch.Tensor, accumulate: bool, *, own: tuple[torch.Tensor, ...]
    ) -> None:
        out.copy_(own[0] + messages.sum(0))


@dataclass(frozen=True)
class Rounding:
    """coding: None is exact. columns: each column of a matrix is divided by its rms in the step before, which the
    receivers decoded, too."""

    coding: Blockwise | Emulated | None
    columns: bool = False

    @cached_property
    def bytes(self) -> float:
        """Return the bytes that an element takes."""
        return 4.0 if self.coding is None else self.coding.bits / 8 + 2 / self.coding.block


EXACT = "exact"
ROUNDINGS: dict[str, Rounding] = {
    EXACT: Rounding(None),
    "INT4 64": Rounding(Blockwise(4, 64)),
    "INT4 64 + H64": Rounding(Blockwise(4, 64, 64)),
    "INT4 2048": Rounding(Blockwise(4, 2048)),
    "INT4 128": Rounding(Blockwise(4, 128)),
    "INT4 128 + H128": Rounding(Blockwise(4, 128, 128)),
    "INT4 2048 + H128": Rounding(Blockwise(4, 2048, 128)),
    "INT4 512 + H128": Rounding(Blockwise(4, 512, 128)),
    "INT8 128": Rounding(Blockwise(8, 128)),
    "INT4 128 + H32": Rounding(Blockwise(4, 128, 32)),
    "INT8 2048": Rounding(Blockwise(8, 2048)),
    "INT4 64, columns": Rounding(Blockwise(4, 64), columns=True),
    "INT4 128, columns": Rounding(Blockwise(4, 128), columns=True),
    "3 bits 64 + H64": Rounding(Emulated(3, 64, 64)),
    "2 bits 64 + H64": Rounding(Blockwise(2, 64, 64)),
}
WEIGHTS = {"INT8 128": Blockwise(8, 128), "INT4 64": Blockwise(4, 64), "INT4 64 + H64": Blockwise(4, 64, 64)}
DIFFERENCES = {
    "INT8 128": Blockwise(8, 128),
    "INT4 64": Blockwise(4, 64),
    "INT4 64 + H64": Blockwise(4, 64, 64),
    "INT4 128 + H128": Blockwise(4, 128, 128),
    "INT4 2048": Blockwise(4, 2048),
    "2 bits 64": Blockwise(2, 64),
    "2 bits 64 + H64": Blockwise(2, 64, 64),
}


class Hop:
    """Rounds the gradients of S senders, step after step. The layout's first region is coded, the rest exact.

    Each sender owns 1/S of the sum, as the engine's ranks do, and its own part of its gradient is not sent.
    """

    def __init__(self, rounding: Rounding, layout: UnitLayout) -> None:
        self.rounding, self.layout = rounding, layout
        self.senders, self.coded = layout.sizes[0], layout.regions[0][1]
        self.scale: torch.Tensor | None = None

    def mean(self, gradients: torch.Tensor) -> torch.Tensor:
        """Return the mean fp32 [n] of gradients fp32 [S, n], which are changed. Coded parts travel as messages."""
        coder, senders = self.rounding.coding, self.senders
        if coder is None:
            return gradients.mean(0)
        given = self._prepared(gradients[:, : self.coded])
        rows = given.unflatten(1, (senders, -1))  # by sender, then by owner
        messages = [coder.encode(row) for row in rows]
        total = torch.empty_like(gradients[0])
        sums = total[: self.coded].view(senders, -1)
        for owner in range(senders):
            sent = torch.stack([messages[s][owner] for s in range(senders) if s != owner])
            coder.decode_sum(sent, sums[owner], False, own=(rows[owner, owner],))
        total[self.coded :] = gradients[:, self.coded :].sum(0)
        self._finished(
            total[: self.coded].div_(senders)
            if self.scale is None
            else total[: self.coded].div_(senders).mul_(self.scale)
        )
        total[self.coded :].div_(senders)
        return self._cleared(total)

    def decoded(self, gradients: torch.Tensor) -> torch.Tensor:
        """Return what gradients fp32 [S, n], all of them coded, decode to if every element is sent."""
        coder = self.rounding.coding
        if coder is None:
            return gradients.clone()
        given = self._prepared(gradients.clone())
        out = torch.empty_like(given)
        for sender, row in enumerate(given):
            coder.decode(coder.encode(row[None]), out[sender][None])
        if self.scale is not None:
            out.mul_(self.scale)
        self._finished(out.mean(0))
        return self._cleared(out)

    def _prepared(self, given: torch.Tensor) -> torch.Tensor:
        if self.scale is not None:
            given /= self.scale
        return given

    def _finished(self, mean: torch.Tensor) -> None:
        """Take what all have decoded, fp32 [coded], to the next step."""
        if self.rounding.columns:
            self.scale = self._columns(mean)

    def _columns(self, mean: torch.Tensor) -> torch.Tensor:
        scale = torch.ones_like(mean)
        for slot in self.layout.slots:
            part = slice(slot.start, slot.start + slot.numel)
            if part.stop <= self.coded and len(slot.shape) == 2:
                rms = mean[part].view(slot.shape).square().mean(0).sqrt_()
                largest = rms.max()
                rms = torch.where(largest > 0, rms.clamp(min=FLOOR * largest), torch.ones_like(rms))
                scale[part].view(slot.shape).copy_(rms.expand(slot.shape))
        return scale

    def _cleared(self, values: torch.Tensor) -> torch.Tensor:
        for low, high in self.layout.gaps(0):
            values[..., low:high].zero_()
        return values
