"""fsdp2_patch on four ranks as two nodes of two: parity with FSDP2, what quantised messages keep, what is refused.

A few cases run always. All of them, five minutes on 2 cores:

    python -m pytest tests/fsdp2/test_patch.py -m "slow or not slow"
"""

from __future__ import annotations

import contextlib
import io
import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method

import fsdp2_patch
from fsdp2_patch import weights
from megazero.comm.watch import LossyGradients
from megazero.kernels.fingerprint import fingerprints
from megazero.patches.checks import GradientSamples
from megazero.patches.names import release
from tests.dist.pool import run_ranks
from tests.fsdp2.job import RANKS, Case, Job, Model, Run, experts_on_their_mesh, patched, train, train_all
from tests.fsdp2.mixed import give_norms_fp32, policies_of_parameters
from tests.messages import names, refused

BF16, FP16 = (torch.bfloat16, torch.float32), (torch.float16, torch.float16)
EXACT: dict[str, Any] = {}
INT4 = {"gradients": "int4", "exact_numel": 0}
INT8_INT4 = {"weights": "int8", **INT4}
DELTA_INT4 = {"weights": "int4-delta", **INT4}

CASES = {
    "2d": Case("2d"),
    "2d, 4 micro-batches": Case("2d", 4),
    "2d, 4 micro-batches, each crossing": Case("2d", 4, deferring=False),
    "2d, whole gradients": Case("2d", 4, whole=True),
    "2d, bf16": Case("2d", 2, (torch.bfloat16, None)),
    "2d, bf16 and fp32": Case("2d", 2, BF16),
    "2d, fp16": Case("2d", 2, FP16),
    "2d, checkpointing": Case("2d", checkpointing=True),
    "2d, compiled": Case("2d", compiled=True),
    "2d, frozen": Case("2d", 2, frozen=True),
    "2d, divide": Case("2d", 2, divide=1.0),
    "1d": Case(),
    "1d, 4 micro-batches": Case(micro_batches=4),
    "1d, 4 micro-batches, each crossing": Case(micro_batches=4, deferring=False),
    "1d, whole gradients": Case(micro_batches=4, whole=True),
    "1d, bf16": Case("1d", 2, (torch.bfloat16, None)),
    "1d, bf16 and fp32": Case("1d", 2, BF16),
    "1d, fp16": Case("1d", 2, FP16),
    "1d, kept after forward": Case("1d", 2, reshard=False),
    "1d, resharded to a node": Case("1d", 2, reshard=2),
    "1d, checkpointing": Case("1d", 2, checkpointing=True),
    "1d, compiled": Case("1d", 2, compiled=True),
    "1d, frozen": Case("1d", 2, frozen=True),
    "1d, divide": Case("1d", 2, divide=1.0),
    "1d, experts": Case("1d", 2, experts=2, divide=RANKS),
    "1d, experts, kept after forward": Case("1d", 2, reshard=False, experts=2, divide=RANKS),
    "1d, experts, bf16 and fp32": Case("1d", 2, BF16, experts=2, divide=RANKS),
    "1d, experts of one rank": Case("1d", 2, experts=4, divide=RANKS),
    "2d, experts": Case("2d", 2, experts=2, divide=RANKS),
    "2d, experts, bf16 and fp32": Case("2d", 2, BF16, experts=2, divide=RANKS),
    "tp": Case("tp", 2),
    "tp, bf16": Case("tp", 2, BF16),
}
ALWAYS = {"2d, 4 micro-batches", "2d, experts"}


def cases(always: set[str]) -> list:
    assert always <= set(CASES)
    return [pytest.param(CASES[n], id=n, marks=[pytest.mark.slow] * (n not in always)) for n in CASES]


def beside(case: Case, *formats: dict[str, Any]) -> list[list[Run]]:
    """The runs of all ranks without the patch, and with each of these words."""
    words: list[Any] = [None, *formats]
    every = run_ranks(RANKS, train_all, [(case, given) for given in words], timeout=300)
    return [list(runs) for runs in zip(*every, strict=True)]


