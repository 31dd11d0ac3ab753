"""Attention in pieces, which holds no matrix of [s, s] and skips what no query sees.

A piece is some queries of one sample and the keys that they see. A document is one piece, short neighbours share one,
and where there is a window or a matrix of scores, pieces have at most BAND queries: windows cost s * w, and a
matrix lives only while its piece is computed. The backward computes scores again from the log of each row's sum (Dao
et al. 2022), so between forward and backward there are q, k, v, the output and [b, heads, s].

    q, k, v, out   as in attention.py
    sums           [b, heads, s], the log of each row's sum of exponentials, in at least fp32; with exp(sink) in it,
                   where heads have sinks. With such sums and outputs the backward of q, k and v is that without sinks
    sinks          [heads], or None
    bias           [queries, keys], added to scores; -inf for keys that are not seen
    pieces         int64 [n, 6] on the host: sample (-1: each one), first query, end of queries, first key, form, and
                   how far the queries lie before their position in the sample (Masking.queries). Padded with empty
                   ones, so that documents do not change its shape
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from megazero.config.model.attention import BAND
from megazero.models.dropout import Key, keyed_randomness
from megazero.models.masking import AttentionTables, Masking

# Forms of a piece: no bias; one of positions alone; that, and several documents.
CAUSAL, BIASED, MIXED = range(3)


def cut(masking: Masking, backend: str, length: int, like: Tensor) -> tuple[Tensor, Tensor | None]:
    """Return ``pieces`` of samples of ``length`` tokens, and ``starts`` where they are computed. The kernel of "math"
    has a matrix for each piece.
    """
    bounded = backend == "math" or masking.window is not None
    rows, most, before = list[tuple[int, ...]](), 0, 0
    for chunk in masking.chunks(length):
        starts = [[0]]
        if masking.starts is not None:
            of_chunk = masking.starts[:, before : before + len(chunk)].cpu()
            starts = [row.unique().tolist() for row in of_chunk]
        rows += [
            (-1 if masking.starts is None else sample, *piece, chunk.start - before)
            for sample, begins in enumerate(starts)
            for first, end in _together([chunk.start, *begins[1:], chunk.stop])
            for piece in _banded(first, end, begins, masking, bounded)
        ]
        most += len(starts) * (3 * (len(chunk) // BAND) + 2)
        before += len(chunk)
    pieces = torch.zeros(most, 6, dtype=torch.int64)
    pieces[: len(rows)] = torch.tensor(rows)
    return pieces, None if masking.starts is None else masking.starts.to(like.device, non_blocking=True)


def _together(bounds: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield (first, end) of each document of a chunk, and of neighbours that have no more than BAND tokens."""
    first = bounds[0]
    for end, after in zip(bounds[1:], (*bounds[2:], None), strict=True):
        if after is None or after - first > BAND:
            yield first, end
            first = end


def _banded(
    first: int, end: int, begins: Sequence[int], masking: Masking, bounded: bool
) -> Iterator[tuple[int, int, int, int]]:
    """Yield the pieces of [first, end), without the sample and the chunk's: in bands of queries if they are
    ``bounded`` or their document began before, so that the keys they see are no square.
    """
    inside = bisect_left(begins, end) - bisect_right(begins, first)  # documents that begin after ``first``
    begin, back = begins[bisect_right(begins, first) - 1], masking.window or end
    bounded = bounded or begin < first
    for query in range(first, end, BAND) if bounded else (first,):
        stop, key = min(query + BAND, end) if bounded else end, max(begin, query - back + 1)
        biased = key < query or stop - query > back
        yield query, stop, key, MIXED if inside else BIASED if biased else CAUSAL


def by_pieces(
    q: Tensor, k: Tensor, v: Tensor, tables: AttentionTables, dropout: float, key: Key | None
) -> Tensor:
    masking, matrix = tables.masking, tables.backend == "math"
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))  # else flash is silently wrong
    scores = (masking.scale, masking.cap, masking.window)
    return _pieces(q, k, v, tables.sinks, *tables.made, *scores, dropout, key, matrix)[0]


class _Piece(NamedTuple):
    """Where a piece lies. queries, keys: among its sample's. name: what keys its dropout."""

    sample: int
    queries: slice
    keys: slice
    bias: Tensor | None
    name: Key

    def take(self, x: Tensor, at: slice, groups: int) -> Tensor:
        """Return x [s, b, heads, d] of these tokens as a view [groups, heads / groups, tokens, d]."""
        return x[at, self.sample].unflatten(1, (groups, -1)).permute(1, 2, 0, 3)


