"""zeropp between nodes: the bytes are few on every layout of a mixture, and copies of experts stay the same bits."""

from __future__ import annotations

import io
from contextlib import ExitStack, redirect_stdout
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megazero.config import World, make_config
from megazero.mesh.launch import Launch
from megazero.train import setup
from megazero.zero.records import save_records
from tests.bytes_across import Across, Llama
from tests.dist.pool import run_ranks
from tests.dist.runs import train_each
from tests.sizes import TINY

RANKS, NODES, EXACT = 4, 2, 600  # of the parameters norms and routers are as small as that
TP = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
SIZES = {"hidden_size": 64, "ffn_hidden_size": 96, "num_attention_heads": 4, "vocab_size": 202}
ZEROPP = {
    **SIZES,
    **{"zero_preset": "zeropp", "ranks_per_node": RANKS // NODES, "zero_exact_numel": EXACT},
    **{"params_dtype": "bf16", "seq_length": 16, "max_position_embeddings": 16, "train_iters": 2},
    **{"make_vocab_size_divisible_by": 2, "lr_warmup_iters": 0},
}
MIXTURE = {**ZEROPP, "model_family": "mixtral", "num_experts": 8, "moe_router_topk": 2}
LAYOUTS: dict[str, dict[str, Any]] = {
    "dense": ZEROPP,
    "EP 1": MIXTURE,
    "EP 2": {**MIXTURE, "expert_model_parallel_size": 2},
    "TP 2, EP 1": {**MIXTURE, **TP},
}


def oracle(values: dict[str, Any]) -> Across:
    model = Llama(
        layers=2,
        hidden=64,
        ffn=96,
        heads=4,
        groups=4,
        vocabulary=202,
        experts=values.get("num_experts", 0),
    )
    tp, ep = (values.get(f"{name}_model_parallel_size", 1) for name in ("tensor", "expert"))
    return Across(model, NODES, RANKS, tp, ep, EXACT)


def test_what_crosses_nodes_is_what_arithmetic_says() -> None:
    for name, seen in train_each({name: (RANKS, values) for name, values in LAYOUTS.items()}).items():
        for rank in seen:
            sent = {kind: rank.sent[-1].get(f"{kind}_inter_node", 0) for kind in ("refresh", "reduce")}
            assert sent == oracle(LAYOUTS[name]).sent(), name


def copied(values: dict[str, Any]) -> tuple[int, list[str]]:
    """Train, and return how many elements of tensor-parallel copies are rounded, and what a checkpoint holds that
    differs between the copies."""
    config = make_config({**TINY, **values}, World(RANKS, RANKS))
    with ExitStack() as stack, redirect_stdout(io.StringIO()):
        run = setup.prepare(config, Launch(dist.get_rank(), RANKS, local_world_size=RANKS), stack)
        run.run()
    engine, rounded, differ = run.engine, 0, list[str]()
    engine.refresh()
    for record in save_records(engine):
        name = record.placement.name
        if not engine.traits[name].rounded:
            continue
        rounded += record.stop - record.start
        for kind, mine in record.tensors.items():
            both = [torch.empty_like(mine) for _ in range(2)]
            dist.all_gather(both, mine, group=engine.mesh.tp.gather_group)
            differ += [f"{name}: {kind}"] * (not torch.equal(*both))
    return rounded, differ


@pytest.mark.parametrize(
    "how", [{}, pytest.param({"zero_quantized_weights_delta": False}, marks=pytest.mark.slow)], ids=str
)
def test_copies_of_experts_stay_the_same_bits(how: dict[str, Any], tmp_path: Path) -> None:
    values = {**LAYOUTS["TP 2, EP 1"], **how, "train_iters": 4, "log_dir": str(tmp_path)}
    rounded, differ = zip(*run_ranks(RANKS, copied, values, timeout=180), strict=True)
    assert sum(rounded) and not any(differ), differ