@pytest.mark.parametrize("case", cases(ALWAYS))
def test_exact_messages_change_nothing(case: Case) -> None:
    """Bit for bit on a 2-D mesh; else fp32's sums in another order, and 16 bits' own rounding of the same."""
    if case not in (CASES[name] for name in ALWAYS):
        case = replace(case, steps=20)
    plain, runs = beside(case, {**EXACT, "checksum_interval": 2})
    for run, other in zip(runs, plain, strict=True):
        assert run.sent["inter_node_bytes"] > 0 and not run.warned  # it was on
        if case.mesh == "2d":
            assert (run.losses, run.norms, run.shards) == (other.losses, other.norms, other.shards)
            continue
        # In 16 bits FSDP2 itself rounds each rank's sum, which the patch sums in fp32.
        sixteen = case.dtypes[1] in (torch.float16, None) and case.dtypes[0] is not None
        near = 2e-3 if sixteen else 1e-6
        assert run.losses == pytest.approx(other.losses, rel=near)
        assert run.norms == pytest.approx(other.norms, rel=10 * near)
    assert all(run.whole == runs[0].whole for run in runs)


@pytest.mark.parametrize("case", cases({"2d"}))
def test_quantised_messages_train_and_keep_replicas_equal(case: Case) -> None:
    """Of the loss they cost less than one step of training gains."""
    if case not in (CASES["1d"], CASES["2d"]):
        case = replace(case, steps=20)
    plain, *found = beside(case, *((INT4,) if case.mesh == "2d" else (INT4, INT8_INT4, DELTA_INT4)))
    for runs in found:
        assert all(run.whole == runs[0].whole for run in runs)
        if case.mesh == "2d":
            assert [run.shards for run in runs[:2]] == [run.shards for run in runs[2:]]
        losses, wanted = runs[0].losses, plain[0].losses
        gain = max(before - after for before, after in zip(wanted, wanted[1:], strict=False))
        assert 0 < max(abs(a - b) for a, b in zip(losses, wanted, strict=True)) < gain
        assert not runs[0].warned


def printed(case: Case, words: dict[str, Any]) -> str:
    """What a rank prints in a training."""
    with contextlib.redirect_stdout(io.StringIO()) as said:
        train(case, words)
    return said.getvalue()


def test_the_first_steps_are_verified() -> None:
    told, *others = run_ranks(
        RANKS, printed, Case(micro_batches=2, steps=2), {**INT8_INT4, "verify_first_steps": 1}
    )
    assert "1-D mesh of 4 ranks = 2 nodes x 2" in told and "int8 (blocks of 64)" in told
    errors = {
        kind: float(told.split(f"step 1: {kind} differ from exact ones by ")[1].split()[0])
        for kind in ("weights", "gradients")
    }
    # Errors are uniform in half a step, 1/127 or 1/7 of a block's largest value: of normal ones, 3 times their norm.
    assert 1e-3 < errors["weights"] < 3 / 127 / math.sqrt(12) and 1e-2 < errors[
        "gradients"
    ] < 3 / 7 / math.sqrt(12)
    assert "step 2: weights" not in told and others == [""] * 3


def printed_after_few_samples(case: Case, words: dict[str, Any]) -> str:
    """What a rank prints where every step is measured, two measurements decide, and 5% are too much."""
    few = mock.patch.multiple(LossyGradients, WINDOW=2, LIMIT=0.05)
    with mock.patch.object(GradientSamples, "EVERY", 1), few:
        return printed(case, words)


@pytest.mark.parametrize("mesh", ["1d", pytest.param("2d", marks=pytest.mark.slow)])
def test_the_first_rank_warns_once_of_gradients_that_lose_much(mesh: str) -> None:
    case = Case(mesh, steps=8)
    lossy, fine = {"gradients": "int4", "exact_numel": 0}, {"gradients": "int8", "exact_numel": 0}
    told, *others = run_ranks(RANKS, printed_after_few_samples, case, lossy)
    assert told.count("warning") == 1 and others == [""] * 3
    names(told, "--zero-gradient-bits 8", "gradients='int8'")
    assert "warning" not in run_ranks(RANKS, printed_after_few_samples, case, fine)[0]