def _each(q: Tensor, pieces: Tensor, masking: Masking, every: bool) -> Iterator[_Piece]:
    """Yield the pieces with their bias, or None for one that only is causal, unless ``every`` one needs it."""
    rows = [row for row in pieces.tolist() if row[2]]
    back = max(row[1] - row[3] for row in rows)
    most = max((row[2] - row[1] for row in rows if every or row[4] != CAUSAL), default=0)
    common = masking.bias(range(back, back + most), range(back + most), q)  # distances alone decide it
    for number, (of, first, end, start, form, before) in enumerate(rows):
        own = slice(first - before, end - before)
        for sample in range(q.shape[1]) if of < 0 else (of,):
            bias: Tensor | None = None
            if every or form != CAUSAL:
                bias = common[: end - first, back - first + start : back + end - first]
                if form == MIXED:
                    assert masking.starts is not None
                    begins = masking.starts[sample, own, None]
                    bias = bias.masked_fill(torch.arange(start, end, device=q.device) < begins, -torch.inf)
                bias = bias[None, None]
            yield _Piece(sample, own, slice(start, end), bias, (number, sample))


@torch.library.custom_op("megazero::attention_in_pieces", mutates_args=())
def _pieces(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    pieces: Tensor,
    starts: Tensor | None,
    scale: float,
    cap: float,
    window: int | None,
    dropout: float,
    key: Sequence[int] | None,
    matrix: bool,
) -> tuple[Tensor, Tensor]:
    """Return ``out`` and ``sums``. One operator, so that torch.compile neither unrolls pieces nor sees how many there
    are. matrix: by products of matrices, else by torch's flash attention for CPUs.
    """
    masking = Masking(scale, cap, window, starts)
    out, groups = torch.empty_like(q, memory_format=torch.contiguous_format), k.shape[2]
    sums = q.new_empty((*q.shape[1:3], q.shape[0]), dtype=torch.promote_types(q.dtype, torch.float32))
    for piece in _each(q, pieces, masking, matrix):
        own_q = piece.take(q, piece.queries, groups)
        own_k, own_v = (piece.take(x, piece.keys, groups) for x in (k, v))
        if matrix:
            assert piece.bias is not None  # every one has it
            with keyed_randomness(q.device, (*key, *piece.name) if key else None):
                part, row_sums = _matrix_forward(own_q, own_k, own_v, piece.bias, scale, cap, dropout)
        else:
            own_k, own_v = (x.expand(-1, own_q.shape[1], -1, -1) for x in (own_k, own_v))
            part, row_sums = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
                own_q, own_k, own_v, 0.0, piece.bias is None, attn_mask=piece.bias, scale=scale
            )
        piece.take(out, piece.queries, groups).copy_(part)
        sums[piece.sample, :, piece.queries] = row_sums.flatten(0, 1)
    if sinks is not None:
        own, sums = sums, sums.logaddexp(sinks[:, None].to(sums.dtype))
        out.mul_((own - sums).exp_().permute(2, 0, 1).unsqueeze(-1))
    return out, sums


