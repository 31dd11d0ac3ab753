"""Samples seen depend on the data, the seed and the count consumed: not on layouts, batches' cut or restarts."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from megazero.checkpoint import store
from tests.dist.pool import run_ranks
from tests.dist.runs import Seen, refusals, samples, train_each, write_data

NODES = {"ranks_per_node": 2}
LAYOUTS = {
    "one rank": (1, {}),
    "tp 2": (2, {"tensor_model_parallel_size": 2, "micro_batch_size": 4}),
    "zero3": (2, {"zero_preset": "zero3", "micro_batch_size": 2}),
    "tp 4": (4, {"tensor_model_parallel_size": 4, "micro_batch_size": 2}),
    "tp 2 x zero3": (4, {"tensor_model_parallel_size": 2, "zero_preset": "zero3", "micro_batch_size": 2}),
    "hpz": (4, {"zero_preset": "hpz", **NODES}),
    "ddp": (4, {"zero_preset": "ddp"}),
    "zb-h1": (2, {"pipeline_model_parallel_size": 2, "pipeline_schedule": "zb-h1"}),
    "interleaved": (4, {"pipeline_model_parallel_size": 2, "num_virtual_stages_per_pipeline_rank": 2}),
    "pp 2 outermost dp": (
        4,
        {"pipeline_model_parallel_size": 2, "use_tp_pp_dp_mapping": True, "zero_preset": "zero3", **NODES},
    ),
    "pp 2 x tp 2": (
        4,
        {"pipeline_model_parallel_size": 2, "tensor_model_parallel_size": 2, "micro_batch_size": 4},
    ),
    "pp 4": (4, {"pipeline_model_parallel_size": 4}),
}
STEPS = [4, 4, 4, 4, 8, 8, 12, 12]  # of the ramp-up below, by Megatron's rule
SAMPLES = list(range(sum(STEPS)))


def values(tmp_path: Path) -> dict:
    """Two blended files that are walked through several times, and a batch that grows on the way."""
    one, two = (write_data(tmp_path / f"data{seed}", seed=seed) for seed in (1, 2))
    return {
        "mock_data": None,
        "data_path": ("0.3", one, "0.7", two),
        "split": "90,10,0",
        "rampup_batch_size": (4, 4, 30),
        "global_batch_size": 12,
        "train_iters": len(STEPS),
        "num_layers": 4,
        "log_dir": str(tmp_path / "logs"),
    }


def runs(jobs: list[tuple[int, dict]]) -> list[list[Seen]]:
    """Every rank's view of each job."""
    seen = train_each(dict(enumerate(jobs)))
    return [seen[number] for number in range(len(jobs))]


@pytest.mark.slow
def test_every_layout_sees_the_same_samples(tmp_path: Path) -> None:
    base = {**values(tmp_path), "num_layers": 2, "train_iters": 6}
    deep = dict.fromkeys(("interleaved", "pp 4"), {"num_layers": 4})  # as many as their stages
    seen = train_each({name: (n, {**base, **v, **deep.get(name, {})}) for name, (n, v) in LAYOUTS.items()})
    first = samples(seen["one rank"])
    assert [sample for sample, _ in first] == SAMPLES[: sum(STEPS[:6])]
    assert len({text for _, text in first}) > len(first) // 2  # samples that differ
    for name, every in seen.items():
        assert samples(every) == first, name
    (reseeded,) = runs([(1, {**base, "seed": 7, "train_iters": 3})])
    assert samples(reseeded) != first[: sum(STEPS[:3])]


@pytest.mark.slow
def test_no_gap_and_no_repeat_after_resumes_on_other_layouts(tmp_path: Path) -> None:
    """Stopped mid-ramp and again later, each time going on elsewhere; a checkpoint between is not looked at."""
    base = {**values(tmp_path), "save": str(tmp_path / "run")}
    wanted = samples(runs([(1, {**base, "save": None})])[0])
    seen = []
    stops = {"ddp": 3, "pp 2 outermost dp": 4, "tp 4": 5, "interleaved": 7, "zero3": None}
    for layout, exit_at in stops.items():
        ranks, changes = LAYOUTS[layout]
        job = {**base, **changes, "exit_interval": exit_at, "load": str(tmp_path / "run")}
        job |= {"allow_fresh_start": True, "save_interval": 2}
        seen += samples(runs([(ranks, job)])[0])
    assert seen == wanted


