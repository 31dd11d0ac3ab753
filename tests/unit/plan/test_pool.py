"""What the planner says of one rank's messages, their bytes and buffers, against an engine's. No ranks."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megazero import zero
from megazero.comm.codec import Blockwise
from megazero.comm.wire import Codecs, Coding
from megazero.config.layout.shards import Shards
from megazero.config.model.spec import EMBEDDING, HEAD, LAYER
from megazero.kernels.arena import ALIGN
from megazero.mesh.grid import make_grid
from megazero.mesh.levels import INTER
from megazero.plan.communication import Formats, UnitShape, model_state
from megazero.plan.gathers import Copies, gathers
from megazero.plan.memory import States, gathered
from tests.byte_formula import sent_for_unit
from tests.gpu.test_hpz_race import CPU, MICRO_BATCHES, Cluster, Landing, Wire

BLOCK = 64
CODECS: dict[
    str, tuple[tuple[int, int] | None, tuple[int, int] | None, bool]
] = {  # (bits, block), differences
    "exact": (None, None, False),
    "weights": ((8, BLOCK), None, False),
    "differences": ((4, BLOCK), None, True),
    "gradients": (None, (4, BLOCK), False),
}


def alike(wire: Wire, out: torch.Tensor, own: torch.Tensor) -> Landing:
    """A gather of ranks that all send the same."""
    return Landing(wire, lambda: [part.copy_(own) for part in out.view(wire.size, -1)])


SHARDS = [(1, 1, 1), (1, 1, 4), (1, 2, 4), (2, 2, 2), (2, 2, 4), (2, 4, 4), (4, 4, 4)]


@pytest.mark.parametrize("prefetch_bytes", [0, 140_000, 1 << 20], ids=["none", "a layer", "all"])
@pytest.mark.parametrize("codecs", CODECS)
@pytest.mark.parametrize("shards", SHARDS, ids=str)
def test_the_bytes_of_a_step(
    shards: tuple[int, int, int], codecs: str, prefetch_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 3 layers in bf16 and 2 micro-batches, on 2 nodes of 2."""
    weights, gradients, delta = CODECS[codecs]
    coded = {INTER: Blockwise(*gradients)} if gradients else {}
    made = zero.Codecs(weights and Blockwise(*weights), coded, delta)
    policy = zero.Policy(codecs=made, block=BLOCK, prefetch_bytes=prefetch_bytes)
    cluster = Cluster(CPU, 3, monkeypatch, shards=shards, policy=policy)
    monkeypatch.setattr(Wire, "gather", alike)
    monkeypatch.setattr(Cluster, "_compute", lambda *_: None)  # it looks for right parameters
    for _ in range(2):
        cluster.engine.traffic.take()
        cluster.engine.begin_step(MICRO_BATCHES)
        for _ in range(MICRO_BATCHES):
            cluster.module(cluster.inputs).sum().backward()
        assert not cluster.engine.step().skipped
    sent = +Counter(cluster.engine.traffic.bytes)
    planned = {INTER: Coding(*gradients)} if gradients else {}
    formats = Formats(2, 4, Codecs(weights and Coding(*weights), planned, delta))
    units = [UnitShape(unit.layout.numel, 0, made != zero.Codecs()) for unit in cluster.engine.units]
    copies = Copies([[[0], [1], [2]]], shards[0] == 1, prefetch_bytes)
    program = [("F", 0), ("B", 0)] * MICRO_BATCHES
    grid = make_grid(4, 2, shards=shards)
    assert model_state(units, grid, formats, copies, program, MICRO_BATCHES) == sent
    by_formula = Counter[tuple[str, str]]()
    for unit in units:
        codecs = formats.codecs if unit.quantised else Codecs[Coding]()
        by_formula += sent_for_unit(
            (unit.coded, 0), grid.data_axes, codecs, width=2, micro_batches=MICRO_BATCHES
        )
    assert by_formula == {key: n for key, n in sent.items() if key[0] in ("refresh", "reduce")}


