"""Quantised messages through the trainer, on 4 ranks as 2 nodes of 2: losses, resuming, schedule."""

from __future__ import annotations

import io
from contextlib import ExitStack, redirect_stdout
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from megazero.comm.watch import LossyGradients
from megazero.config import World, make_config
from megazero.log.metrics import read_metrics
from megazero.mesh.launch import Launch
from megazero.train import setup
from tests.dist.pool import run_ranks
from tests.dist.runs import checkpoint_of, refusals, train_all
from tests.exact_gradients import exact_from
from tests.sizes import TINY

RANKS, PER_NODE = 4, 2
NODES = {"ranks_per_node": PER_NODE}
EXACT = 40  # elements: of TINY's parameters, the norms
UNSAID = {"zero_preset": "zeropp", "zero_exact_numel": EXACT, "params_dtype": "bf16", **NODES}
ZEROPP = {**UNSAID, "zero_quantized_weights_delta": False}  # INT8 weights; unsaid, differences
REPLICAS = {**ZEROPP, "zero_preset": None, "zero_shard": (1, 1, 4)}
REPLICAS |= {"zero_quantized_weights": True, "zero_quantized_gradients": True}
DELTA = {"zero_quantized_weights_delta": True}


def runs(jobs: list[dict[str, Any]]) -> list[list[Any]]:
    """For each job what every rank saw."""
    return [list(each) for each in zip(*run_ranks(RANKS, train_all, jobs, timeout=300), strict=True)]


def iterations(folder: str | Path) -> list[dict[str, Any]]:
    return [line for line in read_metrics(folder) if "lm_loss" in line]


@pytest.mark.slow
def test_loss_falls_as_with_exact_messages(tmp_path: Path) -> None:
    base = {"train_iters": 20, "params_dtype": "bf16", **NODES, "log_dir": str(tmp_path)}
    jobs = [{"zero_preset": "hpz"}, ZEROPP, {**ZEROPP, **DELTA}, {**REPLICAS, **DELTA}]
    exact, *others = (
        [loss for _, loss in seen[0].losses] for seen in runs([{**base, **job} for job in jobs])
    )
    fall = sum(exact[:3]) / 3 - sum(exact[-3:]) / 3
    assert fall > 0.1
    for losses in others:
        assert losses != exact
        assert abs(sum(losses[-3:]) - sum(exact[-3:])) / 3 < 0.1 * fall


def test_errors_are_sampled_unit_by_unit(tmp_path: Path) -> None:
    runs([{**ZEROPP, "train_iters": 8, "log_dir": str(tmp_path)}])
    lines = iterations(tmp_path)
    units = [line["quantization_unit"] for line in lines]
    assert len(set(units[:4])) == 4 and units[:4] == units[4:]
    for line in lines:
        assert 0 < line["quantization_error_weights"] < 0.01
        assert 0.01 < line["quantization_error_gradients"] < 0.3
        assert 0 < line["quantization_zeroed_gradients"] < 0.9


# -- resuming ----------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_resume_sends_gradients_as_its_checkpoint_did_until_the_format_is_named(tmp_path: Path) -> None:
    """A checkpoint from before the transform was the default says 'none'. It goes on without, to the bit."""
    base = {**UNSAID, "train_iters": 3, "log_dir": str(tmp_path / "logs")}
    plain, mixed = {"zero_gradient_transform": "none"}, {"zero_gradient_transform": "hadamard"}
    first = {"exit_interval": 1, "save": str(tmp_path / "first")}
    again = {**base, "load": str(tmp_path / "first")}
    jobs = [
        {**base, **plain},
        {**base, **plain, **first},
        again,
        {**again, **mixed},
        {**again, **plain},
        base,
        {**base, **mixed},
    ]
    straight, _, kept, changed, named, fresh, asked = (ranks[0].losses for ranks in runs(jobs))
    assert kept == named == straight[1:]
    assert (
        changed[0] == straight[1] and changed[1] != straight[2]
    )  # the second step's gradients are sent otherwise
    assert fresh == asked != straight


@pytest.mark.slow
def test_a_resume_may_change_the_size_of_chunks(tmp_path: Path) -> None:
    base = {**ZEROPP, "train_iters": 4, "log_dir": str(tmp_path / "logs")}
    (straight, *_), (first, *_), (second, *_) = runs(
        [
            {**base, "zero_chunk_numel": 3000},
            {**base, "zero_chunk_numel": 3000, "exit_interval": 2, "save": str(tmp_path / "first")},
            {**base, "zero_chunk_numel": 5000, "load": str(tmp_path / "first")},
        ]
    )
    assert first.losses == straight.losses[:2] and second.start == 2
    assert second.losses[0][1] == pytest.approx(straight.losses[2][1], rel=1e-6)
    assert second.losses[1][1] == pytest.approx(straight.losses[3][1], rel=1e-2)


