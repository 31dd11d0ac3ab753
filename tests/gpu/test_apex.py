"""The real apex of NVIDIA, where it imports: its update and norms equal torch's, its signatures the stand-in's."""

from __future__ import annotations

import inspect
from importlib import import_module

import pytest
import torch

from megazero.config.options.sections import TrainingConfig
from megazero.models.norm import LayerNorm, RMSNorm, use_apex
from megazero.train.nvidia_apex import fused_adam, refuse_without_apex
from megazero.zero.elementwise import OnePassAdamW
from tests.apex_stand_in import installed

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.fixture(scope="module", autouse=True)
def apex() -> None:
    try:
        refuse_without_apex(TrainingConfig(optimizer_impl="apex", norm_impl="apex"), torch.device("cuda"))
    except ValueError as error:
        pytest.skip(str(error))


def test_the_stand_in_has_its_signatures() -> None:
    def signatures() -> list[inspect.Signature]:
        adam = import_module("apex.optimizers").FusedAdam
        norms = import_module("apex.normalization.fused_layer_norm")
        functions = (norms.fused_rms_norm_affine, norms.fused_layer_norm_affine)
        return [inspect.signature(each) for each in (adam.__init__, adam.step, *functions)]

    real = signatures()
    with installed():
        assert signatures() == real


def test_updates_of_a_slice_are_torchs() -> None:
    """A slice that begins in the middle of a buffer, over ten steps; the one pass, too."""
    torch.manual_seed(0)
    buffers, grads = torch.randn(3, 1 << 16, device="cuda"), torch.randn(10, 40000, device="cuda")
    buffers[1:] = buffers[0]
    leaves = [torch.nn.Parameter(b[640:40640]) for b in buffers]
    options = {"lr": 1e-2, "weight_decay": 0.1, "betas": (0.9, 0.95)}
    optimizers = [
        torch.optim.AdamW([leaves[0]], fused=True, **options),
        fused_adam([{"params": [leaves[1]]}], **options),
        OnePassAdamW([leaves[2]], **options),
    ]
    for grad in grads:
        for leaf, optimizer in zip(leaves, optimizers, strict=True):
            leaf.grad = grad.clone()
            optimizer.step()
    for leaf in leaves[1:]:
        torch.testing.assert_close(leaf, leaves[0], rtol=0, atol=2e-6)
    assert torch.equal(buffers[0, :640], buffers[1, :640])


@pytest.mark.parametrize("dtype, close", [(torch.float32, 1e-5), (torch.bfloat16, 3e-2)])
def test_norms_are_torchs(dtype: torch.dtype, close: float) -> None:
    torch.manual_seed(0)
    norms = torch.nn.ModuleList([RMSNorm(512, 1e-5), LayerNorm(512, 1e-5)]).to("cuda", dtype)
    x, results = torch.randn(64, 4, 512, device="cuda", dtype=dtype), []
    for norm in norms:
        torch.nn.init.normal_(norm.weight)
    for apex in (False, True):
        if apex:
            use_apex(norms)
        given = x.clone().requires_grad_()
        outs = [norm(given) for norm in norms]
        sum(out.float().square().mean() for out in outs).backward()
        results.append([*outs, given.grad, *(p.grad for p in norms.parameters())])
        norms.zero_grad(set_to_none=True)
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=close, atol=close)