def printed_with_two_optimizers() -> str:
    job = Job(Case())
    weights = [p for p in job.model.parameters() if p.ndim > 1]
    other = torch.optim.SGD([p for p in job.model.parameters() if p.ndim == 1], lr=1e-3)
    job.optimizer = torch.optim.AdamW(weights)
    with contextlib.redirect_stdout(io.StringIO()) as said, patched(job.model, {"verify_first_steps": 2}, 2):
        for step in range(3):
            job.step(step)
            other.step()
    return said.getvalue()


def test_optimizers_that_share_a_group_make_one_step() -> None:
    told = run_ranks(RANKS, printed_with_two_optimizers)[0]
    assert [f"step {i}: gradients" in told for i in (1, 2, 3)] == [True, True, False]


def sends() -> list[dict[str, int]]:
    """What this rank sends in the second step, in each format, and what an exact message has."""
    found = []
    for case, words in (
        (Case("2d", 4), INT4),
        (Case("1d", 4), EXACT),
        (Case("1d", 4), INT8_INT4),
        (Case("1d", 4), DELTA_INT4),
    ):
        job = Job(case)
        with patched(job.model, words, case.ranks_per_node):
            job.step(0)
            fsdp2_patch.counters().take()
            job.step(1)
            found.append(fsdp2_patch.counters().take())
    return found


def test_bytes_are_those_of_the_formats() -> None:
    """N / 4 elements of a shard, padded to blocks of 64 by parameter; 4 micro-batches cross as one."""
    hsdp, exact, int8, delta = run_ranks(RANKS, sends)[0]
    root, blocks = 64 * 32 * 2 + 4, 2 * (32 * 128 * 2 + 128 + 32 + 64)
    n = root + blocks
    padded = n // 4 + 64 * 15
    for kind in ("refresh", "reduce"):
        assert exact[f"{kind}_inter_node_bytes"] == n
    # Into half of each node's elements go 4 bytes: for a forward and a backward, and for the root, which stays, once.
    assert exact["gather_intra_node_bytes"] == 2 * 4 * (2 * blocks + root)
    assert 0.5 * n / 4 <= delta["refresh_inter_node_bytes"] <= 0.5625 * padded + 16 * 15
    assert 1.0 * n / 4 <= int8["refresh_inter_node_bytes"] <= 1.0625 * padded + 16 * 15
    assert 0.5 * n / 4 <= int8["reduce_inter_node_bytes"] <= 0.5625 * padded + 16 * 15
    assert int8["reduce_inter_node_bytes"] == delta["reduce_inter_node_bytes"]
    assert 0.5 * n / 2 <= hsdp["reduce_inter_node_bytes"] <= 0.5625 * (n / 2 + 64 * 30) + 32 * 15


def sent_by_stages() -> dict[str, int]:
    """What a rank sends where the second of two stages alone has experts."""
    axes = {"pp": 2, "replicate": 1, "efsdp": 2, "ep": 2}
    dense = init_device_mesh("cpu", (2, 4), mesh_dim_names=("pp", "fsdp"))["fsdp"]
    every = init_device_mesh("cpu", tuple(axes.values()), mesh_dim_names=tuple(axes))
    second = dist.get_rank() >= RANKS
    model = Model(experts=second)
    placed = experts_on_their_mesh(model, every["replicate", "efsdp", "ep"]) if second else {}
    for block in model.blocks:
        fully_shard(block, mesh=dense, **placed)
    fully_shard(model, mesh=dense)
    with patched(model, EXACT, 2):
        model(torch.zeros(1, 8, dtype=torch.long)).sum().backward()
        return fsdp2_patch.counters().take()


