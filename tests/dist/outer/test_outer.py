"""Outer replicas: against DiLoCo in plain torch, the bytes between them, their checkpoints, what they refuse."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from megazero import zero
from megazero.comm.codec import Blockwise, Identity
from megazero.config import RunConfig, World, make_config
from megazero.log.metrics import read_metrics
from megazero.mesh.mesh import create_mesh
from megazero.plan.base_layout import BaseLayout
from megazero.plan.layout import Layout
from megazero.plan.seconds import Collectives
from megazero.train import forecast
from megazero.zero.slices import Slice
from tests.dist.outer.cases import OuterCase, error, on_ranks, plain, whole
from tests.dist.parity_cases import EXPERTS
from tests.dist.pool import run_ranks
from tests.dist.runs import checkpoint_of, differences, samples, train_each
from tests.messages import refused
from tests.sizes import TINY

OUTER = {"outer_interval": 2}
TP2 = {"tensor_model_parallel_size": 2}
PP2 = {"pipeline_model_parallel_size": 2}
EXACT = {"fp32": 1e-6, "fp64": 1e-12}
SGD = {"optimizer": "sgd", "lr": 0.05}
LATE = {"outer_interval": 4, "outer_delay": 2}
TIED = {"untie_embeddings_and_output_weights": False}
CASES = [
    OuterCase("zero3 inside", 2, {**OUTER, **EXPERTS["balanced experts"], "zero_preset": "zero3"}),
    OuterCase("zero3 inside, fp32", 2, {**OUTER, **SGD, "zero_preset": "zero3"}, dtype="fp32"),
    OuterCase("tp 2", 2, {**OUTER, **TP2, "outer_optimizer": "sgd"}),
    OuterCase("pp 2", 2, {**OUTER, **PP2, "untie_embeddings_and_output_weights": False}),
    OuterCase("four", 4, {"outer_interval": 3, "outer_optimizer": "average"}, per_node=1, steps=7),
    OuterCase("late, zero3 inside", 2, {**LATE, "zero_preset": "zero3"}, steps=7),
    OuterCase("late, ddp, in flight", 2, {**LATE, "zero_preset": "ddp"}, steps=9),
]
MORE = [
    OuterCase("ddp inside", 2, {**OUTER, "zero_preset": "ddp"}),
    OuterCase(
        "every step",
        2,
        {"outer_interval": 1, "outer_lr": 0.5, "outer_momentum": 0.0, "outer_optimizer": "sgd"},
    ),
    OuterCase("long", 2, {"outer_interval": 4}, steps=14),
    OuterCase("two nodes in a replica", 2, {**OUTER, "outer_replicas": 2, "zero_preset": "zero3"}, world=8),
    OuterCase(
        "ddp, two nodes in a replica", 2, {**OUTER, "outer_replicas": 2, "zero_preset": "ddp"}, world=8
    ),
    OuterCase("tp 2 x zero3, virtual stages", 2, {**OUTER, **TP2, **PP2}, world=8, per_node=4),
    OuterCase("late, fp32", 2, {**LATE, **SGD}, dtype="fp32", steps=10),
    OuterCase("late, tp 2", 2, {**LATE, **TP2}, steps=11),
    OuterCase("late, pp 2, tied", 2, {**LATE, **PP2, **TIED}, steps=9),
    OuterCase("late, four", 4, {**LATE, "outer_optimizer": "sgd"}, per_node=1, steps=9),
    OuterCase("late, skipped", 2, LATE, steps=9, skips=(4, 1)),
    OuterCase("late, two nodes in a replica", 2, {**LATE, "outer_replicas": 2}, world=8, steps=9),
    OuterCase("late, tp 2 x pp 2", 2, {**LATE, **TP2, **PP2}, world=8, per_node=4, steps=9),
]


@pytest.mark.parametrize("cases", [CASES, pytest.param(MORE, marks=pytest.mark.slow)], ids=["core", "more"])
def test_ranks_take_the_steps_of_diloco(cases: list[OuterCase]) -> None:
    """Weights of every replica and of the anchor, norms, how far replicas were apart; the last steps do not meet."""
    for world in sorted({case.world for case in cases}):
        some = [case for case in cases if case.world == world]
        every = run_ranks(world, on_ranks, some, timeout=300)
        for case, seen in zip(some, zip(*every, strict=True), strict=True):
            want, bound = plain(case), EXACT[case.dtype]
            for replica, masters in enumerate(want.masters):
                assert error(whole(case, seen, replica, "masters"), masters) < (bound, ""), (
                    case.name,
                    replica,
                )
                assert error(whole(case, seen, replica, "anchors"), want.anchor) < (bound, ""), (
                    case.name,
                    replica,
                )
            since = (case.steps - case.values.get("outer_delay", 0)) % case.values["outer_interval"]
            apart = since > 0
            assert (error(want.masters[0], want.anchor) > (1e-3, "")) == apart, (
                "replicas have moved on, or just met"
            )
            for rank in seen:
                torch.testing.assert_close(
                    torch.tensor(rank.norms), torch.tensor(want.norms), rtol=1e-4, atol=1e-8, equal_nan=True
                )
                assert [d is None for d in rank.drifts] == [d is None for d in want.drifts], case.name
                for got, wanted in zip(rank.drifts, want.drifts, strict=True):
                    assert wanted is None or got == pytest.approx(wanted, rel=1e-3), case.name


# -- bytes and rounding ------------------------------------------------------------------------------

CODECS = {
    "exact": None,
    "bf16": Identity(torch.bfloat16),
    "8": Blockwise(8),
    "4": Blockwise(4),
    "2": Blockwise(2),
}
WIDTH = {"exact": 4.0, "bf16": 2.0, "8": 1 + 2 / 128, "4": 0.5 + 2 / 64, "2": 0.25 + 2 / 64}
NUMEL = 256 * 512


def moved(
    shards: tuple[int, int, int], name: str, outer: int, per_node: int
) -> tuple[float, float, float, bool]:
    """Three outer steps that average, after replicas moved apart.

    Returns what went missing, relatively (the replicas' ways with the residuals of before, less what the anchor moved
    with the residuals of after); bytes sent by those of the formula; the size of the last residual; whether anchors
    are the same bits in all replicas.
    """
    codec = CODECS[name]
    mesh = create_mesh(shards=shards, outer=outer, ranks_per_node=per_node)
    assert mesh.outer is not None
    torch.manual_seed(0)
    model = torch.nn.Linear(256, 512, bias=False)
    policy = zero.Policy(outer=zero.Outer(1, 1.0, 0.0, False, codec, feedback=codec is not None))
    engine = zero.shard(model, mesh=mesh, policy=policy)
    (unit,), steps = engine.units, engine.outer
    assert steps is not None
    anchor, sent, missing = steps.anchors[unit], 0, 0.0
    layout, axes = unit.layout, unit.axes

    def own(values: torch.Tensor) -> torch.Tensor:
        """The part that this rank alone of its replica sends."""
        return Slice(layout, values, axes.os).rows(axes.all, 1)[0].view(-1)

    def total(values: torch.Tensor) -> torch.Tensor:
        every = [torch.empty_like(values) for _ in range(outer)]
        dist.all_gather(every, values.clone(), group=mesh.outer.gather_group)
        return torch.stack(every).sum(0)

    kept = torch.zeros(layout.level_numel(axes.all)) if anchor.residual is None else anchor.residual
    for step in range(3):
        torch.manual_seed(100 * step + mesh.replica)
        way = torch.randn(NUMEL) * (1 + mesh.replica)
        (piece,) = layout.pieces(axes.os)
        unit.master.value.add_(way[piece.span])
        before = anchor.value.clone()
        wanted = total(own(before - unit.master.value) + kept)
        steps.updated(True)
        sent += engine.traffic.take()["outer_inter_node_bytes"]
        got = outer * own(before - anchor.value) + total(kept)
        missing = max(missing, ((got - wanted).norm() / wanted.norm()).item())
    formula = 3 * 2 * (outer - 1) / outer * WIDTH[name] * NUMEL / mesh.dp_size
    rows, size = mesh.gather_rows(steps.hash.view(1)), mesh.grid.replica_size
    equal = all(bool(rows[i] == rows[i % size]) for i in range(mesh.world_size))
    return missing, sent / formula, (kept.norm() / way.norm()).item(), equal


def all_moved(cases: list[tuple]) -> list[tuple]:
    return [moved(*case) for case in cases]


def test_what_rounding_loses_is_sent_later_and_bytes_are_those_of_the_formula() -> None:
    cases = [((2, 2, 2), name, 2, 2) for name in CODECS] + [((1, 1, 1), "4", 2, 2), ((1, 1, 1), "4", 4, 1)]
    every = run_ranks(4, all_moved, cases, timeout=120)
    for case, ranks in zip(cases, zip(*every, strict=True), strict=True):
        for missing, share, lost, equal in ranks:
            assert missing < 1e-6 and equal, (case, missing)
            assert share == pytest.approx(1, abs=0.01), case
            assert (lost == 0) == (case[1] == "exact") and lost < 2, (case, lost)


def skipping() -> tuple[bool, list[int]]:
    """Replica 1 overflows in the first of two steps. Whether all then have the mean of what both are, and the units
    that moved: one is frozen."""
    mesh = create_mesh(shards=(1, 1, 1), outer=2, ranks_per_node=1)
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(4, 4, bias=False) for _ in range(2)))
    model[0].requires_grad_(False)
    weight = model[1].weight.detach().clone()
    policy = zero.Policy(block=4, outer=zero.Outer(2, 1.0, 0.0, False))
    engine = zero.shard(model, mesh=mesh, units=[*model], policy=policy, optimizer=sgd_of)
    grads, sent = [], []
    for step in range(2):
        x = torch.full((1, 4), float("inf") if (step, mesh.replica) == (0, 1) else 1.0 + mesh.replica)
        engine.begin_step()
        model[1](x).sum().backward()
        info = engine.step()
        grads.append(info)
        sent.append(engine.traffic.take().get("outer_inter_node_bytes", 0))
    assert grads[0].skips == 1 and grads[0].skipped == (mesh.replica == 1) and grads[1].skips == 0
    assert grads[0].updated_norm is not None and grads[0].updated_norm > 0
    # SGD of a sum: every step subtracts 0.1 x; replica 0 took two steps of x = 1, replica 1 one of x = 2.
    wanted = weight - (0.2 * 1 + 0.1 * 2) / 2
    with engine.gathered():
        good = torch.allclose(model[1].weight, wanted, atol=1e-6)
    return good, sent


def sgd_of(groups: list) -> torch.optim.Optimizer:
    return torch.optim.SGD(groups, lr=0.1)


def strangers() -> str:
    """Replicas that start from different weights."""
    mesh = create_mesh(shards=(1, 1, 1), outer=2, ranks_per_node=1)
    torch.manual_seed(dist.get_rank())
    model = torch.nn.Linear(8, 8)
    engine = zero.shard(model, mesh=mesh, policy=zero.Policy(block=8, outer=zero.Outer(2)))
    engine.begin_step()
    model(torch.ones(1, 8)).sum().backward()
    with refused("outer replicas", "anchors", "ranks [1]", by=RuntimeError):
        engine.step()
    with refused("Policy(outer=...)", "create_mesh(outer=...)"):
        zero.shard(torch.nn.Linear(8, 8), mesh=create_mesh(outer=2, ranks_per_node=1))
    return "refused"


def test_a_replica_that_skips_meets_the_others_and_frozen_units_are_not_sent() -> None:
    for good, sent in run_ranks(2, skipping):
        assert good and sent == [0, 2 * 16 // 2 * 4], "one unit of 16, there and back"


def test_anchors_that_differ_are_found() -> None:
    assert run_ranks(2, strangers) == ["refused"] * 2


# -- whole runs --------------------------------------------------------------------------------------

SITES = {"ranks_per_node": 2, "outer_interval": 3, "train_iters": 8}


@pytest.mark.slow
def test_runs_with_outer_replicas(tmp_path: Path) -> None:
    """Stopped in the middle of an interval they go on bit for bit. Evaluations are of the anchor, or of a replica,
    and change nothing. Each sample comes once, in the order of a run without replicas. One replica is such a run, to
    the bit. Averaging SGD every step is plain data parallelism."""
    zero3, four = {"zero_preset": "zero3", "log_dir": str(tmp_path / "logs")}, {"outer_bits": 4}
    straight = {**SITES, **zero3, **four, "save": str(tmp_path / "straight")}
    stopped = {**straight, "save": str(tmp_path / "stopped"), "exit_interval": 4}
    evaluated = {"eval_interval": 1, "eval_iters": 2, "log_dir": str(tmp_path / "evaluated logs")}
    sgd = {**zero3, "optimizer": "sgd", "clip_grad": 0.0, "params_dtype": "fp64", "ranks_per_node": 2}
    average = {"outer_interval": 1, "outer_optimizer": "average"}
    jobs = {
        "straight": (4, straight),
        "stopped": (4, stopped),
        "gone on": (4, {**stopped, "load": stopped["save"], "exit_interval": None}),
        "evaluated": (4, {**straight, **evaluated, "save": str(tmp_path / "evaluated")}),
        "of a replica": (
            4,
            {**straight, **evaluated, "outer_evaluation": "replica", "save": str(tmp_path / "of a replica")},
        ),
        "plain": (4, {**zero3, "train_iters": 8, "ranks_per_node": 2, "save": str(tmp_path / "plain")}),
        "one": (4, {**zero3, **SITES, "outer_replicas": 1, "save": str(tmp_path / "one")}),
        "sgd": (4, sgd),
        "averaged": (4, {**sgd, **average}),
    }
    seen = train_each(jobs)
    assert seen["stopped"][0].losses + seen["gone on"][0].losses == seen["straight"][0].losses
    wanted = checkpoint_of(tmp_path / "straight")
    assert {
        "weights",
        "outer momentum",
        "replica 0 master",
        "replica 1 exp_avg",
        "replica 1 outer residual",
    } < set(wanted)
    assert not differences(wanted, checkpoint_of(tmp_path / "stopped"))
    assert not differences(wanted, checkpoint_of(tmp_path / "evaluated"))
    losses = seen["evaluated"][0].evaluations
    assert losses[2] == losses[3] == losses[4] != losses[5] and losses[5] == losses[6] == losses[7]
    assert not differences(wanted, checkpoint_of(tmp_path / "of a replica"))
    own = seen["of a replica"][0].evaluations
    apart = [abs(got - loss) / loss for got, loss in zip(own, losses, strict=True)]
    moved = [apart[at] for at in (1, 3, 4, 6, 7)]  # the first step of the warm-up has a learning rate of 0
    assert max(apart[2], apart[5]) < 1e-6 < min(moved), "equal after a meeting"
    assert samples(seen["straight"]) == samples(seen["plain"])
    assert seen["one"][0].losses == seen["plain"][0].losses != seen["straight"][0].losses
    assert not differences(checkpoint_of(tmp_path / "one"), checkpoint_of(tmp_path / "plain"))
    for (_, got), (_, plain_loss) in zip(seen["averaged"][0].losses, seen["sgd"][0].losses, strict=True):
        assert got == pytest.approx(plain_loss, rel=1e-12)
    lines = [line for line in read_metrics(tmp_path / "evaluated logs") if "lm_loss" in line]
    assert [("outer" in line) for line in lines] == [False, False, False, True, False, False, True, False]
    assert set(lines[0]["replicas"]) == {"0", "1"} and lines[3]["outer"]["drift"] > 0
    mean = sum(each["lm_loss"] for each in lines[0]["replicas"].values()) / 2
    assert lines[0]["lm_loss"] == pytest.approx(mean)


@pytest.mark.slow
def test_another_number_of_replicas_is_refused_and_may_start_from_the_anchor(tmp_path: Path) -> None:
    first = {**SITES, "zero_preset": "zero3", "exit_interval": 4, "log_dir": str(tmp_path / "logs")}
    train_each({"two": (4, {**first, "save": str(tmp_path / "two")})})
    other = {**first, "load": str(tmp_path / "two"), "exit_interval": 5, "save": str(tmp_path / "other")}
    for count, values in (("1", {"outer_interval": 0}), ("4", {"ranks_per_node": 1})):
        with refused(f"has {count}", "--outer-replicas 2", "--finetune", by=Exception):
            train_each({"other": (4, {**other, **values})})
    anew = {**other, "ranks_per_node": 1, "finetune": True, "lr": 1e-30, "weight_decay": 0.0, "min_lr": 0.0}
    train_each({"anew": (4, {**anew, "exit_interval": 1})})
    anchor, weights = checkpoint_of(tmp_path / "two")["weights"], checkpoint_of(tmp_path / "other")["weights"]
    assert all(torch.equal(anchor[name], weights[name]) for name in anchor)


COARSE = {"zero_preset": "zeropp", "zero_quantized_weights_delta": False, "zero_exact_numel": 16}
TWO_STAGES = {**TP2, **PP2, "ranks_per_node": 4, "params_dtype": "bf16"}
# name: (ranks, options, steps after which runs stop)
RUNS = {
    "zeropp between a replica's nodes": (8, {**COARSE, "outer_replicas": 2, "params_dtype": "bf16"}, (4,)),
    "tp 2 x pp 2, bf16": (8, {**TWO_STAGES, "outer_bits": 2}, (4,)),
    "moments in fewer bits": (
        4,
        {"zero_preset": "zero3", "exp_avg_dtype": "bf16", "exp_avg_sq_dtype": "bf16", "outer_bits": 8},
        (4,),
    ),
    "muon": (4, {"zero_preset": "zero3", "optimizer": "muon"}, (4,)),
    "fp16, steps that overflow": (
        4,
        {"zero_preset": "zero1", "params_dtype": "fp16", "initial_loss_scale": 2.0**22, "hysteresis": 1},
        (4,),
    ),
    # Stopped with differences on their way, and between two meetings.
    "late, ddp": (4, {**LATE, "zero_preset": "ddp"}, (4, 6)),
    "late, 2 bits, asynchronous saves": (
        4,
        {**LATE, "zero_preset": "zero3", "outer_bits": 2, "async_save": True, "save_interval": 4},
        (5, 6),
    ),
    "late, tp 2 x pp 2, bf16": (8, {**LATE, **TWO_STAGES, **TIED}, (4, 6)),
    "late, zeropp between a replica's nodes": (
        8,
        {**LATE, **COARSE, "outer_replicas": 2, "outer_bits": 8},
        (5,),
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_replicas_of_any_kind_go_on_bit_for_bit(tmp_path: Path, name: str) -> None:
    """Evaluations change nothing, also where messages are quantised; bytes are those predicted."""
    world, values, stops = RUNS[name]
    base = {**SITES, "lr": 1e-3, "train_iters": 9, **values, "log_dir": str(tmp_path / "logs")}
    evaluated = {"eval_interval": 1, "eval_iters": 1, "log_dir": str(tmp_path / "evaluated logs")}
    jobs = {"straight": base, "evaluated": {**base, **evaluated}}
    folders = {name: str(tmp_path / name) for name in jobs}
    for at in stops:
        first, rest, saved = f"stopped at {at}", f"gone on from {at}", str(tmp_path / f"at {at}")
        jobs |= {first: {**base, "exit_interval": at}, rest: {**base, "load": saved}}
        folders |= {first: saved, rest: saved}
    seen = train_each({job: (world, {**own, "save": folders[job]}) for job, own in jobs.items()})
    wanted = checkpoint_of(tmp_path / "straight")
    assert not differences(wanted, checkpoint_of(tmp_path / "evaluated"))
    for at in stops:
        both = seen[f"stopped at {at}"][0].losses + seen[f"gone on from {at}"][0].losses
        assert both == seen["straight"][0].losses
        assert not differences(wanted, checkpoint_of(tmp_path / f"at {at}"))
    nodes = World(world, base["ranks_per_node"])
    mean, most = predicted(make_config({**TINY, **base}, nodes), nodes)
    interval = base["outer_interval"]
    sent = [[step.get("outer_inter_node", 0) for step in rank.sent] for rank in seen["straight"]]
    per_meeting = [sum(each[interval - 1 : 2 * interval - 1]) for each in sent]
    assert max(per_meeting) == pytest.approx(mean * interval, rel=1e-3)
    assert max(max(each) for each in sent) <= 1.001 * most


def predicted(config: RunConfig, world: World) -> tuple[float, float]:
    cluster = forecast._unknown_cluster(config, world, None, torch.device("cpu"))
    base = BaseLayout(config, world, cluster, Collectives(cluster))
    return Layout(base, config.zero).bytes_of_meetings


@pytest.mark.slow
def test_a_flight_on_other_layouts(tmp_path: Path) -> None:
    """Saved as differences have left. The same replicas go on with other shards, stages and tensor parallelism.

    pytest -m slow tests/dist/outer/test_outer.py -k flight
    """
    first = {
        **SITES,
        **LATE,
        "train_iters": 9,
        "lr": 1e-3,
        "zero_preset": "zero3",
        "params_dtype": "fp64",
        "lr_warmup_iters": 0,
    }
    first |= {"log_dir": str(tmp_path / "logs"), "save": str(tmp_path / "two"), "exit_interval": 4}
    straight = {**first, "save": str(tmp_path / "straight"), "exit_interval": None}
    seen = train_each({"two": (4, first), "straight": (4, straight)})
    assert checkpoint_of(tmp_path / "two")["outer sums"]
    on = {**straight, "zero_preset": "ddp", "load": first["save"]}
    # Half the data-parallel ranks, and twice the micro-batch: each replica has the samples that it had.
    half = {"micro_batch_size": 2}
    jobs = {"ddp": on, "pp": {**on, **PP2, **half}, "tp": {**on, **TP2, **half}}
    seen |= train_each({name: (4, {**v, "save": str(tmp_path / name)}) for name, v in jobs.items()})
    wanted = checkpoint_of(tmp_path / "straight")["weights"]
    for name in jobs:
        for (_, got), (_, loss) in zip(seen[name][0].losses, seen["straight"][0].losses[4:], strict=True):
            assert got == pytest.approx(loss, rel=1e-9), name
        far = checkpoint_of(tmp_path / name)["weights"]
        for key, value in wanted.items():
            torch.testing.assert_close(far[key], value, rtol=1e-8, atol=1e-10)
