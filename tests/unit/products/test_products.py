"""Products: what autograd makes of linears and what a product computes by its parts are the same bits."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megazero.models.dtypes import DTYPES
from megazero.products import PRODUCTS, make_product
from megazero.tp import TensorParallel, column_parallel


def drawn(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape))).to(dtype)


@pytest.mark.parametrize("name", PRODUCTS)
def test_a_linear_has_the_bits_of_the_parts(name: str) -> None:
    product, dtype = make_product(name), DTYPES.get(name, torch.bfloat16)
    shapes = ((8, 2, 16), (32, 16), (32,))
    x, weight, bias = (drawn(*shape, dtype=dtype).requires_grad_() for shape in shapes)
    (y,) = column_parallel(x, [(weight, bias)], TensorParallel(product=product))
    grad = drawn(8, 2, 32, dtype=dtype) / 3
    expected = torch.autograd.grad(y, (x, weight), grad)
    with torch.no_grad():
        operand, rows = product.operand(x), product.gradient(grad.flatten(0, 1))
        assert torch.equal(product.forward(operand, weight, bias), y)
        flat = product.operand(x.flatten(0, 1))
        out = torch.empty(16, 32, dtype=dtype)
        assert torch.equal(product.forward(flat, weight, out=out), product.forward(flat, weight))
        to_x = product.grad_x([rows], [weight])
        assert torch.equal(to_x.view_as(x), expected[0])
        assert torch.equal(product.grad_x([rows], [weight], out=torch.empty_like(to_x)), to_x)
        assert torch.equal(product.grad_weight(rows, operand, dtype), expected[1])
        wide = torch.zeros(32, 16, dtype=torch.promote_types(dtype, torch.float32))
        assert torch.equal(product.grad_weight(rows, operand, dtype, wide).to(dtype), expected[1])
