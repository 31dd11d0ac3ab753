"""Megatron's distributed checkpoint under megatron_core_patch: a resume repeats the bits of the run that went on.

One case runs always. All of them, two minutes on 2 cores:

    python -m pytest tests/megatron/test_resume.py -m "slow or not slow"
"""

from __future__ import annotations

import multiprocessing
import queue
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from tests.dist.pool import run_ranks
from tests.megatron.case import Case, Run, replicas_differ, step_losses
from tests.megatron.cases import CASES, DELTA_INT4, EXACT, INT8_INT4
from tests.megatron.training import Formats, Job, a_job

pytest.importorskip("megatron.core")
pytest.importorskip("megatron_core_patch")

HALF, STEPS = 3, 6
NAMES: dict[str, Formats | None] = {
    "exact": EXACT,
    "INT8 + INT4": INT8_INT4,
    "4-bit differences + INT4": DELTA_INT4,
}


def legs(case: Case, formats: Sequence[Formats | None], folder: Path, saves: bool = True) -> Run:
    """Train in as many legs as there are formats, each in classes of its own that load what the last one saved."""
    share, losses, norms = STEPS // len(formats), [], []
    for leg, each in enumerate(formats):
        with a_job(case, each) as job:
            if leg:
                load(job, folder / str(leg - 1))
            for step in range(leg * share, (leg + 1) * share):
                job.step(step)
                if saves and step == HALF - 1:
                    save(job, folder / str(leg))
            run = job.run()
            losses, norms = losses + run.losses, norms + run.norms
    return replace(run, losses=losses, norms=norms)


def save(job: Job, folder: Path, **more: Any) -> None:
    """Save as megatron's save_checkpoint: all parameters gathered, the optimizer's in buckets, and ``more``."""
    job.sync()
    write({**state(job, is_loading=False), **more}, folder)


def write(state: dict[str, Any], folder: Path) -> None:
    """Write a distributed checkpoint from a rank of the pool.

    The writers are processes, which a daemon such as a rank of the pool may not have, and their results go through
    the queue of a server that would outlive the rank.
    """
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    made = "get_write_results_queue"  # with an underscore up to megatron-core 0.16
    made = made if hasattr(filesystem_async, made) else f"_{made}"
    folder.mkdir(parents=True, exist_ok=True)
    with (
        mock.patch.dict(multiprocessing.current_process()._config, daemon=False),
        mock.patch.object(filesystem_async, made, queue.Queue),
        mock.patch.object(filesystem_async, "_process_memory", lambda: 0),  # for a log line, by psutil
    ):
        dist_checkpointing.save(state, str(folder))


def load(job: Job, folder: Path) -> None:
    from megatron.core import dist_checkpointing

    for each in job.optimizer.chained_optimizers:  # its state is asked for before torch's AdamW has made one
        for group in each.optimizer.param_groups:
            for part in group["params"]:
                zeros = {name: torch.zeros_like(part) for name in ("exp_avg", "exp_avg_sq")}
                each.optimizer.state[part] = {"step": torch.tensor(0.0), **zeros}
    found = dist_checkpointing.load(state(job, is_loading=True), str(folder))
    for i, chunk in enumerate(job.chunks):
        chunk.module.load_state_dict(found[f"model{i}"])
    job.optimizer.load_state_dict(found["optimizer"])
    for each in job.optimizer.chained_optimizers:  # with torch's AdamW the groups alone have the step
        for group in each.optimizer.param_groups:
            for part in group["params"]:
                each.optimizer.state[part]["step"] = torch.tensor(float(group["step"]))


def state(job: Job, is_loading: bool) -> dict[str, Any]:
    # Of the formats this one alone can be loaded with torch's AdamW.
    metadata = {"distrib_optim_sharding_type": "dp_reshardable"}
    models = {f"model{i}": chunk.module.sharded_state_dict() for i, chunk in enumerate(job.chunks)}
    whole = models["model0"] if len(models) == 1 else models
    optimizer = job.optimizer.sharded_state_dict(whole, is_loading=is_loading, metadata=metadata)
    return {**models, "optimizer": optimizer}


@pytest.mark.slow
@pytest.mark.parametrize(
    "formats",
    [
        pytest.param(formats, id=name, marks=[] if formats is DELTA_INT4 else [pytest.mark.slow])
        for name, formats in NAMES.items()
    ],
)
@pytest.mark.parametrize(
    "name",
    [
        "dp4 overlap",
        *(pytest.param(n, marks=pytest.mark.slow) for n in ("dp4", "tp2 sp", "pp2 vpp2 overlap")),
    ],
)
def test_a_resume_repeats_the_bits(name: str, formats: Formats, tmp_path: Path) -> None:
    case = replace(CASES[name], bf16=True, steps=STEPS)
    went_on = run_ranks(case.world, legs, case, [formats], tmp_path / "a", timeout=120)
    resumed = run_ranks(case.world, legs, case, [formats] * 2, tmp_path / "b", timeout=120)
    assert went_on == resumed


@pytest.mark.slow
@pytest.mark.parametrize("overlap", [False, True])
def test_a_save_changes_nothing(overlap: bool, tmp_path: Path) -> None:
    """-m slow"""
    case = replace(CASES["dp4 overlap" if overlap else "dp4"], bf16=True, steps=STEPS)
    runs = [
        run_ranks(4, legs, case, [DELTA_INT4], tmp_path, saves=saves, timeout=120) for saves in (True, False)
    ]
    assert runs[0] == runs[1]


@pytest.mark.slow
@pytest.mark.parametrize("formats", NAMES.values(), ids=NAMES)
@pytest.mark.parametrize("first", ["patched", "unpatched"])
def test_a_checkpoint_goes_on_without_the_patch_and_back(
    first: str, formats: Formats, tmp_path: Path
) -> None:
    """The same bits where messages are exact and two ranks are summed, else within rounding. -m slow"""
    case = replace(CASES["tp2 sp" if formats is EXACT else "dp4 overlap"], bf16=True, steps=STEPS)
    both = [formats, None] if first == "patched" else [None, formats]
    mixed = run_ranks(case.world, legs, case, both, tmp_path / "a", timeout=120)
    plain = run_ranks(case.world, legs, case, [None], tmp_path / "b", timeout=120)
    if formats is EXACT:
        assert mixed == plain
    assert step_losses(case, mixed) == pytest.approx(step_losses(case, plain), rel=0.02)
    assert not replicas_differ(mixed)