@pytest.mark.slow
def test_stages_may_have_different_groups() -> None:
    sent = [found["inter_node_bytes"] for found in run_ranks(2 * RANKS, sent_by_stages)]
    assert len(set(sent[:RANKS])) == len(set(sent[RANKS:])) == 1 and 0 < sent[0] < sent[-1]


def written(words: dict[str, Any], how: str, folder: str) -> tuple[list[float], list[float]]:
    """Losses before and after parameters are written in the middle of a run, patched and not."""
    found = []
    for given in (None, words):
        job = Job(Case(seed=2))
        other = Job(Case(seed=3))
        with patched(job.model, given, 2):
            job.step(0)
            before = job.look()
            if how == "in place":
                with torch.no_grad():
                    for p in job.model.parameters():
                        p.to_local().mul_(3)
            elif how == "load_state_dict":
                job.model.load_state_dict(other.model.state_dict())
            else:
                dcp.save(other.model.state_dict(), checkpoint_id=folder)
                dcp.load(job.model.state_dict(), checkpoint_id=folder)
            after = job.look()
            job.step(1)
            if how == "in place":  # right behind an update, which alone would send a difference
                with torch.no_grad():
                    job.model.head.weight.to_local().mul_(3)
            last = job.look()
        found.append([before, after, last])
    return found[0], found[1]


@pytest.mark.parametrize(
    "words, how",
    [
        pytest.param(EXACT, "load_state_dict", id="exact-load_state_dict"),
        pytest.param(EXACT, "in place", id="exact-in place", marks=pytest.mark.slow),
        pytest.param(DELTA_INT4, "in place", id="differences-in place", marks=pytest.mark.slow),
        pytest.param(DELTA_INT4, "dcp", id="differences-dcp", marks=pytest.mark.slow),
    ],
)
def test_weights_are_never_stale(words: dict[str, Any], how: str, tmp_path: Path) -> None:
    """A forward behind a write computes with what was written, though no optimizer made it."""
    plain, runs = run_ranks(RANKS, written, words, how, str(tmp_path))[0]
    assert abs(plain[1] - plain[0]) > 0.05
    assert runs == pytest.approx(plain, rel=1e-6 if not words else 1e-2)
    assert runs[1] == pytest.approx(plain[1], rel=1e-6 if not words else 5e-3)


def written_ahead(words: dict[str, Any] | None, how: str) -> float:
    """What is computed behind a load, where weights are gathered before the model is called."""
    job, other = Job(Case(seed=2)), Job(Case(seed=3))
    job.model.encode = job.model.forward
    register_fsdp_forward_method(job.model, "encode")
    with patched(job.model, words, 2):
        job.step(0)
        job.look()
        job.model.load_state_dict(other.model.state_dict())
        if how == "unshard":
            for module in (job.model, *job.model.blocks):
                module.unshard(async_op=True)
            return job.look()
        with torch.no_grad():
            if how == "part":
                return job.model.blocks[0](torch.ones(1, 32)).norm().item()
            return job.model.encode(job.batch(0, 0)).logsumexp(-1).mean().item()


@pytest.mark.first(1)
@pytest.mark.parametrize("how", ["unshard", "method", "part"])
def test_weights_are_not_stale_without_the_models_forward(how: str) -> None:
    """``unshard`` gathers before a forward, a registered method is none, and a part may be called alone."""
    plain = run_ranks(RANKS, written_ahead, None, how)[0]
    assert run_ranks(RANKS, written_ahead, EXACT, how)[0] == pytest.approx(plain, rel=1e-6)


class Holder(torch.optim.Optimizer):
    """An optimizer whose step is that of another one, as torchtitan's."""

    def __init__(self, held: torch.optim.Optimizer) -> None:
        super().__init__([p for group in held.param_groups for p in group["params"]], {})
        self.held = held

    def step(self, closure: Any = None) -> None:
        self.held.step()


