"""NVIDIA's apex: refused where it is not, and against a stand-in with its signatures. tests/gpu has the real one."""

from __future__ import annotations

import shutil
from functools import partial
from pathlib import Path

import pytest
import torch

from megazero.config import ConfigError, make_config
from megazero.config.options.sections import TrainingConfig
from megazero.models.norm import LayerNorm, RMSNorm, use_apex
from megazero.train import nvidia_apex
from megazero.train.nvidia_apex import fused_adam, refuse_without_apex
from megazero.zero.elementwise import make_state, refuse_unless_elementwise, refuse_unless_from_zeros
from tests.apex_stand_in import FOLDER, installed

CUDA, CPU = torch.device("cuda"), torch.device("cpu")
BOTH = TrainingConfig(train_iters=1, optimizer_impl="apex", norm_impl="apex")
OPTIMIZER = TrainingConfig(train_iters=1, optimizer_impl="apex")


def test_without_cuda_every_option_is_named_and_with_it_none() -> None:
    refuse_without_apex(TrainingConfig(train_iters=1), CPU)  # which does not ask for it
    with installed():
        refuse_without_apex(BOTH, CUDA)
    with installed(), pytest.raises(ValueError, match="--optimizer-impl apex: it runs on CUDA") as found:
        refuse_without_apex(BOTH, CPU)
    assert "--norm-impl apex: it runs on CUDA" in str(found.value)


def test_without_it_the_error_says_how_to_build_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvidia_apex, "find_spec", lambda _: None)
    with pytest.raises(ValueError, match="apex is not installed; build NVIDIA's .*APEX_CUDA_EXT=1"):
        refuse_without_apex(OPTIMIZER, CUDA)


def test_the_other_project_of_that_name_is_told_apart(tmp_path: Path) -> None:
    """PyPI's apex 0.9.10dev: lib, templates and so on."""
    (tmp_path / "apex" / "lib").mkdir(parents=True)
    (tmp_path / "apex" / "__init__.py").write_text("raise ImportError('No module named pyramid')")
    with (
        installed(tmp_path),
        pytest.raises(ValueError, match="is not NVIDIA's .*Pyramid.*pip uninstall apex"),
    ):
        refuse_without_apex(OPTIMIZER, CUDA)


@pytest.mark.parametrize(
    "config, extension", [(OPTIMIZER, "amp_C"), (TrainingConfig(norm_impl="apex"), "fused_layer_norm_cuda")]
)
def test_a_build_without_extensions_is_refused(
    config: TrainingConfig, extension: str, tmp_path: Path
) -> None:
    """As pip makes it without the variables; or for another torch."""
    shutil.copytree(FOLDER / "apex", tmp_path / "apex")
    with installed(tmp_path), pytest.raises(ValueError, match=f"no extension {extension} .*APEX_CPP_EXT=1"):
        refuse_without_apex(config, CUDA)
    (tmp_path / f"{extension}.py").write_text("raise ImportError('undefined symbol: _ZN3c10')")
    with installed(tmp_path), pytest.raises(ValueError, match="undefined symbol"):
        refuse_without_apex(config, CUDA)


@pytest.mark.parametrize(
    "values, said",
    [
        (
            {"optimizer": "lion", "optimizer_impl": "apex"},
            "--optimizer-impl apex has no lion, only adamw; nearest: auto",
        ),
        ({"optimizer_impl": "apex", "params_dtype": "fp64"}, "--optimizer-impl apex takes no fp64"),
        (
            {"norm_impl": "apex", "apply_layernorm_1p": True},
            "--norm-impl apex has no norm that multiplies by 1 + weight",
        ),
        ({"norm_impl": "apex", "device": "cpu"}, "--norm-impl apex runs on CUDA, and --device is cpu"),
    ],
)
def test_what_it_lacks_is_refused_in_the_configuration(values: dict, said: str) -> None:
    needed = {"num_layers": 2, "hidden_size": 16, "num_attention_heads": 2, "seq_length": 8, "lr": 1e-3}
    needed |= {"vocab_size": 50, "micro_batch_size": 1, "train_iters": 1, "mock_data": True}
    make_config(needed)
    with pytest.raises(ConfigError, match=said.replace("+", r"\+")):
        make_config({**needed, **values})


GROUPS = [(), (("weight_decay", 0.0),)]


def test_its_adam_is_elementwise_and_starts_from_zeros() -> None:
    with installed():
        factory = partial(fused_adam, lr=0.1, weight_decay=0.1)
        refuse_unless_elementwise(factory, GROUPS, torch.float32, CPU)
        refuse_unless_from_zeros(factory, GROUPS, torch.float32, CPU)


def test_a_state_that_is_made_counts_no_step() -> None:
    weight = torch.nn.Parameter(torch.ones(4))
    with installed():
        optimizer = fused_adam([{"params": [weight]}], lr=0.1)
    make_state(optimizer)
    assert optimizer.param_groups[0]["step"] == 0 and torch.equal(weight.detach(), torch.ones(4))


def test_norms_go_through_its_functions() -> None:
    torch.manual_seed(0)
    norms = torch.nn.ModuleList([RMSNorm(16, 1e-5), LayerNorm(16, 1e-3)])
    x, results = torch.randn(3, 2, 16), []
    for norm in norms:
        torch.nn.init.normal_(norm.weight)
    with installed():
        for apex in (False, True):
            if apex:
                use_apex(norms)
            given = x.clone().requires_grad_()
            outs = [norm(given) for norm in norms]
            sum(out.square().sum() for out in outs).backward()
            results.append([*outs, given.grad, *(p.grad for p in norms.parameters())])
            norms.zero_grad(set_to_none=True)
        from apex.normalization import fused_layer_norm

        assert fused_layer_norm.calls == ["rms", "layer"]
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other)
