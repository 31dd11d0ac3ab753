"""Products in fp8 on tensor-parallel ranks: a pair of linears computes what it does on one rank, and inputs are
gathered in fp8. tests/dist/verify certifies whole layouts."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from megazero.comm.hops import Traffic
from megazero.mesh.levels import INTRA
from megazero.products import FP8_PRODUCTS, make_product, operand_bytes
from megazero.tp import RowParallelLinear, TensorParallel, column_parallel
from tests.dist.models.test_tp import context
from tests.dist.pool import run_ranks

S, B, H, FFN = 16, 2, 256, 384
Found = dict[str, torch.Tensor]


def pair(name: str, tp: TensorParallel) -> Found:
    """Outputs and gradients of this rank's part of two column-parallel linears and a row-parallel one."""
    tp = replace(tp, product=make_product(name, gradients="float8_e5m2"))
    made = torch.Generator().manual_seed(0)
    x, gate, up, down, to_y = (
        torch.randn(shape, generator=made).bfloat16()
        for shape in ((S, B, H), (FFN, H), (FFN, H), (H, FFN), (S, B, H))
    )
    own, rows = slice(tp.rank * FFN // tp.size, (tp.rank + 1) * FFN // tp.size), slice(0, S)
    if tp.sharded_sequence:
        rows = slice(tp.rank * S // tp.size, (tp.rank + 1) * S // tp.size)
    linear = RowParallelLinear(FFN, H, tp, bias=False, dtype=torch.bfloat16)
    with torch.no_grad():
        linear.weight.copy_(down[:, own])
    leaves = [each.contiguous().requires_grad_() for each in (x[rows], gate[own], up[own])]
    a, b = column_parallel(leaves[0], [(leaves[1], None), (leaves[2], None)], tp)
    y = linear(a.sigmoid() * b)
    grads = torch.autograd.grad(y, [*leaves, linear.weight], to_y[rows])
    return dict(zip(("y", "x", "gate", "up", "down"), (y.detach(), *grads), strict=True))


def on_a_rank(sequence_parallel: bool) -> list[tuple[Found, int]]:
    found = []
    for name in FP8_PRODUCTS:
        traffic = Traffic()
        found.append((pair(name, replace(context(sequence_parallel), traffic=traffic)), traffic.total(INTRA)))
    return found


@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["plain", "sequence"])
def test_two_ranks_compute_what_one_does(sequence_parallel: bool) -> None:
    ranks = run_ranks(2, on_a_rank, sequence_parallel)
    half = S * B * H  # bytes of a half of y, or of x's gradient
    for name, (first, sent), (second, _) in zip(FP8_PRODUCTS, *ranks, strict=True):
        want, cut = pair(name, TensorParallel()), 0 if sequence_parallel else None
        for key, dim in {"y": cut, "x": cut, "gate": 0, "up": 0, "down": 1}.items():
            got = first[key] if dim is None else torch.cat([first[key], second[key]], dim)
            # Sums of two ranks' rounded terms, and what these make other fp8 numbers of.
            off = (got - want[key]).float().norm() / want[key].float().norm()
            assert off < 0.01, (name, key, off)
        gathers = 2 * S // 2 * B * operand_bytes(name, H, 2)  # in the forward, and for gradients of weights
        agreed = 4 * (name == "fp8_tensorwise")
        # y is scattered and its gradient gathered, and x's is scattered; without sequence parallel two are summed.
        assert sent == (3 * half + gathers + agreed if sequence_parallel else 4 * half)