@torch.library.custom_op("megazero::attention_in_pieces_backward", mutates_args=())
def _pieces_backward(
    gradient: Tensor,
    out: Tensor,
    sums: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    pieces: Tensor,
    starts: Tensor | None,
    scale: float,
    cap: float,
    window: int | None,
    dropout: float,
    key: Sequence[int] | None,
    matrix: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and v. Pieces that share keys add theirs in at least fp32."""
    masking, groups = Masking(scale, cap, window, starts), k.shape[2]
    dq = torch.empty_like(q, memory_format=torch.contiguous_format)
    wide = torch.promote_types(q.dtype, torch.float32)
    dk, dv = (torch.zeros_like(x, dtype=wide, memory_format=torch.contiguous_format) for x in (k, v))
    for piece in _each(q, pieces, masking, matrix):
        own_q, own_out, own = (piece.take(x, piece.queries, groups) for x in (q, out, gradient))
        own_k, own_v = (piece.take(x, piece.keys, groups) for x in (k, v))
        row_sums = sums[piece.sample, :, piece.queries].unflatten(0, (groups, -1))
        if matrix:
            assert piece.bias is not None  # every one has it
            with keyed_randomness(q.device, (*key, *piece.name) if key else None):
                parts = _matrix_backward(
                    own, own_q, own_k, own_v, own_out, row_sums, piece.bias, scale, cap, dropout
                )
        else:
            own_k, own_v = (x.expand(-1, own_q.shape[1], -1, -1) for x in (own_k, own_v))
            parts = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
                *(own, own_q, own_k, own_v, own_out, row_sums, 0.0, piece.bias is None),
                attn_mask=piece.bias,
                scale=scale,
            )
        piece.take(dq, piece.queries, groups).copy_(parts[0])
        for total, part in zip((dk, dv), parts[1:], strict=True):
            piece.take(total, piece.keys, groups).add_(part.sum(1, keepdim=True))
    return dq, dk.to(k.dtype), dv.to(v.dtype)


@_pieces.register_fake
def _(q: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    sums = q.new_empty((*q.shape[1:3], q.shape[0]), dtype=torch.promote_types(q.dtype, torch.float32))
    return torch.empty_like(q, memory_format=torch.contiguous_format), sums


@_pieces_backward.register_fake
def _(gradient: Tensor, out: Tensor, sums: Tensor, *inputs: Any) -> tuple[Tensor, ...]:
    return tuple(torch.empty_like(x, memory_format=torch.contiguous_format) for x in inputs[:3])


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*output, *inputs[:6])
    ctx.scores = inputs[6:]
    ctx.mark_non_differentiable(output[1])


def _differentiate(ctx: Any, gradient: Tensor, _: Any) -> tuple[Any, ...]:
    out, sums, q, k, v, sinks, *made = ctx.saved_tensors
    found = _pieces_backward(gradient, out, sums, q, k, v, *made, *ctx.scores)
    return (*found, _of_sinks(gradient, out, sums, sinks), *([None] * 8))


def _of_sinks(gradient: Tensor, out: Tensor, sums: Tensor, sinks: Tensor | None) -> Tensor | None:
    """Return the gradient of the sinks: their values are zeros, which each row of outputs lacks."""
    if sinks is None:
        return None
    weights = (sinks[:, None] - sums).exp()
    rows = (gradient.to(sums.dtype) * out).sum(-1).permute(1, 2, 0)
    return -(weights * rows).sum((0, 2)).to(sinks.dtype)


_pieces.register_autograd(_differentiate, setup_context=_keep)


def _scores(q: Tensor, k: Tensor, bias: Tensor, scale: float, cap: float) -> tuple[Tensor, Tensor | None]:
    """Return scores [groups, heads / groups, queries, keys] in at least fp32, and tanh(s / cap) of capped ones."""
    products = (q * scale).flatten(1, 2) @ k[:, 0].mT  # the heads of a group in one matrix
    scores = products.to(torch.promote_types(q.dtype, torch.float32)).unflatten(1, q.shape[1:3])
    bounded = (scores / cap).tanh_() if cap else None
    return (scores if bounded is None else bounded * cap) + bias, bounded


def _matrix_forward(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor, scale: float, cap: float, dropout: float
) -> tuple[Tensor, Tensor]:
    scores, _ = _scores(q, k, bias, scale, cap)
    sums = scores.logsumexp(-1)
    weights = F.dropout(scores.sub_(sums.unsqueeze(-1)).exp_().to(q.dtype), dropout)
    return (weights.flatten(1, 2) @ v[:, 0]).unflatten(1, q.shape[1:3]), sums


def _matrix_backward(
    gradient: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    sums: Tensor,
    bias: Tensor,
    scale: float,
    cap: float,
    dropout: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of a piece's q, and of k and v [groups, 1, keys, d]."""
    scores, bounded = _scores(q, k, bias, scale, cap)
    weights = scores.sub_(sums.unsqueeze(-1)).exp_()
    kept = F.dropout(torch.ones_like(weights, dtype=q.dtype), dropout).to(weights.dtype) if dropout else None
    used = weights if kept is None else weights * kept
    flat = gradient.flatten(1, 2)
    dv = used.to(q.dtype).flatten(1, 2).mT @ flat
    of_used = (flat @ v[:, 0].mT).to(weights.dtype).unflatten(1, q.shape[1:3])
    if kept is not None:
        of_used.mul_(kept)
    rows = (gradient.to(weights.dtype) * out.to(weights.dtype)).sum(-1, keepdim=True)
    of_scores = of_used.sub_(rows).mul_(weights)
    if bounded is not None:
        of_scores.mul_(1 - bounded.square_())
    narrow = of_scores.mul_(scale).to(q.dtype).flatten(1, 2)
    dk = narrow.mT @ q.flatten(1, 2)
    return (narrow @ k[:, 0]).unflatten(1, q.shape[1:3]), dk[:, None], dv[:, None]
