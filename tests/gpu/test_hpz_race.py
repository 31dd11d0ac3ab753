"""The race that makes stock hpZ diverge (Dai et al., ICML 2024 workshop), against the engine.

Stock hpZ copies a slice of the forward's gathered parameters into its secondary partition on the compute stream,
while the backward's all-gather, prefetched on another stream, may already read it. Here one process is one rank of 2
nodes of 2; a Wire stands for the communicator of an axis and lets data land late. The engine reads right
parameters, and the test sees wrong ones as soon as one wait is left out.

The CUDA tests have not been run on a GPU yet; the same flow runs on the CPU, where data lands when waited for.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn

from megazero import zero
from megazero.comm import hops
from megazero.mesh.grid import AxisSpec, make_grid
from megazero.mesh.levels import INTER
from megazero.mesh.mesh import Axis, Mesh
from megazero.zero.unit import Unit

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
WIDTH, LAYERS, MICRO_BATCHES = 256, 3, 2
SLOW, QUICK = 30, 1  # ms: apart enough for the order of two streams to be sure
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def sleep(ms: float) -> None:
    """Keep the current CUDA stream busy."""
    torch.cuda._sleep(int(ms * 1.5e6))  # cycles, at about 1.5 GHz


class Landing:
    """A collective under way. CUDA: behind the caller's stream, on the wire's own. CPU: lands in ``wait``."""

    def __init__(self, wire: Wire, copy: Callable[[], object]) -> None:
        self.wire, self.copy, self.done = wire, copy, False
        if wire.stream is not None:
            wire.stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(wire.stream):
                sleep(wire.ms)
                copy()
                self.event = wire.stream.record_event()

    def is_completed(self) -> bool:
        return self.done

    def wait(self, timeout: object = None) -> None:
        if self.wire.cluster.waits and self.wire.stream is not None:
            torch.cuda.current_stream().wait_event(self.event)
        elif self.wire.cluster.waits:
            self.copy()
        self.done = True


class Wire:
    """The communicator of an axis, with NCCL's promises. The other ranks gather true values into place, and send in
    an exchange what this rank sends them."""

    def __init__(self, cluster: Cluster, spec: AxisSpec, ms: float) -> None:
        self.cluster, self.index, self.size = cluster, spec.index(cluster.rank), spec.size
        self.ms = ms * (10 if spec.link == INTER else 1)
        self.stream = torch.cuda.Stream() if cluster.device.type == "cuda" else None

    def gather(self, out: torch.Tensor, own: torch.Tensor) -> Landing:
        true = self.cluster.truth_of(out)

        def copy() -> None:
            m = own.numel()
            out[self.index * m : (self.index + 1) * m].copy_(own)
            for i in set(range(self.size)) - {self.index}:
                out[i * m : (i + 1) * m].copy_(true[i * m : (i + 1) * m])

        return Landing(self, copy)

    def exchange(self, out: torch.Tensor, messages: torch.Tensor) -> Landing:
        return Landing(self, lambda: out.copy_(messages))


class Cluster:
    """Rank ``rank`` of 2 nodes of 2, hpZ's shards (P = 2, G = OS = 4) if no others are asked for, linear layers.

    truth: per unit the values [n] of the step, random and new in every step. waits: False leaves out every wait
    for a collective. wrong: elements of parameters that differed where a forward or backward read them.
    """

    def __init__(
        self,
        device: torch.device,
        rank: int,
        patch: pytest.MonkeyPatch,
        wire_ms: float = 0,
        compute_ms: float = 0,
        shards: tuple[int, int, int] = (2, 4, 4),
        policy: zero.Policy | None = None,
    ) -> None:
        self.device, self.rank, self.waits, self.compute_ms = device, rank, True, compute_ms
        patch.setattr(Mesh, "gather_rows", lambda mesh, row, out: out.copy_(row.expand(mesh.world_size, -1)))
        patch.setattr(Mesh, "gather_along", lambda mesh, axes, row: row[None])
        patch.setattr(hops, "_gathered", lambda axis, out, own, group: group.gather(out, own))
        patch.setattr(
            dist, "all_to_all_single", lambda out, sent, *_, group, async_op: group.exchange(out, sent)
        )
        grid = make_grid(4, 2, shards=shards)
        axes = {spec.name: self._axis(spec, wire_ms) for spec in grid.axes}
        self.module = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))).to(
            device, torch.bfloat16
        )
        self.engine = zero.shard(
            self.module,
            mesh=Mesh(grid, rank, device, axes),
            units=self.module,
            policy=policy,
            optimizer=partial(torch.optim.SGD, lr=0.1),
        )
        self.truth: dict[Unit, torch.Tensor] = {}
        self.wrong = torch.zeros((), dtype=torch.int64, device=device)
        self.inputs = torch.randn(8, WIDTH, device=device, dtype=torch.bfloat16)
        for unit, layer in zip(self.engine.units, self.module, strict=True):
            layer.register_forward_pre_hook(lambda *_, unit=unit: self._compute(unit))
            layer.register_forward_hook(lambda layer, _, out, unit=unit: self._before_backward(unit, out))

    def _axis(self, spec: AxisSpec, ms: float) -> Axis:
        gather, reduce = (Wire(self, spec, ms) if spec.size > 1 else None for _ in range(2))
        return Axis(spec, spec.index(self.rank), spec.ranks(self.rank), gather, reduce)  # type: ignore[arg-type]

    def _before_backward(self, unit: Unit, out: torch.Tensor) -> None:
        if out.requires_grad:
            out.register_hook(lambda grad: self._compute(unit))

    def _compute(self, unit: Unit) -> None:
        """A slow layer: reads its parameters after a while."""
        if self.compute_ms:
            sleep(self.compute_ms)
        for name, param in unit.params.items():
            slot = unit.slots[name]
            true = self.truth[unit][slot.start : slot.start + slot.numel].view(slot.shape)
            self.wrong += (param.detach() != true).sum()

    def truth_of(self, out: torch.Tensor) -> torch.Tensor:
        """True values of what a gather fills: a part of some unit's P copy or of its full buffer."""
        for unit in self.engine.units:
            (copy,) = unit.layout.pieces(unit.axes.p)
            for buffer, start in ((unit.weights.copy, copy.start), (unit.weights.full, 0)):
                if buffer.untyped_storage().data_ptr() == out.untyped_storage().data_ptr():
                    low = start + out.storage_offset()
                    return self.truth[unit][low : low + out.numel()]
        raise AssertionError("a gather into a buffer that is no unit's")

    def step(self) -> int:
        """New weights, forwards and backwards; how many elements were read wrong."""
        self.wrong.zero_()
        if self.compute_ms:
            sleep(self.compute_ms)
        for unit in self.engine.units:
            self.truth[unit] = torch.randn(unit.layout.numel, device=self.device).to(unit.dtype)
            (own,) = unit.layout.pieces(unit.axes.os)
            unit.master.value.copy_(self.truth[unit][own.start : own.start + own.numel])
        self.engine.invalidate()
        self.engine.begin_step(MICRO_BATCHES)
        for _ in range(MICRO_BATCHES):
            self.module(self.inputs).sum().backward()
        self.engine.step()
        if self.device.type == "cuda":
            torch.cuda.synchronize()  # what nobody waited for must not land in later tests
        return int(self.wrong)


