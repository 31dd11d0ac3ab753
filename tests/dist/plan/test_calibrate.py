"""A calibration on local ranks: 2 nodes of 2, with the engine's own collectives."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from megazero.calibrate import model, rates, timing
from megazero.calibrate.options import read_request
from megazero.calibrate.run import Calibration
from megazero.config import World, make_config
from megazero.config.options.cluster import load_cluster
from megazero.mesh.launch import Launch
from megazero.plan.base_layout import BaseLayout
from megazero.plan.layout import Layout
from megazero.plan.seconds import Collectives
from megazero.plan.simulate import simulate
from tests.dist.pool import run_ranks

MODEL = ["--model-family", "llama", "--num-layers", "2", "--hidden-size", "32", "--num-attention-heads", "4"]
MODEL += ["--seq-length", "16", "--vocab-size", "64"]


def shared_groups() -> int:
    """Return how many groups of several ranks there are."""
    return sum(group.size() > 1 for group in torch.distributed.distributed_c10d._world.pg_map)


def calibrated(output: str, more: list[str]) -> None:
    timing.ROUND_S, rates.ELEMENTS["cpu"], rates.MATRIX["cpu"] = 1e-4, 1 << 12, 64
    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    words = ["--cluster-output", output, "--calibrate-rounds", "3", "--calibrate-largest-bytes", "4096"]
    request = read_request([*MODEL, *words, *more])
    config = make_config({**request.values, "micro_batch_size": 1, "global_batch_size": None})
    launch = Launch(rank, world, rank % 2, 2)
    run = Calibration(request, config, launch, 2, torch.device("cpu"))
    before = shared_groups()
    run.measure()
    assert shared_groups() == before, "communicators of what was measured are left"
    if rank == 0:
        run.write()


def too_large_for_one(output: str, more: list[str]) -> None:
    """Calibrate where rank 1 has no memory for two samples on one rank."""
    made = model._calls

    def calls(decoder, samples, *args):
        if samples == 2 and decoder.tp.size == 1 and torch.distributed.get_rank() == 1:
            raise torch.OutOfMemoryError("Tried to allocate 80 GiB")
        return made(decoder, samples, *args)

    model._calls = calls
    try:
        calibrated(output, more)
    finally:
        model._calls = made


@pytest.mark.slow
def test_a_size_for_which_a_rank_has_no_memory_is_left_out(tmp_path: Path) -> None:
    output = tmp_path / "lab.yaml"
    run_ranks(4, too_large_for_one, str(output), ["--calibrate-micro-batches", "1", "2"])
    found = {(row.tp, row.micro_batch) for row in load_cluster(str(output)).layers}
    assert found == {(1, 1), (2, 1), (2, 2)}


@pytest.mark.slow
def test_a_cluster_is_measured_and_planned_with(tmp_path: Path) -> None:
    output = tmp_path / "lab.yaml"
    run_ranks(4, calibrated, str(output), ["--calibrate-micro-batches", "2"])
    cluster = load_cluster(str(output))
    assert (cluster.nodes, cluster.ranks_per_node) == (2, 2) and cluster.cores is not None
    assert {(r.operation, r.ranks, r.nodes) for r in cluster.collectives} == {
        *((name, 2, nodes) for name in ("gather", "exchange", "message") for nodes in (1, 2)),
        ("sum", 2, 1),
    }
    assert {(r.module, r.tp) for r in cluster.layers} == {
        (name, tp) for name in ("embedding", "layer", "head") for tp in (1, 2)
    }

    world = World(4, 2)
    values = {"micro_batch_size": 2, "global_batch_size": 16, "zero_preset": "zero3", "ranks_per_node": 2}
    config = make_config({**read_request(MODEL).values, **values}, world)
    timing_ = simulate(Layout(BaseLayout(config, world, cluster, Collectives(cluster)), config.zero))
    assert sum(timing_.bill.values()) == pytest.approx(timing_.seconds)
