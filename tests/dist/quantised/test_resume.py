"""Checkpoints of quantised training: bit for bit on the same layout, nothing lost on another."""

from __future__ import annotations

import io
import json
from contextlib import ExitStack, redirect_stdout
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megazero import zero
from megazero.checkpoint import store
from megazero.comm.codec import Blockwise
from megazero.config import World, make_config
from megazero.mesh.launch import Launch
from megazero.train import setup
from megazero.zero.records import (
    kinds_to_load,
    load_rank_tensors,
    load_records,
    rank_tensors,
    residual_sum,
    save_records,
)
from tests.dist.capture import assemble, local_slices
from tests.dist.pool import run_ranks
from tests.dist.quantised.cases import (
    ADAMW,
    H4,
    H8,
    Q4,
    S4,
    Case,
    bits_of,
    make,
    owed_by,
    reduced,
    several,
    step_with,
    take_step,
)
from tests.dist.runs import checkpoint_of, differences, train_each
from tests.exact_gradients import exact_from
from tests.sizes import TINY

BF16 = torch.bfloat16


def by_name(engine, level_buffer) -> dict:
    shapes = {s.name: s.shape for u in engine.units for s in u.layout.slots}
    return assemble(local_slices(engine, level_buffer), shapes)


def owed(engine) -> dict:
    """residual_sum by parameter, full tensors."""
    sums = {u: residual_sum(engine, u) for u in engine.units}
    return by_name(engine, lambda u, a, b: sums[u][a:b])


def parameters(model, engine) -> dict:
    with engine.gathered():
        return {n: p.detach().double().clone() for n, p in model.named_parameters()}


def save(engine, case, root, step):
    engine.refresh()
    snapshot = store.Snapshot(
        step,
        save_records(engine),
        state={"engine": engine.state(), "optimizer": engine.optimizer.scalars()},
        rank_tensors=rank_tensors(engine),
        layout={"case": case.letters, "per_node": case.per_node},
    )
    return store.save(root, snapshot, group=dist.group.WORLD)


