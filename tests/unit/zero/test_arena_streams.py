"""When passing buffers may be used again on CUDA, shown without a card: on the streams of test_lane_streams.py.

Every write and read of an arena's memory is an operation on the stream that is current. Whoever takes the memory next
must come after all of them.
"""

from __future__ import annotations

from collections import defaultdict
from functools import partial
from typing import Any

import pytest
import torch

from megazero import zero
from megazero.comm.codec import Blockwise, Identity
from megazero.comm.lane import Lane
from megazero.kernels import arena as arena_module
from megazero.kernels.arena import Frame
from megazero.mesh.levels import INTER, INTRA
from megazero.zero.gradients import Gradients
from megazero.zero.reduce import Reducer
from megazero.zero.unit import Unit
from tests.gpu.test_hpz_race import CPU, LAYERS, Cluster, Landing, Wire
from tests.unit.zero.test_lane_streams import Streams, Watch

QUANTISED = zero.Codecs(gradients={INTRA: Blockwise(8), INTER: Blockwise(4)})
LAYOUTS: dict[str, tuple[tuple[int, int, int], dict[str, Any]]] = {
    "zero3": ((4, 4, 4), {}),
    "hpz": ((2, 4, 4), {}),
    "zero1": ((1, 1, 4), {}),
    "zero3, no reduction may lag": ((4, 4, 4), {"pending_reductions": 0}),
    "zero3, quantised": ((4, 4, 4), {"codecs": QUANTISED}),
    "zeropp": ((2, 2, 4), {"codecs": zero.Codecs(gradients={INTER: Blockwise(4)})}),
}


