"""A run with --zero-preset auto is the run with the flags that the planner chose."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from megazero.config.read.flags import read_flags
from tests.dist.runs import train_each
from tests.unit.plan.test_plan import write_cluster


@pytest.mark.slow
def test_auto_is_the_layout_that_it_names(tmp_path: Path) -> None:
    file = Path(write_cluster(tmp_path / "lab.yaml", 1))
    file.write_text(
        file.read_text().replace("ranks_per_node: 4", "ranks_per_node: 2").replace("bf16", "fp32")
    )
    auto = {"cluster": str(file), "zero_preset": "auto", "loss_policy": "zeropp", "ranks_per_node": 2}
    quiet = {"zero_exact_numel": 64, "log_dir": str(tmp_path / "logs")}  # small matrices are quantised, too
    (chosen, *_) = train_each({"auto": (4, {**auto, **quiet})})["auto"]
    line = next(note for note in chosen.notes if "--zero-preset auto chose" in note)
    flags = shlex.split(line.split(": ")[-1])
    named = {
        name: value for name, value in read_flags(flags).layer.values.items() if name.startswith("zero_")
    }
    assert "zero_shard" in named and "zero_quantized_gradients" in named, line
    (same, *_) = train_each({"named": (4, {**named, "ranks_per_node": 2, **quiet})})["named"]
    assert chosen.losses == same.losses and len(same.losses) == 6
