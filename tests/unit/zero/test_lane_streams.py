"""What gathers come after on CUDA, shown without a card: streams and events that know what precedes what.

Every read and write of an engine's parameters is an operation on the stream that is current; a stream knows the
operations that come before what it is given next. Memory is the caching allocator's: what is allocated on a stream
may be any memory that came free before among what was allocated on that stream.
"""

from __future__ import annotations

from collections import defaultdict
from contextlib import contextmanager, nullcontext
from functools import partial
from itertools import count

import pytest
import torch

from megazero import zero
from megazero.comm.lane import Lane
from megazero.zero import gather
from megazero.zero.weights import Weights
from tests.gpu.test_hpz_race import CPU, Cluster, Wire

NUMBER = count()


class Event:
    def __init__(self, **_: object) -> None:
        self.before: frozenset[int] = frozenset()

    def record(self, stream: Stream | None = None) -> None:
        self.before = frozenset((stream or Streams.now[-1]).before)

    def query(self) -> bool:
        return False


class Stream:
    def __init__(self) -> None:
        self.before: set[int] = set()

    def run(self) -> int:
        """An operation of this stream."""
        number = next(NUMBER)
        self.before.add(number)
        return number

    def record_event(self) -> Event:
        event = Event()
        event.record(self)
        return event

    def wait_event(self, event: Event) -> None:
        self.before |= event.before

    def wait_stream(self, other: Stream) -> None:
        self.before |= other.before


class Streams:
    """The current stream is the last one."""

    now: list[Stream] = []

    @staticmethod
    @contextmanager
    def entered(stream: Stream):
        Streams.now.append(stream)
        yield
        Streams.now.pop()


class Watch:
    """An engine of a Cluster on fake streams. wrong: what was not ordered, in words. behind: for every unit's
    refresh, how many of the step's reads it has to wait for."""

    def __init__(self, patch: pytest.MonkeyPatch, shards: tuple[int, int, int], **policy: object) -> None:
        self.compute = Stream()
        Streams.now = [self.compute]
        patch.setattr(torch.cuda, "Event", Event)
        patch.setattr(torch.cuda, "current_stream", lambda *_: Streams.now[-1])
        patch.setattr(torch.cuda, "stream", Streams.entered)
        self.wrong: set[str] = set()
        self.behind: list[int] = []
        self.uses: defaultdict[int, list[int]] = defaultdict(list)  # by storage: since it was allocated
        self.writes: dict[int, int] = {}
        self.home: dict[int, Stream] = {}
        self.free: defaultdict[Stream, set[int]] = defaultdict(set)  # uses of memory that came free
        self.reads: set[int] = set()
        self.update = self.compute.run()
        self.cluster = Cluster(CPU, 3, patch, shards=shards, policy=zero.Policy(**policy))
        for lane in (self.cluster.engine.gathers, self.cluster.engine.reductions):
            lane.streams = [Stream(), Stream()]
        self._watch_memory(patch)
        self._watch_data(patch)

    def _watch_memory(self, patch: pytest.MonkeyPatch) -> None:
        def allocating(method):
            def call(weights: Weights, *take):
                buffers = (weights.full, weights.copy)
                empty = [b for b in buffers if not b.untyped_storage().nbytes()]
                out = method(weights, *take)
                for buffer in empty:
                    if buffer.untyped_storage().nbytes():
                        stream = Streams.now[-1]
                        if not self.free[stream] <= stream.before:
                            self.wrong.add("memory is taken while its last user may still read it")
                        self.home[id(buffer)] = stream
                        self.uses[id(buffer)] = []
                return out

            return call

        def freeing(method):
            def call(weights: Weights):
                full = [b for b in (weights.full, weights.copy) if b.untyped_storage().nbytes()]
                method(weights)
                for buffer in full:
                    if not buffer.untyped_storage().nbytes():
                        home = self.home.get(id(buffer), self.compute)
                        self.free[home].update(self.uses.pop(id(buffer), ()))

            return call

        for name in ("materialise_full", "open_refresh"):
            patch.setattr(Weights, name, allocating(getattr(Weights, name)))
        for name in ("drop_full", "drop_copy"):
            patch.setattr(Weights, name, freeing(getattr(Weights, name)))

    def _watch_data(self, patch: pytest.MonkeyPatch) -> None:
        collective, compute, encode = Wire.gather, Cluster._compute, gather._encode

        def gathered(wire, out, own):
            held = [b for u in self.cluster.engine.units for b in (u.weights.full, u.weights.copy)]
            for tensor, writes in ((own, False), (out, True)):
                storage = tensor.untyped_storage().data_ptr()
                buffer = next(b for b in held if b.untyped_storage().data_ptr() == storage)
                self._touch(buffer, writes)
            return collective(wire, out, own)

        def computed(cluster, unit):
            self._touch(unit.weights.full)
            self.reads.add(self.uses[id(unit.weights.full)][-1])
            compute(cluster, unit)

        def encoded(unit, messages):
            if self.update not in Streams.now[-1].before:
                self.wrong.add("a refresh reads master weights before their update")
            self.behind.append(len(self.reads & Streams.now[-1].before))
            encode(unit, messages)

        patch.setattr(Wire, "gather", gathered)
        patch.setattr(Cluster, "_compute", computed)
        patch.setattr(gather, "_encode", encoded)

    def _touch(self, buffer: torch.Tensor, writes: bool = False) -> None:
        stream = Streams.now[-1]
        if self.writes.get(id(buffer), -1) not in {*stream.before, -1}:
            self.wrong.add("data is used before it has landed")
        number = stream.run()
        self.uses[id(buffer)].append(number)
        if writes:
            self.writes[id(buffer)] = number

    def change(self) -> None:
        """The master weights are changed, as a load does."""
        self.update = self.compute.run()
        self.cluster.engine.invalidate()

    def step(self) -> int:
        self.reads.clear()
        self.behind.clear()
        self.update = self.compute.run()
        return self.cluster.step()


