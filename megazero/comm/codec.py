"""Wire formats of the hops.

A codec turns a slice of n elements into a message and back. A message is a 1-D tensor of ``wire_dtype``
with ``message_numel(n)`` elements: everything of the slice that crosses the link. Messages of nested
slices concatenate in layout order, so a gather over any axes needs no knowledge of the format; only the
two ends encode and decode. Reduction is all-to-all, decode, sum in at least fp32 by source index.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch


class Codec(Protocol):
    """One small interface for every wire format."""

    @property
    def wire_dtype(self) -> torch.dtype: ...

    def message_numel(self, n: int) -> int:
        """Elements of wire_dtype for a slice of n elements."""
        ...

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        """x [k, n] (k slices) -> messages [k, message_numel(n)]; may be x itself."""
        ...

    def decode(self, messages: torch.Tensor, out: torch.Tensor) -> None:
        """messages [k, m] -> out [k, n], any float dtype."""
        ...

    def decode_sum(self, messages: torch.Tensor, out: torch.Tensor, accumulate: bool) -> None:
        """out [n] (at least fp32) = (out if accumulate) + messages[0] + messages[1] + ... in this order."""
        ...


@dataclass(frozen=True)
class Identity:
    """Elements as they are, in ``wire_dtype``: exact if the source has no more precision than the wire."""

    wire_dtype: torch.dtype

    def message_numel(self, n: int) -> int:
        return n

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        return x.to(self.wire_dtype)

    def decode(self, messages: torch.Tensor, out: torch.Tensor) -> None:
        if messages.data_ptr() != out.data_ptr():
            out.copy_(messages)

    def decode_sum(self, messages: torch.Tensor, out: torch.Tensor, accumulate: bool) -> None:
        # Chain of adds: on a CPU as fast as torch.sum(dim=0) in fp32 and 1.6x faster in bf16
        # (5.0 ms against 8.0 ms for 4 x 1M), and the order of the sum is the source order by construction.
        sources = messages.unbind(0)
        if accumulate:
            out.add_(sources[0])
        elif len(sources) > 1 and messages.dtype == out.dtype:
            torch.add(sources[0], sources[1], out=out)
            sources = sources[1:]
        else:
            out.copy_(sources[0])
        for source in sources[1:]:
            out.add_(source)
