"""Rates of a decoder's operations by kind and size: products, grouped products of experts, attention, and what only
moves memory.

A product [tokens, k] x [k, n] is timed forward and as its two gradients, in bf16 on random values. Sizes are those of
published models, whole or cut by tensor parallelism. Experts: tokens x top-k rows in equal groups, by torch's
grouped_mm and as one product per expert.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.nn import functional as F

from benchmarks.gpu_report.record import Record, Skip
from benchmarks.gpu_report.setting import Setting, elapsed, free

# (what, tokens, k, n)
PRODUCTS = (
    ("1B, QKV and output", 4096, 2048, 2048),
    ("1B, MLP", 4096, 2048, 5632),
    ("8B, output", 4096, 4096, 4096),
    ("8B, QKV", 8192, 4096, 6144),
    ("8B, gate and up", 8192, 4096, 28672),
    ("8B, down", 8192, 14336, 4096),
    ("8B, head", 4096, 4096, 128256),
    ("70B of 8, QKV", 8192, 8192, 1280),
    ("70B of 8, gate and up", 8192, 8192, 7168),
    ("70B of 8, down", 8192, 3584, 8192),
)
# (what, rows = tokens x top-k, experts here, hidden, expert's MLP)
EXPERTS = (
    ("30B-A3B, 128 experts", 32768, 128, 2048, 768),
    ("30B-A3B, 16 experts of EP 8", 32768, 16, 2048, 768),
    ("Mixtral 8x7B, 8 experts", 8192, 8, 4096, 14336),
    ("fine-grained, 64 experts", 24576, 64, 2048, 1024),
)
# (what, tokens, heads, key groups, head width)
ATTENTION = (
    ("1B", 4096, 16, 16, 128),
    ("8B", 8192, 32, 8, 128),
    ("8B, long", 32768, 32, 8, 128),
)


def run(setting: Setting, record: Record) -> None:
    for what, tokens, k, n in PRODUCTS:
        with record.attempt(kind="product", what=what) as row:
            setting.need(3)
            row |= _product(setting, *setting.pick((tokens, k, n), (16, 8, 24)))
    for what, rows, experts, hidden, mlp in EXPERTS:
        sizes = setting.pick((rows, experts, hidden, mlp), (64, 4, 16, 32))
        for way, multiply in (("grouped_mm", _grouped), ("a loop", _looped)):
            with record.attempt(kind="experts", what=f"{what}, {way}") as row:
                setting.need(3)
                row |= _experts(setting, multiply, *sizes)
    for what, tokens, heads, groups, width in ATTENTION:
        with record.attempt(kind="attention", what=f"{what}, {tokens:,} tokens") as row:
            setting.need(3)
            row |= _attention(setting, *setting.pick((tokens, heads, groups, width), (16, 4, 2, 8)))
    _memory(setting, record)


def _timed(
    setting: Setting,
    forward: Callable[[], torch.Tensor],
    inputs: Sequence[torch.Tensor],
    flops: float,
    products: float = 3,
) -> dict[str, Any]:
    """Return the milliseconds and rates of a forward, and of a forward with the gradients of ``inputs``.

    flops: of the forward; with the backward it is so many ``products`` of them.
    """
    free(setting.device)
    repeats = setting.pick(5, 1)
    gradient = torch.randn_like(forward())

    def both() -> None:
        torch.autograd.grad(forward(), inputs, gradient)

    both()

    there = min(elapsed(forward, setting.device, repeats) for _ in range(3))
    whole = min(elapsed(both, setting.device, repeats) for _ in range(3))
    return {
        "forward ms": 1e3 * there,
        "both ms": 1e3 * whole,
        "forward TFLOP/s": flops / there / 1e12,
        "both TFLOP/s": products * flops / whole / 1e12,
    }


def _random(setting: Setting, *shape: int) -> torch.Tensor:
    dtype = setting.pick(torch.bfloat16, torch.float32)
    return torch.randn(shape, device=setting.device, dtype=dtype).requires_grad_()


def _product(setting: Setting, tokens: int, k: int, n: int) -> dict[str, Any]:
    x, weight = _random(setting, tokens, k), _random(setting, n, k)
    found = _timed(setting, lambda: F.linear(x, weight), (x, weight), 2.0 * tokens * k * n)
    return {"size": f"{tokens} x {k} x {n}", **found}


Multiply = Callable[[torch.Tensor, torch.Tensor, list[int]], torch.Tensor]


def _grouped(x: torch.Tensor, weights: torch.Tensor, rows: list[int]) -> torch.Tensor:
    if not hasattr(F, "grouped_mm"):
        raise Skip("this torch has no grouped_mm")
    ends = torch.tensor(rows, device=x.device, dtype=torch.int32).cumsum(0).to(torch.int32)
    return F.grouped_mm(x, weights.transpose(-2, -1), offs=ends)


def _looped(x: torch.Tensor, weights: torch.Tensor, rows: list[int]) -> torch.Tensor:
    return torch.cat([F.linear(part, weight) for part, weight in zip(x.split(rows), weights, strict=True)])


def _experts(
    setting: Setting, multiply: Multiply, rows: int, experts: int, hidden: int, mlp: int
) -> dict[str, Any]:
    x, weights = _random(setting, rows, hidden), _random(setting, experts, 2 * mlp, hidden)
    each = [rows // experts] * experts
    found = _timed(setting, lambda: multiply(x, weights, each), (x, weights), 2.0 * rows * hidden * 2 * mlp)
    return {"size": f"{experts} x ({rows // experts} x {hidden} x {2 * mlp})", **found}


def _attention(setting: Setting, tokens: int, heads: int, groups: int, width: int) -> dict[str, Any]:
    q = _random(setting, 1, heads, tokens, width)
    k, v = (_random(setting, 1, groups, tokens, width) for _ in range(2))
    flops = 2.0 * heads * width * tokens**2  # causal: half of two products
    return {
        "size": f"{tokens} x {heads} ({groups}) x {width}",
        **_timed(
            setting,
            lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=heads != groups),
            (q, k, v),
            flops,
            products=3.5,  # the backward has five products for the forward's two
        ),
    }


def _memory(setting: Setting, record: Record) -> None:
    """Time what only moves memory, as a share of the bytes that it must read and write."""
    tokens, hidden, mlp, vocabulary = setting.pick((8192, 4096, 14336, 128256), (16, 8, 16, 64))
    x, gate, up = (
        _random(setting, tokens, hidden),
        _random(setting, tokens, mlp),
        _random(setting, tokens, mlp),
    )
    weight, size = _random(setting, hidden), x.element_size()
    cases: dict[str, tuple[Callable[[], torch.Tensor], tuple[torch.Tensor, ...], int]] = {
        "RMSNorm": (lambda: F.rms_norm(x, (hidden,), weight), (x, weight), 2 * x.numel() * size),
        "SwiGLU": (lambda: F.silu(gate) * up, (gate, up), 3 * gate.numel() * size),
        "residual": (lambda: x + x, (x,), 2 * x.numel() * size),
    }
    for what, (forward, inputs, moved) in cases.items():
        with record.attempt(kind="memory", what=what) as row:
            setting.need(2)
            row |= _timed(setting, forward, inputs, 0.0)
            row["forward GB/s"] = moved / row["forward ms"] / 1e6
    with record.attempt(kind="memory", what="cross-entropy in fp32") as row:
        setting.need(2)
        logits = _random(setting, tokens // 4, vocabulary)
        labels = torch.randint(0, vocabulary, (tokens // 4,), device=setting.device)
        row |= _timed(
            setting, lambda: F.cross_entropy(logits.float(), labels, reduction="sum"), (logits,), 0.0
        )
        row["forward GB/s"] = logits.numel() * size / row["forward ms"] / 1e6
