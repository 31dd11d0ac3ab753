"""What mixers share whose tokens meet in a state: a convolution before it, and the decays of its chunks.

A state decays by a_t at token t. Within a chunk of tokens all are products of matrices; between chunks there is the
state alone.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megazero.config.model.mixers.mixer import CHUNK


class CausalConvolution(nn.Module):
    """Computes y_t = sum over j of w_j x_(t-j), of each channel by itself.

    ``weight`` is [channels, 1, kernel]; its last element is that of the token itself, as torch's Conv1d has it.
    ``bias`` is [channels].
    """

    def __init__(self, channels: int, kernel: int, *, bias: bool = False, **factory: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(channels, 1, kernel, **factory))
        self.bias = nn.Parameter(torch.empty(channels, **factory)) if bias else None

    def forward(self, x: Tensor, starts: Tensor | None) -> Tensor:
        """``x`` is [s, b, channels], as the result. starts: int64 [b, s], where each token's document begins."""
        length, taps = x.shape[0], self.weight[:, 0].unbind(-1)
        padded = F.pad(x, (0, 0, 0, 0, len(taps) - 1, 0))  # views of it are kept, not copies
        out = x * taps[-1] if self.bias is None else torch.addcmul(self.bias, x, taps[-1])
        for back in range(1, len(taps)):
            moved = padded[len(taps) - 1 - back :][:length]
            if starts is not None:
                at = torch.arange(length, device=x.device)
                moved = moved * (at - back >= starts).t().unsqueeze(-1)
            out = torch.addcmul(out, moved, taps[-1 - back])
        return out


class Decays(NamedTuple):
    """The decays in chunks, [chunks, b, heads, tokens]: from a chunk's beginning to a token's state, and from there
    to the chunk's end. through: of the whole chunk, [chunks, b, heads, 1]. between: from the second token's state
    to the first's, [chunks, b, heads, tokens, tokens], 0 where the first does not see the second.
    """

    begin: Tensor
    end: Tensor
    through: Tensor
    between: Tensor


def chunked(x: Tensor) -> Tensor:
    """Cut [s, b, heads, ...] into [chunks, b, heads, tokens, ...]. What is added at the end changes no state."""
    size = min(CHUNK, x.shape[0])
    more = F.pad(x, (0, 0) * (x.ndim - 1) + (0, -x.shape[0] % size))
    return more.unflatten(0, (-1, size)).movedim(1, 3)


def joined(x: Tensor, length: int) -> Tensor:
    """Return [s, b, heads, ...] of what ``chunked`` cut, without what it added."""
    return x.movedim(3, 1).flatten(0, 1)[:length]


def decays(logs: Tensor, starts: Tensor | None) -> Decays:
    """Return the decays of log a, [s, b, heads]. starts: int64 [b, s], where each token's document begins, if the
    state ends with a document."""
    total = chunked(logs).cumsum(-1)
    seen = torch.ones(total.shape[-1], total.shape[-1], dtype=torch.bool, device=logs.device).tril()
    begin, end, through = total.exp(), (total[..., -1:] - total).exp(), total[..., -1:].exp()
    if starts is not None:
        documents = chunked(starts.t().unsqueeze(-1))
        last = documents[..., -1:]
        before = torch.cat((last[:1], last[:-1]))
        seen = seen & (documents.unsqueeze(-1) == documents.unsqueeze(-2))
        begin, end, through = (
            begin * (documents == before),
            end * (documents == last),
            through * (last == before),
        )
    between = (total.unsqueeze(-1) - total.unsqueeze(-2)).masked_fill(~seen, -torch.inf).exp()
    return Decays(begin, end, through, between)


def wide(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)
