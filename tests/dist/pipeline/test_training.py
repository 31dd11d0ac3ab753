"""Whole runs on pipelines: dropout and evaluations of one rank; bytes, times and rates that add up."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megazero.config import World, make_config
from megazero.config.model.spec import training_flops
from megazero.log.metrics import read_metrics
from megazero.log.time_bill import items_over
from tests.dist.pool import run_ranks
from tests.dist.runs import checkpoint_of, differences, train_all, train_each
from tests.sizes import TINY

NODES = {"ranks_per_node": 2}
TP2 = {"tensor_model_parallel_size": 2}
DROPOUT = {"hidden_dropout": 0.1, "attention_dropout": 0.1}
TIED = {"untie_embeddings_and_output_weights": False}
EVALUATED = {"eval_iters": 2, "eval_interval": 2, "eval_at_start": True}


def pipeline(
    pp: int, schedule: str | None = None, virtual: int | None = None, **others: Any
) -> dict[str, Any]:
    return {
        "num_layers": max(pp * (virtual or 1), 3),
        "pipeline_model_parallel_size": pp,
        "pipeline_schedule": schedule,
        "num_virtual_stages_per_pipeline_rank": virtual,
        **others,
    }


@pytest.mark.slow
def test_dropout_and_evaluations_are_those_of_one_rank(tmp_path: Path) -> None:
    """Masks are drawn by the seed, the iteration and the samples: by no layout."""
    values = {**DROPOUT, **TIED, **EVALUATED, "params_dtype": "fp64", "num_layers": 4, "train_iters": 4}
    values["log_dir"] = str(tmp_path)
    seen = train_each({0: (1, values), 1: (4, {**values, **pipeline(2, virtual=2, zero_preset="zero3")})})
    alone, ranks = seen[0][0], seen[1]
    for each in ranks:
        assert dict(each.losses) == pytest.approx(dict(alone.losses), rel=1e-10)
        assert each.evaluations == pytest.approx(alone.evaluations, rel=1e-10) and len(each.evaluations) == 3


@pytest.mark.first(1)
@pytest.mark.parametrize("ranks, layout", [(2, pipeline(2, "zb-h1")), (4, pipeline(2, virtual=2, **TIED))])
def test_evaluations_do_not_change_training(tmp_path: Path, ranks: int, layout: dict[str, Any]) -> None:
    base = {**layout, **DROPOUT, "params_dtype": "bf16", "zero_preset": "zero1", "train_iters": 4}
    base |= {"global_batch_size": 4, "log_dir": str(tmp_path / "l")}
    evaluated = {**base, **EVALUATED, "save": str(tmp_path / "evaluated")}
    jobs = [{**base, "save": str(tmp_path / "plain")}, evaluated]
    for plain, other in run_ranks(ranks, train_all, jobs, timeout=300):
        assert plain.losses == other.losses and not plain.evaluations and len(other.evaluations) == 3
    one, two = (checkpoint_of(tmp_path / name) for name in ("plain", "evaluated"))
    assert len(one) == 4 and not differences(one, two)


COUNTED = {
    "interleaved of 4, 2 nodes": (4, pipeline(4, virtual=2, **NODES)),
    "x zero3, outermost dp": (4, pipeline(2, zero_preset="zero3", use_tp_pp_dp_mapping=True, **NODES)),
    "1f1b of 4, recompute": (4, pipeline(4, ranks_per_node=1, recompute_granularity="full")),
    "zb-h1, bf16, 2 samples": (2, pipeline(2, "zb-h1", params_dtype="bf16", micro_batch_size=2)),
    "x tp 2, interleaved": (4, pipeline(2, virtual=2, **TP2, sequence_parallel=True, **NODES)),
}


def messages_sent(ranks: int, values: dict[str, Any]) -> list[dict[str, int]]:
    """Bytes that each rank sends to other stages in a step, by link: an activation up and a gradient down for each
    micro-batch and boundary, a tensor-parallel rank its share of them."""
    config = make_config({**TINY, **values}, World(ranks, ranks))
    parallel, model = config.parallel, config.model
    tp, pp = parallel.tensor_model_parallel_size, parallel.pipeline_model_parallel_size
    per_node = parallel.ranks_per_node or ranks
    dp = ranks // (tp * pp)
    width = {"bf16": 2, "fp32": 4, "fp64": 8}[config.precision.params_dtype]
    assert model.seq_length and model.hidden_size and config.batch.micro_batch_size
    size = model.seq_length * config.batch.micro_batch_size * model.hidden_size * width // tp
    count = config.num_micro_batches(World(ranks, ranks))
    out: list[dict[str, int]] = [{} for _ in range(ranks)]
    stride = tp if parallel.use_tp_pp_dp_mapping else tp * dp
    for rank, sent in enumerate(out):
        index = rank // stride % pp
        stages = pp * config.virtual_stages
        for stage in range(index, stages, pp):
            for other in (stage - 1, stage + 1):
                if 0 <= other < stages:
                    peer = rank + (other % pp - index) * stride
                    link = "intra" if peer // per_node == rank // per_node else "inter"
                    key = f"pp_{link}_node"
                    sent[key] = sent.get(key, 0) + count * size
    return out


@pytest.mark.first(2)
@pytest.mark.parametrize("name", COUNTED)
def test_bytes_times_and_rates(tmp_path: Path, name: str) -> None:
    ranks, values = COUNTED[name]
    values = {**values, "train_iters": 3, "log_dir": str(tmp_path)}
    wanted = messages_sent(ranks, values)
    for each, own in zip(train_each({name: (ranks, values)})[name], wanted, strict=True):
        for sent in each.sent:
            assert {key: n for key, n in sent.items() if key.startswith("pp_")} == own
    config = make_config({**TINY, **values}, World(ranks, ranks))
    flops, waited = training_flops(config.model, [TINY["seq_length"]], 1) * TINY["global_batch_size"], 0.0
    for line in read_metrics(tmp_path):
        assert wanted[0].items() <= {k.removesuffix("_bytes"): n for k, n in line["bytes"].items()}.items()
        bill, seconds = line["time_bill"], line["iteration_time_s"]
        assert tuple(bill) == items_over() and abs(sum(bill.values()) - seconds) < 1e-6
        waited += bill["exposed_pipeline_intra"] + bill["exposed_pipeline_inter"]
        for link in ("intra", "inter"):
            kinds = [n for key, n in line["bytes"].items() if key.endswith(f"_{link}_node_bytes")]
            assert line[f"{link}_node_bytes"] == sum(kinds)
            # Waits are booked on links that there are.
            assert f"pp_{link}_node" in wanted[0] or not bill[f"exposed_pipeline_{link}"]
        tokens = TINY["global_batch_size"] * TINY["seq_length"]
        assert line["tokens_per_s"] * seconds == pytest.approx(tokens)
        assert line["tflops_per_rank"] * 1e12 * ranks * seconds == pytest.approx(flops)
    assert waited > 0
