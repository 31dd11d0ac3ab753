"""Whole runs on pipelines: losses, samples and evaluations of one rank; bytes, times and rates that add up."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from megazero.config import World, make_config
from megazero.log.metrics import read_metrics
from megazero.log.time_bill import ITEMS
from tests.dist.pool import run_ranks
from tests.dist.runs import Seen, checkpoint_of, differences, samples, train_all, train_each
from tests.sizes import TINY

NODES = {"ranks_per_node": 2}
TP2 = {"tensor_model_parallel_size": 2}
FP64 = {"params_dtype": "fp64"}
DROPOUT = {"hidden_dropout": 0.1, "attention_dropout": 0.1}
RESET = {"reset_position_ids": True, "reset_attention_mask": True}
MASKED = {
    "eod_mask_loss": True,
    **RESET,
    "seq_length": 24,
}  # long enough for an end of document in a few samples
GROWING = {**MASKED, "rampup_seq_length": (12, 24, 4, 4), "z_loss_strength": 1e-2}
CLIPPED = {"clip_grad": 0.05}
TIED = {"untie_embeddings_and_output_weights": False}
EVALUATED = {"eval_iters": 2, "eval_interval": 2, "eval_at_start": True}
LAYOUT = (
    *("pipeline_model_parallel_size", "pipeline_schedule", "num_virtual_stages_per_pipeline_rank"),
    *("use_tp_pp_dp_mapping", "pipeline_partition", "tensor_model_parallel_size", "sequence_parallel"),
    *("zero_preset", "zero_shard", "ranks_per_node", "recompute_granularity", "micro_batch_size"),
)


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


def ramp(start: int, increment: int, target: int) -> dict[str, Any]:
    return {"rampup_batch_size": (start, increment, 2 * (start + target)), "global_batch_size": target}


def alone(values: dict[str, Any]) -> tuple[int, dict[str, Any]]:
    """The same run on one rank: (ranks, values).

    Tensor-parallel ranks draw the masks of what each has its part of (heads; with sequence parallel, everything), so
    there the run keeps them.
    """
    parted = (
        values.get("attention_dropout") or values.get("sequence_parallel") and values.get("hidden_dropout")
    )
    kept = ("tensor_model_parallel_size", "sequence_parallel") if parted else ()
    rest = {name: value for name, value in values.items() if name not in LAYOUT or name in kept}
    return rest.get("tensor_model_parallel_size", 1), rest


# name: (ranks, values)
RUNS = {
    "1f1b x zero3, ramp-up, masked, tied": (
        4,
        pipeline(2, zero_preset="zero3", **ramp(2, 4, 10), **MASKED, **TIED, micro_batch_size=1),
    ),
    "interleaved x hpz, outermost dp, ramp-up, clipped": (
        4,
        pipeline(2, virtual=2, zero_preset="hpz", use_tp_pp_dp_mapping=True, **ramp(4, 4, 12), **CLIPPED),
    ),
    "zb-h1 x tp 2, sequence parallel, growing": (
        4,
        pipeline(2, "zb-h1", **TP2, sequence_parallel=True, **GROWING, recompute_granularity="full"),
    ),
    "interleaved x tp 2 x zero3, dropout, tied, sequence parallel": (
        8,
        pipeline(2, virtual=2, **TP2, zero_preset="zero3", sequence_parallel=True, **DROPOUT, **TIED),
    ),
}


def lines_of(folder: Path) -> list[dict[str, Any]]:
    return [line for line in read_metrics(folder) if "lm_loss" in line]


def train_beside_one_rank(
    runs: Mapping[str, tuple[int, dict[str, Any]]], common: dict[str, Any], folder: Path
) -> dict[Any, Any]:
    """Train every run (ranks, values) by name, and alone by (name, "alone"). Logs: folder/0, folder/0-alone, ..."""
    jobs: dict[Any, tuple[int, dict[str, Any]]] = {}
    for number, (name, (ranks, values)) in enumerate(runs.items()):
        whole = {**common, **values}
        jobs[name] = (ranks, {**whole, "log_dir": str(folder / f"{number}")})
        one, single = alone(whole)
        jobs[name, "alone"] = (one, {**single, "log_dir": str(folder / f"{number}-alone")})
    return train_each(jobs)


@pytest.mark.slow
def test_losses_norms_and_samples_equal_one_ranks(tmp_path: Path) -> None:
    """What the covers of parity have not: dropout, ramps, ends of documents, evaluations. Whole runs in fp64."""
    limit, common = 1e-10, {**EVALUATED, **FP64, "train_iters": 4}
    seen = train_beside_one_rank(RUNS, common, tmp_path)
    for number, name in enumerate(RUNS):
        ours, wanted = seen[name], seen[name, "alone"][0]
        assert len({(each.losses, each.evaluations) for each in ours}) == 1, name
        assert samples(ours) == samples([wanted]), name
        for got, want in zip(ours[0].losses, wanted.losses, strict=True):
            assert got[0] == want[0] and abs(got[1] - want[1]) <= limit * abs(want[1]), (name, got, want)
        assert len(wanted.evaluations) == 3
        for got, want in zip(ours[0].evaluations, wanted.evaluations, strict=True):
            assert abs(got - want) <= limit * want, (name, got, want)
        for got, want in zip(*(lines_of(tmp_path / f"{number}{end}") for end in ("", "-alone")), strict=True):
            assert got["grad_norm"] == pytest.approx(want["grad_norm"], rel=10 * limit), name
            assert got["batch_size"] == want["batch_size"] and got["learning_rate"] == want["learning_rate"]


@pytest.mark.first(1)
@pytest.mark.parametrize("ranks, layout", [(2, pipeline(2, "zb-h1")), (4, pipeline(2, virtual=2, **TIED))])
def test_evaluations_do_not_change_training(tmp_path: Path, ranks: int, layout: dict[str, Any]) -> None:
    base = {
        **layout,
        **DROPOUT,
        "params_dtype": "bf16",
        "zero_preset": "zero1",
        "log_dir": str(tmp_path / "l"),
        "train_iters": 4,
        "global_batch_size": 4,
    }
    jobs = [
        {**base, "save": str(tmp_path / "plain")},
        {**base, **EVALUATED, "save": str(tmp_path / "evaluated")},
    ]
    for plain, evaluated in run_ranks(ranks, train_all, jobs, timeout=300):
        assert plain.losses == evaluated.losses and not plain.evaluations and len(evaluated.evaluations) == 3
    one, two = (checkpoint_of(tmp_path / name) for name in ("plain", "evaluated"))
    assert len(one) == 4 and not differences(one, two)


# -- metrics -----------------------------------------------------------------------------------------

COUNTED = {
    "zb-h1, bf16, 2 samples": (2, pipeline(2, "zb-h1", params_dtype="bf16", micro_batch_size=2)),
    "interleaved of 4, 2 nodes": (4, pipeline(4, virtual=2, **NODES)),
    "1f1b of 4, one rank per node, recompute": (
        4,
        pipeline(4, ranks_per_node=1, recompute_granularity="full"),
    ),
    "x zero3, outermost dp, 2 nodes": (
        4,
        pipeline(2, zero_preset="zero3", use_tp_pp_dp_mapping=True, **NODES),
    ),
    "x tp 2, sequence parallel, interleaved": (
        4,
        pipeline(2, virtual=2, **TP2, sequence_parallel=True, **NODES),
    ),
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


@pytest.mark.parametrize(
    "names",
    [
        ("interleaved of 4, 2 nodes", "x zero3, outermost dp, 2 nodes"),
        pytest.param(tuple(COUNTED), marks=pytest.mark.slow),
    ],
    ids=["some", "all"],
)
def test_bytes_times_and_rates(tmp_path: Path, names: tuple[str, ...]) -> None:
    common = {"train_iters": 3}
    counted = {name: COUNTED[name] for name in names}
    seen = train_beside_one_rank(counted, common, tmp_path)
    for number, (name, (ranks, values)) in enumerate(counted.items()):
        _bytes_are_those_of_the_formula(name, seen[name], messages_sent(ranks, {**common, **values}))
        first = messages_sent(ranks, {**common, **values})[0]
        pairs = zip(lines_of(tmp_path / f"{number}"), lines_of(tmp_path / f"{number}-alone"), strict=True)
        waited = 0.0
        for line, single in pairs:
            for key, sent in first.items():
                assert line["bytes"][f"{key}_bytes"] == sent, name
            for link in ("intra", "inter"):
                kinds = [n for key, n in line["bytes"].items() if key.endswith(f"_{link}_node_bytes")]
                assert line[f"{link}_node_bytes"] == sum(kinds), name
            bill, seconds = line["time_bill"], line["iteration_time_s"]
            assert tuple(bill) == ITEMS and abs(sum(bill.values()) - seconds) < 1e-6, name
            waited += bill["exposed_pipeline_intra"] + bill["exposed_pipeline_inter"]
            for link in ("intra", "inter"):  # waits are booked on links that there are
                assert f"pp_{link}_node" in first or not bill[f"exposed_pipeline_{link}"], name
            assert line["tokens_per_s"] * seconds == pytest.approx(
                single["tokens_per_s"] * single["iteration_time_s"]
            )
            assert line["tflops_per_rank"] * ranks * seconds == pytest.approx(
                single["tflops_per_rank"] * single["iteration_time_s"]
            )
        assert waited > 0, name


def _bytes_are_those_of_the_formula(name: str, seen: list[Seen], expected: list[dict[str, int]]) -> None:
    for rank, (each, wanted) in enumerate(zip(seen, expected, strict=True)):
        for sent in each.sent:
            assert {key: n for key, n in sent.items() if key.startswith("pp_")} == wanted, (name, rank)
