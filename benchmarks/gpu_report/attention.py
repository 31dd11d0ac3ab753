"""Attention backends: forward and backward of one layer's attention beside plain causal attention, and each one's
distance to matrix products in fp32."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from benchmarks.gpu_report.record import Record, Skip
from benchmarks.gpu_report.setting import Setting, elapsed, free
from benchmarks.harness import ratios, take_turns
from megazero.config.model.attention import TORCH, able
from megazero.models.attention import (
    AttentionTables,
    Masking,
    attend,
    make_tables,
    missing_backends,
)

CASES = ("", "documents", "windows", "documents, windows", "capped scores")


def run(setting: Setting, record: Record) -> None:
    device, length = setting.device, setting.pick(8192, 512)
    heads, groups, width = setting.pick((32, 8, 128), (4, 2, 16))
    dtype = setting.pick(torch.bfloat16, torch.float32)
    q, k, v = (
        torch.randn(length, 1, n, width, device=device, dtype=dtype, requires_grad=True)
        for n in (heads, groups, groups)
    )
    plain = make_tables(Masking(width**-0.5), TORCH, length, q)
    for case in CASES:
        words = frozenset(case.split(", ")) if case else frozenset[str]()
        masking = masking_of(words, length, width)
        names = [each.name for each in able(words, 8 * dtype.itemsize, length, device.type)]
        exact = None
        for name in names:
            with record.attempt(case=case or "plain", backend=name, tokens=length) as row:
                setting.need(5)
                if name in missing_backends() and not (name == "flash" and masking.plain):
                    raise Skip(missing_backends()[name])
                tables = make_tables(masking, name, length, q)
                exact = exact or gradients(
                    make_tables(masking, "math", length, q.float()), q.float(), k.float(), v.float()
                )
                found = gradients(tables, q, k, v)
                row["difference"] = max(
                    ((one.float() - other).norm() / other.norm()).item()
                    for one, other in zip(found, exact, strict=True)
                )
                turns: dict[str, Callable[[], float]] = {
                    each: partial(elapsed, partial(gradients, of, q, k, v), device, setting.pick(5, 1))
                    for each, of in (("own", tables), ("plain", plain))
                }
                taken = take_turns(turns, setting.pick(5, 1), warm_up=setting.pick(2, 0))
                row["ms"] = statistics.median(taken["own"]) * 1e3
                row["of plain"] = statistics.median(ratios(taken["own"], taken["plain"]))
            free(device)


def masking_of(words: frozenset[str], length: int, width: int) -> Masking:
    """Return the masking. Documents are 1/8 of the sample on average, windows 1/8."""
    return Masking(
        width**-0.5,
        50.0 if "capped scores" in words else 0.0,
        length // 8 if "windows" in words else None,
        starts_of(length, length // 8) if "documents" in words else None,
    )


def starts_of(length: int, document: int) -> Tensor:
    """Return where each token's document starts [1, length]. Documents have half to one and a half times ``document``
    tokens."""
    generator, starts, end = torch.Generator().manual_seed(0), torch.zeros(1, length, dtype=torch.int64), 0
    while end < length:
        first = end
        end += int(torch.randint(document // 2, document * 3 // 2 + 1, (), generator=generator))
        starts[0, first:end] = first
    return starts


def gradients(tables: AttentionTables, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    """Return the output, and the gradients of q, k and v."""
    inputs = [x.detach().requires_grad_() for x in (q, k, v)]
    out = attend(*inputs, tables)  # type: ignore[call-arg]
    return (out.detach(), *torch.autograd.grad(out, inputs, torch.ones_like(out)))
