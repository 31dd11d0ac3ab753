"""megazero verify: a right configuration is certified, every seeded fault is seen and named."""

from __future__ import annotations

import json
import re
from functools import partial
from pathlib import Path

import pytest

from megazero.cli import main
from megazero.mesh.local_ranks import RanksFailed
from megazero.verify import verification
from megazero.verify.certificate import Certificate
from megazero.verify.options import read_request
from tests import ROOT
from tests.dist.pool import pool
from tests.dist.verify.seeded_faults import FAULTS, seeded
from tests.messages import names, refused

CONFIGS = ROOT / "pretrain" / "configs"
LLAMA = (
    "--model-family llama --num-layers 24 --hidden-size 2048 --num-attention-heads 16 --num-query-groups 8 "
    "--seq-length 2048 --vocab-size 32000 --micro-batch-size 2 --global-batch-size 64 --lr 1e-4 --train-iters 100 "
    "--mock-data --bf16 --world-size 4"
)
# Tensors, stages, sequence slices and tied ends at once.
GRID = (
    f"{LLAMA} --model-family gpt --num-query-groups 16 --tensor-model-parallel-size 2 --sequence-parallel "
    "--pipeline-model-parallel-size 2"
)
TENSORS = f"{LLAMA} --tensor-model-parallel-size 2"
NODES = f"{LLAMA} --ranks-per-node 2"
ZEROPP = f"{NODES} --zero-preset zeropp"
JOINED = "--zero-unit-layers 2"
SMALL_MOMENTS = "--exp-avg-dtype bf16 --exp-avg-sq-dtype bf16"
ZEROPP_FP16 = ZEROPP.replace("--bf16", "--fp16")
RANDOM = f"{NODES} --zero-preset ddp {SMALL_MOMENTS}"
EIGHT = LLAMA.replace("--world-size 4", "--world-size 8")

CONTEXTS = f"{NODES} --context-parallel-size 4 --cp-comm-type a2a --zero-preset zero3"
CONTEXTS += " --recompute-granularity selective"
KEYS = CONTEXTS.replace("a2a", "all_gather")  # inside nodes, and across
ROUNDED_KEYS = "rounding of gathered keys and values, INT8, blocks of 128, Hadamard transform of 128"
CODED_KEYS = f"{KEYS} --cp-gather-bits 8"
BOTH_WAYS = CONTEXTS.replace("--cp-comm-type a2a", "")  # swaps inside nodes, gathered keys across
BOTH_OF_TENSORS = (
    f"{NODES} --context-parallel-size 4 --zero-preset hpz --tensor-model-parallel-size 2 --sequence-parallel "
    "--world-size 8 --ranks-per-node 4"
)
CONTEXT_GRID = (
    f"{GRID} --world-size 16 --ranks-per-node 4 --context-parallel-size 2 --zero-preset hpz "
    "--pipeline-schedule zb-h1"
)
EXPERTS = "--num-experts 64 --moe-router-topk 8 --moe-ffn-hidden-size 768"
SHARED = f"{NODES} {EXPERTS} --expert-model-parallel-size 2 --zero-preset zero3 --recompute-granularity full"
SHARED_ZEROPP = (
    f"{ZEROPP} {JOINED} {EXPERTS} --expert-model-parallel-size 2 --moe-shared-expert-intermediate-size 512 "
    "--moe-aux-loss-coeff 0.01 --moe-z-loss-coeff 0.001"
)
SHARED_GRID = (
    f"{EIGHT} {EXPERTS} --tensor-model-parallel-size 2 --sequence-parallel --pipeline-model-parallel-size 2 "
    "--pipeline-schedule zb-h1 --ranks-per-node 4 --expert-model-parallel-size 4 --zero-preset zero2"
)
CROSSING = (
    f"{NODES} {EXPERTS} --expert-model-parallel-size 4 --moe-dispatch-across-nodes int8 --zero-preset zero3 "
    "--recompute-granularity full --moe-shared-expert-intermediate-size 512"
)
CROSSING_GRID = (
    f"{EIGHT} {EXPERTS} --tensor-model-parallel-size 2 --sequence-parallel --pipeline-model-parallel-size 2 "
    "--pipeline-schedule zb-h1 --ranks-per-node 2 --expert-model-parallel-size 4 --moe-dispatch-across-nodes exact "
    "--zero-preset zero2"
)

