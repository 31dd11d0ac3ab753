"""Runs with products in fp8: turned on and off at resumes, compiled, and on layouts beside one rank."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.dist.runs import Seen, Values, train_each

FP8 = {"params_dtype": "bf16", "fp8_format": "hybrid", "fp8_min_size": 16}
SPLIT = {"pipeline_model_parallel_size": 2, "pipeline_schedule": "zb-h1"}


def losses(seen: list[Seen]) -> list[float]:
    """Those of the ranks that have them, by iteration."""
    return [
        max(of_ranks) for of_ranks in zip(*([loss for _, loss in each.losses] for each in seen), strict=True)
    ]


def test_a_run_goes_on_in_fp8_and_back(tmp_path: Path) -> None:
    """What is computed before a change is the same, and what comes after it is not."""
    plain: Values = {"params_dtype": "bf16", "load": str(tmp_path), "save": str(tmp_path)}
    legs = [{**plain, "exit_interval": 2}, {**plain, **FP8, "exit_interval": 4}, plain]
    whole = train_each({"plain": (1, {"params_dtype": "bf16"}), "fp8": (1, FP8)})
    found = [train_each({0: (1, leg)})[0][0] for leg in legs]
    assert [seen.start for seen in found] == [0, 2, 4]
    mixed, expected = [loss for seen in found for _, loss in seen.losses], losses(whole["plain"])
    assert mixed[:2] == expected[:2] and mixed[2] != expected[2]
    assert mixed == pytest.approx(expected, rel=0.01) == losses(whole["fp8"])


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "blockwise"])
def test_layouts_and_compiled_layers_have_the_losses_of_one_rank(recipe: str) -> None:
    run = {**FP8, "fp8_recipe": recipe}
    tensors = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
    compiled = {"compile": True, "compile_backend": "aot_eager"}
    found = train_each(
        {
            "one": (1, run),
            "compiled": (1, {**run, **compiled}),
            "recomputed": (1, {**run, "recompute_granularity": "full"}),
            "tensors": (2, {**run, **tensors}),
            "compiled tensors": (2, {**run, **tensors, **compiled}),
            "stages": (2, {**run, **SPLIT}),
            "contexts": (2, {**run, "context_parallel_size": 2}),
            "shards": (4, {**run, "zero_shard": (2, 2, 4), "ranks_per_node": 2}),
        }
    )
    want = losses(found.pop("one"))
    assert losses(found.pop("compiled")) == losses(found.pop("recomputed")) == want
    for layout, seen in found.items():
        assert losses(seen) == pytest.approx(want, rel=2e-3), layout
