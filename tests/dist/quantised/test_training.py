"""Quantised messages through the trainer, on 4 ranks as 2 nodes of 2: bytes, resuming, schedule."""

from __future__ import annotations

import io
import itertools
from contextlib import ExitStack, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from megazero.comm.watch import LossyGradients
from megazero.config import World, make_config
from megazero.log.metrics import read_metrics
from megazero.log.time_bill import ITEMS
from megazero.mesh.launch import Launch
from megazero.models import Decoder
from megazero.train import setup
from tests.dist.pool import run_ranks
from tests.dist.runs import checkpoint_of, differences, refusals, train_all
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


def iterations(folder: Path) -> list[dict[str, Any]]:
    return [line for line in read_metrics(folder) if "lm_loss" in line]


# -- bytes -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Formula:
    """Bytes that one rank sends per step, from the definitions: shapes, formats, who sends what to whom.

    weights, gradients: (bits, block) of what crosses nodes. inside: of gradients inside a node. align: elements.
    """

    values: dict[str, Any]
    weights: tuple[int, int] | None = (8, 128)
    gradients: tuple[int, int] | None = (4, 64)
    inside: tuple[int, int] | None = None
    align: int = 128

    def units(self) -> list[tuple[int, int]]:
        """(quantised, exact) elements of each unit, padded so that all slices are whole blocks."""
        config = make_config({**TINY, **self.values}, World(RANKS, RANKS))
        decoder = Decoder(config.model, device="meta")
        out = []
        for group in decoder.units():
            shapes = [p.numel() for module in group for p in module.parameters()]
            parts = [n for n in shapes if n > EXACT], [n for n in shapes if n <= EXACT]
            out.append(tuple(up(sum(up(n, self.align) for n in part), RANKS * self.align) for part in parts))
        return out

    @property
    def width(self) -> int:
        return 2 if self.values["params_dtype"] == "bf16" else 4

    def expected(self, micro_batches: int) -> dict[str, int]:
        shape = self.values.get("zero_shard") or (2, 2, 4)
        count = self.replicas if shape == (1, 1, 4) else self.zeropp
        total = dict.fromkeys(
            ("refresh_inter", "refresh_intra", "gather_intra", "reduce_intra", "reduce_inter"), 0
        )
        units = self.units()
        stay = "zero_prefetch_bytes" in self.values  # the bytes of the whole model
        often = [1] * len(units) if stay else gathers_per_step(len(units), micro_batches)
        for unit, gathers in zip(units, often, strict=True):
            for key, sent in count(unit, gathers, micro_batches).items():
                total[key] += sent
        return {f"{key}_node_bytes": sent for key, sent in total.items() if sent}

    def zeropp(self, unit: tuple[int, int], gathers: int, micro_batches: int) -> dict[str, int]:
        """P,G,OS = 2,2,4: a quarter crosses nodes once, halves travel inside at every use."""
        quarter, half = (tuple(n // k for n in unit) for k in (4, 2))
        delta = self.values.get("zero_quantized_weights_delta", True)
        refresh = message(self.weights, quarter, self.width)
        return {
            "refresh_inter": refresh,
            "gather_intra": gathers * (sum(half) * self.width if delta else 2 * refresh),
            "reduce_intra": micro_batches
            * (message(self.inside, half, 4) if self.inside else sum(half) * self.width),
            "reduce_inter": message(self.gradients, quarter, 4),
        }

    def replicas(self, unit: tuple[int, int], gathers: int, micro_batches: int) -> dict[str, int]:
        """P,G,OS = 1,1,4: a quarter crosses nodes, then the two quarters that a rank has go to its neighbour."""
        quarter, half = (tuple(n // k for n in unit) for k in (4, 2))
        refresh, raw = message(self.weights, quarter, self.width), self.width if micro_batches == 1 else 4
        return {
            "refresh_inter": refresh,
            "refresh_intra": 2 * refresh,
            "reduce_intra": message(self.inside, half, 4) if self.inside else sum(half) * raw,
            "reduce_inter": message(self.gradients, quarter, 4),
        }


def up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple


def message(coding: tuple[int, int] | None, part: tuple[int, ...], width: int) -> int:
    """Bytes of a slice's message: digits and scales, then the exact elements, each to a multiple of 16."""
    coded, exact = part
    if coding is None:
        return (coded + exact) * width
    bits, block = coding
    return up(coded * bits // 8 + 2 * coded // block, 16) + up(exact * width, 16)


def gathers_per_step(units: int, micro_batches: int) -> list[int]:
    """Of each unit, if nothing is held ahead: a use that follows one of the same unit needs no other gather."""
    uses = [*range(units), *reversed(range(units))] * micro_batches
    runs = [unit for unit, _ in itertools.groupby(uses)]
    return [runs.count(unit) for unit in range(units)]


FORMULAS = {
    "zeropp": Formula(ZEROPP),
    "all stays": Formula({**ZEROPP, "zero_prefetch_bytes": 1 << 20}),
    "fp32": Formula({**ZEROPP, "params_dtype": "fp32"}),
    "bits": Formula(
        {**ZEROPP, "zero_weight_bits": 4, "zero_block_size": 32, "zero_gradient_bits_intra_node": 8},
        (4, 32),
        (4, 32),
        (8, 32),
        align=64,
    ),
    "blocks": Formula({**ZEROPP, "zero_block_size": 16}, (8, 16), (4, 16), align=64),
    "unsaid": Formula(UNSAID, weights=(4, 64), align=64),
    "differences in INT8": Formula({**UNSAID, "zero_weight_bits": 8}),
    "weights only": Formula({**ZEROPP, "zero_quantized_gradients": False}, gradients=None),
    "gradients only": Formula({**ZEROPP, "zero_quantized_weights": False}, weights=None, align=64),
    "1,1,4": Formula(REPLICAS),
    "1,1,4, inside, delta": Formula(
        {**REPLICAS, **DELTA, "zero_gradient_bits_intra_node": 4}, (4, 64), inside=(4, 64), align=64
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("micro_batches", [1, 3])
def test_bytes_equal_the_formula(tmp_path: Path, micro_batches: int) -> None:
    """Of every iteration but the first, which has yet to see the order of use (and starts with R everywhere)."""
    length = {"train_iters": 3, "global_batch_size": RANKS * micro_batches}
    length["zero_prefetch_bytes"] = 0
    jobs = [{**length, **f.values, "log_dir": str(tmp_path / name)} for name, f in FORMULAS.items()]
    for (name, formula), seen in zip(FORMULAS.items(), runs(jobs), strict=True):
        assert all(each.losses == seen[0].losses for each in seen), name
        expected = formula.expected(micro_batches)
        for line in iterations(tmp_path / name)[1:]:
            counted = {key: n for key, n in line["bytes"].items() if not key.startswith("scalar")}
            assert counted == expected, (name, line["iteration"])
            for link in ("intra", "inter"):
                scalars = line["bytes"].get(f"scalar_{link}_node_bytes", 0)
                total = sum(n for key, n in counted.items() if key.endswith(f"{link}_node_bytes"))
                assert line[f"{link}_node_bytes"] == total + scalars
            assert tuple(line["time_bill"]) == ITEMS
            assert abs(sum(line["time_bill"].values()) - line["iteration_time_s"]) < 1e-6


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

RESUMED = {
    "zeropp": ZEROPP,
    "delta": {**ZEROPP, **DELTA},
    "delta, fp32": {**ZEROPP, **DELTA, "params_dtype": "fp32"},
    "inside too": {**ZEROPP, "zero_gradient_bits_intra_node": 4, "hidden_dropout": 0.1},
    "1,1,4, delta": {**REPLICAS, **DELTA},
    "mics": {**REPLICAS, "zero_shard": (2, 2, 2), "zero_quantized_weights": False},
    "tied, delta": {**ZEROPP, **DELTA, "untie_embeddings_and_output_weights": False},
    "tied, delta, fp32": {
        **ZEROPP,
        **DELTA,
        "untie_embeddings_and_output_weights": False,
        "params_dtype": "fp32",
    },
    "tp 2": {**REPLICAS, "zero_shard": (1, 1, 2), "tensor_model_parallel_size": 2},
    "until": {**ZEROPP, "callbacks": exact_from(4)},
}


@pytest.mark.slow
@pytest.mark.parametrize("names", [("tp 2",), tuple(RESUMED)], ids=["some", "all"])
def test_resume_equals_the_uninterrupted_run_bit_for_bit(tmp_path: Path, names: tuple[str, ...]) -> None:
    """The uninterrupted run, which also evaluates, against one that stops after 2 iterations of 4 and goes on."""
    jobs = {}
    for name in names:
        folder = tmp_path / name
        values = {**RESUMED[name], "train_iters": 4, "log_dir": str(folder / "logs")}
        straight = {"save": str(folder / "straight"), "log_dir": str(folder / "straight-logs")}
        jobs |= {
            (name, "straight"): {**values, **straight, "eval_interval": 2, "eval_iters": 1},
            (name, "first"): {**values, "save": str(folder / "first"), "exit_interval": 2},
            (name, "second"): {**values, "load": str(folder / "first"), "save": str(folder / "second")},
        }
    seen = dict(zip(jobs, runs(list(jobs.values())), strict=True))
    for name in names:
        parts = (seen[name, part] for part in ("straight", "first", "second"))
        for straight, first, second in zip(*parts, strict=True):
            assert len(straight.losses) == 4 and len(first.losses) == 2 == second.start, name
            assert first.losses + second.losses == straight.losses, name
        one, two = checkpoint_of(tmp_path / name / "straight"), checkpoint_of(tmp_path / name / "second")
        assert not differences(one, two), name
        keys = [
            "grad_norm",
            "quantization_unit",
            "quantization_error_weights",
            "quantization_error_gradients",
            "quantization_zeroed_gradients",
        ]
        before, after = (iterations(tmp_path / name / logs) for logs in ("straight-logs", "logs"))
        for key in keys:
            assert [line.get(key) for line in before] == [line.get(key) for line in after], (name, key)


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
    values = {**ZEROPP, "train_iters": 6, "global_batch_size": RANKS, "callbacks": exact_from(4)}
    runs([{**values, "log_dir": str(tmp_path)}])
    coded, exact = Formula(ZEROPP).expected(1), Formula(ZEROPP, gradients=None).expected(1)
    lines = iterations(tmp_path)
    assert len(lines) == 6
    for line in lines[1:]:
        expected = coded if line["iteration"] <= 3 else exact
        assert line["bytes"]["reduce_inter_node_bytes"] == expected["reduce_inter_node_bytes"]
        for what in ("error", "zeroed"):
            assert (f"quantization_{what}_gradients" in line) == (line["iteration"] <= 3)
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
