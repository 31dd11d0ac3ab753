"""Rules of an engine that one rank shows: its wires bring what it sends. No ranks."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megazero import zero
from megazero.comm.codec import Blockwise
from megazero.comm.hops import HopSpec
from megazero.comm.lane import Chain, Lane, Ticket
from megazero.mesh.grid import AxisSpec, make_grid
from megazero.mesh.levels import INTER, INTRA
from megazero.mesh.mesh import Mesh, create_mesh
from megazero.zero.build import Placed, _refuse_different_starts
from megazero.zero.grad_norm import GlobalNorm, clip_factor, counted
from megazero.zero.optimizer import SliceOptimizer, Traits
from megazero.zero.records import save_records
from tests.gpu.test_hpz_race import CPU, Cluster, Landing, Wire
from tests.messages import refused

BLOCK = 512  # more than the layers fill: every unit has padding within its last block
CODED = Blockwise(4, BLOCK)
DELTA = zero.Codecs(weights=CODED, delta=True)
LR = 0.1  # of the cluster's plain SGD


def engine(patch: pytest.MonkeyPatch, shards: tuple[int, int, int], rank: int = 0, **policy: Any) -> Cluster:
    patch.setattr(
        Wire, "gather", lambda wire, out, own: Landing(wire, partial(out.copy_, own.repeat(wire.size)))
    )
    patch.setattr(Cluster, "_compute", lambda *_: None)  # it looks for other ranks' parameters
    torch.manual_seed(5)
    return Cluster(CPU, rank, patch, shards=shards, policy=zero.Policy(block=BLOCK, **policy))


def step(cluster: Cluster, factor: float = 1.0, divisor: float = 1.0) -> zero.StepInfo:
    cluster.engine.begin_step(divisor=divisor)
    (cluster.module(cluster.inputs) * factor).sum().backward()
    return cluster.engine.step()


def test_gradients_below_the_limit_stay() -> None:
    assert (
        clip_factor(0.5, 1.0, 4.0) == clip_factor(0.5, None, 4.0) == clip_factor(torch.nan, 1.0, 4.0) == 0.25
    )
    assert clip_factor(8.0, 2.0, 4.0) == pytest.approx(0.25 / 4)


@pytest.mark.parametrize("shards", [(1, 1, 1), (1, 1, 4), (2, 4, 4)], ids=str)
def test_a_step_that_is_not_finite_leaves_nothing_for_the_next(
    shards: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No NaN in padding, which blocks that were not finite bring."""
    codecs = zero.Codecs(CODED, {INTRA: CODED, INTER: CODED})
    runs = []
    for factors in ((1.0, 1.0), (1.0, torch.inf, 1.0)):
        cluster = engine(monkeypatch, shards, codecs=codecs)
        skipped = [step(cluster, factor).skipped for factor in factors]
        assert skipped == [factor == torch.inf for factor in factors]
        runs.append(cluster.engine)
    assert runs[0].state() == runs[1].state()
    for one, other in zip(runs[0].units, runs[1].units, strict=True):
        assert torch.equal(one.master.value, other.master.value)


def test_a_load_of_what_receivers_hold_sends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """R was loaded with the master weights: a refresh before their next update would advance it once more."""
    held = engine(monkeypatch, (2, 2, 4), codecs=DELTA).engine
    held.refresh()
    held.traffic.take()
    for unit in held.units:
        unit.master.value.add_(1)
    held.invalidate()
    held.refresh()
    assert not any(held.traffic.take().values())
    whole = engine(monkeypatch, (2, 2, 4), codecs=zero.Codecs(weights=CODED)).engine
    whole.refresh()
    whole.traffic.take()
    whole.invalidate()
    whole.refresh()
    assert whole.traffic.take()["refresh_inter_node_bytes"] > 0