def straight(case: Case, root, steps: int):
    """Half the steps, a save, the other half."""
    model, engine = make(case, ADAMW)
    for step in range(steps // 2):
        step_with(case, model, engine, step, divisor=2.0 + step)
    path = save(engine, case, root, steps // 2)
    sums = owed(engine)
    for unit in engine.units:
        if unit.axes.crossing is not None:
            every = owed_by(unit, engine.mesh)
            for slot in unit.layout.slots:
                want = every[slot.start : slot.start + slot.numel].view(slot.shape)
                torch.testing.assert_close(sums[slot.name], want, rtol=1e-6, atol=1e-7)
    assert any(x.any() for x in sums.values())
    held = parameters(model, engine)
    infos = [step_with(case, model, engine, s, divisor=2.0 + s) for s in range(steps // 2, steps)]
    return path, held, sums, infos, bits_of(engine), parameters(model, engine)


def resume(case: Case, path):
    model, engine = make(case, ADAMW)
    manifest = store.read_manifest(path)
    loaded = store.load(
        path,
        records=load_records(engine, residual=True),
        group=dist.group.WORLD,
        kinds=kinds_to_load(engine, list(manifest.kinds), ["exp_avg", "exp_avg_sq"], True),
        layout={"case": case.letters, "per_node": case.per_node},
    )
    engine.invalidate()
    engine.optimizer.load_scalars(loaded.state["optimizer"])
    load_rank_tensors(engine, loaded.rank_tensors or {})
    engine.load_state(json.loads(json.dumps(loaded.state["engine"])))
    return model, engine


def resumed(case: Case, path, steps: int):
    model, engine = resume(case, path)
    infos = [step_with(case, model, engine, s, divisor=2.0 + s) for s in range(steps // 2, steps)]
    return infos, bits_of(engine), parameters(model, engine)


def elsewhere(case: Case, path, held, sums, root) -> None:
    """On another layout: R and what rounding owes are kept, over a bad step and another save, too, and paid."""
    model, engine = resume(case, path)
    if case.codecs.delta and engine.units[0].delta:
        now = parameters(model, engine)
        assert all(torch.equal(now[n], held[n]) for n in held), case

    def zeros(bad):
        out = [[torch.zeros(s, dtype=case.dtype) for s in shapes] for shapes in case.units]
        if bad:
            out[0][0].fill_(torch.nan)
        return out

    assert take_step(case, model, engine, lambda m: zeros(True)).skipped
    assert all(torch.equal(x, sums[n]) for n, x in owed(engine).items()), case
    again = save(engine, case, f"{root}/{case.letters}-{case.per_node}-{dist.get_world_size()}", 1)
    model, engine = resume(case, again)
    assert all(torch.equal(x, sums[n]) for n, x in owed(engine).items()), case
    engine.exact_gradients = True
    assert not take_step(case, model, engine, lambda m: zeros(False), divisor=4.0).skipped
    paid = {u: reduced(u) for u in engine.units}
    for name, value in by_name(engine, lambda u, a, b: paid[u][a:b]).items():
        torch.testing.assert_close(value, sums[name], rtol=1e-6, atol=1e-12)
    assert not any(x.any() for x in owed(engine).values()), case


NOISY = zero.Codecs(
    weights=S4, delta=True, gradients_intra=Blockwise(8, 16, True), gradients_inter=Q4, feedback=True
)
# Parameters end inside blocks: what is mixed with their padding is not part of a checkpoint.
MIXED = zero.Codecs(weights=H4, delta=True, gradients_intra=H8, gradients_inter=H4, feedback=True)


@pytest.mark.first(1)
@pytest.mark.parametrize(("letters", "codecs"), [("hhd", NOISY), ("11d", MIXED)])
def test_a_resume_keeps_residuals_and_what_receivers_hold(letters, codecs, tmp_path):
    case, steps = Case(letters, 2, codecs, dtype=BF16), 6
    every = run_ranks(4, straight, case, tmp_path, steps, timeout=300)
    again = run_ranks(4, resumed, case, every[0][0], steps, timeout=300)
    for (_, _, _, *want), got in zip(every, again, strict=True):
        assert got[:2] == tuple(want[:2])
        assert all(torch.equal(got[2][n], x) for n, x in want[2].items())
    path, held, sums = every[0][:3]
    for world, others in ((4, ("11d", "hhd", "hhh", "ddd")), (2, ("11d", "ddd"))):
        cases = [case.but(letters=x, per_node=world // 2) for x in others if (x, world) != (letters, 4)]
        run_ranks(world, several, elsewhere, cases, path, held, sums, tmp_path, timeout=300)


def test_residuals_are_summed_where_replicas_share_a_node(tmp_path):
    """The OS slice is the whole unit, and each of the node's replicas owes for another part of it."""
    codecs = zero.Codecs(gradients_intra=Blockwise(8, 16, True), gradients_inter=Q4, feedback=True)
    case, steps = Case("111", 2, codecs, dtype=BF16), 4
    every = run_ranks(4, straight, case, tmp_path, steps, timeout=300)
    again = run_ranks(4, resumed, case, every[0][0], steps, timeout=300)
    for (_, _, _, *want), got in zip(every, again, strict=True):
        assert got[:2] == tuple(want[:2])
    path, held, sums = every[0][:3]
    run_ranks(2, several, elsewhere, [case.but(letters="11d", per_node=1)], path, held, sums, tmp_path)


# -- pipelines through the trainer ---------------------------------------------------------------------

PP2 = {"pipeline_model_parallel_size": 2, "num_layers": 4, "zero_exact_numel": 40}
TIED = {"untie_embeddings_and_output_weights": False}
ACROSS = {
    "use_tp_pp_dp_mapping": True,
    "ranks_per_node": 2,
    "zero_shard": (1, 1, 2),
}  # a pipeline on each node
GRADIENTS = {"zero_quantized_gradients": True, "zero_gradient_bits": 2}
FEEDBACK = {**GRADIENTS, "zero_gradient_rounding": "feedback"}
DELTA = {"zero_quantized_weights": True, "zero_quantized_weights_delta": True}
ZEROPP = {"zero_preset": "zeropp", "callbacks": exact_from(6)}
# name: (ranks, values)
RESUMED = {
    "delta, feedback, tied, bf16": (
        4,
        {**PP2, **ACROSS, **DELTA, **FEEDBACK, **TIED, "params_dtype": "bf16"},
    ),
    "stochastic, tied, ends on two nodes, zb-h1": (
        4,
        {
            **PP2,
            **TIED,
            **GRADIENTS,
            "zero_gradient_rounding": "stochastic",
            "ranks_per_node": 1,
            "zero_shard": (1, 1, 2),
            "pipeline_schedule": "zb-h1",
        },
    ),
    "zeropp, interleaved, feedback, tied, bf16": (
        8,
        {
            **PP2,
            **ZEROPP,
            **FEEDBACK,
            **TIED,
            "num_virtual_stages_per_pipeline_rank": 2,
            "ranks_per_node": 2,
            "params_dtype": "bf16",
        },
    ),
    "zeropp, zb-h1, outermost dp, stochastic": (
        8,
        {
            **PP2,
            **ZEROPP,
            "zero_gradient_rounding": "stochastic",
            "use_tp_pp_dp_mapping": True,
            "ranks_per_node": 4,
            "pipeline_schedule": "zb-h1",
            "hidden_dropout": 0.1,
        },
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [next(iter(RESUMED)), *(pytest.param(n, marks=pytest.mark.slow) for n in [*RESUMED][1:])]
)
def test_a_resume_of_a_quantised_pipeline_is_bit_for_bit(tmp_path: Path, name: str) -> None:
    world, values = RESUMED[name]
    values = {**values, "log_dir": str(tmp_path / "logs"), "global_batch_size": 2 * world}
    evaluated = {"eval_interval": 2, "eval_iters": 1}
    jobs = {
        "straight": (world, {**values, **evaluated, "save": str(tmp_path / "straight")}),
        "first": (world, {**values, "save": str(tmp_path / "first"), "exit_interval": 3}),
        "second": (world, {**values, "load": str(tmp_path / "first"), "save": str(tmp_path / "second")}),
    }
    for straight, first, second in zip(*train_each(jobs).values(), strict=True):
        assert len(straight.losses) == 6 and len(first.losses) == 3 == second.start
        assert first.losses + second.losses == straight.losses
        assert first.ids + second.ids == straight.ids
    one, two = (checkpoint_of(tmp_path / part) for part in ("straight", "second"))
    assert ("residual" in one) == (values["zero_gradient_rounding"] == "feedback") and "exp_avg" in one
    assert not differences(one, two)


# Tied embeddings and error feedback; messages are exact from the fourth iteration on, so that what was owed is paid
# and every layout does the same.
OWING = {**FEEDBACK, **TIED, "num_layers": 4, "zero_exact_numel": 40, "callbacks": exact_from(4)}
OWING |= {"lr_warmup_iters": 0, "zero_quantized_weights": False}
_PP2 = {"pipeline_model_parallel_size": 2}
# The first two differ only in the order of ranks: then a rank's own residuals are another rank's.
ELSEWHERE = {
    "ends": (4, {**_PP2, "zero_shard": (1, 1, 2), "ranks_per_node": 1}),
    "ends, the other order": (4, {**_PP2, **ACROSS, "ranks_per_node": 1}),
    "ends, two stages each": (4, {**_PP2, **ACROSS, "num_virtual_stages_per_pipeline_rank": 2}),
    "no pipeline": (4, {"zero_shard": (1, 1, 4), "ranks_per_node": 2}),
    "ends, pipelines inside nodes": (4, {**_PP2, **ACROSS}),
    "no pipeline, tp 2": (4, {"tensor_model_parallel_size": 2, "zero_shard": (1, 1, 2), "ranks_per_node": 2}),
    "ends of 4": (8, {**ACROSS, "pipeline_model_parallel_size": 4, "ranks_per_node": 4}),
}


def pass_on(values: dict[str, Any]) -> None:
    """Load and save again, without a step in between."""
    world = dist.get_world_size()
    config = make_config({**TINY, **values}, World(world, world))
    with ExitStack() as stack, redirect_stdout(io.StringIO()):
        run = setup.prepare(config, Launch(dist.get_rank(), world, local_world_size=world), stack)
        run.checkpointing.save(run.progress)


@pytest.mark.slow
def test_what_is_owed_goes_from_layout_to_layout_and_is_paid(tmp_path: Path) -> None:
    """From tied ends of a pipeline to one parameter and back, over every layout in turn."""
    base = {**OWING, "log_dir": str(tmp_path / "logs"), "train_iters": 6}
    first = {name: (ranks, {**base, **values}) for name, (ranks, values) in ELSEWHERE.items()}
    source = "ends"
    jobs: dict[Any, tuple[int, dict[str, Any]]] = {"stayed": first[source]}
    ranks, values = first[source]
    jobs["stopped"] = ranks, {**values, "exit_interval": 3, "save": str(tmp_path / source)}
    stayed = train_each(jobs)["stayed"][0]
    names = list(ELSEWHERE)
    for before, name in zip(names, names[1:], strict=False):
        ranks, values = first[name]
        moved = {**values, "load": str(tmp_path / before), "save": str(tmp_path / name)}
        run_ranks(ranks, pass_on, moved, timeout=300)
    owed = checkpoint_of(tmp_path / source)["residual"]
    assert all(x.isfinite().all() for x in owed.values()) and sum(x.abs().sum().item() for x in owed.values())
    for name in names[1:]:
        passed = checkpoint_of(tmp_path / name)["residual"]
        for tensor, value in owed.items():
            torch.testing.assert_close(passed[tensor], value, rtol=1e-6, atol=1e-9, msg=f"{name}, {tensor}")
    # Each goes on from the file that the one before it in the chain passed on; the first, from its own.
    after = {
        (name, load): (ranks, {**values, "load": str(tmp_path / load)})
        for (name, (ranks, values)), load in zip(first.items(), [names[-1], *names[:-1]], strict=True)
    }
    for (name, load), seen in train_each(after).items():
        for (_, got), (_, wanted), limit in zip(
            seen[0].losses, stayed.losses[3:], (1e-6, 1e-5, 1e-5), strict=True
        ):
            assert abs(got - wanted) <= limit * wanted, (name, load, seen[0].losses, stayed.losses)
