"""What the planner says that a rank holds for good, against what an engine holds: model states, and the pool."""

from __future__ import annotations

import io
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, redirect_stdout
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megazero.config import World, make_config
from megazero.config.options.cluster import Cores
from megazero.mesh.launch import Launch
from megazero.plan.base_layout import BaseLayout
from megazero.plan.layout import Layout
from megazero.plan.seconds import Collectives
from megazero.train import setup
from tests.dist.pool import run_ranks
from tests.sizes import TINY
from tests.unit.plan.test_plan import cluster

EXPERTS = {"num_experts": 8, "moe_ffn_hidden_size": 64}
SHARED = {**EXPERTS, "expert_model_parallel_size": 2, "params_dtype": "bf16"}
LAYOUTS: dict[str, dict[str, Any]] = {
    "ddp": {"zero_preset": "ddp"},
    "zero2": {"zero_preset": "zero2"},
    "whole gradients": {"zero_preset": "zero2", "zero_gradients_lifetime": "step"},
    "hpz": {"zero_preset": "hpz"},
    "bf16": {"zero_preset": "zero3", "params_dtype": "bf16"},
    "zeropp": {"zero_preset": "zeropp", "params_dtype": "bf16"},
    "joined layers": {"zero_preset": "zeropp", "params_dtype": "bf16", "zero_unit_layers": 3},
    "small moments": {"zero_preset": "zero2", "exp_avg_dtype": "bf16", "exp_avg_sq_dtype": "bf16"},
    "tensor parallel": {"zero_preset": "zero3", "tensor_model_parallel_size": 2},
    "muon": {"zero_preset": "zero3", "optimizer": "muon", "params_dtype": "bf16"},
    "experts": {**EXPERTS, "zero_preset": "zero3"},
    "shared experts": {**EXPERTS, "zero_preset": "zero2", "expert_model_parallel_size": 2},
    "shared experts, bf16": {**SHARED, "zero_preset": "hpz"},
    "shared experts, zeropp": {**SHARED, "zero_preset": "zeropp"},
    "shared experts, muon": {**SHARED, "zero_preset": "zero3", "optimizer": "muon"},
    "experts of two nodes": {
        **{**EXPERTS, "zero_preset": "zero3", "expert_model_parallel_size": 4},
        "moe_dispatch_across_nodes": "exact",
    },
    "tied ends": {"zero_preset": "zero2", "model_family": "gpt", "pipeline_model_parallel_size": 2},
}
MODEL = {**TINY, "num_layers": 4, "hidden_size": 64, "ffn_hidden_size": 192, "train_iters": 3}
MODEL |= {"vocab_size": 1000, "ranks_per_node": 2}


def state_bytes(engine: Any) -> int:
    """Return the bytes of P copies, gradients, master weights, moments, residuals and anchors, before an update."""
    moments = [value for state in engine.optimizer.torch.state.values() for value in state.values()]
    buffers = [
        each
        for unit in engine.units
        for each in (
            unit.weights.copy if unit.weights.copy_present else None,
            *(unit.master.value, unit.gradients.grad),
        )
    ]
    held = [t for t in (*moments, *buffers) if isinstance(t, torch.Tensor) and t.numel() > 1]
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in held}.values())


def hold(layouts: Sequence[Mapping[str, Any]]) -> list[tuple[int, int, float, float]]:
    """Train each; return the bytes of states and of the pool at its fullest, then what the planner says of them."""
    out = []
    for values in layouts:
        launch = Launch(dist.get_rank(), dist.get_world_size(), local_world_size=dist.get_world_size())
        with ExitStack() as stack, redirect_stdout(io.StringIO()):
            logs = stack.enter_context(tempfile.TemporaryDirectory())
            config = make_config({**MODEL, **values, "log_dir": logs}, World(4, 4))
            run = setup.prepare(config, launch, stack)
            states, step = list[int](), run.engine.step
            run.engine.step = lambda *row, e=run.engine, s=step, n=states: (
                n.append(state_bytes(e)),
                s(*row),
            )[1]  # type: ignore[misc]
            run.run()
        on = cluster(2, 2)
        on = replace(on, cores=Cores(2, 2), device=replace(on.device, fp32_tflops=1.0))
        said = Layout(BaseLayout(run.config, World(4, 2), on, Collectives(on)), run.config.zero)
        memory = said.memory_of(run.mesh.pp.index, said.loss_chunk)
        out.append((states[-1], run.engine.arena.peak, memory.model_states, memory.staging + memory.margin))
    return out


FEW = ("ddp", "whole gradients", "zeropp", "tensor parallel", "muon")
NAMES = [pytest.param(name, marks=[] if name in FEW else pytest.mark.slow) for name in LAYOUTS]


@cache
def held(few: bool) -> dict[str, list[tuple[int, int, float, float]]]:
    """What each layout of FEW, or of the others, holds on every rank."""
    names = [name for name in LAYOUTS if (name in FEW) == few]
    every = run_ranks(4, hold, [LAYOUTS[name] for name in names], timeout=120)
    return {name: [rank[number] for rank in every] for number, name in enumerate(names)}


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_model_states_are_what_is_held(name: str) -> None:
    for states, _, predicted, _ in held(name in FEW)[name]:
        assert predicted == pytest.approx(states, rel=0.005)  # states are whole blocks of every rank's slice


@pytest.mark.parametrize("name", NAMES)
def test_the_pool_is_bounded(name: str) -> None:
    """How many chains are under way at once depends on the ranks' timing: the planner says the most, about."""
    for _, pool, _, predicted in held(name in FEW)[name]:
        assert predicted / 4 <= pool <= 1.25 * predicted, (pool, predicted)
