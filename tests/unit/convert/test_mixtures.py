"""What is wrong with a mixture of experts is one sentence, and nothing is lost or left behind."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from megazero.cli import main
from megazero.config import ConfigError, World, begun, parse
from megazero.convert.importing import Published
from tests.family_models import save
from tests.hugging_face import weights_digest

LAYER = "model.layers.1.mlp"
TRAINING = "--seq-length 16 --micro-batch-size 2 --global-batch-size 2 --lr 1e-3 --train-iters 2 --mock-data"


def remove(weights: dict[str, Tensor]) -> None:
    del weights[f"{LAYER}.experts.3.up_proj.weight"]


def widen(weights: dict[str, Tensor]) -> None:
    weights[f"{LAYER}.experts.3.up_proj.weight"] = torch.zeros(21, 48)


def add(weights: dict[str, Tensor]) -> None:
    weights[f"{LAYER}.experts.6.up_proj.weight"] = torch.zeros(20, 48)


def drop_row(weights: dict[str, Tensor]) -> None:
    weights[f"{LAYER}.gate.weight"] = weights[f"{LAYER}.gate.weight"][:5].clone()


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save("qwen3_moe", tmp_path_factory.mktemp("published") / "hf")


def changed(published: Path, folder: Path, change: Callable[[dict[str, Tensor]], None]) -> Path:
    folder.mkdir()
    (folder / "config.json").write_bytes((published / "config.json").read_bytes())
    weights = load_file(published / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (remove, f"{LAYER}.experts.3.up_proj.weight is missing"),
        (widen, f"{LAYER}.experts.3.up_proj.weight has shape (21, 48), not (20, 48)"),
        (add, f"{LAYER}.experts.6.up_proj.weight belongs to no parameter"),
        (drop_row, f"{LAYER}.gate.weight has shape (5, 48), not (6, 48)"),
    ],
)
def test_a_folder_whose_experts_are_not_its_configs(
    change: Callable, said: str, published: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    folder = changed(published, tmp_path / "hf", change)
    before = weights_digest(folder)
    assert main(["convert", "from-hf", str(folder), str(tmp_path / "checkpoint")]) == 2
    *_, head, line = capsys.readouterr().err.strip().splitlines()
    assert "these weights are not of this model" in head and line.strip() == said
    assert weights_digest(folder) == before and not (tmp_path / "checkpoint").exists()


@pytest.mark.parametrize(
    ("variant", "fields", "note"),
    [
        # transformers' grouped products refuse rows that are no multiple of 16 bytes.
        ("qwen2_moe", {"moe_intermediate_size": 11}, "experts_implementation"),
        ("glm4_moe", {"first_k_dense_replace": 2}, "tensors"),
        ("mixtral", {"num_experts_per_tok": 1}, "tensors"),
        ("qwen3_moe", {"num_experts_per_tok": 1}, "tensors"),
        ("granitemoe", {"num_experts_per_tok": 1}, "tensors"),
    ],
)
def test_a_mixture_that_is_seldom_goes_in_and_out(
    variant: str, fields: dict, note: str, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    folder = save(variant, tmp_path / "hf", **fields)
    root, out = tmp_path / "checkpoint", tmp_path / "out"
    assert main(["convert", "from-hf", str(folder), str(root)]) == 0
    assert main(["convert", "to-hf", str(root), str(out)]) == 0
    assert capsys.readouterr().out.count(note) == 2
    before, after = Published.open(folder), Published.open(out)
    assert before.model == after.model and before.shapes == after.shapes


def test_experts_of_another_count(published: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    root = tmp_path / "checkpoint"
    assert main(["convert", "from-hf", str(published), str(root), "--no-check"]) == 0
    for load in (str(root), f"hf:{published}"):
        line = f"{TRAINING} --finetune --load {load}"
        assert begun(parse(line.split(), World(1, 1))).model.num_experts == 6
        with pytest.raises(ConfigError) as caught:
            begun(parse([*line.split(), "--num-experts", "8"], World(1, 1)))
        (error,) = caught.value.errors
        assert (
            error.startswith("--num-experts 8 is not the model of") and "which has --num-experts 6" in error
        )
    other = save("qwen3_moe", tmp_path / "other", num_experts=8)
    capsys.readouterr()
    assert main(["convert", "check", str(root), str(other)]) == 1
    assert (
        "experts.6.down_proj.weight' is (48, 20) there and absent in the checkpoint"
        in capsys.readouterr().out
    )