@pytest.mark.slow
def test_a_ramp_up_stops_where_its_batch_does_not_divide_and_goes_on_elsewhere(tmp_path: Path) -> None:
    """Batches of 8, 12 and 16: two ranks of micro-batches of 4 share the first, with those of 2 all of them."""
    base = {**values(tmp_path), "rampup_batch_size": (8, 4, 32), "global_batch_size": 16, "train_iters": 5}
    wanted = samples(runs([(1, base)])[0])
    wide = {**base, "micro_batch_size": 4, "save": str(tmp_path / "run"), "load": str(tmp_path / "run")}
    (first,) = runs([(2, wide)])
    assert len(first[0].ids) == 2 and any("stops after iteration 2" in note for note in first[0].notes)
    stuck = run_ranks(2, refusals, [wide], timeout=300)
    assert all("a batch of 12, which is not a multiple of 8" in text for (text,) in stuck)
    (second,) = runs([(2, {**wide, "micro_batch_size": 2})])
    assert samples(first) + samples(second) == wanted and len(wanted) == 8 + 8 + 12 + 12 + 16


def test_a_changed_order_is_told(tmp_path: Path) -> None:
    base = {**values(tmp_path), "save": str(tmp_path / "run"), "exit_interval": 1}
    changed = {**base, "exit_interval": 2, "load": str(tmp_path / "run"), "seed": 7, "split": "80,20,0"}
    first, second = runs([(1, base), (1, changed)])
    assert not first[0].notes
    assert [note.split(" was ")[0] for note in second[0].notes] == ["--seed", "--split"]
    assert "1234 when the checkpoint was written and is 7 now" in second[0].notes[0]


@pytest.mark.slow
def test_a_length_in_samples_ends_there_whatever_the_batches_were(tmp_path: Path) -> None:
    """Counted from the checkpoint; a length in iterations counts iterations, and samples go on from the consumed."""
    base = {
        "train_iters": None,
        "lr_warmup_iters": None,
        "train_samples": 50,
        "log_dir": str(tmp_path / "logs"),
    }
    first = {**base, "save": str(tmp_path / "run"), "exit_interval": 2}  # 16 samples
    length = {**base, "train_samples": None, "train_iters": 5}
    ramp = {"rampup_batch_size": (4, 4, 24), "global_batch_size": 12}
    changed = [
        ({**base, "global_batch_size": 4}, [4] * 8),
        ({**base, "global_batch_size": 16}, [16] * 2),
        ({**base, **ramp}, [8, 12, 12]),
        ({**base, "train_samples": 17}, []),
        ({**length, "global_batch_size": 4}, [4] * 3),
        ({**length, **ramp}, [8, 12, 12]),
        ({**length, "train_iters": 1}, []),
    ]
    runs([(1, first)])
    jobs = [(1, {**job, "load": str(tmp_path / "run")}) for job, _ in changed]
    for seen, (job, sizes) in zip(runs(jobs), changed, strict=True):
        assert [sum(map(len, step)) for step in seen[0].ids] == sizes, job
        assert [sample for sample, _ in samples(seen)] == list(range(16, 16 + sum(sizes))), job


