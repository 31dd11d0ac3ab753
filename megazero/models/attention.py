"""Causal attention: what it computes, as a description without kernels, and the backends that compute it.

A query sees the keys from the first token of its window or document, whichever is later, up to itself. So without
documents, windows and ALiBi torch's kernels need no mask. With them no backend holds one of [s, s] for samples above
DENSE_TOKENS: variable lengths (torch's, flash-attn) say where documents end, flex attention knows which blocks are
hidden, and on CPUs samples are cut into pieces.

A piece is some queries of one sample and the keys that they see. A document is one piece, short neighbours share one,
and where there is a window, ALiBi or a matrix of scores, pieces have at most BAND queries: windows cost s * w, and a
matrix lives only while its piece is computed. The backward computes scores again from the log of each row's sum (Dao
et al. 2022), so between forward and backward there are q, k, v, the output and [b, heads, s].

    q              [s, b, heads, d]
    k, v           [s, b, kv heads, d]; heads / kv heads neighbouring query heads share one
    out            as q
    sums           [b, heads, s], the log of each row's sum of exponentials, in at least fp32
    bias           [1 or heads, queries, keys], added to scores; -inf for keys that are not seen
    pieces         int64 [n, 5] on the host: sample (-1: each one), first query, end of queries, first key, form.
                   Padded with empty ones, so that documents do not change its shape
"""

from __future__ import annotations

import hashlib
import inspect
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import lru_cache
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.backends import cuda
from torch.nn.attention import SDPBackend, sdpa_kernel, varlen
from torch.nn.attention import flex_attention as flex

from megazero.config.model.attention import BAND, PLAIN, TORCH, Wants, able, pick, wants_of
from megazero.config.model.section import ModelConfig
from megazero.models.dropout import Key
from megazero.tp import TensorParallel

FLEX_BLOCK = 128
LENGTHS = 64  # of samples in a run, for which torch.compile makes graphs
CAUSAL, BIASED, MIXED = range(
    3
)  # forms of a piece: no bias; one of positions alone; that, and several documents
_KERNELS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
}


class Masking(NamedTuple):
    """What attention computes beside that a query sees no later keys. Nothing here has s * s elements.

    scale: factor of scores. cap: scores s become cap * tanh(s / cap); 0 for none.
    window: tokens that a query sees, its own included, if they are fewer than the sample's.
    starts: int64 [b, s], where in the sample each query's document begins, if attention stays within documents; on
        the host, so that nobody waits for a device to know where they end.
    slopes: ALiBi's [heads of this rank], at least fp32; slope * (key - query) is added to capped scores.
    steps: scaled ALiBi's [heads of this rank, s] instead; steps[key] - steps[query] is added.
    """

    scale: float
    cap: float = 0.0
    window: int | None = None
    starts: Tensor | None = None
    slopes: Tensor | None = None
    steps: Tensor | None = None

    @property
    def plain(self) -> bool:
        """Tell whether torch's causal attention is all."""
        return not self.cap and self.window is None and self.starts is None and not self.biased

    @property
    def biased(self) -> bool:
        return self.slopes is not None or self.steps is not None

    def dense(self, length: int, like: Tensor) -> Tensor:
        """Return all but scale and cap as one additive mask [b or 1, heads or 1, s, s], like ``like``."""
        bias = self.bias(range(length), range(length), like)
        if self.starts is None:
            return bias[None]
        starts = self.starts.to(like.device, non_blocking=True)
        hidden = torch.arange(length, device=like.device) < starts.unsqueeze(-1)
        return bias.masked_fill(hidden.unsqueeze(1), -torch.inf)

    def bias(self, queries: range, keys: range, like: Tensor) -> Tensor:
        """Return the bias of these positions, documents aside, like ``like``."""
        at = torch.arange(queries.start, queries.stop, device=like.device)[:, None]
        distance = torch.arange(keys.start, keys.stop, device=like.device) - at
        hidden = distance > 0
        if self.window is not None:
            hidden |= distance <= -self.window
        if self.steps is not None:
            rows, columns = self.steps[:, queries.start : queries.stop], self.steps[:, keys.start : keys.stop]
            added = columns[:, None] - rows[:, :, None]
        elif self.slopes is not None:
            added = self.slopes[:, None, None] * distance
        else:
            added = like.new_zeros(1, 1, 1).expand(1, *hidden.shape)
        return added.masked_fill(hidden, -torch.inf).to(like.dtype)


