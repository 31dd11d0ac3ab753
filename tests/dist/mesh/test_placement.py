"""Another order of nodes changes which host a rank runs on, and nothing else: the same collectives, the same bits."""

from __future__ import annotations

import hashlib
from typing import Any

import torch
import torch.distributed as dist

from megazero.comm.hops import Traffic
from megazero.config import World, make_config
from megazero.train.distributed import make_mesh
from megazero.train.parallelize import MicroBatch, build_decoder, build_pipeline, shard_decoder
from tests.dist.pool import run_ranks
from tests.sizes import TINY

WORLD = World(4, 2)


def trained(order: tuple[int, ...]) -> tuple[int, Any]:
    """Train two steps, this process being a rank of the node that ``order`` puts its node's place at."""
    node, local = divmod(dist.get_rank(), 2)
    rank, store = order.index(node) * 2 + local, dist.distributed_c10d._get_default_store()
    dist.barrier()
    dist.destroy_process_group()
    dist.init_process_group("gloo", store=dist.PrefixStore("placed", store), rank=rank, world_size=4)
    config = make_config(
        {**TINY, "zero_preset": "zeropp", "zero_exact_numel": 64, "ranks_per_node": 2}, WORLD
    )
    mesh, traffic = make_mesh(config, WORLD, torch.device("cpu")), Traffic()
    decoder = build_decoder(config, mesh, traffic)
    engine = shard_decoder(decoder, config, mesh)
    pipeline = build_pipeline(decoder, engine, config, mesh)
    tokens = torch.randint(51, (2, 12), generator=torch.Generator().manual_seed(mesh.dp_rank))
    data = [MicroBatch(t, t, torch.ones(t.shape)) for t in tokens.split(1)]
    issued = []
    for _ in range(2):
        engine.begin_step(2, 96, pipeline.program(2))
        pipeline.step(data)
        issued.append(engine.issued.value)
        engine.step()
    masters = b"".join(unit.master.value.numpy().tobytes() for unit in engine.units)
    return rank, (issued, dict(traffic.bytes), hashlib.sha256(masters).hexdigest())


def test_another_order_of_nodes_gives_the_same_bits() -> None:
    given, placed = (dict(run_ranks(4, trained, order)) for order in ((0, 1), (1, 0)))
    assert given.keys() == placed.keys() == {0, 1, 2, 3}
    assert given == placed
    assert len({facts[2] for facts in given.values()}) == 4, "ranks hold different slices"
