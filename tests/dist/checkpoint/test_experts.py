"""Checkpoints of runs whose ranks share experts: bit for bit on other layouts, and none of a rank may be missing."""

from __future__ import annotations

import io
from contextlib import ExitStack, redirect_stdout
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megazero.checkpoint import store
from megazero.config import World, make_config
from megazero.mesh.launch import Launch
from megazero.train import setup
from tests.dist.pool import run_ranks
from tests.sizes import TINY

MODEL = {
    **TINY,
    **{"model_family": "qwen3_moe", "num_layers": 4, "num_experts": 8, "moe_router_topk": 2},
    **{"moe_ffn_hidden_size": 12, "eval_iters": 0, "device": "cpu", "train_iters": 2, "save_interval": 2},
    "lr_warmup_iters": 0,
}
STAGES = {"pipeline_model_parallel_size": 2, "num_virtual_stages_per_pipeline_rank": 2}
TENSORS = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
CROSSING = {"ranks_per_node": 2, "moe_dispatch_across_nodes": "exact"}
# Each begins with what the one before has saved: ranks and layout.
CHAIN: tuple[tuple[int, dict[str, Any]], ...] = (
    (
        4,
        {
            "expert_model_parallel_size": 4,
            **CROSSING,
            "moe_dispatch_across_nodes": "int8",
            "zero_preset": "zero3",
        },
    ),
    (2, {"zero_preset": "zero1", **STAGES, "micro_batch_size": 2}),
    (4, {"expert_model_parallel_size": 2, "ranks_per_node": 2, "zero_preset": "hpz"}),
    (4, {"expert_model_parallel_size": 4, **CROSSING, **TENSORS, "zero_preset": "zero2"}),
    (4, {"expert_model_parallel_size": 2, "pipeline_model_parallel_size": 2, "zero_preset": "zero3"}),
    (1, {"zero_preset": "ddp"}),
)


def run_once(values: dict[str, Any], train: bool) -> None:
    """A whole run, or one that saves what it has loaded."""
    world = dist.get_world_size() if dist.is_initialized() else 1
    config = make_config(values, World(world, values.get("ranks_per_node") or world))
    with ExitStack() as stack, redirect_stdout(io.StringIO()):
        rank = dist.get_rank() if dist.is_initialized() else 0
        run = setup.prepare(config, Launch(rank, world, local_world_size=world), stack)
        if train:
            run.run()
        else:
            run.checkpointing.save(run.progress)


@pytest.mark.slow
def test_a_checkpoint_goes_through_layouts_bit_for_bit(tmp_path: Path) -> None:
    before, wanted = None, {}
    for number, (world, layout) in enumerate(CHAIN):
        folder = tmp_path / f"{number}"
        values = {**MODEL, **layout, "save": str(folder), "log_dir": str(tmp_path / "logs")}
        values |= {"load": str(before), "train_iters": 3} if before else {}
        run_ranks(world, run_once, values, before is None, timeout=180)
        found = store.load_kinds(store.latest(folder))
        wanted, before = wanted or found, folder
        assert found.keys() == wanted.keys() >= {"weights", "exp_avg", "exp_avg_sq"}
        for kind, tensors in wanted.items():
            assert found[kind].keys() == tensors.keys()
            same = [name for name, tensor in tensors.items() if torch.equal(found[kind][name], tensor)]
            assert same == list(tensors), (layout, kind)
    assert sum("experts" in name for name in wanted["weights"]) == 4 * 8 * 3
