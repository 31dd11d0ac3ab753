"""Checkpoints of quantised training: bit for bit on the same layout, nothing lost on another."""

from __future__ import annotations

import json

import pytest
import torch
import torch.distributed as dist

from megazero import zero
from megazero.checkpoint import store
from megazero.comm.codec import Blockwise
from megazero.zero.reduction import residual_sum
from megazero.zero.state import (
    load_kinds,
    load_rank_tensors,
    load_records,
    rank_tensors,
    save_records,
)
from tests.dist.capture import assemble, local_slices
from tests.dist.pool import run_ranks
from tests.dist.quantised import (
    ADAMW,
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

BF16 = torch.bfloat16


def by_name(engine, level_buffer) -> dict:
    shapes = {s.name: s.shape for u in engine.units for s in u.layout.slots}
    return assemble(local_slices(engine, level_buffer), shapes)


def owed(engine) -> dict:
    """residual_sum by parameter, full tensors."""
    sums = {u: residual_sum(u, engine.mesh.data_axes, engine.mesh.rank) for u in engine.units}
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
        if unit.crossing is not None:
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
        kinds=load_kinds(engine, list(manifest.kinds), ["exp_avg", "exp_avg_sq"], True),
        layout={"case": case.letters, "per_node": case.per_node},
        convert=True,
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


@pytest.mark.parametrize("letters", ["hhd", "11d"])
def test_a_resume_keeps_residuals_and_what_receivers_hold(letters, tmp_path):
    codecs = zero.Codecs(
        weights=S4, delta=True, gradients_intra=Blockwise(8, 16, True), gradients_inter=Q4, feedback=True
    )
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