BALANCED = (
    f"{LLAMA} --tensor-model-parallel-size 2 --sequence-parallel --recompute-granularity full "
    "--zero-preset zero2 --num-experts 16 --moe-router-topk 4 --moe-router-score-function sigmoid "
    "--moe-router-num-groups 4 --moe-router-group-topk 2 --moe-router-enable-expert-bias "
    "--moe-router-bias-update-rate 0.01 --moe-z-loss-coeff 0.01 "
    "--moe-router-load-balancing-type aux_loss global_aux_loss --moe-aux-loss-coeff 0.1 0.1"
)
EVEN = (
    f"{LLAMA} --tensor-model-parallel-size 2 --sequence-parallel --context-parallel-size 2 --num-experts 8 "
    "--moe-router-topk 1 --moe-ffn-hidden-size 512 --moe-router-load-balancing-type sinkhorn"
)
# Another optimizer than AdamW.
EXPERTS_LION = f"{NODES} --zero-preset zero3 --optimizer lion --num-experts 8 --moe-ffn-hidden-size 512"
EXPERTS_LION += " --moe-aux-loss-coeff 0.1 --moe-router-load-balancing-type global_aux_loss"

FP8 = f"{TENSORS} --sequence-parallel --recompute-granularity full --fp8-format hybrid"
FP8_STAGES = f"{GRID} --pipeline-schedule zb-h1 --recompute-granularity selective"
FP8_STAGES += " --fp8-format hybrid --fp8-recipe blockwise"

# fault -> (configuration, a check that must fail)
SEEN = {
    "skip-last-reduction": (GRID, "Pass 1, exact: gradients"),
    "wrong-norm-group": (GRID, "Pass 1, exact: gradient replicas"),
    "missing-divisor": (TENSORS, "Pass 1, exact: gradients"),
    "stale-secondary": (ZEROPP, "Pass 1, exact: weights in use"),
    "swapped-shard": (ZEROPP, "Pass 1, exact: gradients"),
    "wrong-tied-sum": (GRID, "Pass 1, exact: gradient replicas"),
    "lost-activation": (GRID, "Pass 1, exact: activations"),
    "wrong-noise": (RANDOM, "Pass 2, as configured: master replicas"),  # pass 1 has no small moments
    "wrong-bytes": (ZEROPP, "Pass 1, exact: bytes sent"),
    "unswapped-gradient": (CONTEXTS, "Pass 1, exact: gradients"),
    "shifted-part": (CONTEXTS, "Pass 1, exact: gradients"),
    "recounted-tokens": (BALANCED, "Pass 1, exact: expert loads"),
    "own-counts": (BALANCED, "Pass 1, exact: balance losses"),
    "partial-router": (BALANCED, "Pass 1, exact: gradient replicas"),
    "doubled-swap": (BOTH_WAYS, "Pass 1, exact: bytes sent"),
    "wrong-chunk": (KEYS, "Pass 1, exact: gradients"),
    "unsummed-keys": (KEYS, "Pass 1, exact: gradients"),
    "unlike-signs": (CODED_KEYS, f"Pass 2, as configured: {ROUNDED_KEYS}"),
    "dropped-expert-reduction": (SHARED, "Pass 1, exact: gradients"),
    "wrong-expert-offset": (SHARED, "Pass 1, exact: gradients"),
    "norm-without-experts": (SHARED, "Pass 1, exact: gradient norm"),
    "stale-sizes": (SHARED, "Pass 1, exact: gradients"),
    "doubled-dispatch": (SHARED, "Pass 1, exact: bytes sent"),
    "own-scales": (FP8, "Pass 1, exact: gradients"),
}


def certify(words: str, fault: str | None = None) -> Certificate:
    seed = {"around": partial(seeded, fault)} if fault else {}
    return verification.verify(read_request(words.split()), pool(), **seed)