def checksums_taken(micro_batches: int, held: bool = False) -> list[int]:
    """Of how many shards checksums are taken in each of 3 steps and 2 evaluations."""
    job, taken = Job(Case(micro_batches=micro_batches)), list[int]()
    job.optimizer = Holder(job.optimizer) if held else job.optimizer

    def counting(values: list[torch.Tensor]) -> torch.Tensor:
        taken[-1] += len(values)
        return fingerprints(values)

    with mock.patch.object(weights, "fingerprints", counting), patched(job.model, EXACT, 2):
        for step in range(5):
            taken.append(0)
            job.step(step) if step < 3 else job.look()
    return taken


@pytest.mark.slow
def test_checksums_are_taken_only_where_they_are_compared() -> None:
    """With one micro-batch a step they are not, but in the first, until what is kept is used again."""
    one, two, held = (run_ranks(RANKS, checksums_taken, *given)[0] for given in ((1,), (2,), (2, True)))
    n = len(list(Model().parameters()))
    assert one == [n, 0, 0, 0, n] and two == held == [2 * n, 2 * n, 2 * n, n, n]


def mixed(case: Case, words: dict[str, Any] | None) -> tuple[Run, list[str], str, set[torch.dtype]]:
    """A run whose parameters have policies of their own, what it warns and prints, and the dtypes of its gathers."""
    seen = set()
    with policies_of_parameters(), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        job = Job(case)
        give_norms_fp32(job.model)
        with contextlib.redirect_stdout(io.StringIO()) as said, patched(job.model, words, 2):
            for step in range(case.steps):
                job.step(step)
            for module in job.model.blocks:
                seen |= {out.dtype for p in raw_of(module).fsdp_params for out in p.all_gather_outputs}
            return job.run(), [str(w.message) for w in caught], said.getvalue(), seen


def raw_of(module: nn.Module) -> Any:
    return module._get_fsdp_state()._fsdp_param_group


@pytest.mark.parametrize("mesh", ["1d", pytest.param("2d", marks=pytest.mark.slow)])
def test_parameters_with_policies_of_their_own(mesh: str) -> None:
    """What comes as bytes of several dtypes goes exactly, and is said to; sums of one dtype are quantised."""
    case = Case(mesh, 2, steps=3)
    plain, *_ = run_ranks(RANKS, mixed, case, None)[0]
    run, warned, _, dtypes = run_ranks(RANKS, mixed, case, EXACT)[0]
    assert dtypes == {torch.bfloat16, torch.float32}
    if mesh == "2d":
        assert (run.losses, run.shards) == (plain.losses, plain.shards)
    else:
        assert run.losses == pytest.approx(plain.losses, rel=1e-6)
    assert not [text for text in warned if "fsdp2_patch" in text]
    coded, warned, said, _ = run_ranks(RANKS, mixed, case, INT4 if mesh == "2d" else INT8_INT4)[0]
    assert coded.losses == pytest.approx(plain.losses, rel=1e-2) and coded.losses != plain.losses
    told = [text for text in warned if "its weights are sent exactly" in text]
    assert len(told) == (2 if mesh == "1d" else 0)  # the blocks; the root has no norm


def bytes_to_reduce() -> None:
    """Sums come as bytes of several dtypes, of the right size."""
    job = Job(Case())
    with patched(job.model, EXACT, 2):
        job.step(0)
        raw = raw_of(job.model.blocks[0])
        given = torch.zeros(RANKS * sum(p.padded_sharded_param_size.numel() for p in raw.fsdp_params))
        raw._reduce_scatter_comm.params = raw.fsdp_params
        for sums in (given.to(torch.uint8), given.view(torch.uint8), given[:-RANKS]):
            with refused("blocks.0", "reduce_dtype", by=RuntimeError):
                raw._reduce_scatter_comm(given, sums, raw.mesh_info.shard_process_group, dist.ReduceOp.SUM)


def test_sums_of_several_dtypes_are_refused_by_name() -> None:
    run_ranks(RANKS, bytes_to_reduce)


