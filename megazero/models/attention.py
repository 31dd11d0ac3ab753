"""Causal attention as ``Masking`` describes it: the backends that compute it, and which of them runs.

With documents or windows no backend holds a mask of [s, s] for samples above DENSE_TOKENS: variable lengths
(torch's, flash-attn) say where documents end, flex attention knows which blocks are hidden, and on CPUs samples are
cut into pieces (attention_pieces.py).

    q              [s, b, heads, d]; of context-parallel ranks that gather keys, those at ``Masking.queries`` alone
    k, v           [s, b, kv heads, d]; heads / kv heads neighbouring query heads share one
    out            as q
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import nullcontext
from functools import lru_cache
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.backends import cuda
from torch.nn.attention import SDPBackend, sdpa_kernel, varlen
from torch.nn.attention import flex_attention as flex

from megazero.config.model.attention import PLAIN, TORCH, Wants, able, pick, wants_of
from megazero.config.model.mixers import mixers_of
from megazero.config.model.section import ModelConfig
from megazero.models.attention_pieces import by_pieces, cut
from megazero.models.dropout import Key, keyed_randomness
from megazero.models.masking import AttentionTables, Masking
from megazero.tp import TensorParallel

FLEX_BLOCK = 128
LENGTHS = 64  # of samples in a run, for which torch.compile makes graphs
_KERNELS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
}


def make_tables(masking: Masking, backend: str, length: int, like: Tensor) -> AttentionTables:
    """Return a backend's tables for samples of ``length`` tokens, on the device and in the dtype of ``like``."""
    make = _WAYS[_way(masking, backend, like.device)].make
    return AttentionTables(masking, backend, make(masking, backend, length, like))


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    tables: AttentionTables,
    dropout: float = 0.0,
    key: Key | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Return attention [queries, b, heads, d] of q [queries, b, heads, d] and of k and v [s, b, kv heads, d].

    Narrower values get zeros, and the result their width: most kernels take heads of one width.
    dropout: the probability of a weight to be dropped, with the mask of ``key``. Without a key nothing is dropped.
    sinks: [heads], where ``Masking.sinks``: weights are exp(score) over sum of exp(scores) + exp(sink).
    """
    assert tables.masking.sinks == (sinks is not None)
    tables = tables._replace(sinks=sinks)
    compute = _WAYS[_way(tables.masking, tables.backend, q.device)].compute
    if key is None or dropout == 0:
        dropout, key = 0.0, None
    width = v.shape[-1]
    if width == q.shape[-1]:
        return compute(q, k, v, tables, dropout, key)
    return compute(q, k, F.pad(v, (0, q.shape[-1] - width)), tables, dropout, key)[..., :width]


# --- torch's scaled_dot_product_attention ---------------------------------------------------------------------------


@torch.compiler.assume_constant_result  # torch.compile does not trace SDPAParams
def fused(
    heads: int, groups: int, width: int, dtype: torch.dtype, device: torch.device, dropout: float
) -> bool:
    """Return whether a fused CUDA kernel takes causal attention of ``heads`` heads over ``groups`` as they are.

    Of those that ``sdpa_kernel`` allows. The answer is False for other devices. cuDNN's kernel is not asked: where
    the other two refuse, torch prefers math to it.
    """
    allowed = cuda.flash_sdp_enabled(), cuda.mem_efficient_sdp_enabled()
    return _fused(allowed, heads, groups, width, dtype, device, dropout)


@lru_cache  # every layer of every forward asks: two tensors and two checks, some 30 us
def _fused(
    allowed: tuple[bool, bool],
    heads: int,
    groups: int,
    width: int,
    dtype: torch.dtype,
    device: torch.device,
    dropout: float,
) -> bool:
    """Answer ``fused``. allowed: whether flash and memory-efficient kernels may run, which the answer depends on."""
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
            # On a GPU so that a fused kernel runs: without copies fp32 and masks mostly fall to the math kernel.
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


# --- variable lengths -----------------------------------------------------------------------------------------------


def cumulative_lengths(
    masking: Masking, backend: str, length: int, like: Tensor
) -> list[tuple[Tensor, Tensor]] | None:
    """Return, for each chunk of queries, where documents begin in the samples laid end to end, closed by their end:
    among the chunk's queries and among the keys up to its last, int32 [n + 1] each.

    Empty ones at the end fill n to a power of two, so that few sizes are compiled. None without documents.
    """
    if masking.starts is None:
        return None
    made, before = list[tuple[Tensor, Tensor]](), 0
    for chunk in masking.chunks(length):
        starts = masking.starts[:, before : before + len(chunk)].cpu()
        begins = starts == torch.arange(chunk.start, chunk.stop)
        begins[:, 0] = True  # or before the chunk
        samples, at = begins.nonzero(as_tuple=True)
        queries = samples * len(chunk) + at
        keys = samples * chunk.stop + starts[samples, at]
        if chunk.start:  # keys before a chunk's first document: a document of no queries
            every = torch.arange(len(starts))
            queries = torch.cat((queries, every * len(chunk))).sort().values
            keys = torch.cat((keys, every * chunk.stop)).sort().values
        ends = _padded(queries, len(starts) * len(chunk)), _padded(keys, len(starts) * chunk.stop)
        made.append((ends[0].to(like.device, non_blocking=True), ends[1].to(like.device, non_blocking=True)))
        before += len(chunk)
    return made


def _padded(begins: Tensor, end: int) -> Tensor:
    padded = torch.full((1 + (1 << (len(begins) - 1).bit_length()),), end, dtype=torch.int32)
    padded[: len(begins)] = begins
    return padded


def _by_lengths(
    q: Tensor, k: Tensor, v: Tensor, tables: AttentionTables, dropout: float, key: Key | None
) -> Tensor:
    """Compute each chunk of queries with the keys up to its last: kernels let the last query see the last key."""
    parts: list[Tensor] = []  # torch.compile does not trace list[Tensor]()
    before = 0
    for number, chunk in enumerate(tables.masking.chunks(k.shape[0])):
        seen = (q[before : before + len(chunk)], k[: chunk.stop], v[: chunk.stop])
        ends = None if tables.made is None else tables.made[number]
        parts.append(_end_to_end(*seen, ends, tables, dropout, (*key, number) if key and number else key))
        before += len(chunk)
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _end_to_end(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    ends: tuple[Tensor, Tensor] | None,
    tables: AttentionTables,
    dropout: float,
    key: Key | None,
) -> Tensor:
    """Lay the samples end to end, [b * s, heads, d], and compute each document by itself."""
    lengths, size, masking = (q.shape[0], k.shape[0]), q.shape[1], tables.masking
    if ends is None:
        every = torch.arange(size + 1, dtype=torch.int32, device=q.device)
        ends = every * lengths[0], every * lengths[1]
    q, k, v = (x.transpose(0, 1).flatten(0, 1) for x in (q, k, v))
    back = -1 if masking.window is None else masking.window - 1
    out: Any
    if tables.backend == "flash":
        out = varlen.varlen_attn(
            *(q, k, v, *ends, *lengths),
            scale=masking.scale,
            window_size=(back, 0),
            enable_gqa=q.shape[1] != k.shape[1],
        )
    else:
        import flash_attn  # not import_module, which torch.compile does not trace

        with keyed_randomness(q.device, key):
            out = flash_attn.flash_attn_varlen_func(
                *(q, k, v, *ends, *lengths),
                dropout_p=dropout,
                softmax_scale=masking.scale,
                causal=True,
                window_size=(back, back if back < 0 else 0),
                softcap=masking.cap,
                deterministic=torch.are_deterministic_algorithms_enabled(),
            )
    return out.unflatten(0, (size, lengths[0])).transpose(0, 1)


# --- flex attention -------------------------------------------------------------------------------------------------


def block_mask(masking: Masking, backend: str, length: int, like: Tensor) -> flex.BlockMask:
    """Return which blocks of queries and keys are computed, for flex attention.

    From one query to the next, neither the first key that is seen nor the last moves back. So a block of queries
    needs the blocks from its first query's first key to its last query, and from its last query's first key to its
    first query no key is hidden. Block numbers are computed from [b, queries], never from [b, queries, s].
    """
    at = masking.positions(length, like.device)
    first = torch.zeros_like(at)[None] if masking.starts is None else masking.starts.to(like.device)
    if masking.window is not None:
        first = torch.maximum(first, at - (masking.window - 1))
    order = torch.arange(-(-length // FLEX_BLOCK), device=like.device)
    begin = torch.arange(0, len(at), FLEX_BLOCK, device=like.device)  # of a block of queries
    last = (begin + FLEX_BLOCK - 1).clamp_max(len(at) - 1)
    low = first[:, begin] // FLEX_BLOCK  # [b or 1, blocks]
    own = (at[begin] + 1) // FLEX_BLOCK  # here the first query's own block begins, or ends right before
    clear = -(-first[:, last] // FLEX_BLOCK)  # from here to before that block nothing is hidden
    clear = torch.minimum(clear, own)
    partial, full = (clear - low) + at[last] // FLEX_BLOCK - own + 1, own - clear
    # The partial ones are low .. clear - 1 and own .. the last query's block; those after them are not read.
    before = (clear - low)[..., None]
    indices = torch.where(order < before, low[..., None] + order, own[:, None] + order - before)

    def seen(b: Tensor, h: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (key <= at[query]) & (key >= first[b if len(first) > 1 else 0, query])

    return flex.BlockMask.from_kv_blocks(
        partial[:, None].int(),
        indices.clamp_max(len(order) - 1)[:, None].int(),
        full[:, None].int(),
        (clear[..., None] + order).clamp_max(len(order) - 1)[:, None].int(),
        BLOCK_SIZE=FLEX_BLOCK,
        mask_mod=seen,
        seq_lengths=(len(at), length),
    )


def capped_scores(cap: float) -> Callable[..., Tensor] | None:
    """Return what flex attention does to a scaled score of (sample, head, query, key), if anything."""

    def change(score: Tensor, b: Tensor, h: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return torch.tanh(score / cap) * cap

    return change if cap else None


def _by_flex(
    q: Tensor, k: Tensor, v: Tensor, tables: AttentionTables, dropout: float, key: Key | None
) -> Tensor:
    q, k, v = (x.permute(1, 2, 0, 3) for x in (q, k, v))
    function: Any = flex.flex_attention if torch.compiler.is_compiling() else _compiled_flex(q.is_cuda)
    sinks = tables.sinks
    out = function(
        *(q, k, v, capped_scores(tables.masking.cap), tables.made),
        scale=tables.masking.scale,
        enable_gqa=q.shape[1] != k.shape[1],
        return_aux=None if sinks is None else flex.AuxRequest(lse=True),
    )
    if sinks is not None:  # which leave a share of each row
        out, (sums, _) = out
        out = out * (sums - sinks[:, None]).sigmoid().unsqueeze(-1).to(out.dtype)
    return out.permute(2, 0, 1, 3)


@lru_cache
def _compiled_flex(fused: bool) -> Callable[..., Any]:
    """Return flex attention, traced for sizes that stay: traced by itself, as uncompiled, that of torch 2.15 refuses
    other sizes than its first. fused: as Triton's kernel. Without it, on CPUs, all scores are held.
    """
    allow_graphs(2)  # with a window and without
    backend = "inductor" if fused else "eager"
    return torch.compile(flex.flex_attention, fullgraph=True, dynamic=False, backend=backend)


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
    """How some backends compute. make: their tables, before the layers. compute: attention, in a layer."""

    make: Callable[[Masking, str, int, Tensor], Any]
    compute: Callable[[Tensor, Tensor, Tensor, AttentionTables, float, Key | None], Tensor]


_WAYS = {
    "torch": _Way(_torch_mask, _by_torch),
    "pieces": _Way(cut, by_pieces),
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
    """Return the backends for GPUs that this installation lacks, each with the reason. "flash" lacks only documents
    and windows.
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
    chunks: bool = False,
) -> str | None:
    """Return what to say of attention at the start of a run, or None where it is plain and has a fused kernel.

    choice: --attention-backend. documents: attention stays within documents. chunks: ranks gather keys, and have
    chunks of the queries. Raises ValueError as ``choose``.
    """
    wants = wants_of(model, documents, chunks=chunks)
    backend = choose(choice, wants, dtype, model.seq_length, device)
    if backend == "math" and choice == "auto" and device.type != "cpu":
        lacking = "; ".join(f"{name}: {why}" for name, why in missing_backends().items())
        return (
            f"attention runs in matrix products in bands of queries (--attention-backend math): no kernel here "
            f"computes {' and '.join(sorted(wants))} in {_word(dtype)}{f' ({lacking})' if lacking else ''}"
        )
    if wants - PLAIN:
        return f"attention with {' and '.join(sorted(wants))}: --attention-backend {backend}"
    kernel = mixers_of(model)[0].heads
    if kernel is not None and backend == TORCH and device.type != "cpu":
        heads = tp.share(kernel.number, "num_attention_heads")
        if not fused(heads, heads, kernel.width, dtype, device, model.attention_dropout):
            return (
                "attention runs in torch's math kernel, which keeps a matrix of length x length per head: no fused "
                f"one takes {heads} heads of {kernel.width} in {_word(dtype)} on this GPU; bf16 and a head size "
                "that is a multiple of 8 get one, and --attention-backend math keeps no such matrix"
            )
    return None


def _word(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
