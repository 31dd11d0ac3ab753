"""zeropp between nodes: the bytes are few on every layout of a mixture, and copies of experts stay the same bits."""

from __future__ import annotations

import io
import math
from contextlib import ExitStack, redirect_stdout
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megazero.config import World, make_config
from megazero.mesh.launch import Launch
from megazero.train import setup
from megazero.zero.records import RESIDUAL, save_records
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
    "TP 2, copied heads": {**ZEROPP, **TP, "num_query_groups": 1},
}


def oracle(values: dict[str, Any]) -> Across:
    model = Llama(
        layers=2,
        hidden=64,
        ffn=96,
        heads=4,
        groups=values.get("num_query_groups", 4),
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


def copied(values: dict[str, Any]) -> tuple[int, int, list[str]]:
    """Train, and return how many elements of copies that tensor-parallel ranks hold are rounded, how many of these
    owe something, and what a checkpoint holds that differs between the copies, or is not owed by all four senders."""
    config = make_config({**TINY, **values}, World(RANKS, RANKS))
    with ExitStack() as stack, redirect_stdout(io.StringIO()):
        run = setup.prepare(config, Launch(dist.get_rank(), RANKS, local_world_size=RANKS), stack)
        run.run()
    engine, rounded, owing, differ, owed = run.engine, 0, 0, list[str](), dict[str, torch.Tensor]()
    for unit in engine.units:
        if (
            unit.feedback.residual is not None
        ):  # with one data-parallel rank on a node it is of the whole unit
            every = unit.feedback.residual.clone()
            dist.all_reduce(every)
            owed |= {slot.name: every[at : at + high] for slot, _, high, at in unit.layout.ranges(0)}
    engine.refresh()
    for record in save_records(engine):
        name = record.placement.name
        if not engine.traits[name].replicated or math.prod(record.placement.local_shape) <= EXACT:
            continue
        rounded += record.stop - record.start
        for kind, mine in record.tensors.items():
            both = [torch.empty_like(mine) for _ in range(2)]
            dist.all_gather(both, mine, group=engine.mesh.tp.gather_group)
            differ += [f"{name}: {kind}"] * (not torch.equal(*both))
        if owed:
            mine, whole = record.tensors[RESIDUAL], owed[name][record.start : record.stop]
            owing += int(whole.count_nonzero())
            differ += [f"{name}: owed"] * (not torch.allclose(mine, whole, rtol=1e-5, atol=1e-8))
    return rounded, owing, differ


@pytest.mark.parametrize(
    "how",
    [
        {"zero_gradient_rounding": "feedback"},
        pytest.param({}, marks=pytest.mark.slow),
        pytest.param(
            {"zero_gradient_rounding": "stochastic", "zero_quantized_weights_delta": False},
            marks=pytest.mark.slow,
        ),
    ],
    ids=str,
)
def test_copies_of_experts_stay_the_same_bits(how: dict[str, Any], tmp_path: Path) -> None:
    for model in (LAYOUTS["TP 2, EP 1"], LAYOUTS["TP 2, copied heads"]):
        values = {**model, **how, "train_iters": 4, "log_dir": str(tmp_path)}
        rounded, owing, differ = zip(*run_ranks(RANKS, copied, values, timeout=180), strict=True)
        assert not any(differ), differ
        assert sum(rounded)
        assert bool(sum(owing)) == (how.get("zero_gradient_rounding") == "feedback")
