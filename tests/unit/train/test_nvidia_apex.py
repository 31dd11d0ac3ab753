"""NVIDIA's apex: refused where it is absent, compared with a stand-in; on a GPU against the real one."""

from __future__ import annotations

import sys
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F

from megazero.config.options.sections import TrainingConfig
from megazero.models.norm import LayerNorm, RMSNorm, use_apex
from megazero.train.nvidia_apex import fused_adam, refuse_without_apex
from tests.messages import refused

CUDA, CPU = torch.device("cuda"), torch.device("cpu")
BOTH = TrainingConfig(train_iters=1, optimizer_impl="apex", norm_impl="apex")


class FusedAdam(torch.optim.AdamW):
    """As apex/optimizers/fused_adam.py: the step is counted in the group, not in the states."""

    def __init__(self, params, adam_w_mode=True, **options):
        assert adam_w_mode
        super().__init__(params, **options)

    def step(self, closure=None):
        for group in self.param_groups:
            count = group["step"] = group.get("step", 0) + 1
            for state in (self.state[p] for p in group["params"] if self.state[p]):
                state["step"] = torch.tensor(count - 1.0)
        super().step(closure)
        for state in self.state.values():
            del state["step"]


@contextmanager
def installed(folder=None):
    """Inside the block ``import apex`` finds the stand-in, or what lies in the folder."""
    made = {name: ModuleType(name) for name in ("apex", "apex.optimizers", "apex.normalization", "amp_C")}
    made["fused_layer_norm_cuda"] = norms = ModuleType("apex.normalization.fused_layer_norm")
    made["apex.optimizers"].FusedAdam = FusedAdam
    norms.fused_rms_norm_affine = lambda x, weight, shape, eps: F.rms_norm(x, shape, weight, eps)
    norms.fused_layer_norm_affine = lambda x, weight, bias, shape, eps: F.layer_norm(
        x, shape, weight, bias, eps
    )
    made["apex.normalization"].fused_layer_norm = made[norms.__name__] = norms
    kept = {name: module for name, module in sys.modules.items() if name.split(".")[0] not in made}
    path = patch.object(sys, "path", [f"{folder}", *sys.path])
    with path, patch.dict(sys.modules, kept if folder else kept | made, clear=True):
        yield


@pytest.mark.parametrize("said", ["is not NVIDIA's", "no extension amp_C"])
def test_what_a_run_cannot_have_is_refused_with_the_command_that_builds_it(said: str, tmp_path: Path) -> None:
    """PyPI's apex is another project; pip builds no extensions unless it is told to."""
    (tmp_path / "apex" / ("lib" if "not" in said else "multi_tensor_apply")).mkdir(parents=True)
    (tmp_path / "apex" / "__init__.py").touch()
    with installed(tmp_path), pytest.raises(ValueError, match=f"{said}.*APEX_CUDA_EXT=1"):
        refuse_without_apex(BOTH, CUDA)
    with refused("--optimizer-impl apex", "--norm-impl apex", "CUDA"):
        refuse_without_apex(BOTH, CPU)


def test_norms_go_through_its_functions() -> None:
    x = torch.randn(3, 2, 16)
    norms = torch.nn.ModuleList([RMSNorm(16, 1e-5), LayerNorm(16, 1e-3)])
    plain = [norm(x) for norm in norms]
    with installed():
        use_apex(norms)
        with patch.object(F, "rms_norm", side_effect=AssertionError("called")), pytest.raises(AssertionError):
            norms[0](x)
        torch.testing.assert_close([norm(x) for norm in norms], plain)


@pytest.mark.gpu
def test_the_real_ones_update_of_a_slice_and_norms_are_torchs() -> None:
    try:
        refuse_without_apex(BOTH, CUDA)
    except ValueError as error:
        pytest.skip(str(error))
    buffers, grads = torch.randn(1 << 16, device="cuda").repeat(2, 1), torch.randn(10, 40000, device="cuda")
    leaves = [torch.nn.Parameter(b[640:40640]) for b in buffers]
    options = {"lr": 1e-2, "weight_decay": 0.1, "betas": (0.9, 0.95)}
    optimizers = [
        torch.optim.AdamW(leaves[:1], fused=True, **options),
        fused_adam([{"params": leaves[1:]}], **options),
    ]
    for grad in grads:
        for leaf, optimizer in zip(leaves, optimizers, strict=True):
            leaf.grad = grad.clone()
            optimizer.step()
    torch.testing.assert_close(*leaves, rtol=0, atol=2e-6)
    assert torch.equal(buffers[0, :640], buffers[1, :640])
    norms, x = (
        torch.nn.ModuleList([RMSNorm(512, 1e-5), LayerNorm(512, 1e-5)]).cuda(),
        torch.randn(64, 512).cuda(),
    )
    plain = [norm(x) for norm in norms]
    use_apex(norms)
    torch.testing.assert_close([norm(x) for norm in norms], plain, rtol=1e-5, atol=1e-5)
