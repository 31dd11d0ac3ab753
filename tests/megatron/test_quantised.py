"""Quantised messages under megatron-core: replicas stay equal, NaN arrives, errors and bytes are what they should be.

A few cases run always. All of them, five minutes on 2 cores:

    python -m pytest tests/megatron/test_quantised.py -m "slow or not slow"
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from megazero.comm.codec import Blockwise
from megazero.mesh.levels import INTER, INTRA
from tests.dist.pool import run_ranks
from tests.megatron.case import Case, Run, replicas_differ, step_losses
from tests.megatron.cases import CASES, DELTA_INT4, EXACT, INT8_INT4, LARGE, SMALL
from tests.megatron.training import Formats, a_job, train

pytest.importorskip("megatron.core")
pytest.importorskip("megatron_core_patch")

BLOCK = 64
FORMATS = {"INT8 + INT4": INT8_INT4, "4-bit differences + INT4": DELTA_INT4}
BOTH = pytest.mark.parametrize("formats", FORMATS.values(), ids=FORMATS)
# Groups and nodes of many shapes.
SHAPES = {
    "2 nodes of 2": Case(dp=4),
    "overlap": Case(dp=4, overlap_grad_reduce=True, overlap_param_gather=True),
    "1 micro-batch": Case(dp=4, micro_batches=1),
    "4 micro-batches": Case(dp=4, micro_batches=4),
    "one rank per node": Case(dp=4, ranks_per_node=1),
    "one node": Case(dp=4, ranks_per_node=4),
    "DP 3": Case(dp=3, ranks_per_node=1),
    "DP 6 on 2 nodes": Case(dp=6, ranks_per_node=3),
    "DP 6 on 3 nodes": Case(dp=6, ranks_per_node=2),
    "TP 2 on 2 nodes": Case(dp=4, tp=2, sp=True, ranks_per_node=4),
    "MoE": Case(dp=4, ep=2, experts=4),
}
ALWAYS = ("overlap",)


def shapes() -> list:
    return [
        pytest.param(replace(case, bf16=True), id=name, marks=[] if name in ALWAYS else [pytest.mark.slow])
        for name, case in SHAPES.items()
    ]


@pytest.mark.first(1)
@BOTH
@pytest.mark.parametrize("case", shapes())
def test_every_shape(case: Case, formats: Formats) -> None:
    """Replicas' bits, bytes by hop, and losses near those of exact messages."""
    runs = run_ranks(case.world, train, case, formats, timeout=120)
    assert not replicas_differ(runs)
    if case.overlap_grad_reduce:  # several buckets, of which some end so that shards cut blocks
        assert any(numel // len(ranks) % BLOCK for run in runs for numel, ranks, _ in run.buckets)
    for rank, run in enumerate(runs):
        assert run.sent == expected_bytes(case, run, rank, formats)
    exact = run_ranks(case.world, train, case, EXACT, timeout=120)
    losses = step_losses(case, runs)
    assert losses == pytest.approx(step_losses(case, exact), rel=0.02)
    quantised = case.ranks_per_node < case.world
    assert (losses == step_losses(case, exact)) == (not quantised)
    if quantised:
        across = [
            sum(run.sent.get((kind, INTER), 0) for kind in ("refresh", "reduce"))
            for run in (runs[0], exact[0])
        ]
        assert across[0] < 0.35 * across[1]  # of few steps, of which the first gathers experts exactly, too


def expected_bytes(case: Case, run: Run, rank: int, formats: Formats) -> dict[tuple[str, str], int]:
    """What a rank sends in all steps: each element of a bucket once a step and hop, whatever the micro-batches."""
    gradient_bits, weight_bits = int(formats["gradients"][3]), int(formats["weights"][3])
    sent = dict.fromkeys([(kind, link) for kind in ("reduce", "refresh") for link in (INTRA, INTER)], 0)
    for numel, ranks, parameters in run.buckets:
        inside = sum(other // case.ranks_per_node == rank // case.ranks_per_node for other in ranks)
        nodes, n = len(ranks) // inside, numel // len(ranks)
        node, local = divmod(ranks.index(rank), inside)
        coded = coded_blocks(numel, n, parameters) if nodes > 1 else [0] * len(ranks)
        width, exact = max(coded) * BLOCK, [n - BLOCK * blocks for blocks in coded]
        column = [sum(exact[i::inside]) for i in range(inside)]  # of all nodes, by local index
        weights = message_bytes(width, weight_bits)
        sent["reduce", INTRA] += 4 * ((inside - 1) * nodes * width + sum(column) - column[local])
        sent["reduce", INTER] += (nodes - 1) * message_bytes(width, gradient_bits)
        sent["refresh", INTRA] += (inside - 1) * (nodes * weights + 2 * column[local])
        if nodes > 1:
            sent["reduce", INTER] += 4 * (column[local] - exact[ranks.index(rank)])
            sent["refresh", INTER] += (nodes - 1) * (weights + 2 * exact[ranks.index(rank)])
    sent = {key: case.steps * size for key, size in sent.items()}
    if not case.overlap_param_gather:  # Megatron gathers experts before their first update, too: exactly
        for numel, ranks, _ in run.buckets:
            sent["refresh", INTER] += numel // len(ranks) * case.dtype.itemsize * (len(ranks) < case.dp)
    return {key: size for key, size in sent.items() if size}


def coded_blocks(numel: int, n: int, parameters: Sequence[tuple[int, int]]) -> list[int]:
    """How many blocks of each shard of n elements are coded: whole ones without an element of a small parameter."""
    exact = torch.zeros(numel, dtype=torch.bool)
    for begin, end in parameters:
        exact[begin:end] = end - begin <= SMALL
    shard = torch.arange(numel) // n
    blocks, shards = exact.view(-1, BLOCK), shard.view(-1, BLOCK)
    whole = ~blocks.any(1) & (shards[:, 0] == shards[:, -1])
    return torch.bincount(shards[:, 0][whole], minlength=numel // n).tolist()


def message_bytes(width: int, bits: int) -> int:
    return math.ceil((width * bits // 8 + 2 * width // BLOCK) / 16) * 16


@pytest.mark.slow
def test_gradients_are_exact_from_a_step_on() -> None:
    """Of four steps the last two send what exact messages send. -m slow"""
    case = replace(CASES["dp4 overlap"], bf16=True, steps=4)
    int4 = {"exact_numel": SMALL, "gradients": "int4"}
    formats = (EXACT, int4, {**int4, "quantized_gradients_until_step": 2})
    exact, coded, until = (sent_across(case, each) for each in formats)
    assert until == (exact + coded) / 2


def sent_across(case: Case, formats: Formats) -> int:
    """Bytes of gradients that rank 0 sends across nodes in all steps."""
    return run_ranks(case.world, train, case, formats, timeout=120)[0].sent["reduce", INTER]


@pytest.mark.slow
@BOTH
@pytest.mark.parametrize("name", ["tp2 sp dp4", "pp2 tied dp4", "moe tp2 sp ep2"])
def test_replicas_after_50_steps(name: str, formats: Formats) -> None:
    """Data-parallel replicas, parameters that tensor-parallel ranks share, tied embeddings. -m slow"""
    case = replace({**CASES, **LARGE}[name], bf16=True, steps=50)
    runs = run_ranks(case.world, train, case, formats, timeout=300)
    assert not replicas_differ(runs)
    assert all(math.isfinite(norm) for run in runs for norm in run.norms)


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("case", [CASES["dp4"], pytest.param(LARGE["tp2 sp dp4"], marks=pytest.mark.slow)])
def test_nan_on_one_rank_is_a_nan_norm_everywhere(case: Case, value: float) -> None:
    for norm in run_ranks(case.world, norm_with_a_bad_gradient, replace(case, bf16=True), value, timeout=120):
        assert not math.isfinite(norm)


def norm_with_a_bad_gradient(case: Case, value: float) -> float:
    """Train one step in which rank 1 has a bad element among its gradients; return the norm."""
    with a_job(case, INT8_INT4) as job:

        def spoil(group: Any) -> None:
            if torch.distributed.get_rank() == 1:
                group.buckets[-1].grad_data[-200] = value

        before_gradients_leave(job, spoil)
        job.step(0)
        return job.norms[0]


def before_gradients_leave(job: Any, look: Any) -> None:
    """Have ``look(bucket_group)`` called before each reduction of gradients starts."""
    for chunk in job.chunks:
        for group in (*chunk.bucket_groups, *chunk.expert_parallel_bucket_groups):

            def start(
                *args: Any, group: Any = group, original: Any = group.start_grad_sync, **kwargs: Any
            ) -> Any:
                look(group)
                return original(*args, **kwargs)

            group.start_grad_sync = start


def one_step(case: Case, formats: Formats) -> dict[str, list[torch.Tensor]]:
    """By bucket: this rank's gradients before they leave, its shard of their sum, parameters before and after."""
    with a_job(case, formats) as job:
        buckets = [bucket for buffer in job.buffers() for bucket in buffer.buckets]
        rank, found = torch.distributed.get_rank(), {"before": [b.param_data.clone() for b in buckets]}
        left: dict[int, torch.Tensor] = {}

        def keep(group: Any) -> None:
            left.update({id(b): b.grad_data * b.gradient_scaling_factor for b in group.buckets})

        before_gradients_leave(job, keep)
        update = job.optimizer.step

        def step() -> Any:
            found["sums"] = [b.grad_data.view(case.dp, -1)[rank].clone() for b in buckets]
            return update()

        job.optimizer.step = step
        job.step(0)
        found["own"] = [left[id(b)] for b in buckets]
        found["after"] = [b.param_data.clone() for b in buckets]
        return found


def whole(x: torch.Tensor) -> torch.Tensor:
    """Return x [n] as whole blocks [1, m], with zeros behind it."""
    return torch.nn.functional.pad(x, (0, -len(x) % BLOCK))[None]


def bounds(x: torch.Tensor, codec: Blockwise) -> torch.Tensor:
    """Return the codec's bound of each element of x [n], whose blocks begin at its start."""
    return codec.error_bound(whole(x))[0].repeat_interleave(BLOCK)[: len(x)]


def test_gradients_err_within_the_codecs_bound() -> None:
    """The sum of a node is exact, and the other node's sum has one rounding, of what the transform made of it.

    Of whole blocks: where a block is filled with zeros, what these lost is not in the sum.
    """
    codec = Blockwise(4, block=BLOCK, hadamard=BLOCK)
    case = Case(dp=4, bf16=True, steps=1)
    ranks = run_ranks(4, one_step, case, {"gradients": "int4", "exact_numel": 0}, timeout=120)
    worst = 0.0
    for bucket in range(len(ranks[0]["own"])):
        own = torch.stack([rank["own"][bucket].view(4, -1) for rank in ranks])  # [sender, shard, n]
        nodes = torch.stack([own[:2].sum(0), own[2:].sum(0)])
        for shard, rank in enumerate(ranks):
            here, there = nodes[shard // 2, shard], nodes[1 - shard // 2, shard]
            blocks = slice(0, len(there) // BLOCK * BLOCK)
            error = codec.mixed(whole(rank["sums"][bucket] - (here + there))).abs()[0, blocks]
            bound = bounds(there, codec)[blocks] / BLOCK
            assert (error <= bound + 1e-6 * whole(here.abs() + there.abs())[0, blocks].max()).all()
            worst = max(worst, float((error / bound.clamp(min=1e-30)).max()))
    assert worst > 0.9  # it was quantised, and the bound is no more than it must be


@pytest.mark.parametrize("weights, bits", [("int8", 8), ("int4-delta", 4)])
def test_weights_err_within_the_codecs_bound(weights: str, bits: int) -> None:
    case = Case(dp=4, bf16=True, steps=1)
    exact = run_ranks(4, one_step, case, EXACT, timeout=120)[0]
    coded = run_ranks(4, one_step, case, {"weights": weights, "exact_numel": 0}, timeout=120)[0]
    worst = 0.0
    for was, right, got in zip(exact["before"], exact["after"], coded["after"], strict=True):
        for old, want, have in zip(*(x.float().view(4, -1) for x in (was, right, got)), strict=True):
            bound = bounds(want - old if "delta" in weights else want, Blockwise(bits, block=BLOCK))
            error = (have - want).abs()
            assert (error <= bound + have.abs() * 2**-8).all()  # and the rounding to bf16
            worst = max(worst, float((error / (bound + have.abs() * 2**-8).clamp(min=1e-30)).max()))
    assert worst > 0.4
