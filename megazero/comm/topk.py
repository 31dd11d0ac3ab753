"""Sparse messages: of each chunk of 4,096 elements the 64 largest, in 2 bits each. For links below 0.5 Gb/s.

SparseLoCo (arXiv 2508.15706) sends outer differences so. What is left out stays in the sender's residual, which takes
the place of the outer momentum: ``Sparse.FEEDBACK`` of it is added to the next difference. Sums of sparse messages
are not sparse, so all replicas gather all messages: each sends one, however many they are.

A chunk's message, uint8 [84]:

    levels   bf16 [2]    the mean magnitudes of the values up to, and above, the mean of all 64; of 0, and above, if
                         fewer than 64 are not 0
    high     bits [128]  bit (p >> 6) + i is set for the i-th place p in ascending order (Elias-Fano)
    picks    uint8 [64]  by ascending place: its 6 low bits, the sign, the level

So a place takes 8 bits, a value 2, and a parameter 0.0205 bytes. SparseLoCo's places take 12 bits; 7.4 would be the
least. A last chunk that is shorter is filled with zeros, and what is decoded there is cut off.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from megazero.comm.wire import ALIGN, Sparse, filled
from megazero.kernels.sum_rows import sum_rows

CHUNK, KEPT = Sparse.CHUNK, Sparse.KEPT
PIECE = 256  # chunks that are coded at once: 8 MiB of keys; 12 ns an element on a core, of 1024 22
LOW = 6  # bits of a place that are not in ``high``
HIGH_BITS = KEPT + (CHUNK >> LOW)
PARTS = (4, HIGH_BITS // 8, KEPT)  # bytes of levels, high and picks


@dataclass(frozen=True)
class TopK(Sparse):
    """The codec (comm/codec.py) of ``Sparse``. Of equal magnitudes the earlier is sent, on every device.

    What is decoded of a chunk with NaN, in its 64 places, is NaN.
    """

    exact_dtype: torch.dtype = torch.float32

    @property
    def wire_dtype(self) -> torch.dtype:
        return torch.uint8

    def message_numel(self, n: int, exact: int = 0) -> int:
        return self.message_bytes(n, exact * self.exact_dtype.itemsize)

    def encode(self, x: Tensor, exact: Tensor | None = None, *, out: Tensor | None = None) -> Tensor:
        """Encode as ``Codec.encode`` says."""
        k, n = x.shape
        e = 0 if exact is None else exact.shape[1]
        if out is None:
            out = x.new_empty(k, self.message_numel(n, e), dtype=torch.uint8)
        out.zero_()
        for values, message in zip(x, self._chunks(out, n), strict=True):
            for start in range(0, len(message), PIECE):
                piece = values[start * CHUNK : (start + PIECE) * CHUNK].float()
                rows = pad(piece, (0, -len(piece) % CHUNK)).view(-1, CHUNK)
                message[start : start + PIECE] = torch.cat(encoded_chunks(rows), 1)
        if exact is not None:
            self._exact(out, n, e).copy_(exact)
        return out

    def decode(self, messages: Tensor, out: Tensor, exact: Tensor | None = None) -> None:
        """Decode as ``Codec.decode`` says. Raises ValueError for bytes that ``encode`` does not write."""
        k, n = out.shape
        chunks = self._chunks(messages, n)
        for message, values in zip(chunks, out, strict=True):
            for start in range(0, len(message), PIECE):
                piece = message[start : start + PIECE]
                rows = piece.new_zeros(len(piece), CHUNK, dtype=torch.float32)
                part = values[start * CHUNK : (start + PIECE) * CHUNK]
                part.copy_(rows.scatter_(1, *decoded_chunks(piece)).view(-1)[: len(part)])
        if exact is not None:
            exact.copy_(self._exact(messages, n, exact.shape[1]))

    def decode_sum(
        self,
        messages: Tensor,
        out: Tensor,
        accumulate: bool,
        exact: Tensor | None = None,
        *,
        own: Sequence[Tensor] = (),
    ) -> None:
        """Add up as ``Codec.decode_sum`` says."""
        regions = (out,) if exact is None else (out, exact)
        values = [out.new_empty(len(messages), total.numel()) for total in regions]
        self.decode(messages, *values)
        for at, (rows, total) in enumerate(zip(values, regions, strict=True)):
            sum_rows(rows, total, accumulate, own[at] if own else None)

    def _chunks(self, messages: Tensor, n: int) -> Tensor:
        """Return the coded part of messages [k, m] as a view [k, chunks, bytes of a chunk]."""
        return messages[:, : self.coded_bytes(n)].unflatten(1, (-1, self.CHUNK_BYTES))

    def _exact(self, messages: Tensor, n: int, e: int) -> Tensor:
        """Return the exact region of messages [k, m] as a view [k, e]."""
        start = filled(self.coded_bytes(n), ALIGN)
        return messages[:, start : start + e * self.exact_dtype.itemsize].view(self.exact_dtype)


def encoded_chunks(rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """fp32 [c, CHUNK] -> levels, high and picks, uint8 [c, PARTS]."""
    order = torch.arange(CHUNK - 1, -1, -1, device=rows.device)
    keys = rows.abs().view(torch.int32).long() * CHUNK + order  # no two are equal, so no device has a choice
    places = (CHUNK - 1 - keys.topk(KEPT, sorted=False).values % CHUNK).sort().values
    values = rows.gather(1, places)
    sizes = values.abs()
    # Where zeros are sent, they arrive as zeros: padding is never anything else.
    large = sizes > sizes.mean(1, keepdim=True) * (sizes.amin(1, keepdim=True) > 0)
    levels = [sizes.where(kind, 0.0).sum(1) / kind.sum(1).clamp_(min=1) for kind in (~large, large)]
    spread = (places >> LOW) + torch.arange(KEPT, device=rows.device)
    high = rows.new_zeros(len(rows), HIGH_BITS, dtype=torch.uint8).scatter_(1, spread, 1)
    picks = (places % (1 << LOW)) * 4 + (values < 0) * 2 + large
    return (
        torch.stack(levels, 1).bfloat16().view(torch.uint8),
        (high.view(-1, PARTS[1], 8) << _bits(rows)).sum(2, dtype=torch.uint8),
        picks.to(torch.uint8),
    )


def decoded_chunks(rows: Tensor) -> tuple[Tensor, Tensor]:
    """uint8 [c, bytes of a chunk] -> places int64 [c, KEPT], values fp32 [c, KEPT]."""
    levels, high, picks = rows.split(PARTS, 1)
    spread = (high[:, :, None] >> _bits(rows) & 1).view(-1, HIGH_BITS)
    if not (spread.sum(1) == KEPT).all():
        raise ValueError(f"a sparse message has a chunk with other than {KEPT} places")
    places = spread.nonzero()[:, 1].view(-1, KEPT) - torch.arange(KEPT, device=rows.device)
    places = places * (1 << LOW) + (picks >> 2)
    if not ((places.diff(dim=1) > 0).all() and (places < CHUNK).all()):
        raise ValueError(f"a sparse message has places that do not ascend, or not below {CHUNK}")
    values = levels.contiguous().view(torch.bfloat16).float().gather(1, (picks & 1).long())
    return places, values * (1 - (picks & 2).float())


def _bits(like: Tensor) -> Tensor:
    return torch.arange(8, dtype=torch.uint8, device=like.device)