def test_a_save_before_the_first_step_changes_no_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """The optimizer's state is made for it, by a step that must not count."""
    masters = []
    for saves in (0, 1, 2):
        cluster = engine(monkeypatch, (1, 1, 1))
        units = cluster.engine.units
        traits = cluster.engine.traits
        adam = partial(torch.optim.AdamW, lr=0.1, weight_decay=0.1, fused=True)
        cluster.engine.optimizer = SliceOptimizer(units, traits, adam)
        for _ in range(saves):
            save_records(cluster.engine)
        assert set(cluster.engine.optimizer.scalars().values()) <= {0.0}
        for _ in range(2):
            step(cluster)
        assert cluster.engine.optimizer.scalars() == {"step": 2.0}
        masters.append(torch.cat([unit.master.value for unit in units]))
    assert torch.equal(masters[0], masters[1]) and torch.equal(masters[0], masters[2])


EVERY = [(1, 1, 1), (1, 1, 2), (1, 1, 4), (1, 2, 4), (2, 2, 2), (2, 2, 4), (2, 4, 4), (4, 4, 4)]


@pytest.mark.parametrize("shards", EVERY, ids=str)
def test_a_step_does_not_depend_on_the_one_before(
    shards: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same weights and samples give the same norm: nothing is left of the last step's gradients."""
    cluster = engine(monkeypatch, shards)
    masters = [unit.master.value.clone() for unit in cluster.engine.units]
    norms = []
    for _ in range(3):
        norms.append(step(cluster).grad_norm)
        for unit, value in zip(cluster.engine.units, masters, strict=True):
            unit.master.value.copy_(value)
        cluster.engine.invalidate()
    assert norms[0] == norms[1] == norms[2] > 0


@pytest.mark.parametrize("coded", [False, True])
@pytest.mark.parametrize("shards", EVERY, ids=str)
def test_a_chain_uses_the_axes_that_it_states(
    shards: tuple[int, int, int], coded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By what chains state the lane keeps the ranks' orders alike."""
    make, submit, stated = Wire.__init__, Lane.submit, list[tuple[str, ...]]()

    def named(wire: Wire, cluster: Cluster, spec: AxisSpec, ms: float) -> None:
        make(wire, cluster, spec, ms)
        wire.name = spec.name  # type: ignore[attr-defined]

    def followed(plan: tuple[HopSpec, ...], chain: Chain) -> Chain:
        used = []
        for work in chain:
            used.append(work.wire.name)  # type: ignore[attr-defined]
            yield work
        assert used == [hop_spec.axis for hop_spec in plan]
        stated.append(tuple(used))

    monkeypatch.setattr(Wire, "__init__", named)

    def submitted(lane: Lane, unit: str, plan: tuple[HopSpec, ...], chain: Chain, **more: Any) -> Ticket:
        return submit(lane, unit, plan, followed(plan, chain), **more)

    monkeypatch.setattr(Lane, "submit", submitted)
    codecs = zero.Codecs(CODED, {INTRA: CODED, INTER: CODED}) if coded else zero.Codecs()
    cluster = engine(monkeypatch, shards, codecs=codecs)
    for _ in range(2):
        step(cluster)
    assert len(max(stated, key=len)) >= 2, "no chain has an order"


def test_noise_is_new_after_every_update_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = engine(monkeypatch, (1, 1, 4))
    drawn = []
    for factor in (1.0, torch.inf, 1.0):
        drawn.append(cluster.engine.rounding.noise(cluster.engine.units[0], "hop"))
        step(cluster, factor)
    assert drawn[0] != drawn[1] == drawn[2]


def test_what_the_parameters_cannot_hold_is_no_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    """Below a rounding step of bf16 a master has not moved: its residue would inflate the scales of what has."""
    add, sent = Blockwise.decode_add, list[torch.Tensor]()

    def noted(codec: Blockwise, messages: torch.Tensor, out: torch.Tensor, *exact: torch.Tensor) -> None:
        sent.append(torch.empty_like(out))
        codec.decode(messages, sent[-1], *exact)
        add(codec, messages, out, *exact)

    monkeypatch.setattr(Blockwise, "decode_add", noted)
    cluster = engine(monkeypatch, (2, 2, 4), codecs=DELTA)
    for unit in cluster.engine.units:
        unit.master.value.mul_(1 + 2**-11)
        unit.weights.version = 0
    cluster.engine.refresh()
    assert sent and not any(x.any() for x in sent)
    for unit in cluster.engine.units:
        unit.master.value.mul_(1 + 2**-6)
        unit.weights.version = 0
    cluster.engine.refresh()
    assert sent[-1].any()


@pytest.mark.parametrize(
    "policy",
    [{}, {"dtype": torch.float32}, {"lifetime": "step"}, {"codecs": DELTA}],
    ids=["bf16", "fp32", "dropped", "differences"],
)
@pytest.mark.parametrize("shards", [(1, 1, 1), (1, 1, 4)], ids=str)
def test_what_can_be_read_is_what_the_next_forward_reads(
    shards: tuple[int, int, int], policy: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the user's own loop, between forwards: what an update or a load left behind raises, with P = 1, too."""
    cluster = engine(monkeypatch, shards, **policy)
    cluster.inputs = cluster.inputs.to(policy.get("dtype", torch.bfloat16))
    held, module, used = cluster.engine, cluster.module, list[torch.Tensor]()
    weight = module[0].weight
    module[0].register_forward_pre_hook(lambda *_: used.append(weight.detach().clone()))

    def seen() -> torch.Tensor | None:
        try:
            return weight.detach().clone()
        except RuntimeError:
            return None

    def write() -> None:
        with held.gathered(write=True), torch.no_grad():
            weight.mul_(1.25)
            assert seen() is not None

    def change() -> None:
        for unit in held.units:
            unit.master.value.mul_(1.25)
        held.invalidate()

    def load_in_block() -> None:
        with held.gathered():
            held.invalidate()
            assert seen() is not None

    acts: dict[str, Callable[[], object]] = {
        "shard": lambda: None,
        "update": lambda: step(cluster),
        "begin_step": lambda: (step(cluster), held.begin_step()),
        "abort_step": held.abort_step,
        "skipped": lambda: step(cluster, torch.inf),
        "write": write,
        "load": change,
        "load in a block": load_in_block,
    }
    for name, act in acts.items():
        act()
        before = seen()
        with torch.no_grad():
            module(cluster.inputs)
        assert before is None or torch.equal(before, used[-1]), name
        if name in ("update", "begin_step", "write", "load"):
            assert before is None, name
        if name == "skipped" and policy.get("lifetime") != "step":
            assert before is not None
        after = seen()
        assert after is not None and torch.equal(after, used[-1]), name


def test_what_ranks_share_counts_once() -> None:
    """All tensor-parallel ranks hold a norm; key/value heads that are fewer than ranks, some in a row."""
    assert Traits(replicated=True).holders(3, 4) == range(4)
    assert [Traits(replicated=True, span=2).holders(rank, 4).start for rank in range(4)] == [0, 0, 2, 2]
    assert Traits(span=2).holders(3, 4) == range(3, 4)


def test_tied_parameters_count_at_one_end(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = engine(monkeypatch, (1, 1, 1))
    cluster.engine.begin_step()
    cluster.module(cluster.inputs).sum().backward()
    cluster.engine.reducer.wait()
    object.__setattr__(cluster.engine.units[1], "tied", True)
    mesh, squares = cluster.engine.mesh, {}
    for index in (0, 1):  # of the two ends
        monkeypatch.setitem(vars(mesh), "ends", SimpleNamespace(index=index))
        out = torch.zeros(1, dtype=torch.float64)
        GlobalNorm(counted(cluster.engine.optimizer.runs, mesh), mesh).write(out)
        squares[index] = float(out)
    runs = [run for run in cluster.engine.optimizer.runs if run.unit is cluster.engine.units[1]]
    own = sum(float(run.grad.double().square().sum()) for run in runs)
    assert squares[0] - squares[1] == pytest.approx(own, rel=1e-5), "norms are taken in fp32"


def test_the_ends_sum_comes_after_each_ends_own(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = engine(monkeypatch, (1, 1, 4))
    reducer, calls = cluster.engine.reducer, list[tuple[str, ...]]()
    shared = reducer.units[1]
    object.__setattr__(shared, "tied", True)
    tickets = [Ticket(unit.name, (), iter(())) for unit in (*reducer.units, shared)]  # type: ignore[arg-type]
    reducer.pending.extend(tickets)
    lane: Any = SimpleNamespace(
        wait=lambda ticket: calls.append(("wait", ticket.label)),
        follow=lambda: calls.append(("follow",)),
        submit=lambda name, hop_specs, chain: calls.append(("submit", name)),
    )
    monkeypatch.setattr(reducer, "lane", lane)
    ends: Any = SimpleNamespace(spec=SimpleNamespace(role="ends"), name="ends", link=INTER, index=0)
    reducer.join_ends(ends)
    waits = [("wait", shared.name)] * 2
    assert calls == [*waits, ("follow",), ("submit", shared.name)]


def test_starts_are_compared_to_the_bit_and_without_copies() -> None:
    """Of values that have one sum; an fp64 copy of an embedding of 128k x 8k takes 8 GB."""
    module = torch.nn.Linear(64, 1 << 14, bias=False, dtype=torch.bfloat16)
    rows: list[torch.Tensor] = []

    def gather(_: object, row: torch.Tensor) -> torch.Tensor:
        rows.append(row)
        return torch.stack([rows[0], row])

    mesh: Any = SimpleNamespace(device=CPU, gather_along=gather)
    two: Any = SimpleNamespace(size=2)
    place_of = {id(module.weight): Placed((module,), zero.DataAxes((two,), 0, 0, 0), False)}
    with torch.profiler.profile(profile_memory=True) as profile:
        _refuse_different_starts(module, place_of, mesh)
    sizes = [event.self_cpu_memory_usage for event in profile.events()]
    assert 0 < max(sizes) < module.weight.nbytes
    with torch.no_grad():
        module.weight.copy_(module.weight.flip(0))
    with refused("different values", "'weight'"):
        _refuse_different_starts(module, place_of, mesh)


def test_a_mesh_on_another_device_than_the_current_one_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    mesh = Mesh(make_grid(1, 1), 0, torch.device("cuda", 1), {})
    with refused("cuda:1", "cuda:0", "torch.cuda.set_device(1)"):
        zero.shard(torch.nn.Linear(2, 2), mesh=mesh)


def test_norms_of_some_runs_have_their_own_dtypes() -> None:
    """The counted ones may leave out the first: fp64 was written to a scalar of fp32."""
    module = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4).double())
    held = zero.shard(module, mesh=create_mesh(), units=module)
    held.begin_step()
    for unit in held.units:
        assert unit.gradients.grad is not None
        unit.gradients.grad.fill_(2.0)
    runs = [run for run in held.optimizer.runs if run.unit is held.units[1]]
    out = torch.zeros(1, dtype=torch.float64)
    GlobalNorm(runs, held.mesh).write(out)
    assert float(out) == pytest.approx(4.0 * sum(run.stop - run.start for run in runs))


def test_a_loop_that_only_evaluates_keeps_the_last_evaluation_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster, lengths = engine(monkeypatch, (2, 2, 2), prefetch_bytes=0), []
    for _ in range(3):
        with cluster.engine.evaluation():
            cluster.module(cluster.inputs)
        lengths.append(len(cluster.engine.agreement.issued.history))
    assert lengths[0] > 0 and len(set(lengths)) == 1
