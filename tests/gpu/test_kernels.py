"""Kernels on a GPU give the references' bits."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from megazero.comm.codec import Blockwise
from megazero.kernels.fingerprint import fingerprint
from tests import kernel_cases

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("case", kernel_cases.CASES, ids=lambda case: case.name)
@pytest.mark.parametrize("blocks", [4, 1028])
def test_kernels_equal_their_references(case: kernel_cases.Case, blocks: int) -> None:
    assert kernel_cases.different(replace(case, blocks=blocks), "cuda") == []


def test_the_update_equals_its_reference() -> None:
    assert kernel_cases.different_updates("cuda") == []


def test_weighted_swiglu_equals_its_reference() -> None:
    assert kernel_cases.different_activations("cuda", rows=64) == []


def test_messages_of_cpu_and_gpu_are_equal() -> None:
    """Mixed groups, and checkpoints that move: exact region and filling included."""
    codec = Blockwise(4)
    x, exact = torch.randn(3, 64 * 333), torch.randn(3, 7)
    assert torch.equal(codec.encode(x.cuda(), exact.cuda()).cpu(), codec.encode(x, exact))


@pytest.mark.parametrize("n", [7, 1 << 16, (1 << 16) * 130 + 5])
def test_fingerprints_of_cpu_and_gpu_are_equal(n: int) -> None:
    values = torch.randn(n)
    assert torch.equal(fingerprint(values.cuda()).cpu(), fingerprint(values))
