"""Stopping and going on: the same bits on the same layout, the same loss on every other one."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from megazero.checkpoint import store
from megazero.data.gpt import SampleSpec
from megazero.data.mock import MockDataset
from megazero.log.metrics import read_metrics
from megazero.train.generate import Sampling, load_text_model, sample_tokens
from tests.dist.pool import run_ranks
from tests.dist.runs import checkpoint_of, differences, train_all, train_each
from tests.sizes import TINY

NODES = {"ranks_per_node": 2}
DROPOUT = {"hidden_dropout": 0.1, "attention_dropout": 0.1}
GPT, NEOX = ({"model_family": family, "num_query_groups": 8} for family in ("gpt", "gpt_neox"))
RAMP = {"rampup_batch_size": (4, 4, 24), "global_batch_size": 16}  # 4, 4, 8, 12, 12, 16, ...
TIED = {"untie_embeddings_and_output_weights": False}
TP2 = {"tensor_model_parallel_size": 2}
TP4 = {"tensor_model_parallel_size": 4}
PP2 = {"pipeline_model_parallel_size": 2}
PP4 = {"pipeline_model_parallel_size": 4}
ADEMAMIX = {"optimizer": "ademamix", "ademamix_beta3_warmup": 4, "ademamix_alpha_warmup": 7}
VIRTUAL2 = {"num_virtual_stages_per_pipeline_rank": 2}


def pipeline(pp: int, virtual: int | None = None, **others: Any) -> dict[str, Any]:
    sizes = {"pipeline_model_parallel_size": pp, "num_layers": max(2, pp * (virtual or 1))}
    return {**sizes, "num_virtual_stages_per_pipeline_rank": virtual, **others}


# (ranks, values): what is stopped in the middle and must go on bit for bit
SAME = {
    "one rank, dropout": (1, {"global_batch_size": 2, **DROPOUT}),
    "zero1, gpt, bf16, dropout": (2, {"zero_preset": "zero1", "params_dtype": "bf16", **GPT, **DROPOUT}),
    "ddp, ramp-up": (2, {"zero_preset": "ddp", **RAMP}),
    "zero2, sgd, masked ends": (2, {"zero_preset": "zero2", "optimizer": "sgd", "eod_mask_loss": True}),
    "zero3, bf16, ramp-up": (2, {"zero_preset": "zero3", "params_dtype": "bf16", **RAMP}),
    "hpz, bf16, dropout": (4, {"zero_preset": "hpz", "params_dtype": "bf16", **NODES, **DROPOUT}),
    "mics, samples, WSD": (
        4,
        {
            "zero_preset": "mics",
            **NODES,
            "global_batch_size": 8,
            "train_iters": None,
            "train_samples": 48,
            "lr_warmup_iters": None,
            "lr_warmup_samples": 8,
            "lr_decay_style": "WSD",
            "lr_wsd_decay_samples": 16,
        },
    ),
    "tp 2 x zero3, sequence parallel, recompute": (
        4,
        {
            **TP2,
            "zero_preset": "zero3",
            "sequence_parallel": True,
            "recompute_granularity": "full",
            **DROPOUT,
        },
    ),
    "tp 4, gpt, bf16": (4, {**TP4, "params_dtype": "bf16", **GPT, "hidden_dropout": 0.1}),
    "gpipe, sgd, dropout, ramp-up": (
        2,
        pipeline(2, pipeline_schedule="gpipe", optimizer="sgd", **DROPOUT, **RAMP),
    ),
    "1f1b, bf16, tied, dropout": (2, pipeline(2, params_dtype="bf16", **TIED, **DROPOUT)),
    "zb-h1, bf16, gpt": (2, pipeline(2, pipeline_schedule="zb-h1", params_dtype="bf16", **GPT)),
    "interleaved x zero3, bf16, tied, ramp-up": (
        4,
        pipeline(2, 2, zero_preset="zero3", params_dtype="bf16", **TIED, **RAMP),
    ),
    "interleaved x hpz, outermost dp, bf16, tied": (
        8,
        pipeline(2, 2, zero_preset="hpz", params_dtype="bf16", use_tp_pp_dp_mapping=True, **TIED)
        | {"ranks_per_node": 4, "global_batch_size": 8},
    ),
    "zb-h1 x tp 2, bf16, sequence parallel, recompute, masked": (
        4,
        pipeline(
            2,
            pipeline_schedule="zb-h1",
            params_dtype="bf16",
            **TP2,
            sequence_parallel=True,
            recompute_granularity="full",
            eod_mask_loss=True,
        ),
    ),
}


def interrupted(values: dict, folder: Path) -> list[dict]:
    """The uninterrupted run (which also evaluates), a run that stops after 3 iterations, and the rest of it."""
    values = {"global_batch_size": 4, **values, "log_dir": str(folder / "logs")}
    straight = {
        **values,
        "save": str(folder / "straight"),
        "log_dir": str(folder / "straight-logs"),
        "eval_interval": 2,
        "eval_iters": 1,
    }
    first = {**values, "save": str(folder / "first"), "exit_interval": 3}
    return [straight, first, {**values, "load": str(folder / "first"), "save": str(folder / "second")}]


# Of SAME, run always; every one with -m slow.
FEW = (
    *("one rank, dropout", "zero3, bf16, ramp-up", "gpipe, sgd, dropout, ramp-up", "zb-h1, bf16, gpt"),
    "tp 2 x zero3, sequence parallel, recompute",
)


@pytest.mark.parametrize("world", [1, pytest.param(2, marks=pytest.mark.slow), 4])
def test_resume_equals_the_uninterrupted_run_bit_for_bit(tmp_path: Path, world: int) -> None:
    resume_alike(tmp_path, world, {name: SAME[name] for name in FEW})


@pytest.mark.slow
@pytest.mark.parametrize("world", [1, 2, 4, 8])
def test_every_resume_equals_the_uninterrupted_run_bit_for_bit(tmp_path: Path, world: int) -> None:
    resume_alike(tmp_path, world, SAME)


def resume_alike(tmp_path: Path, world: int, every: dict[str, tuple[int, dict]]) -> None:
    """Of those of a number of ranks."""
    cases = {name: values for name, (ranks, values) in every.items() if ranks == world}
    folders = {name: tmp_path / str(number) for number, name in enumerate(cases)}
    jobs = {
        (name, part): (world, job)
        for name, values in cases.items()
        for part, job in enumerate(interrupted(values, folders[name]))
    }
    seen = train_each(jobs)
    for name, folder in folders.items():
        for straight, first, second in zip(*(seen[name, part] for part in range(3)), strict=True):
            assert len(straight.losses) >= 6 and len(first.losses) == 3 == second.start, name
            assert first.losses + second.losses == straight.losses, name
            assert first.ids + second.ids == straight.ids, name
            assert len(straight.evaluations) == len(straight.losses) // 2, name
        one, two = checkpoint_of(folder / "straight"), checkpoint_of(folder / "second")
        assert len(one) == (2 if "sgd" in name else 4 if "bf16" in name else 3), name
        assert not differences(one, two), name
        assert differences(one, checkpoint_of(folder / "first")), name
        lines = read_metrics(folder / "logs")
        straight_lines = read_metrics(folder / "straight-logs")
        assert [line["iteration"] for line in lines] == list(range(1, len(lines) + 1)), name
        for key in ("lm_loss", "grad_norm", "learning_rate", "consumed_samples", "batch_size"):
            wanted = [line[key] for line in straight_lines if "lm_loss" in line]
            assert [line[key] for line in lines] == wanted, (name, key)


MAPPED = {"use_tp_pp_dp_mapping": True}
# Every layout loads what every other wrote. Name: (ranks, values).
LAYOUTS = {
    "1 rank": (1, {}),
    "ddp 2": (2, {"zero_preset": "ddp"}),
    "tp 4": (4, {**TP4}),
    "tp 2 x zero1, sequence parallel": (4, {**TP2, "zero_preset": "zero1", "sequence_parallel": True}),
    "tp 2 x zero3": (4, {**TP2, "zero_preset": "zero3"}),
    "zero3 4, 2 nodes": (4, {"zero_preset": "zero3", **NODES}),
    "mics 4": (4, {"zero_preset": "mics", **NODES}),
    "factors 1,2,4": (4, {"zero_shard": (1, 2, 4), **NODES}),
    "pp 2, zb-h1": (2, {**PP2, "pipeline_schedule": "zb-h1"}),
    "pp 2, uneven": (2, {**PP2, "pipeline_partition": "3,1", "pipeline_schedule": "gpipe"}),
    "pp 4": (4, {**PP4}),
    "pp 2 x 2 x zero1": (4, {**PP2, **VIRTUAL2, "zero_preset": "zero1", **MAPPED, **NODES}),
    "tp 2 x pp 2, sequence parallel": (4, {**TP2, **PP2, "sequence_parallel": True}),
    "pp 2 x hpz": (8, {**PP2, "zero_preset": "hpz", **MAPPED, "ranks_per_node": 4}),
    "tp 2 x pp 2 x zero2": (8, {**TP2, **PP2, "zero_preset": "zero2"}),
}
PAIRS = list(itertools.permutations(LAYOUTS, 2))


def relayout(tmp_path: Path, pairs: list[tuple[str, str]], changes: dict) -> list[tuple]:
    """Train 5 iterations on each source, and the last 2 again on each target, from the checkpoint of iteration 3.
    Return what has other losses."""
    common = {"num_layers": 4, "train_iters": 5, "global_batch_size": 4, "log_dir": str(tmp_path / "logs")}
    common |= changes

    def job(name: str, **more: Any) -> tuple[int, dict]:
        ranks, values = LAYOUTS[name]
        return ranks, {**common, **values, **more}

    sources = dict.fromkeys(source for source, _ in pairs)
    stayed = train_each({name: job(name, save=str(tmp_path / name), save_interval=3) for name in sources})
    moved = {
        (source, target): job(target, load=str(tmp_path / source), ckpt_step=3) for source, target in pairs
    }
    wrong: list[tuple] = []
    for pair, (got, *_) in train_each(moved).items():
        wanted = stayed[pair[0]][0]
        (_, loss), (_, after) = got.losses
        (_, wanted_loss), (_, wanted_after) = wanted.losses[3:]
        # one update later: the moments and the step count came along, too
        near = (
            abs(loss - wanted_loss) <= 1e-6 * wanted_loss and abs(after - wanted_after) <= 1e-5 * wanted_after
        )
        if got.start != 3 or not near:
            wrong.append((*pair, got.start, loss, wanted_loss, after, wanted_after))
    assert len(moved) == len(pairs) > 0
    return wrong


@pytest.mark.parametrize(
    "pair, optimizer",
    [(("pp 2, zb-h1", "zero3 4, 2 nodes"), {}), (("tp 2 x zero3", "pp 2, uneven"), ADEMAMIX)],
    ids=str,
)
def test_a_run_goes_on_on_another_layout(tmp_path: Path, pair: tuple[str, str], optimizer: dict) -> None:
    assert not relayout(tmp_path, [pair], {**TIED, **optimizer})


@pytest.mark.slow
@pytest.mark.parametrize("part", range(10))
def test_a_run_goes_on_on_every_other_layout(tmp_path: Path, part: int) -> None:
    assert not relayout(tmp_path, PAIRS[part::10], {})


@pytest.mark.slow
@pytest.mark.parametrize("model", [TIED, GPT, {**NEOX, **TIED}], ids=["tied", "gpt", "gpt_neox, tied"])
def test_models_that_store_their_matrices_otherwise_go_on_on_other_layouts(
    tmp_path: Path, model: dict
) -> None:
    """GPT stores fused and transposed matrices, GPT-NeoX fused ones; both tie their embeddings."""
    assert not relayout(tmp_path, PAIRS[3::11], model)


def test_a_pipelines_checkpoint_is_read_by_one_process(tmp_path: Path) -> None:
    """Text generation takes the whole model: its loss on a sample is that of the run that goes on from there."""
    layout = pipeline(2, params_dtype="fp64", num_layers=5, **TP2, **TIED)
    base = {**layout, "global_batch_size": 1, "log_dir": str(tmp_path / "logs"), "train_iters": 3}
    base |= {"save": str(tmp_path / "run")}
    jobs = [{**base, "exit_interval": 2}, {**base, "load": str(tmp_path / "run")}]
    stopped, resumed = run_ranks(4, train_all, jobs, timeout=300)[0]
    model = load_text_model(tmp_path / "run" / "iter_0000002")
    data = MockDataset(3, 0, SampleSpec(TINY["seq_length"], 1234, model.tokenizer.info))
    assert resumed.ids == (((2,),),)
    tokens, labels = (torch.from_numpy(data[2][name])[None] for name in ("tokens", "labels"))
    loss = model.decoder(tokens, labels).mean().item()
    assert resumed.start == 2 and loss == pytest.approx(resumed.losses[0][1], rel=1e-12)
    assert abs(loss - stopped.losses[0][1]) > 1e-3
    assert len(list(sample_tokens(model, [1, 2], 5, Sampling(temperature=0)))) <= 5


def state_of(root: Path) -> dict:
    path = store.latest(root)
    assert path is not None
    return json.loads((path / "state.json").read_text())


@pytest.mark.slow
def test_what_is_left_behind_when_asked(tmp_path: Path) -> None:
    """By --no-load-optim and by another precision; and which checkpoints stay."""
    base = {"log_dir": str(tmp_path / "logs"), "zero_preset": "zero3"}
    old = {"load": str(tmp_path / "old")}
    jobs = [
        {**base, "save": str(tmp_path / "old"), "exit_interval": 3},
        {**base, **old, "train_iters": 5},
        {**base, **old, "train_iters": 5, "load_optim": False, "save": str(tmp_path / "fresh")},
        {**base, **old, "optimizer": "sgd", "train_iters": 4, "load_optim": False},
        {**base, **old, "train_iters": 5, "params_dtype": "bf16", "save": str(tmp_path / "half")},
        {**base, "load": str(tmp_path / "half"), "save": str(tmp_path / "back"), "train_iters": 6},
        {
            **base,
            "save": str(tmp_path / "many"),
            "train_iters": 8,
            "save_interval": 1,
            "save_keep_last": 2,
            "save_retain_interval": 3,
        },
    ]
    jobs.append({**jobs[-1], "save": str(tmp_path / "few"), "save_keep_last": None})  # Megatron's rule
    seen = run_ranks(2, train_all, jobs, timeout=300)[0]
    _, stayed, fresh, other, half, back, *_ = seen
    assert fresh.start == 3 and fresh.losses[0] == stayed.losses[0] == other.losses[0]
    assert abs(fresh.losses[1][1] - stayed.losses[1][1]) > 1e-4  # another update than with the moments
    assert state_of(tmp_path / "old")["optimizer"] == {"step": 3.0}
    assert state_of(tmp_path / "fresh")["optimizer"] == {"step": 2.0}

    assert half.start == 3 and abs(half.losses[0][1] - stayed.losses[0][1]) < 0.02
    assert back.start == 5 and set(checkpoint_of(tmp_path / "back")) == {"weights", "exp_avg", "exp_avg_sq"}
    for folder, steps in (("many", (3, 6, 7, 8)), ("few", (3, 6, 8))):
        kept = sorted(path.name for path in (tmp_path / folder).iterdir())
        assert kept == [f"iter_{step:07d}" for step in steps]


def test_a_chain_of_jobs_starts_fresh_in_its_own_folder(tmp_path: Path) -> None:
    """What a killed first save leaves does not count; the folder may be named in two ways."""
    (tmp_path / "run" / ".iter_0000001.partial-1a2b3c4d").mkdir(parents=True)
    (tmp_path / "link").symlink_to("run")
    job = {"log_dir": str(tmp_path / "logs"), "exit_interval": 2, "train_iters": 4, "global_batch_size": 2}
    job |= {"load": str(tmp_path / "link"), "save": f"{tmp_path / 'run'}/", "lr_warmup_iters": 0}
    elsewhere = {**job, "load": str(tmp_path / "no"), "save": str(tmp_path / "b"), "allow_fresh_start": True}
    straight = {**job, "load": None, "save": None, "exit_interval": None}
    first, second, allowed, whole = run_ranks(1, train_all, [job, job, elsewhere, straight], timeout=300)[0]
    assert (first.start, second.start, allowed.start) == (0, 2, 0)
    for fresh in (first, allowed):
        assert [("holds no checkpoint: the run starts from random weights" in n) for n in fresh.notes] == [
            True
        ]
    assert not second.notes and first.losses + second.losses == whole.losses


def names(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir())


@pytest.mark.slow
def test_a_run_goes_on_from_the_checkpoint_that_is_named(tmp_path: Path) -> None:
    """By its step or its folder. Newer ones are renamed, and their lines moved; the same command goes on from what it
    has saved since, and another one that names the same goes back again."""
    root, logs = tmp_path / "run", tmp_path / "logs"
    base = {
        "log_dir": str(logs),
        "zero_preset": "zero3",
        "train_iters": 8,
        "save": str(root),
        "save_interval": 2,
    }
    back = {
        **base,
        "load": str(root),
        "ckpt_step": 2,
        "exit_interval": 3,
    }  # stops after 3 and 6, as a requeue would
    folder = {**base, "load": str(root / "iter_0000002"), "save_keep_last": 1}
    first, again, requeued, once_more = run_ranks(
        2, train_all, [{**base, "exit_interval": 6}, back, back, {**back, "lr": 2e-3}], timeout=300
    )[0]
    assert [each.start for each in (first, again, requeued, once_more)] == [0, 2, 3, 2]
    assert "iter_0000006.superseded, iter_0000004.superseded" in again.notes[0]
    assert "began there before, and goes on from" in requeued.notes[0]
    assert again.losses + requeued.losses == first.losses[2:] and once_more.losses[0] == first.losses[2]
    aside = [
        f"iter_000000{each}" for each in ("3.superseded", "4.superseded", "4.superseded.2", "6.superseded")
    ]
    assert names(root) == sorted(["iter_0000002", "iter_0000003", *aside, "iter_0000006.superseded.2"])
    assert [line["iteration"] for line in read_metrics(logs)] == [1, 2, 3]
    moved = read_metrics(logs / "metrics.superseded.jsonl")
    assert [line["iteration"] for line in moved] == [3, 4, 5, 6, 3, 4, 5, 6]

    (last,) = run_ranks(2, train_all, [folder], timeout=300)[0]
    assert last.start == 2 and last.losses == first.losses[2:] + last.losses[4:]
    left = [name for name in names(root) if "superseded" not in name]
    assert left == ["iter_0000008"]  # retention took what was named, too
    (done,) = run_ranks(2, train_all, [folder], timeout=300)[0]
    assert done.start == 8 and len([name for name in names(root) if "superseded" in name]) == 6
    (superseded,) = run_ranks(
        2,
        train_all,
        [{**base, "load": str(root / "iter_0000004.superseded"), "exit_interval": 5}],
        timeout=300,
    )[0]
    assert superseded.start == 4 and superseded.losses == first.losses[4:5]


@pytest.mark.slow
def test_a_restart_goes_on_from_its_own_checkpoints_wherever_it_began(tmp_path: Path) -> None:
    """A new run from old weights, a branch of a run, and one that began its optimizer anew: each begins once."""
    base = {"log_dir": str(tmp_path / "logs"), "train_iters": 6, "exit_interval": 2, "global_batch_size": 2}
    old = {"load": str(tmp_path / "old")}
    starts = {
        "tuned": {**old, "finetune": True},
        "branch": {"load": str(tmp_path / "old" / "iter_0000002")},
        "anew": {**old, "load_optim": False},
    }
    jobs = [{**base, "save": str(tmp_path / "old")}]
    for name, start in starts.items():
        jobs += [{**base, **start, "save": str(tmp_path / name)}] * 2
        jobs += [{**base, **start, "save": str(tmp_path / f"{name} whole"), "exit_interval": None}]
    _, *seen = run_ranks(1, train_all, jobs, timeout=300)[0]
    for name, (once, twice, whole) in zip(starts, (seen[:3], seen[3:6], seen[6:]), strict=True):
        assert once.start == (0 if name == "tuned" else 2) and twice.start == once.start + 2, name
        assert once.losses + twice.losses == whole.losses[:4], name