def evaluated(words: dict[str, Any] | None) -> list[float]:
    """Losses of a run that is evaluated in inference mode between its steps."""
    job, looks = Job(Case(seed=2)), []
    with patched(job.model, words, 2):
        for step in range(3):
            job.step(step)
            with torch.inference_mode():
                looks.append(job.look())
    return job.losses + looks


def test_it_is_evaluated_in_inference_mode() -> None:
    plain = run_ranks(RANKS, evaluated, None)[0]
    assert run_ranks(RANKS, evaluated, EXACT)[0] == pytest.approx(plain, rel=1e-6)


def telling() -> list[str]:
    """What is said when rank 3 writes between two micro-batches."""
    job = Job(Case(micro_batches=2))
    with patched(job.model, EXACT, 2), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        job.loss(job.batch(0, 0)).backward()
        if dist.get_rank() == 3:
            with torch.no_grad():
                job.model.blocks[1].up.weight.to_local().mul_(3)
        job.loss(job.batch(0, 1)).backward()
    return [str(w.message) for w in caught if "fsdp2_patch" in str(w.message)]


def test_a_write_is_told_by_name() -> None:
    """Though rank 3 alone writes: all ranks send again."""
    told = run_ranks(RANKS, telling)
    assert "blocks.1.up.weight changed outside of an optimizer's step" in told[0][0] and not told[3]


def compiled_steps(words: dict[str, Any] | None, mesh: str) -> list[float]:
    """Losses of a job whose whole step, backward and all, is given to torch.compile."""
    job = Job(Case(mesh, 2, steps=3))
    step = torch.compile(job.step, backend="aot_eager")
    with patched(job.model, words, 2):
        for number in range(3):
            step(number)
    return job.losses


@pytest.mark.slow
@pytest.mark.skipif(release(torch.__version__) < (2, 12), reason="FSDP2's own step cannot be compiled whole")
@pytest.mark.parametrize("mesh", ["1d", "2d"])
def test_a_compiled_step_runs_as_it_does(mesh: str) -> None:
    """Its graphs end at FSDP2's hooks, which run on the host in every step."""
    plain = run_ranks(RANKS, compiled_steps, None, mesh, timeout=300)[0]
    assert run_ranks(RANKS, compiled_steps, EXACT, mesh, timeout=300)[0] == pytest.approx(plain, rel=1e-6)


def every_refusal() -> None:
    """Every refusal at the call, of a model that is right otherwise, by the words that it names."""
    h, inside = {"ranks_per_node": 2}, {"gradients": "int4", "gradients_intra_node": "int8", "exact_numel": 0}
    flat, hsdp, enable = Job(Case()).model, Job(Case("2d")).model, fsdp2_patch.enable
    lacking, first = Job(Case()).model, "int4" if dist.get_rank() else "int8"
    del raw_of(lacking).post_forward_mesh_info
    for model, given, *words in (
        (nn.Linear(2, 2), h, "fully_shard"),
        (flat, {"ranks_per_node": 4}, "crosses nodes", "leave the patch out"),
        (flat, {"ranks_per_node": 3}, "4 ranks", "3 ranks per node"),
        (hsdp, {"weights": "int8", "exact_numel": 0, **h}, "2-D mesh", "weights='none'"),
        (hsdp, {**inside, **h}, "gradients_intra_node='none'"),
        (hsdp, {"ranks_per_node": 1}, "one replica", "nearest"),
        (flat, {"weights": "int8", **h}, "exact_numel=16384"),
        (flat, {"weights": "fp8", **h}, "weights='fp8'"),
        (Job(Case(reshard=2)).model, {"ranks_per_node": 1}, "reshard_after_forward=2", "True or False"),
        (lacking, h, "FSDPParamGroup.post_forward_mesh_info"),
        (flat, {"gradients": first, "exact_numel": 0, **h}, "zero_gradient_bits", "rank 0", "rank 1"),
        (flat, {"ranks_per_node": 1, **inside}, "gradients_intra_node", "leave it out"),
        (replicated(), h, "replicate()", "use fully_shard"),
    ):
        with refused(*words):
            enable(model, **given)
    for name, words in {
        "_all_gather_comm": ["Other"], "_reduce_scatter_comm": ["Other"], "_all_reduce_hook": ["all-reduce hook"]
    }.items():  # fmt: skip
        with mock.patch.object(raw_of(flat), name, Other()), refused(*words, "leave"):
            enable(flat, **h)
    with mock.patch.object(torch, "__version__", "2.10.0"), refused("torch 2.10.0", "2.11"):
        enable(flat, **h)
    from torch.distributed.fsdp._fully_shard import _fsdp_param_group

    other = mock.patch.object(_fsdp_param_group, "foreach_reduce", lambda params, comm: None)
    with other, refused("foreach_reduce", "params, comm", "fsdp_params"):
        enable(flat, **h)
    with patched(flat, {}, 2), refused("disable()", by=RuntimeError):
        enable(flat, **h)


