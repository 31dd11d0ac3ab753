"""fp8 on a GPU: torch's kernels multiply what the same numbers in bf16 give, with scales as the kernels take them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megazero.products import FP8_PRODUCTS, make_product
from megazero.products import fp8 as fp8_module
from megazero.products.fp8 import Rounded
from megazero.tp import TensorParallel, column_parallel

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def in_bf16(a: Rounded, b: Rounded, dtype: torch.dtype, **_: object) -> Tensor:
    return torch.mm(a.wide(dtype), b.wide(dtype).t())


@pytest.mark.parametrize("gradients", ["float8_e4m3fn", "float8_e5m2"])
@pytest.mark.parametrize("shape", [(512, 384, 640), (130, 200, 48)], ids=str)
@pytest.mark.parametrize("name", FP8_PRODUCTS)
def test_kernels_multiply_the_same_numbers(
    name: str, shape: tuple[int, int, int], gradients: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Forward and both gradients. Kernels sum in another order, and in a forward with fewer bits."""
    product = make_product(name, gradients=gradients)
    try:
        product.require(torch.device("cuda"))
    except ValueError as error:
        pytest.skip(str(error))
    tokens, out, into = shape
    made = torch.Generator("cuda").manual_seed(0)
    x, weight, grad = (
        torch.randn(n, m, device="cuda", generator=made).bfloat16()
        for n, m in ((tokens, into), (out, into), (tokens, out))
    )

    def computed() -> list[Tensor]:
        leaves = [each.clone().requires_grad_() for each in (x, weight)]
        (y,) = column_parallel(leaves[0], [(leaves[1], None)], TensorParallel(product=product))
        return [y, *torch.autograd.grad(y, leaves, grad)]

    found = computed()
    monkeypatch.setattr(fp8_module, "multiply", in_bf16)
    for got, want in zip(found, computed(), strict=True):
        assert (got - want).float().norm() < 2.0**-8 * want.float().norm()