class AttentionTables(NamedTuple):
    """What the layers of one kind are given for one micro-batch: ``masking``, the backend that computes it, and what
    that backend made of documents and positions.
    """

    masking: Masking
    backend: str
    made: Any = None


def make_tables(masking: Masking, backend: str, length: int, like: Tensor) -> AttentionTables:
    """Return a backend's tables for samples of ``length`` tokens, on the device and in the dtype of ``like``."""
    make = _WAYS[_way(masking, backend, like.device)].make
    return AttentionTables(masking, backend, make(masking, backend, length, like))


def attend(
    q: Tensor, k: Tensor, v: Tensor, tables: AttentionTables, dropout: float = 0.0, key: Key | None = None
) -> Tensor:
    """Return attention [s, b, heads, d] of q [s, b, heads, d] and of k and v [s, b, kv heads, d].

    dropout: the probability of a weight to be dropped, with the mask of ``key``. Without a key nothing is dropped.
    """
    compute = _WAYS[_way(tables.masking, tables.backend, q.device)].compute
    if key is None or dropout == 0:
        return compute(q, k, v, tables, 0.0, None)
    return compute(q, k, v, tables, dropout, key)


@contextmanager
def keyed_randomness(device: torch.device, key: Key | None) -> Iterator[None]:
    """Seed the device's default generator from ``key`` inside the block, and put its state back after. Without a key
    do nothing.
    """
    if key is None:
        yield
        return
    if device.type == "cuda":
        torch.cuda.init()
        index = device.index if device.index is not None else torch.cuda.current_device()
        generator = torch.cuda.default_generators[index]
    else:
        generator = torch.default_generator
    state = generator.get_state()
    digest = hashlib.blake2b(repr(key).encode(), digest_size=8).digest()
    generator.manual_seed(int.from_bytes(digest, "little") >> 1)
    try:
        yield
    finally:
        generator.set_state(state)


# --- torch's scaled_dot_product_attention ---------------------------------------------------------------------------


@torch.compiler.assume_constant_result  # torch.compile does not trace SDPAParams
def fused(
    heads: int, groups: int, width: int, dtype: torch.dtype, device: torch.device, dropout: float
) -> bool:
    """Return whether a fused CUDA kernel takes causal attention of ``heads`` heads over ``groups`` as they are.

    Of those that ``sdpa_kernel`` allows. The answer is False for other devices. cuDNN's kernel is not asked: where
    the other two refuse, torch prefers math to it.
    """
    q, k = (
        torch.empty(1, each, 64, width, device=device, dtype=dtype, requires_grad=True)
        for each in (heads, groups)
    )
    inputs = cuda.SDPAParams(q, k, k, None, dropout, True, heads != groups)
    return cuda.can_use_flash_attention(inputs) or cuda.can_use_efficient_attention(inputs)


def _torch_mask(masking: Masking, backend: str, length: int, like: Tensor) -> Tensor | None:
    return None if masking.plain else masking.dense(length, like)


def _by_torch(
    q: Tensor, k: Tensor, v: Tensor, tables: AttentionTables, dropout: float, key: Key | None
) -> Tensor:
    mask, kernel = tables.made, _KERNELS.get(tables.backend)
    q, k, v = (t.permute(1, 2, 0, 3) for t in (q, k, v))
    repeat = q.shape[1] // k.shape[1]
    with keyed_randomness(q.device, key), sdpa_kernel(kernel) if kernel else nullcontext():
        grouped = repeat > 1 and q.is_cuda and mask is None  # no kernel takes groups with a mask
        grouped = grouped and fused(q.shape[1], k.shape[1], q.shape[3], q.dtype, q.device, dropout)
        if repeat > 1 and not grouped:
            # On a GPU so that a fused kernel runs: without copies fp32 and ALiBi mostly fall to the math kernel.
            # On the CPU copies are as fast as enable_gqa in fp32 (261 and 256 ms) and faster in bf16
            # (252 and 334 ms: 4 x 512 tokens, 16 heads over 4, width 64, one thread).
            k, v = (t.unsqueeze(2).expand(-1, -1, repeat, -1, -1).flatten(1, 2) for t in (k, v))
        out = F.scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=mask,
            dropout_p=dropout,
            is_causal=mask is None,
            scale=tables.masking.scale,
            enable_gqa=grouped,
        )
    return out.permute(2, 0, 1, 3)