GPU = [pytest.mark.gpu, needs_cuda]


@pytest.mark.parametrize("rank", range(4))
@pytest.mark.parametrize(
    "device, wire_ms, compute_ms",
    [
        (CPU, 0, 0),
        pytest.param(CUDA, QUICK, 0, marks=GPU, id="late data"),
        pytest.param(CUDA, 0, SLOW, marks=GPU, id="late compute"),
    ],
)
def test_late_data_is_waited_for(
    device: torch.device, wire_ms: float, compute_ms: float, rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whichever side is late: nothing is read before it has landed, nor overwritten while it is still read."""
    cluster = Cluster(device, rank, monkeypatch, wire_ms, compute_ms)
    assert {unit.lifetime for unit in cluster.engine.units} == {"step"}, "the P copy is hpZ's partition"
    assert [cluster.step() for _ in range(3)] == [0, 0, 0]


@pytest.mark.parametrize("device", [CPU, pytest.param(CUDA, marks=GPU)], ids=str)
def test_without_waits_wrong_parameters_are_seen(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same flow with the waits for collectives left out: the test above can fail."""
    cluster = Cluster(device, 3, monkeypatch, wire_ms=QUICK)
    assert cluster.step() == 0  # and every kernel is loaded, which may synchronise
    cluster.waits = False
    assert cluster.step() > 0


def stock_hpz(ms: float, synchronised: bool) -> bool:
    """Whether a backward's gather reads the secondary partition that the forward's end has copied."""
    n, comm = 1 << 20, torch.cuda.Stream()
    full = torch.randn(n, device=CUDA)
    secondary, gathered = full.new_full((n // 2,), torch.nan), torch.empty_like(full)
    torch.cuda.synchronize()
    sleep(ms)  # the layer still computes
    secondary.copy_(full[: n // 2])
    if synchronised:
        comm.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(comm):
        gathered[: n // 2].copy_(secondary)
        gathered[n // 2 :].copy_(full[n // 2 :])  # the other rank's part
    torch.cuda.synchronize()
    return torch.equal(gathered, full)


@pytest.mark.gpu
@needs_cuda
def test_stock_hpz_races_and_the_synchronised_one_does_not() -> None:
    assert stock_hpz(SLOW, synchronised=True)  # first: loading kernels may synchronise
    assert not stock_hpz(SLOW, synchronised=False)