@pytest.mark.slow
def test_the_saved_weights_are_those_that_forwards_see(tmp_path: Path) -> None:
    """With the delta refresh R is saved, which is not the rounded master; another layout goes on from it."""
    base = {**ZEROPP, **DELTA, "params_dtype": "fp32", "train_iters": 5}
    base |= {"log_dir": str(tmp_path / "logs"), "lr_warmup_iters": 0}
    moved = {**base, "zero_preset": None, "zero_shard": (1, 2, 4), "zero_quantized_gradients": True}
    exact = {"load": str(tmp_path / "first"), "zero_preset": "zero3", "train_iters": 4, **NODES}
    stayed, _, elsewhere, exactly = runs(
        [
            base,
            {**base, "exit_interval": 3, "save": str(tmp_path / "first")},
            {**moved, "load": str(tmp_path / "first")},
            {**exact, "log_dir": str(tmp_path / "logs"), "lr_warmup_iters": 0},
        ]
    )
    kinds = checkpoint_of(tmp_path / "first")
    assert set(kinds) == {"weights", "master", "exp_avg", "exp_avg_sq"}
    rounded = [n for n, w in kinds["weights"].items() if not torch.equal(w, kinds["master"][n])]
    assert len(rounded) == 2 * 7 + 2  # every matrix; what is exact equals the master
    next_loss, wanted = elsewhere[0].losses[0][1], stayed[0].losses[3][1]
    assert elsewhere[0].start == 3 and abs(next_loss - wanted) <= 1e-6 * wanted
    assert abs(exactly[0].losses[0][1] - wanted) > 1e-6 * wanted  # sees the master, not R


# -- schedule, one node, refusals ------------------------------------------------------------


def test_gradients_are_exact_when_a_callback_says_so(tmp_path: Path) -> None:
    """Then they send what a run sends that quantises weights alone."""
    values = {**ZEROPP, "train_iters": 6, "global_batch_size": RANKS}
    until, exact = (str(tmp_path / name) for name in ("until", "exact"))
    runs(
        [
            {**values, "callbacks": exact_from(4), "log_dir": until},
            {**values, "zero_quantized_gradients": False, "log_dir": exact},
        ]
    )
    for line, plain in zip(iterations(until)[1:], iterations(exact)[1:], strict=True):
        coded = line["iteration"] <= 3
        sent, whole = (each["bytes"]["reduce_inter_node_bytes"] for each in (line, plain))
        assert sent < 0.3 * whole if coded else sent == whole
        for what in ("error", "zeroed"):
            assert (f"quantization_{what}_gradients" in line) == coded
        assert "quantization_error_weights" in line


def printed(values: dict[str, Any], limit: float = LossyGradients.LIMIT) -> str:
    """What a run in this rank writes, where gradients may lose so much."""
    config = make_config({**TINY, **values}, World(RANKS, RANKS))
    launch = Launch(dist.get_rank(), RANKS, local_world_size=RANKS)
    bound = patch.object(LossyGradients, "LIMIT", limit)
    with bound, ExitStack() as stack, redirect_stdout(io.StringIO()) as text:
        run = setup.prepare(config, launch, stack)
        with run.outputs.console:
            run.run()
    return text.getvalue()


def test_the_first_rank_says_what_is_sent(tmp_path: Path) -> None:
    first, *others = run_ranks(RANKS, printed, {**ZEROPP, "train_iters": 4, "log_dir": str(tmp_path)})
    assert others == [""] * (RANKS - 1)
    assert first.count("ZeRO: preset zeropp, P,G,OS = 2,2,4 on 4 data-parallel ranks of 2 nodes") == 1


@pytest.mark.slow
def test_the_first_rank_warns_once_of_gradients_that_lose_much(tmp_path: Path) -> None:
    """A resume warns again. INT8 does not, nor do exact messages, which measure nothing."""
    length = {"train_iters": 2 * LossyGradients.WINDOW + 2, "log_dir": str(tmp_path), "save": str(tmp_path)}
    lossy, limit = {**ZEROPP, **length}, 0.05
    halves = [{**lossy, "exit_interval": LossyGradients.WINDOW + 1}, {**lossy, "load": str(tmp_path)}]
    for values in halves:
        first, *others = run_ranks(RANKS, printed, values, limit, timeout=120)
        assert others == [""] * (RANKS - 1)
        assert first.count("warning: gradients lose 0.") == 1 == first.count("--zero-gradient-bits 8")
    short = {"train_iters": LossyGradients.WINDOW + 1, "log_dir": str(tmp_path / "others")}
    for values in ({**ZEROPP, "zero_gradient_bits": 8}, {"zero_preset": "zero3"}):
        assert "gradients lose" not in run_ranks(RANKS, printed, {**values, **short}, limit, timeout=120)[0]
    assert not any("quantization" in key for line in iterations(tmp_path / "others") for key in line)


def test_on_one_node_zeropp_is_zero3_bit_for_bit(tmp_path: Path) -> None:
    base = {"train_iters": 3, "log_dir": str(tmp_path)}
    ours, theirs = runs(
        [
            {**base, **UNSAID, "ranks_per_node": RANKS},
            {**base, "zero_preset": "zero3", "params_dtype": "bf16"},
        ]
    )
    assert ours[0].losses == theirs[0].losses


def test_a_threshold_above_every_parameter_is_refused(tmp_path: Path) -> None:
    job = {**ZEROPP, "zero_exact_numel": None, "log_dir": str(tmp_path)}
    for rank in run_ranks(RANKS, refusals, [job]):
        assert "nothing would be quantised; nearest: 1663" in rank[0]