@pytest.mark.slow
def test_a_changed_length_keeps_the_order_or_tells(tmp_path: Path) -> None:
    """Of 54 samples an epoch, 48 need one, 72 a second, 104 most of it and 240 more: each alone has another order."""
    base = {
        "mock_data": None,
        "data_path": (write_data(tmp_path / "data", seed=1),),
        "split": "90,10,0",
        "train_iters": 9,
        "log_dir": str(tmp_path / "logs"),
        "eval_iters": 2,
    }
    load = {**base, "load": str(tmp_path / "run")}
    jobs = {
        "whole": base,
        "first": {**base, "save": str(tmp_path / "run"), "exit_interval": 4},
        "shorter": {**load, "train_iters": 6, "eval_iters": 1},
        "longer": {**load, "train_iters": 13, "exit_interval": 6, "save": str(tmp_path / "again")},
        "again": {**load, "train_iters": 12, "eval_iters": 0, "load": str(tmp_path / "again")},
        "smaller": {**load, "global_batch_size": 4, "train_iters": 14},
        "fresh": {**base, "train_iters": 13, "exit_interval": 2},
        "beyond": {**load, "train_iters": 30, "eval_iters": 4, "exit_interval": 5},
    }
    seen = dict(zip(jobs, runs([(1, job) for job in jobs.values()]), strict=True))
    stream = {name: samples(each) for name, each in seen.items()}
    assert stream["whole"] == (stream["first"] + stream["smaller"])
    assert stream["shorter"] == stream["whole"][32:48]
    assert (stream["longer"] + stream["again"])[:40] == stream["whole"][32:]
    assert {name: each[0].notes for name, each in seen.items() if each[0].notes}.keys() == {"beyond"}
    assert stream["fresh"] != stream["whole"][:16] and stream["beyond"] != stream["whole"][32:40]
    train, valid = seen["beyond"][0].notes
    assert "made for 72" in train and "240 that are wanted now: from sample 32 on" in train
    assert "made for 16" in valid and "evaluations take other samples" in valid
    path = store.latest(tmp_path / "again")
    assert path is not None and store.read_state(path)["ordered_for"] == {"train": 72, "valid": 16}


def test_too_little_data_is_counted_from_where_the_run_is(tmp_path: Path) -> None:
    one, two = (write_data(tmp_path / f"data{seed}", seed=seed) for seed in (1, 2))
    base = {"mock_data": None, "data_path": (one, two), "split": "90,10,0", "log_dir": str(tmp_path / "logs")}
    runs([(1, {**base, "save": str(tmp_path / "run"), "exit_interval": 2})])
    load = {**base, "load": str(tmp_path / "run"), "global_batch_size": 4}
    by_samples = {"train_iters": None, "lr_warmup_iters": None, "train_samples": 1000}
    jobs = [{**load, "train_iters": 99}, {**load, **by_samples}, {**base, **by_samples, "train_samples": 7}]
    iters, wanted, little = run_ranks(1, refusals, jobs)[0]
    assert "has 114 samples" in iters and "lower --train-iters to at most 26" in iters
    assert "takes 1000: lower --train-samples to at most 114" in wanted
    assert "--train-samples 7 does not fill the first global batch; nearest: 8" in little


@pytest.mark.first(1)
@pytest.mark.parametrize(("shards", "stages"), [(8, ()), (5, ('{"until": 16, "seq-length": 8}', "{}"))])
def test_a_stream_goes_on_elsewhere_with_the_same_samples(tmp_path: Path, shards: int, stages: tuple) -> None:
    """Its place is gathered at a save from ranks that each read their own shards, or, of 5, more than theirs. Each
    stage of training has a stream."""
    words = np.random.default_rng(0).integers(0, 126, (400, 30))
    lines = [json.dumps({"text": " ".join(map(str, row[: 1 + row[0] % 30]))}) for row in words.tolist()]
    (tmp_path / "text.jsonl").write_text("\n".join(lines))
    base = {**values(tmp_path), "split": None, "data_path": (str(tmp_path / "text.jsonl"),)}
    base |= {"data_source": "stream", "stream_shards": shards, "stream_workers": 0, "eval_iters": 0}
    base |= {"data_stages": stages}
    base |= {"tokenizer_type": "NullTokenizer", "vocab_size": 126}
    (whole,) = runs([(1, base)])
    seen = []
    for layout, exit_at in {"ddp": 3, "tp 2 x zero3": 5, "zb-h1": None}.items():
        ranks, changes = LAYOUTS[layout]
        job = {**base, **changes, "exit_interval": exit_at, "save": str(tmp_path / "run")}
        seen += samples(runs([(ranks, {**job, "load": job["save"], "allow_fresh_start": True})])[0])
    assert seen == samples(whole) and len({text for _, text in seen}) > 40
    path = store.latest(tmp_path / "run")
    assert path is not None
    state = store.read_state(path)["source"]
    assert (state["source"]["samples"] + 16 if stages else state["samples"]) == sum(STEPS)