# --- pieces ---------------------------------------------------------------------------------------------------------


def cut(masking: Masking, backend: str, length: int, like: Tensor) -> tuple[Tensor, Tensor | None]:
    """Return ``pieces`` of samples of ``length`` tokens, and ``starts`` where they are computed. The kernel of "math"
    has a matrix for each piece.
    """
    bounded = backend == "math" or masking.biased or masking.window is not None
    starts = [[0]] if masking.starts is None else [row.unique().tolist() for row in masking.starts.cpu()]
    rows = [
        (-1 if masking.starts is None else sample, *piece)
        for sample, begins in enumerate(starts)
        for first, end in _together([*begins, length])
        for piece in _banded(first, end, begins, masking, bounded)
    ]
    pieces = torch.zeros(len(starts) * (3 * (length // BAND) + 2), 5, dtype=torch.int64)
    pieces[: len(rows)] = torch.tensor(rows)
    return pieces, None if masking.starts is None else masking.starts.to(like.device, non_blocking=True)


def _together(bounds: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield (first, end) of each document, and of neighbouring documents that have no more than BAND tokens."""
    first = bounds[0]
    for end, after in zip(bounds[1:], (*bounds[2:], None), strict=True):
        if after is None or after - first > BAND:
            yield first, end
            first = end


def _banded(
    first: int, end: int, begins: Sequence[int], masking: Masking, bounded: bool
) -> Iterator[tuple[int, int, int, int]]:
    """Yield the pieces of [first, end), without the sample: in bands of queries if they are ``bounded``."""
    inside = bisect_left(begins, end) - bisect_right(begins, first)  # documents that begin after ``first``
    back = masking.window or end
    for query in range(first, end, BAND) if bounded else (first,):
        stop, key = min(query + BAND, end) if bounded else end, max(first, query - back + 1)
        biased = masking.biased or key < query or stop - query > back
        yield query, stop, key, MIXED if inside else BIASED if biased else CAUSAL


def _in_pieces(
    q: Tensor, k: Tensor, v: Tensor, tables: AttentionTables, dropout: float, key: Key | None
) -> Tensor:
    masking, matrix = tables.masking, tables.backend == "math"
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))  # else flash is silently wrong
    scores = (masking.slopes, masking.steps, masking.scale, masking.cap, masking.window)
    return _pieces(q, k, v, *tables.made, *scores, dropout, key, matrix)[0]


class _Piece(NamedTuple):
    """Where a piece lies. queries, keys: of its sample. name: what keys its dropout."""

    sample: int
    queries: slice
    keys: slice
    bias: Tensor | None
    name: Key

    def take(self, x: Tensor, at: slice, groups: int) -> Tensor:
        """Return x [s, b, heads, d] of these tokens as a view [groups, heads / groups, tokens, d]."""
        return x[at, self.sample].unflatten(1, (groups, -1)).permute(1, 2, 0, 3)


def _each(q: Tensor, k: Tensor, pieces: Tensor, masking: Masking, every: bool) -> Iterator[_Piece]:
    """Yield the pieces with their bias, or None for one that only is causal, unless ``every`` one needs it."""
    rows = [row for row in pieces.tolist() if row[2]]
    back = max(row[1] - row[3] for row in rows)
    most = max(row[2] - row[1] for row in rows if every or row[4]) if every or any(r[4] for r in rows) else 0
    # Distances alone decide it, so bands share one. Scaled ALiBi is rounded at each position.
    common = masking.bias(range(back, back + most), range(back + most), q) if masking.steps is None else None
    for number, (of, first, end, start, form) in enumerate(rows):
        for sample in range(q.shape[1]) if of < 0 else (of,):
            bias: Tensor | None = None
            if every or form != CAUSAL:
                bias = (
                    masking.bias(range(first, end), range(start, end), q)
                    if common is None
                    else common[:, : end - first, back - first + start : back + end - first]
                )
            if form == MIXED:
                assert bias is not None and masking.starts is not None
                begins = masking.starts[sample, first:end, None]
                bias = bias.masked_fill(torch.arange(start, end, device=q.device) < begins, -torch.inf)
            if bias is not None:
                bias = bias.unflatten(0, (k.shape[2], -1) if len(bias) > 1 else (1, 1))
            yield _Piece(sample, slice(first, end), slice(start, end), bias, (number, sample))


@torch.library.custom_op("megazero::attention_in_pieces", mutates_args=())
def _pieces(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    pieces: Tensor,
    starts: Tensor | None,
    slopes: Tensor | None,
    steps: Tensor | None,
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
    masking = Masking(scale, cap, window, starts, slopes, steps)
    out, groups = torch.empty_like(q, memory_format=torch.contiguous_format), k.shape[2]
    sums = q.new_empty((*q.shape[1:3], q.shape[0]), dtype=torch.promote_types(q.dtype, torch.float32))
    for piece in _each(q, k, pieces, masking, matrix):
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
    slopes: Tensor | None,
    steps: Tensor | None,
    scale: float,
    cap: float,
    window: int | None,
    dropout: float,
    key: Sequence[int] | None,
    matrix: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and v. Pieces that share keys add theirs in at least fp32."""
    masking, groups = Masking(scale, cap, window, starts, slopes, steps), k.shape[2]
    dq = torch.empty_like(q, memory_format=torch.contiguous_format)
    wide = torch.promote_types(q.dtype, torch.float32)
    dk, dv = (torch.zeros_like(x, dtype=wide, memory_format=torch.contiguous_format) for x in (k, v))
    for piece in _each(q, k, pieces, masking, matrix):
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
    ctx.save_for_backward(*output, *inputs[:7])
    ctx.scores = inputs[7:]
    ctx.mark_non_differentiable(output[1])


def _differentiate(ctx: Any, gradient: Tensor, _: Any) -> tuple[Any, ...]:
    out, sums, *inputs = ctx.saved_tensors
    found = _pieces_backward(gradient, out, sums, *inputs, *ctx.scores)
    return (*found, *([None] * 10))


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


# --- variable lengths -----------------------------------------------------------------------------------------------


def cumulative_lengths(masking: Masking, backend: str, length: int, like: Tensor) -> Tensor | None:
    """Return where documents begin in the samples laid end to end, closed by their end: int32 [n + 1].

    Empty ones at the end fill n to a power of two, so that few sizes are compiled. None without documents.
    """
    if masking.starts is None:
        return None
    starts = masking.starts.cpu()
    begins = (starts == torch.arange(length)).flatten().nonzero().flatten()
    padded = torch.full((1 + (1 << (len(begins) - 1).bit_length()),), starts.numel(), dtype=torch.int32)
    padded[: len(begins)] = begins
    return padded.to(like.device, non_blocking=True)


def _by_lengths(
    q: Tensor, k: Tensor, v: Tensor, tables: AttentionTables, dropout: float, key: Key | None
) -> Tensor:
    """Lay the samples end to end, [b * s, heads, d], and compute each document by itself."""
    (length, size), masking = q.shape[:2], tables.masking
    ends = tables.made
    if ends is None:
        ends = torch.arange(0, (size + 1) * length, length, dtype=torch.int32, device=q.device)
    q, k, v = (x.transpose(0, 1).flatten(0, 1) for x in (q, k, v))
    back = -1 if masking.window is None else masking.window - 1
    out: Any
    if tables.backend == "flash":
        out = varlen.varlen_attn(
            *(q, k, v, ends, ends, length, length),
            scale=masking.scale,
            window_size=(back, 0),
            enable_gqa=q.shape[1] != k.shape[1],
        )
    else:
        import flash_attn  # not import_module, which torch.compile does not trace

        with keyed_randomness(q.device, key):
            out = flash_attn.flash_attn_varlen_func(
                *(q, k, v, ends, ends, length, length),
                dropout_p=dropout,
                softmax_scale=masking.scale,
                causal=True,
                window_size=(back, back if back < 0 else 0),
                softcap=masking.cap,
                alibi_slopes=None if masking.slopes is None else masking.slopes.float(),
                deterministic=torch.are_deterministic_algorithms_enabled(),
            )
    return out.unflatten(0, (size, length)).transpose(0, 1)


# --- flex attention -------------------------------------------------------------------------------------------------


def block_mask(masking: Masking, backend: str, length: int, like: Tensor) -> flex.BlockMask:
    """Return which blocks of queries and keys are computed, for flex attention.

    The first key that a query sees never goes back as queries go on. So the blocks that a block of queries needs are
    those from its first query's first key to itself, and between its last query's first key and itself no key is
    hidden. Their numbers are computed from [b, s], never from [b, s, s].
    """
    at = torch.arange(length, device=like.device)
    first = torch.zeros_like(at)[None] if masking.starts is None else masking.starts.to(like.device)
    if masking.window is not None:
        first = torch.maximum(first, at - (masking.window - 1))
    block = torch.arange(-(-length // FLEX_BLOCK), device=like.device)
    low = first[:, ::FLEX_BLOCK] // FLEX_BLOCK  # [b or 1, blocks]
    last = (block * FLEX_BLOCK + FLEX_BLOCK - 1).clamp_max(length - 1)
    clear = -(-first[:, last] // FLEX_BLOCK)  # from here to before the block itself nothing is hidden
    clear = torch.minimum(clear, block)
    partial, full = (clear - low) + 1, block - clear
    order = block.expand(*low.shape, -1)
    # The partial ones are low .. clear - 1 and the block itself; those after them are not read.
    indices = torch.where(order < (clear - low)[..., None], low[..., None] + order, block[:, None])

    def seen(b: Tensor, h: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (key <= query) & (key >= first[b if len(first) > 1 else 0, query])

    return flex.BlockMask.from_kv_blocks(
        partial[:, None].int(),
        indices[:, None].int(),
        full[:, None].int(),
        (clear[..., None] + order).clamp_max(len(block) - 1)[:, None].int(),
        BLOCK_SIZE=FLEX_BLOCK,
        mask_mod=seen,
        seq_lengths=(length, length),
    )


def changed_scores(masking: Masking) -> Callable[..., Tensor] | None:
    """Return what flex attention does to a scaled score of (sample, head, query, key): the cap, then ALiBi."""
    cap, slopes, steps = masking.cap, masking.slopes, masking.steps

    def change(score: Tensor, b: Tensor, h: Tensor, query: Tensor, key: Tensor) -> Tensor:
        if cap:
            score = torch.tanh(score / cap) * cap
        if steps is not None:
            return score + (steps[h, key] - steps[h, query])
        return score if slopes is None else score + slopes[h] * (key - query)

    return change if cap or masking.biased else None


def _by_flex(
    q: Tensor, k: Tensor, v: Tensor, tables: AttentionTables, dropout: float, key: Key | None
) -> Tensor:
    q, k, v = (x.permute(1, 2, 0, 3) for x in (q, k, v))
    compiled = q.is_cuda and not torch.compiler.is_compiling()  # uncompiled, it holds all scores
    function: Any = _compiled_flex() if compiled else flex.flex_attention
    out = function(
        *(q, k, v, changed_scores(tables.masking), tables.made),
        scale=tables.masking.scale,
        enable_gqa=q.shape[1] != k.shape[1],
    )
    return out.permute(2, 0, 1, 3)


@lru_cache
def _compiled_flex() -> Callable[..., Any]:
    allow_graphs(2)  # with a window and without
    return torch.compile(flex.flex_attention, fullgraph=True, dynamic=False)


def allow_graphs(kinds: int) -> None:
    """Let torch.compile make graphs of ``kinds`` kinds of layers for LENGTHS lengths, training and evaluation.

    Beyond torch's own limit of 8 it would compute uncompiled, or fail.
    """
    from torch._dynamo import config as dynamo

    limit = 2 * LENGTHS * kinds
    dynamo.recompile_limit = max(dynamo.recompile_limit, limit)
    dynamo.accumulated_recompile_limit = max(dynamo.accumulated_recompile_limit, 4 * limit)


# --- which of them runs ---------------------------------------------------------------------------------------------


class _Way(NamedTuple):
    """How some backends compute: what they make before the layers, and what they do in one."""

    make: Callable[[Masking, str, int, Tensor], Any]
    compute: Callable[[Tensor, Tensor, Tensor, AttentionTables, float, Key | None], Tensor]


_WAYS = {
    "torch": _Way(_torch_mask, _by_torch),
    "pieces": _Way(cut, _in_pieces),
    "lengths": _Way(cumulative_lengths, _by_lengths),
    "flex": _Way(block_mask, _by_flex),
}


def _way(masking: Masking, backend: str, device: torch.device) -> str:
    if backend == "math":
        return "pieces"
    if backend == "flash" and not masking.plain:
        return "pieces" if device.type == "cpu" else "lengths"
    return {"flash-attn": "lengths", "flex": "flex"}.get(backend, "torch")


@lru_cache
def missing_backends() -> dict[str, str]:
    """Return the backends for GPUs that this installation lacks, with what is missing. "flash" is only missing for
    documents and windows.
    """
    found = dict[str, str]()
    if find_spec("flash_attn") is None:
        found["flash-attn"] = "the package flash-attn is not installed"
    if find_spec("triton") is None:
        found["flex"] = "the package triton is not installed"
    if absent := {"scale", "window_size", "enable_gqa"} - set(
        inspect.signature(varlen.varlen_attn).parameters
    ):
        words = ", ".join(sorted(absent))
        found["flash"] = f"varlen_attn of torch {torch.__version__} has no {words}"
    return found


def choose(choice: str, wants: Wants, dtype: torch.dtype, length: int, device: torch.device) -> str:
    """Return the backend of this choice, which may be "auto", for samples of ``length`` tokens.

    Raises ValueError if it does not compute what is wanted on this device, or is not installed.
    """
    gpu, bits = device.type != "cpu", 8 * dtype.itemsize
    missing = missing_backends() if gpu else {}
    name = pick(choice, wants, bits, length, "cuda" if gpu else "cpu", missing)
    if name in missing and not (name == "flash" and wants <= PLAIN):
        others = [each.name for each in able(wants, bits, length, "cuda") if each.name not in missing]
        raise ValueError(f"--attention-backend {name}: {missing[name]}; nearest: {', '.join(others)}")
    return name


def attention_note(
    model: ModelConfig,
    tp: TensorParallel,
    device: torch.device,
    dtype: torch.dtype,
    choice: str = "auto",
    documents: bool = False,
) -> str | None:
    """Return what to say of attention at the start of a run, or None where it is plain and has a fused kernel.

    choice: --attention-backend. documents: attention stays within documents. Raises ValueError as ``choose``.
    """
    wants = wants_of(model, documents)
    backend = choose(choice, wants, dtype, model.seq_length, device)
    if backend == "math" and choice == "auto" and device.type != "cpu":
        lacking = "; ".join(f"{name}: {why}" for name, why in missing_backends().items())
        return (
            f"attention runs in matrix products in bands of queries (--attention-backend math): no kernel here "
            f"computes {' and '.join(sorted(wants))} in {_word(dtype)}{f' ({lacking})' if lacking else ''}"
        )
    if wants - PLAIN:
        return f"attention with {' and '.join(sorted(wants))}: --attention-backend {backend}"
    if backend == TORCH and device.type != "cpu":
        heads = tp.share(model.num_attention_heads, "num_attention_heads")
        if not fused(heads, heads, model.kv_channels, dtype, device, model.attention_dropout):
            return (
                "attention runs in torch's math kernel, which keeps a matrix of length x length per head: no fused "
                f"one takes {heads} heads of {model.kv_channels} in {_word(dtype)} on this GPU; bf16 and a head size "
                "that is a multiple of 8 get one, and --attention-backend math keeps no such matrix"
            )
    return None


def _word(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