def test_processors_hold_what_is_gathered_ahead_twice() -> None:
    """gloo gathers among more than two ranks into memory of its own, until all is there."""
    modules = {EMBEDDING: 2000, LAYER: 1000, HEAD: 500}
    every = SimpleNamespace(elements=12_500, apart=1)
    units: Any = SimpleNamespace(counts=[(every, 1)], gathered_modules=lambda p: modules)
    for per_node, copied in ((4, 1), (2, 0)):  # an axis of 4 ranks, two of 2
        sizes = {}
        for on_host in (False, True):
            grid, shards = make_grid(4, per_node, shards=(4, 4, 4)), Shards(4, 4, 4, "use")
            states = States(grid, shards, Formats(2, 4), 0, on_host=on_host)
            sizes[on_host] = {kind: gathered(units, states, kind) for kind in (EMBEDDING, LAYER, HEAD)}
        assert {kind: sizes[True][kind] - sizes[False][kind] for kind in sizes[True]} == {
            EMBEDDING: 2000 * copied,  # the bytes of the first layer
            LAYER: 4000 * copied,  # of the embedding
            HEAD: 2000 * copied,
        }


@pytest.mark.parametrize("delta", [False, True], ids=["whole", "differences"])
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("exact_numel", [0, 512], ids=["one region", "two"])
@pytest.mark.parametrize("shards", [(1, 1, 4), (2, 4, 4), (2, 2, 4), (4, 4, 4)], ids=str)
def test_a_gathers_messages(
    shards: tuple[int, int, int], exact_numel: int, bits: int, delta: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With two regions the messages of a gather after a refresh of differences are not the parameters."""
    codecs = zero.Codecs(weights=Blockwise(bits, BLOCK), delta=delta)
    policy = zero.Policy(codecs=codecs, block=BLOCK, exact_numel=exact_numel)
    engine = Cluster(CPU, 3, monkeypatch, shards=shards, policy=policy).engine
    monkeypatch.setattr(Wire, "gather", alike)
    engine.rounding.names = ()  # no unit's rounding is measured: that has buffers of its own
    engine.invalidate()
    for unit in engine.units:
        unit.weights.version = 0
    engine.refresh()
    unit = engine.units[0]
    p, _, os = shards
    lifetime = "use" if p == os else "resident" if p == 1 or delta else "step"
    formats = Formats(2, 4, Codecs(Coding(bits, BLOCK), delta=delta))
    states = States(make_grid(4, 2, shards=shards), Shards(*shards, lifetime), formats, 0)
    coded, *exact = (numel for _, numel in unit.layout.regions)
    assert len(exact) == (exact_numel > 0)
    said = states.plan(UnitShape(coded, sum(exact), True)).transient_bytes
    assert engine.arena.peak == pytest.approx(said, rel=0.02, abs=ALIGN), "up to the alignment of a buffer"


@pytest.mark.parametrize("codecs", ["exact", "weights", "differences"])
@pytest.mark.parametrize("shards", SHARDS, ids=str)
def test_what_a_gather_ahead_of_use_adds(
    shards: tuple[int, int, int], codecs: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With P = 1 its messages, by which gathers run ahead there: the parameters are there anyway."""
    weights, _, delta = CODECS[codecs]
    made = zero.Codecs(weights=weights and Blockwise(*weights), delta=delta)
    (unit, *_) = Cluster(
        CPU, 3, monkeypatch, shards=shards, policy=zero.Policy(codecs=made, block=BLOCK)
    ).engine.units
    formats = Formats(2, 4, Codecs(Coding(*weights) if weights else None, delta=delta))
    states = States(make_grid(4, 2, shards=shards), Shards(*shards, "resident"), formats, 0)
    weights_of, planned = unit.weights, states.plan(UnitShape(unit.layout.numel, 0, True)).ahead_bytes
    messages = weights_of.refresh_wire.level_numel(0) * weights_of.refresh_codec.wire_dtype.itemsize
    transient = messages if weights is not None else 0
    assert planned == unit.plan.ahead_bytes == (weights_of.full.nbytes if shards[0] > 1 else transient)


def test_what_the_next_module_needs_takes_none_of_the_bytes_beyond_it() -> None:
    """Of layers of 100, 100 and 150 bytes, the second stays for its backward: the third comes before it anyway."""
    copies = Copies([[[0], [1], [2]]], prefetch_bytes=100)
    assert gathers(copies, [("F", 0), ("B", 0)], [100, 100, 150]) == {0: 2, 1: 1, 2: 1}
    assert gathers(replace(copies, prefetch_bytes=99), [("F", 0), ("B", 0)], [100, 100, 150]) == {
        0: 2,
        1: 2,
        2: 1,
    }
