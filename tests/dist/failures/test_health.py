"""The health check on ranks, with planted faults: each is named by every rank alike, and nothing is left behind."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from megazero import files
from megazero.config import World, make_config
from megazero.ops import health_probes
from megazero.ops.health import Storage, Unhealthy, check_health
from megazero.plan.memory import checkpoint_bytes
from tests.dist.pool import run_ranks
from tests.dist.runs import checkpoint_of, train, train_all
from tests.messages import names
from tests.sizes import TINY

SHORT = {"train_iters": 1, "lr_warmup_iters": 0}
RANKS, BAD = 4, 2  # each rank is a node of its own here
BAD_NODE = f"n{BAD}"


def check(save: Path, plant: Callable[[], None] | None = None, size: int = 1) -> str:
    """The notes of a check in this rank, or what it refuses. plant: what makes rank BAD bad."""
    kept = (health_probes.multiplies, files.SEEN_S)
    files.SEEN_S = 1.0
    rank = dist.get_rank()
    if rank == BAD and plant is not None:
        plant()
    elsewhere = save.with_name("elsewhere") if plant is see_another_folder and rank == BAD else save
    try:
        return "\n".join(check_health(f"n{rank}", torch.device("cpu"), Storage(elsewhere, size, 2)))
    except Unhealthy as error:
        return f"{error.exit_status.name} {error}"
    finally:
        health_probes.multiplies, files.SEEN_S = kept


def multiply_wrongly() -> None:
    health_probes.multiplies = lambda device: False


def see_another_folder() -> None:
    """Nothing to change: see ``check``."""


def check_each(save: Path) -> list[str]:
    faults = (None, multiply_wrongly, see_another_folder)
    return [*(check(save, plant) for plant in faults), check(save, size=10**18)]


@pytest.mark.slow
def test_faults_are_named_with_their_node_on_every_rank(tmp_path: Path) -> None:
    every = run_ranks(RANKS, check_each, tmp_path / "deep" / "save")
    well, wrong, elsewhere, full = every[0]
    names(well, "health check of 4 ranks on 4 nodes")
    bad = f"RANK_LOST health check: {BAD_NODE}:", f"--exclude={BAD_NODE}"
    names(wrong, *bad, f"rank {BAD}", "product")
    names(elsewhere, *bad, f"rank {BAD}", "does not see the file")
    names(full, "STORAGE", "--save", "GiB more")
    assert "--exclude" not in full
    refusals = [rank[1:] for rank in every]
    assert refusals == refusals[:1] * RANKS  # word for word
    assert os.listdir(tmp_path / "deep" / "save") == []


def test_a_run_checks_its_nodes_when_it_is_told_to(tmp_path: Path) -> None:
    values = {**SHORT, "log_dir": str(tmp_path / "logs")}
    checked = {**values, "save": str(tmp_path / "save"), "health_check": True}
    with_it, without = run_ranks(2, train_all, [checked, values], timeout=120)[0]
    assert any(note.startswith("health check of 2 ranks on 1 nodes") for note in with_it.notes)
    assert any(note.startswith("--save has room for ") for note in with_it.notes)
    assert not any("health check" in note for note in without.notes)


@pytest.mark.parametrize(
    "values",
    [
        {"optimizer": "sgd", "sgd_momentum": 0.9},
        {
            "zero_preset": "zeropp",
            "ranks_per_node": 2,
            "params_dtype": "bf16",
            "zero_exact_numel": 64,
            "exp_avg_dtype": "bf16",
            "exp_avg_sq_dtype": "bf16",
        },
    ],
)
def test_the_size_of_a_checkpoint_is_known_beforehand(tmp_path: Path, values: dict) -> None:
    run_ranks(4, train, {**values, **SHORT, "save": str(tmp_path), "log_dir": f"{tmp_path}/l"}, timeout=120)
    kinds = checkpoint_of(tmp_path)
    stored = sum(tensor.nbytes for kind in kinds.values() for tensor in kind.values())
    world = World(4, values.get("ranks_per_node", 4))
    config = make_config({**TINY, **values}, world)
    size = checkpoint_bytes(config.model, config.precision.params_dtype, config.optimizer, config.wire(world))
    assert stored == size
