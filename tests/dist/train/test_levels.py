"""Training on racks of nodes: what a line tells of every link, and a checkpoint that goes on under other levels."""

from __future__ import annotations

from pathlib import Path

import pytest

from megazero.config import World, make_config
from megazero.log.metrics import read_metrics
from megazero.log.time_bill import items_over
from megazero.mesh.grid import make_grid
from megazero.mesh.levels import links_of
from megazero.verify.expected_bytes import ExpectedBytes
from tests.dist.runs import train_each
from tests.sizes import TINY

RANKS, BLOCK = 8, 64
RACKS = {"ranks_per_node": 2, "level_sizes": (2,), "zero_shard": (2, 4, 8), "train_iters": 4}


def test_shards_move_from_two_levels_to_three(tmp_path: Path) -> None:
    """P, G and OS of 2, 4 and 8 ranks, first without racks, then with them. Losses are those of one run."""
    folder = {"save": str(tmp_path / "run"), "load": str(tmp_path / "run")}
    nodes = {**RACKS, "level_sizes": (), "zero_shard": (2, 2, 8), **folder, "exit_interval": 2}
    whole = {**RACKS, "log_dir": str(tmp_path / "whole")}
    seen = train_each({"stayed": (RANKS, whole), "nodes": (RANKS, nodes)})
    seen |= train_each({"racks": (RANKS, {**RACKS, **folder})})
    legs = [loss for leg in ("nodes", "racks") for loss in seen[leg][0].losses]
    assert seen["racks"][0].start == 2 and [at for at, _ in legs] == [1, 2, 3, 4]
    for (_, got), (_, wanted) in zip(legs, seen["stayed"][0].losses, strict=True):
        assert got == pytest.approx(wanted, rel=1e-5)
    last = read_metrics(tmp_path / "whole")[-1]
    assert tuple(last["time_bill"]) == items_over(links_of(1))
    config, sent = make_config({**TINY, **RACKS}, World(RANKS, 2)), last["bytes"]
    expected = ExpectedBytes(config, World(RANKS, 2), True, BLOCK).bytes_of(0, 3, after_save=False)
    for (link, rows), total in zip(
        make_grid(8, 2, level_sizes=(2,)).rows_sent.items(), (1, 2, 4), strict=True
    ):
        assert rows == total and sent[f"scalar_{link}_bytes"] == rows * sent["scalar_inter_rack_bytes"]
        assert last[f"{link}_bytes"] == sum(n for hop, n in sent.items() if hop.endswith(f"{link}_bytes"))
    hops = [{hop: n for hop, n in each.items() if "scalar" not in hop} for each in (sent, expected)]
    assert hops[0] == hops[1] and hops[0]["reduce_inter_rack_bytes"] > 0