class Other:
    """Stands for a collective of somebody else's."""


def replicated() -> nn.Module:
    from torch.distributed._composable.replicate_with_fsdp import replicate

    return replicate(nn.Linear(4, 4), mesh=init_device_mesh("cpu", (RANKS,)))


def test_what_is_refused_at_the_call() -> None:
    run_ranks(RANKS, every_refusal)


def early(job: Job) -> None:
    job.model.set_requires_all_reduce(False)
    job.loss(job.batch(0, 0)).backward()
    job.optimizer.step()


def in_backward(job: Job) -> None:
    handle = job.model.head.weight.register_post_accumulate_grad_hook(lambda p: None)
    job.model.set_requires_all_reduce(True)
    try:
        job.loss(job.batch(0, 0)).backward()
    finally:
        handle.remove()


def uneven(job: Job) -> None:
    job.loss(job.batch(0, 0)).backward()
    with mock.patch.object(Model, "forward", unscaled):
        job.loss(job.batch(0, 1)).backward()


def given_up(job: Job) -> None:
    job.loss(job.batch(0, 0)).backward()
    job.optimizer.zero_grad()  # and begin anew
    job.loss(job.batch(1, 0)).backward()


def divided_otherwise(job: Job) -> None:
    job.loss(job.batch(0, 0)).backward()
    for module in (*job.model.blocks, job.model):
        module.set_gradient_divide_factor(2.0 * RANKS)
    job.loss(job.batch(0, 1)).backward()


def scattered(job: Job) -> None:
    with mock.patch.object(raw_of(job.model), "_reduce_scatter_comm", Other()):
        job.loss(job.batch(0, 0)).backward()


def hooked(job: Job) -> None:
    job.model.set_all_reduce_hook(lambda _: None)
    job.loss(job.batch(0, 0)).backward()


def unscaled(model: Model, tokens: torch.Tensor) -> torch.Tensor:
    """The forward without one of the root's parameters."""
    x = model.embedding(tokens)
    for block in model.blocks:
        x = block(x)
    return model.head(x)


RESETS = hasattr(FSDPModule, "reset_iter_state")  # from torch 2.13 on: a job may go on behind a refusal
# What is refused when it happens, whether it crosses nodes, and the words of the refusal.
Act = tuple[Callable[[Job], None], bool, list[str]]
ACTS: list[Act] = [
    (early, False, ["set_requires_all_reduce(True)"]),
    (in_backward, True, ["head.weight", "hook"]),
    (uneven, False, ["scale", "set_reduce_scatter_unused_params(True)"]),
    (given_up, False, ["blocks.1.up.weight", "zero_grad", "reset_iter_state()"]),
    (divided_otherwise, False, ["blocks.1", "8.0", "set_requires_all_reduce(True)"]),
    (scattered, True, ["the model", "reduce-scatter", "disable()"]),
    (hooked, True, ["the model", "hook", "disable()"]),
]


