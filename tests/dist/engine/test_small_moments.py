"""Moments in bf16: the same values in every data-parallel layout, after a resume, and on another layout."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megazero import zero
from megazero.checkpoint import store
from megazero.config.layout.wire import ALIGNMENT
from megazero.zero.elementwise import OnePassAdamW
from megazero.zero.records import load_records, save_records
from tests.dist.pool import run_ranks
from tests.dist.quantised.cases import Case, drawn, make, take_step
from tests.dist.verify.test_verify import GRID, certify

KINDS = ("weights", "exp_avg", "exp_avg_sq")
UNITS = (((40, 9), (7, 13), (5,)), ((33, 9),))
STEPS, SAMPLES = 6, 4  # gradients of a step, dealt to the ranks
CHOICES = {"bf16": ("bf16", "bf16"), "second": ("fp32", "bf16")}


def case(letters: str, world: int) -> Case:
    options = {"block": ALIGNMENT, "exact_numel": 0}
    return Case(letters, min(2, world), zero.Codecs(), SAMPLES // world, units=UNITS, options=options)


def engine_of(of: Case, kept: str) -> tuple[Any, zero.Engine]:
    first, second = CHOICES[kept]
    optimizer = partial(OnePassAdamW, lr=1e-2, weight_decay=0.1, exp_avg_dtype=first, exp_avg_sq_dtype=second)
    return make(of, optimizer)


def advance(of: Case, model: Any, engine: zero.Engine, steps: range) -> None:
    """Steps on the same gradients in every layout, whose sums are exact in any order."""
    for step in steps:

        def own(index: int, step: int = step) -> list:
            sample = engine.mesh.dp_rank * of.micro_batches + index
            return [[(g * 16).round() / 16 for g in unit] for unit in drawn(of, 0, 0, sample, step)]

        take_step(of, model, engine, own, divisor=4.0)


def values(engine: zero.Engine) -> dict[str, torch.Tensor]:
    """Masters and moments of the whole model, from every rank's slices. Collective."""
    mine = [
        (f"{kind} {record.placement.name}", record.start, held)
        for record in save_records(engine)
        for kind, held in record.tensors.items()
    ]
    every: list = [None] * dist.get_world_size()
    dist.all_gather_object(every, [(name, start, held.float()) for name, start, held in mine])
    numel = {s.name: s.numel for unit in engine.units for s in unit.layout.slots}
    whole = {f"{kind} {name}": torch.full((n,), torch.nan) for kind in KINDS for name, n in numel.items()}
    for name, start, held in (part for rank in every for part in rank):
        whole[name][start : start + len(held)] = held
    return whole


def trained(letters: str, kept: str) -> dict[str, torch.Tensor]:
    of = case(letters, dist.get_world_size())
    model, engine = engine_of(of, kept)
    advance(of, model, engine, range(STEPS))
    return values(engine)


def all_trained(jobs: list[tuple[str, str]]) -> list[dict[str, torch.Tensor]]:
    return [trained(*job) for job in jobs]


def saved(letters: str, kept: str, root: Path) -> Path:
    of = case(letters, dist.get_world_size())
    model, engine = engine_of(of, kept)
    advance(of, model, engine, range(STEPS // 2))
    state = {"engine": engine.state(), "optimizer": engine.optimizer.scalars()}
    snapshot = store.Snapshot(STEPS // 2, save_records(engine), state=state)
    return store.save(root, snapshot, group=dist.group.WORLD)


def continued(letters: str, kept: str, path: Path) -> dict[str, torch.Tensor]:
    of = case(letters, dist.get_world_size())
    model, engine = engine_of(of, kept)
    kinds = {"master": "weights", "exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq"}
    records = load_records(engine)
    loaded = store.load(path, records=records, group=dist.group.WORLD, kinds=kinds)
    engine.invalidate()
    engine.optimizer.load_scalars(loaded.state["optimizer"])
    engine.load_state(json.loads(json.dumps(loaded.state["engine"])))
    advance(of, model, engine, range(STEPS // 2, STEPS))
    return values(engine)


def all_continued(jobs: list[tuple[str, str, Path]]) -> list[dict[str, torch.Tensor]]:
    return [continued(*job) for job in jobs]


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    assert not any(x.isnan().any() for x in a.values())
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize(
    "world, layouts, kinds",
    [
        (2, ("11d", "ddd"), ("bf16",)),
        pytest.param(
            4, ("111", "11d", "1dd", "hhh", "hhd", "hdd", "ddd"), tuple(CHOICES), marks=pytest.mark.slow
        ),
    ],
)
def test_layouts_are_one_rank_and_a_checkpoint_goes_on_in_any(
    world: int, layouts: tuple[str, ...], kinds: tuple[str, ...], tmp_path: Path
) -> None:
    """To the bit, since the noise is the same, and gradients add up exactly."""
    jobs = [(letters, kept) for kept in kinds for letters in layouts]
    alone = dict(zip(kinds, run_ranks(1, all_trained, [("111", kept) for kept in kinds])[0], strict=True))
    for (letters, kept), found in zip(jobs, run_ranks(world, all_trained, jobs)[0], strict=True):
        assert same(found, alone[kept]), (letters, kept)
    for kept in kinds:
        path = run_ranks(world, saved, layouts[-1], kept, tmp_path / kept)[0]
        later = [(letters, kept, path) for letters in layouts]
        found = (
            run_ranks(world, all_continued, later)[0] + run_ranks(1, all_continued, [("111", kept, path)])[0]
        )
        assert all(same(each, alone[kept]) for each in found), kept


@pytest.mark.slow
def test_a_configuration_with_them_is_certified() -> None:
    """Under tensor and pipeline parallelism, tied ends: replicas to the bit, a resume to the bit, the loss."""
    certificate = certify(f"{GRID} --exp-avg-dtype bf16 --exp-avg-sq-dtype bf16")
    assert certificate.good, certificate.verdict
