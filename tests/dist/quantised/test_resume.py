"""Checkpoints of quantised training: bit for bit on the same layout; what receivers hold is kept on another."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from megazero import zero
from megazero.checkpoint import store
from megazero.log.metrics import read_metrics
from megazero.mesh.levels import INTER, INTRA
from megazero.zero.records import (
    RESIDUAL,
    kinds_to_load,
    load_rank_tensors,
    load_records,
    rank_tensors,
    save_records,
)
from tests.dist.pool import run_ranks
from tests.dist.quantised.cases import (
    ADAMW,
    H4,
    H8,
    Q4,
    Q8,
    Case,
    bits_of,
    make,
    several,
    step_with,
)
from tests.dist.runs import checkpoint_of, differences, train_each
from tests.exact_gradients import exact_from

BF16 = torch.bfloat16


def parameters(model, engine) -> dict:
    with engine.gathered():
        return {n: p.detach().double().clone() for n, p in model.named_parameters()}


def save(engine, case, root, step):
    """With what earlier versions wrote under error feedback, and of units that fell back."""
    engine.refresh()
    records = [
        replace(r, tensors={**r.tensors, RESIDUAL: torch.ones(r.tensors["weights"].numel())})
        for r in save_records(engine)
    ]
    owed = {f"{RESIDUAL} {unit.name}": torch.ones(unit.layout.numel) for unit in engine.units}
    snapshot = store.Snapshot(
        step,
        records,
        state={
            "engine": {**engine.state(), "fallen_back": {engine.units[0].name: ["weights"]}},
            "optimizer": engine.optimizer.scalars(),
        },
        rank_tensors={**rank_tensors(engine), **owed},
        layout={"case": case.letters, "per_node": case.per_node},
    )
    return store.save(root, snapshot, group=dist.group.WORLD)


def straight(case: Case, root, steps: int):
    """Half the steps, a save, the other half."""
    model, engine = make(case, ADAMW)
    for step in range(steps // 2):
        step_with(case, model, engine, step, divisor=2.0 + step)
    path = save(engine, case, root, steps // 2)
    held = parameters(model, engine)
    infos = [step_with(case, model, engine, s, divisor=2.0 + s) for s in range(steps // 2, steps)]
    return path, held, infos, bits_of(engine), parameters(model, engine)


def resume(case: Case, path):
    model, engine = make(case, ADAMW)
    manifest = store.read_manifest(path)
    loaded = store.load(
        path,
        records=load_records(engine),
        group=dist.group.WORLD,
        kinds=kinds_to_load(engine, list(manifest.kinds), ["exp_avg", "exp_avg_sq"]),
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


def elsewhere(case: Case, path, held) -> None:
    """On another layout R is kept."""
    model, engine = resume(case, path)
    if case.codecs.delta and engine.units[0].delta:
        now = parameters(model, engine)
        assert all(torch.equal(now[n], held[n]) for n in held), case


PLAIN = zero.Codecs(weights=Q4, delta=True, gradients={INTRA: Q8, INTER: Q4})
# Parameters end inside blocks: what is mixed with their padding is not part of a checkpoint.
MIXED = zero.Codecs(weights=H4, delta=True, gradients={INTRA: H8, INTER: H4})


@pytest.mark.first(1)
@pytest.mark.parametrize(("letters", "codecs"), [("hhd", PLAIN), ("11d", MIXED)])
def test_a_resume_keeps_what_receivers_hold_and_ignores_residuals_of_earlier_versions(
    letters, codecs, tmp_path
):
    case, steps = Case(letters, 2, codecs, dtype=BF16), 6
    every = run_ranks(4, straight, case, tmp_path, steps, timeout=300)
    again = run_ranks(4, resumed, case, every[0][0], steps, timeout=300)
    for (_, _, *want), got in zip(every, again, strict=True):
        assert got[:2] == tuple(want[:2])
        assert all(torch.equal(got[2][n], x) for n, x in want[2].items())
    path, held = every[0][:2]
    for world, others in ((4, ("11d", "hhd", "hhh", "ddd")), (2, ("11d", "ddd"))):
        cases = [case.but(letters=x, per_node=world // 2) for x in others if (x, world) != (letters, 4)]
        run_ranks(world, several, elsewhere, cases, path, held, timeout=300)


# -- through the trainer -----------------------------------------------------------------------------

PP2 = {"pipeline_model_parallel_size": 2, "num_layers": 4}
TIED = {"untie_embeddings_and_output_weights": False}
NODES = {"zero_exact_numel": 40, "ranks_per_node": 2}
GRADIENTS = {"zero_quantized_gradients": True}
INT8, DELTA = ({"zero_quantized_weights": True, "zero_quantized_weights_delta": x} for x in (False, True))
REPLICAS = {**NODES, **GRADIENTS, "zero_shard": (1, 1, 4), "params_dtype": "bf16"}
ZEROPP = {**NODES, "zero_preset": "zeropp", "zero_quantized_weights_delta": False, "params_dtype": "bf16"}
CHANGES = {**ZEROPP, "zero_quantized_weights_delta": True}
UNTIL = {"callbacks": exact_from(4)}
# name: (ranks, values)
RESUMED = {
    "tp 2": (4, {**REPLICAS, **INT8, "zero_shard": (1, 1, 2), "tensor_model_parallel_size": 2}),
    "zeropp": (4, ZEROPP),
    "delta": (4, CHANGES),
    "delta, fp32": (4, {**CHANGES, "params_dtype": "fp32"}),
    "inside too": (4, {**ZEROPP, "zero_gradient_bits_intra_node": 4, "hidden_dropout": 0.1}),
    "1,1,4, delta": (4, {**REPLICAS, **DELTA}),
    "mics": (4, {**REPLICAS, "zero_shard": (2, 2, 2)}),
    "tied, delta": (4, {**CHANGES, **TIED}),
    "until": (4, {**ZEROPP, **UNTIL}),
    "pp 2, delta, tied": (
        4,
        {**REPLICAS, **PP2, **DELTA, **TIED, "use_tp_pp_dp_mapping": True, "zero_shard": (1, 1, 2)},
    ),
    "pp 2, tied, ends on two nodes, zb-h1": (
        4,
        {
            **PP2,
            **TIED,
            **GRADIENTS,
            **{"zero_exact_numel": 40, "ranks_per_node": 1, "zero_shard": (1, 1, 2)},
            "pipeline_schedule": "zb-h1",
        },
    ),
    "zeropp, interleaved, tied": (
        8,
        {**CHANGES, **PP2, **UNTIL, **TIED, "num_virtual_stages_per_pipeline_rank": 2},
    ),
    "zeropp, zb-h1, outermost dp": (
        8,
        {
            **{**CHANGES, **PP2, **UNTIL, "params_dtype": "fp32", "hidden_dropout": 0.1},
            **{"use_tp_pp_dp_mapping": True, "ranks_per_node": 4, "pipeline_schedule": "zb-h1"},
        },
    ),
}
TOLD = [
    "grad_norm",
    *(f"quantization_{x}" for x in ("unit", "error_weights", "error_gradients", "zeroed_gradients")),
]


@pytest.mark.slow
@pytest.mark.parametrize("name", RESUMED)
def test_a_resume_equals_the_uninterrupted_run_bit_for_bit(tmp_path: Path, name: str) -> None:
    """The uninterrupted run also evaluates."""
    world, values = RESUMED[name]
    values = {**values, "train_iters": 6, "log_dir": str(tmp_path / "logs"), "global_batch_size": 2 * world}
    evaluated = {"eval_interval": 2, "eval_iters": 1, "log_dir": str(tmp_path / "straight logs")}
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
    assert "exp_avg" in one and not differences(one, two)
    before, after = (
        [line for line in read_metrics(tmp_path / logs) if "lm_loss" in line]
        for logs in ("straight logs", "logs")
    )
    for key in TOLD:
        assert [line.get(key) for line in before] == [line.get(key) for line in after], key
