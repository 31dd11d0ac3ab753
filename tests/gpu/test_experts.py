"""Experts on a GPU: grouped products of any group sizes, and a layer that never waits for the device."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from megazero.cp import ContextParallel
from megazero.models import make_model
from megazero.models.experts import MixtureOfExperts
from megazero.moe import BalanceLosses, Decision, ExpertParallel
from megazero.products.product import PLAIN
from megazero.tp import TensorParallel

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
IN, OUT = 256, 384


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(
    "groups", [(64, 64, 64, 64), (1, 0, 130, 7), (0, 0, 300, 0), (5, 3, 0, 0), (0, 0, 0, 0)], ids=str
)
def test_grouped_products_are_each_experts(groups: tuple[int, ...], dtype: torch.dtype) -> None:
    """Forward and both gradients, experts without rows and a rank without any included."""
    drawn = torch.Generator("cuda").manual_seed(1)
    rows = torch.randn(sum(groups), IN, device="cuda", generator=drawn).to(dtype).requires_grad_()
    weight = torch.randn(len(groups), OUT, IN, device="cuda", generator=drawn).to(dtype).requires_grad_()
    to_out = torch.randn(sum(groups), OUT, device="cuda", generator=drawn).to(dtype)
    ends = torch.tensor(groups, device="cuda").cumsum(0, dtype=torch.int32)
    # What the allocator has lies about: a kernel that leaves an expert's gradient unwritten is seen.
    torch.full((len(groups) * OUT * IN,), torch.nan, device="cuda", dtype=dtype)
    found = _with_gradients(PLAIN.grouped(rows, weight, ends), rows, weight, to_out)
    exact_rows, exact_weight = (x.detach().double().requires_grad_() for x in (rows, weight))
    parts = exact_rows.split(list(groups))
    out = torch.cat([F.linear(part, each) for part, each in zip(parts, exact_weight.unbind(), strict=True)])
    exact = _with_gradients(out, exact_rows, exact_weight, to_out.double())
    close = 1e-2 if dtype == torch.bfloat16 else 2e-3
    for own, other in zip(found, exact, strict=True):
        assert own.shape == other.shape and own.isfinite().all()
        assert (own.double() - other).norm() <= close * other.norm()


def _with_gradients(
    out: torch.Tensor, rows: torch.Tensor, weight: torch.Tensor, to_out: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    return (out.detach(), *torch.autograd.grad(out, (rows, weight), to_out))


def test_a_layer_does_not_wait_for_the_device_and_repeats_its_bits() -> None:
    config = make_model(
        model_family="mixtral", num_layers=1, hidden_size=IN, ffn_hidden_size=OUT, num_attention_heads=4,
        vocab_size=64, max_position_embeddings=64, num_experts=16, moe_router_topk=4, moe_ffn_hidden_size=OUT,
    )  # fmt: skip
    losses = BalanceLosses(over_micro_batches=1e-2, z=1e-3, samples=2)
    layer = MixtureOfExperts(
        config, TensorParallel(), ContextParallel(), ExpertParallel(), losses,
        device="cuda", dtype=torch.bfloat16,
    )  # fmt: skip
    drawn = torch.Generator("cuda").manual_seed(1)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.normal_(std=0.05, generator=drawn)
    x = torch.randn(64, 2, IN, device="cuda", generator=drawn).bfloat16().requires_grad_()

    def gradients() -> tuple[torch.Tensor, ...]:
        return torch.autograd.grad(layer(x, Decision()).float().square().sum(), (x, *layer.parameters()))

    first = gradients()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        second = gradients()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert all(
        a.isfinite().all() and a.any() and torch.equal(a, b) for a, b in zip(first, second, strict=True)
    )
