"""Hashes of many tensors at once: every change shows in its tensor's, and launches do not grow with the tensors."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from megazero.kernels.fingerprint import fingerprint, fingerprints


def tensors(dtype: torch.dtype, lengths: list[int]) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(n, generator=generator).mul(100).to(dtype) for n in lengths]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64, torch.int8])
def test_every_change_shows_in_the_tensors_own_hash(dtype: torch.dtype) -> None:
    lengths = [1, 3, 0, 4096, 1_000_001, 5, 70_000]  # the fifth fills several batches
    values = tensors(dtype, lengths)
    before = fingerprints(values)
    assert torch.equal(fingerprints([v.clone() for v in values]), before) and before[2] == 0
    for i, numel in enumerate(lengths):
        for place in {0, numel // 2, numel - 1} if numel else ():
            other = [v.clone() for v in values]
            other[i][place] += 1
            changed = fingerprints(other) != before
            assert changed.tolist() == [j == i for j in range(len(lengths))]
    order = [v.flip(0) for v in values]
    assert (fingerprints(order) != before).tolist() == [n > 1 for n in lengths]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64, torch.int8])
def test_one_hash_sees_every_change(dtype: torch.dtype) -> None:
    (values,) = tensors(dtype, [70_001])
    before = int(fingerprint(values))
    assert int(fingerprint(values.clone())) == before and int(fingerprint(values[:0])) == 0
    for change in (
        lambda v: v[-1:].add_(1),
        lambda v: v[3:].copy_(v[:-3].clone()),
        lambda v: v[66_000:].copy_(v[66_000:].flip(0)),
        lambda v: v.copy_(v.flip(0)),
        lambda v: v.zero_(),
        lambda v: v.neg_(),
    ):
        other = values.clone()
        change(other)
        assert int(fingerprint(other)) != before


def test_dtypes_may_be_mixed() -> None:
    values = [*tensors(torch.float32, [7, 9]), *tensors(torch.bfloat16, [7]), *tensors(torch.float32, [3])]
    every = fingerprints(values)
    assert torch.equal(every[[0, 1, 3]], fingerprints([values[0], values[1], values[3]]))
    values[2][0] += 1
    assert (fingerprints(values) != every).tolist() == [False, False, True, False]


class Launches(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[func._schema.name] += 1
        return func(*args, **(kwargs or {}))


def test_launches_do_not_grow_with_the_tensors() -> None:
    values = tensors(torch.float32, [64] * 100)
    fingerprints(values)  # lays them out
    with Launches() as few:
        fingerprints(values)
    views = {"aten::slice", "aten::view", "aten::detach"}
    assert sum(n for name, n in few.counts.items() if name not in views) <= 8