class ArenaWatch(Watch):
    """wrong: what was not ordered. taken: how many buffers were; homes: of how many streams."""

    def __init__(self, patch: pytest.MonkeyPatch, shards: tuple[int, int, int], **policy: Any) -> None:
        self.touched: defaultdict[int, list[tuple[int, int, int]]] = defaultdict(list)
        self.blocks: list[torch.Tensor] = []  # kept, so that no other memory has their address
        self.taken, self.homes = 0, set[int]()
        super().__init__(patch, shards, **policy)
        self._watch_arena(patch)

    def _watch_arena(self, patch: pytest.MonkeyPatch) -> None:
        patch.setattr(arena_module, "home_of", lambda device: Streams.now[-1])
        take, exchange, stage, add = Frame.take, Wire.exchange, Gradients._stage, Identity.decode_sum

        def taking(frame: Frame, numel: int, dtype: torch.dtype) -> torch.Tensor:
            buffer = take(frame, numel, dtype)
            self._take(buffer)
            return buffer

        def exchanging(wire: Wire, out: torch.Tensor, messages: torch.Tensor) -> Any:
            self.use(out, messages)
            return exchange(wire, out, messages)

        def staging(gradients: Gradients) -> None:
            stage(gradients)
            if gradients.staging is not None:
                self.use(gradients.staging.buffer)

        def adding(
            codec: Identity, received: torch.Tensor, out: torch.Tensor, more: bool, *exact: Any, own: Any
        ) -> None:
            self.use(received, out, *exact, *own)
            add(codec, received, out, more, *exact, own=own)

        patch.setattr(Frame, "take", taking)
        patch.setattr(Wire, "exchange", exchanging)
        patch.setattr(Gradients, "_stage", staging)
        patch.setattr(Identity, "decode_sum", adding)

    def _take(self, buffer: torch.Tensor) -> None:
        self.taken += 1
        self.homes.add(id(Streams.now[-1]))
        self.blocks.append(buffer)
        key, low, high = self._place(buffer)
        others = []
        for first, last, operation in self.touched[key]:
            if last <= low or high <= first:
                others.append((first, last, operation))
            elif operation not in Streams.now[-1].before:
                self.wrong.add("a passing buffer is taken while its last user may still use it")
        self.touched[key] = others

    def use(self, *tensors: torch.Tensor) -> None:
        number = Streams.now[-1].run()
        for tensor in tensors:
            key, low, high = self._place(tensor)
            self.touched[key].append((low, high, number))

    @staticmethod
    def _place(tensor: torch.Tensor) -> tuple[int, int, int]:
        low = tensor.storage_offset() * tensor.element_size()
        return tensor.untyped_storage().data_ptr(), low, low + tensor.numel() * tensor.element_size()


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_buffer_is_taken_after_its_last_use(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    shards, policy = LAYOUTS[name]
    watch = ArenaWatch(monkeypatch, shards, **policy)
    assert [watch.step() for _ in range(3)] == [0, 0, 0] and not watch.wrong
    assert watch.taken and len(watch.homes) >= 2
    arena = watch.cluster.engine.arena
    held = arena.nbytes
    watch.step()
    assert arena.used == 0 and arena.nbytes == held, "memory is used again"


def test_streams_that_share_memory_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The test above can fail: chains take turns on two streams."""
    watch = ArenaWatch(monkeypatch, (4, 4, 4))
    monkeypatch.setattr(arena_module, "home_of", lambda device: "one for all")
    for _ in range(3):
        watch.step()
    assert watch.wrong


def test_staging_that_is_let_go_before_the_wait_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """It can fail: a chain has run through when it is submitted, but the compute stream is not behind it."""
    watch = ArenaWatch(monkeypatch, (4, 4, 4))
    submit = Lane.submit

    def hasty(lane: Lane, *arguments: Any, release: Any = lambda: None) -> Any:
        ticket = submit(lane, *arguments, release=release)
        release()
        return ticket

    monkeypatch.setattr(Lane, "submit", hasty)
    for _ in range(3):
        watch.step()
    assert watch.wrong


def stepped(
    shards: tuple[int, int, int], policy: dict[str, Any], patch: pytest.MonkeyPatch
) -> list[torch.Tensor]:
    """Return the norms and the masters of steps of a rank that receives what it sends."""
    torch.manual_seed(5)
    cluster = Cluster(CPU, 3, patch, shards=shards, policy=zero.Policy(**policy))
    patch.setattr(
        Wire, "gather", lambda wire, out, own: Landing(wire, partial(out.copy_, own.repeat(wire.size)))
    )
    patch.setattr(Cluster, "_compute", lambda *_: None)  # it looks for other ranks' parameters
    engine, norms = cluster.engine, []
    for _ in range(3):
        engine.begin_step(2)
        for _ in range(2):
            cluster.module(cluster.inputs).sum().backward()
        norms.append(engine.step().grad_norm)
    return [torch.tensor(norms), *(unit.master.value for unit in engine.units)]


@pytest.mark.parametrize("name", LAYOUTS)
def test_no_buffer_is_read_before_it_is_written(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Padding included: the norm would count what the memory held before."""
    expected = stepped(*LAYOUTS[name], monkeypatch)
    take = Frame.take

    def spoiled(frame: Frame, numel: int, dtype: torch.dtype) -> torch.Tensor:
        buffer = take(frame, numel, dtype)
        buffer.view(torch.uint8).fill_(255)  # NaN in every float dtype
        return buffer

    monkeypatch.setattr(Frame, "take", spoiled)
    for got, wanted in zip(stepped(*LAYOUTS[name], monkeypatch), expected, strict=True):
        assert wanted.isfinite().all() and torch.equal(got, wanted)


@pytest.mark.parametrize("bound", [0, 1, 2])
def test_a_backward_waits_for_the_oldest_of_too_many_reductions(
    bound: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bound is on staging memory: that of one more unit is the one whose gradients arrive."""
    seen, submit = [], Reducer._submit

    def watched(reducer: Reducer, unit: Unit) -> None:
        submit(reducer, unit)
        seen.append(len(reducer.pending))

    monkeypatch.setattr(Reducer, "_submit", watched)
    stepped((4, 4, 4), {"pending_reductions": bound}, monkeypatch)
    assert max(seen) == bound
    seen.clear()
    stepped((1, 1, 4), {"pending_reductions": bound}, monkeypatch)
    assert max(seen) == LAYERS, "without staging there is no bound"