ALWAYS = ("zeropp", "balanced experts")
CERTIFIED = {
    "zeropp": f"{ZEROPP} {SMALL_MOMENTS} {JOINED}",
    "grid": GRID,
    "grid, joined layers": f"{GRID} {JOINED}",
    "zeropp, fp16": ZEROPP_FP16,
    "contexts": CONTEXTS,
    "grid of contexts": CONTEXT_GRID,
    "balanced experts": BALANCED,
    "even experts": EVEN,
    "experts, lion": EXPERTS_LION,
    "gathered keys": KEYS,
    "swaps and gathered keys": BOTH_OF_TENSORS,
    "gathered latents": f"{KEYS} --multi-latent-attention --q-lora-rank 256 --kv-lora-rank 128 --qk-layernorm",
    "keys, INT8": CODED_KEYS,
    "swaps and keys, INT8": f"{BOTH_OF_TENSORS} --cp-gather-bits 8",
    "shared experts, zeropp": SHARED_ZEROPP,
    "shared experts, zeropp, muon": f"{SHARED_ZEROPP} --optimizer muon",
    "grid of shared experts": SHARED_GRID,
    "experts of two nodes, INT8": CROSSING,
    "grid of experts of two nodes": CROSSING_GRID,
    "fp8": FP8,
    "fp8, blocks of stages": FP8_STAGES,
    "fp8, rows of contexts": f"{CONTEXTS} --fp8-format e4m3 --fp8-recipe rowwise",
    "fp8, zeropp": f"{ZEROPP} --fp8-format e4m3",
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name not in ALWAYS)) for name in CERTIFIED]
)
def test_a_right_configuration_is_certified(name: str) -> None:
    words = CERTIFIED[name]
    certificate = certify(words)
    assert certificate.good, certificate.verdict
    checks = [check.name for section in certificate.sections for check in section.checks]
    assert checks.count("bytes sent") == 2 and len([n for n in checks if n.startswith("reshard")]) == 2
    assert any(n.startswith("rounding of weights, INT4") for n in checks) == (ZEROPP[len(NODES) :] in words)
    assert checks.count(ROUNDED_KEYS) == ("--cp-gather-bits" in words)


def test_every_fault_has_a_test() -> None:
    assert set(SEEN) == set(FAULTS)


@pytest.mark.parametrize(
    "fault",
    # test_the_command_writes_both_files plants the divisor, too.
    [pytest.param(name, marks=[pytest.mark.slow] * (name != "stale-secondary")) for name in SEEN],
)
def test_a_fault_is_seen_and_named(fault: str) -> None:
    words, check = SEEN[fault]
    certificate = certify(words, fault)
    assert not certificate.good and check in certificate.failed, certificate.verdict


@pytest.mark.slow
def test_whole_gradients_that_are_summed_over_the_group_are_seen() -> None:
    assert "Pass 1, exact: gradients" in certify(TENSORS, "wrong-norm-group").failed


def test_the_command_writes_both_files(tmp_path: Path, monkeypatch, capsys) -> None:
    wrong = partial(verification.verify, around=partial(seeded, "missing-divisor"))
    monkeypatch.setattr(verification, "verify", wrong)
    words = f"verify {LLAMA} --world-size 2 --verify-output {tmp_path}"
    assert main(words.split()) == 1
    stored = json.loads((tmp_path / "certificate.json").read_text())
    assert not stored["good"] and stored["facts"]["seed"] == 1234
    page = (tmp_path / "certificate.md").read_text()
    assert "| hidden-size | 2048 |" in page and "| gradients |" in page
    printed = capsys.readouterr().out
    names(printed, "FAILS", "does not hold", str(tmp_path))
    (first,) = re.findall("first failure: Pass 1, exact: gradients: (.*)", printed)
    assert f"| {first} |" in page


def fail_on_one(_: object) -> None:
    import torch.distributed as dist

    if dist.get_rank() == 1:
        raise ValueError("this rank cannot")
    dist.barrier()


def test_ranks_that_fail_are_named_and_replaced() -> None:
    with refused("rank 1", "this rank cannot", by=RanksFailed):
        pool().call(fail_on_one, None, world=2, timeout=30)
    assert pool().call(int, "7", world=2, timeout=60) == [7, 7]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "world", "node"),
    [
        ("llama-7b-zero1", 8, 4),
        ("llama-13b-zeropp", 8, 4),
        ("gpt-6b7-zb", 8, 8),
        ("gpt-1b3-hpz", 4, 2),
        ("llama-70b-64-nodes", 1024, 16),
    ],
)
def test_shipped_configurations_hold(name: str, world: int, node: int) -> None:
    words = f"--config {CONFIGS / name}.yaml --world-size {world} --ranks-per-node {node}"
    certificate = certify(words)
    assert certificate.good, certificate.verdict