LAYOUTS = {  # shards, policy
    "hpz": ((2, 4, 4), {}),
    "zero3": ((4, 4, 4), {}),
    "zero1": ((1, 1, 4), {}),
    "zero1, dropped every step": ((1, 1, 4), {"lifetime": "step"}),
    "zero3, the next module alone": ((4, 4, 4), {"prefetch_bytes": 0}),
    "kept": ((2, 4, 4), {"keep_gathered": True}),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_gathers_come_after_what_they_need(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    shards, policy = LAYOUTS[name]
    watch = Watch(monkeypatch, shards, **policy)
    engine, forward = watch.cluster.engine, partial(watch.cluster.module, watch.cluster.inputs)
    assert [watch.step() for _ in range(3)] == [0, 0, 0] and not watch.wrong
    for inside, act in (
        (engine.evaluation, forward),
        (engine.gathered, lambda: None),
        (torch.no_grad, forward),
        (nullcontext, engine.refresh),
    ):
        watch.change()
        with inside():
            act()
        assert watch.step() == 0 and not watch.wrong, (inside, act)
    with torch.no_grad():
        forward()  # of the user's own loop, between steps, twice
        watch.change()
        forward()
    assert watch.step() == 0 and not watch.wrong
    update = engine.step

    def forward_and_update():
        with torch.no_grad():
            forward()  # inside the step, after its last backward
        watch.update = watch.compute.run()
        return update()

    monkeypatch.setattr(engine, "step", forward_and_update)
    watch.step()
    watch.change()
    with torch.no_grad():
        forward()
    assert not watch.wrong


@pytest.mark.parametrize("name", LAYOUTS)
def test_without_following_drops_and_updates_the_watch_finds_it(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The test above can fail."""
    watch = Watch(monkeypatch, *LAYOUTS[name][:1], **LAYOUTS[name][1])
    monkeypatch.setattr(Lane, "follow", lambda lane: None)
    for _ in range(3):
        watch.step()
    assert watch.wrong


def test_gathers_do_not_wait_for_the_computing_before_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """ZeRO-1: nothing is dropped, so a refresh waits for the update alone, even in the first step, where it is
    submitted after the layers before it."""
    watch = Watch(monkeypatch, (1, 1, 4))
    watch.step()
    assert watch.behind == [0] * len(watch.cluster.engine.units)


@pytest.mark.parametrize("name", ["zero1", "zero3", "hpz"])
def test_what_ran_ahead_and_was_not_used_is_waited_for(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a forward after a step that was broken off, and by the update of a step that leaves modules out."""
    shards, policy = LAYOUTS[name]
    watch = Watch(monkeypatch, shards, **policy)
    cluster, engine = watch.cluster, watch.cluster.engine

    def in_flight() -> list[str]:
        return [
            u.name for u in engine.units if not engine.gathers.latest[u.name].before <= watch.compute.before
        ]

    def begin() -> None:
        watch.step()
        watch.change()
        engine.begin_step(2)
        cluster.module[0](cluster.inputs).sum().backward()
        assert in_flight(), "nothing ran ahead"

    watch.step()
    begin()
    engine.abort_step()
    assert not in_flight()
    with torch.no_grad():
        cluster.module(cluster.inputs)
    begin()
    cluster.module[0](cluster.inputs).sum().backward()
    update, behind = engine.optimizer.update, list[list[str]]()
    monkeypatch.setattr(
        engine.optimizer, "update", lambda *given: (behind.append(in_flight()), update(*given))
    )
    engine.step()
    assert behind == [[]] and not watch.wrong