def refusals_at_work(acts: Sequence[Act]) -> None:
    job = Job(Case(micro_batches=2))
    with patched(job.model, EXACT, 2):
        for act, crosses, words in acts:
            job.model.set_requires_all_reduce(crosses)
            with refused(*words, by=RuntimeError):
                act(job)
            if not RESETS:
                return
            job.model.reset_iter_state()  # drops the sums that wait
            job.optimizer.zero_grad()
            if act is early:  # a whole step behind it goes well
                job.model.set_requires_all_reduce(True)
                job.loss(job.batch(0, 0)).backward()
                job.optimizer.step()


def test_what_is_refused_at_work() -> None:
    for acts in [ACTS] if RESETS else [[act] for act in ACTS]:
        run_ranks(RANKS, refusals_at_work, acts)


def on_and_off() -> tuple[Run, Run, bool, list[int]]:
    """A run that is patched twice in its middle and then resumed without, beside one that is not; whether nothing is
    left of the patch, and how many process groups there are behind each step.
    """
    plain, job = Job(Case("2d", 2)), Job(Case("2d", 2))
    raws = [module._get_fsdp_state()._fsdp_param_group for module in (*job.model.blocks, job.model)]
    names = ("_all_gather_comm", "_reduce_scatter_comm", "_all_reduce_hook", "all_reduce_grads")
    state = partial(lambda: [[getattr(raw, name) for name in names] for raw in raws])
    before, groups = state(), []
    for step in range(4):
        plain.step(step)
        with patched(job.model, EXACT if step in (1, 2) else None, 2):
            job.step(step)
        groups.append(len(dist.distributed_c10d._world.pg_names))
    flat = Job(Case())
    raws = [module._get_fsdp_state()._fsdp_param_group for module in (*flat.model.blocks, flat.model)]
    before_flat = state()
    with patched(flat.model, EXACT, 2):
        changed = state() != before_flat
    fsdp2_patch.disable()  # nothing is on: it has no effect
    return plain.run(), job.run(), changed and state() == before_flat and before is not None, groups


def test_it_is_taken_off_without_a_trace() -> None:
    """Communicators stay, which the next ``enable`` takes again."""
    for plain, run, restored, groups in run_ranks(RANKS, on_and_off):
        assert run == plain and restored
        assert groups[0] < groups[1] == groups[2] == groups[3]


def resumed(folder: str, first: dict[str, Any] | None, then: dict[str, Any] | None) -> Run:
    """Two steps, a checkpoint by DCP, and two more in a new job."""
    job = Job(Case())
    with patched(job.model, first, 2):
        for step in range(2):
            job.step(step)
        state = {"model": job.model.state_dict(), "optimizer": job.optimizer.state_dict()}
        dcp.save(state, checkpoint_id=folder)
    job = Job(Case(seed=1))
    with patched(job.model, then, 2):
        job.step(7)  # so that the optimizer has states to load into
        state = {"model": job.model.state_dict(), "optimizer": job.optimizer.state_dict()}
        dcp.load(state, checkpoint_id=folder)
        job.model.load_state_dict(state["model"])
        job.optimizer.load_state_dict(state["optimizer"])
        job.losses.clear()
        for step in range(2, 4):
            job.step(step)
        return job.run()


@pytest.mark.parametrize(
    "first, then",
    [
        pytest.param(EXACT, None, id="with-without", marks=pytest.mark.slow),
        pytest.param(None, EXACT, id="without-with"),
        pytest.param(EXACT, EXACT, id="both", marks=pytest.mark.slow),
    ],
)
def test_checkpoints_load_with_and_without_it(first: Any, then: Any, tmp_path: Path) -> None:
    whole = run_ranks(RANKS, train_all, [(Case(steps=4), None)])[0][0]
    run = run_ranks(RANKS, resumed, str(tmp_path), first, then)[0]
    assert run.losses == pytest.approx(whole.losses[2:], rel=1e-6)
