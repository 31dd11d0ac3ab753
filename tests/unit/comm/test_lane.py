"""In which order a lane issues collectives, whatever ends first, and what it keeps of the waits on CUDA. No ranks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from itertools import permutations
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megazero.comm import timing
from megazero.comm.hops import HopSpec
from megazero.comm.lane import Chain, CommunicationError, Differ, Lane, Ticket
from megazero.comm.timing import no_timing
from tests.messages import refused


class Event:
    """Happened at a time in ms; ``over`` for whoever asks. Nobody may wait for it."""

    def __init__(self, at: float = 0.0, enable_timing: bool = True, over: bool = True) -> None:
        self.at, self.over = at, over

    def record(self, stream: object = None) -> None: ...

    def query(self) -> bool:
        return self.over

    def elapsed_time(self, other: Event) -> float:
        return other.at - self.at


class Stream:
    def wait_event(self, event: Event) -> None: ...


def test_waits_that_nobody_takes_are_added_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "current_stream", lambda *_: Stream())
    monkeypatch.setattr(torch.cuda, "Event", Event)
    lane = Lane("gather", torch.device("cpu"), 0, timed=lambda name: None)
    lane.streams = [Stream()]
    plan = (HopSpec("a", "gather_intra"), HopSpec("b", "gather_inter"))
    for _ in range(3000):
        ticket = Ticket("unit", plan, iter(()), landed=(Event(2.0), Event(5.0)), event=Event(5.0, over=False))
        lane.wait(ticket)
    assert len(lane.stalls.waits) <= timing.MOST
    want = {"exposed_gather_intra": 6.0, "exposed_gather_inter": 9.0}
    assert lane.stalls.take() == pytest.approx(want), "none is lost"
    assert lane.stalls.take() == {}


def test_the_host_does_not_wait_for_waits_that_are_not_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "current_stream", lambda *_: Stream())
    monkeypatch.setattr(torch.cuda, "Event", Event)
    lane = Lane("gather", torch.device("cpu"), 0, timed=lambda name: None)
    lane.streams = [Stream()]
    landed = Event(2.0, over=False)
    lane.wait(Ticket("unit", (HopSpec("a", "gather_intra"),), iter(()), landed=(landed,), event=landed))
    assert lane.stalls.take() == {}
    landed.over = True
    assert lane.stalls.take() == pytest.approx({"exposed_gather_intra": 2e-3})


def test_chains_of_one_unit_follow_each_other_on_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """They take turns on two streams, and add to the same sums."""
    entered: list[Any] = []

    @contextmanager
    def enter(stream: Any) -> Iterator[None]:
        entered.append(stream)
        yield

    waited: list[tuple[Any, Any]] = []

    class Noting(Stream):
        def wait_event(self, event: Event) -> None:
            waited.append((self, event))

    monkeypatch.setattr(torch.cuda, "stream", enter)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    lane = Lane("reduce", torch.device("cpu"), 0, no_timing)
    lane.streams = [Noting(), Noting()]
    first, other, second = (lane.submit(unit, (), iter(())) for unit in "uvu")  # type: ignore[arg-type]
    third = lane.submit("u", (), iter(()))  # type: ignore[arg-type]
    assert entered[0] is entered[2] is not entered[1] is entered[3]
    assert waited == [(entered[2], first.event), (entered[3], second.event)] and third.done and other.done


def test_on_cuda_drain_waits_for_chains_that_were_polled(monkeypatch: pytest.MonkeyPatch) -> None:
    """They have run through for the host, not for the device. Every module's hook polls."""
    waited = list[Event]()
    compute = SimpleNamespace(wait_event=waited.append)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda *_: compute)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    monkeypatch.setattr(torch.cuda, "Event", partial(Event, over=False))
    lane = Lane("gather", torch.device("cpu"), 0, no_timing)
    lane.streams = [Stream(), Stream()]
    tickets = [lane.submit(unit, (), iter(())) for unit in "uvw"]  # type: ignore[arg-type]
    lane.poll()
    assert not lane.busy
    lane.drain()
    assert waited == [ticket.event for ticket in tickets] and not lane.tickets


class Broken:
    """A collective that failed."""

    def wait(self, *_: object) -> None:
        raise RuntimeError("connection reset")

    def is_completed(self) -> bool:
        return True


@pytest.mark.parametrize("differs", [False, True])
def test_of_a_failed_collective_others_are_asked_what_they_issued(differs: bool) -> None:
    """With time for their answers: that ranks differ says more than what the backend says of it."""
    lane, asked = Lane("gather", torch.device("cpu"), 3, no_timing), list[bool]()

    def overdue(failed: bool) -> None:
        asked.append(failed)
        if differs:
            raise Differ("rank 0 gathers unit 'b'")

    lane.overdue = overdue
    kind, said = (Differ, ["unit 'b'"]) if differs else (CommunicationError, ["unit 'a'", "axis 'p'"])
    lane.tickets.append(ticket := Ticket("a", (HopSpec("p", "gather_intra"),), iter([Broken()])))  # type: ignore[arg-type]
    with refused(*said, by=kind):
        lane.wait(ticket)
    assert asked == [True]


class Wire:
    """Collectives that are over when the test says so, or when somebody waits. log: (unit, axis), as they began."""

    def __init__(self) -> None:
        self.log: list[tuple[str, str]] = []
        self.works: list[Work] = []
        self.lane = Lane("reduce", torch.device("cpu"), 0, no_timing)

    def submit(self, unit: str, axes: str) -> Ticket:
        plan = tuple(HopSpec(axis, "reduce_intra") for axis in axes)
        return self.lane.submit(unit, plan, self._chain(unit, axes))

    def _chain(self, unit: str, axes: str) -> Chain:
        for axis in axes:
            self.log.append((unit, axis))
            self.works.append(Work())
            yield self.works[-1]  # type: ignore[misc]
        self.log.append((unit, "end"))

    def units_on(self, axis: str) -> list[str]:
        return [unit for unit, at in self.log if at == axis]


class Work:
    over = False

    def is_completed(self) -> bool:
        return self.over

    def wait(self, timeout: object = None) -> None:
        self.over = True


def endings(wire: Wire, order: tuple[int, ...]) -> Iterator[Work]:
    """Collectives end one after the other: of those under way the one whose number is the first in ``order``."""
    while going := [work for work in wire.works if not work.over]:
        place = next(number for number in order if number < len(wire.works) and not wire.works[number].over)
        assert wire.works[place] in going
        yield wire.works[place]


CHAINS: dict[str, tuple[tuple[str, str], ...]] = {  # units with the axes that their chains use, in order
    "one way": (("u", "ab"), ("v", "ab"), ("w", "ab")),
    "there and back": (("u", "abba"), ("v", "abba")),
    "a short one between": (("u", "ab"), ("v", "b"), ("w", "ba")),
    "without the first axis": (("u", "abc"), ("v", "c"), ("w", "bc")),
}


@pytest.mark.parametrize("name", CHAINS)
def test_axes_are_used_in_the_order_of_the_chains_whatever_ends_first(name: str) -> None:
    """Ranks whose collectives end in other orders would meet in different ones, or hang."""
    chains = CHAINS[name]
    count = sum(len(axes) for _, axes in chains)
    seen: set[tuple[Any, ...]] = set()
    for order in (
        permutations(range(count)) if count < 7 else (tuple(range(count)), tuple(range(count))[::-1])
    ):
        wire = Wire()
        for unit, axes in chains:
            wire.submit(unit, axes)
        for work in endings(wire, order):
            work.over = True
            wire.lane.poll()
        assert not wire.lane.tickets and len(wire.works) == count
        for axis in "abc":
            assert wire.units_on(axis) == [unit for unit, axes in chains for each in axes if each == axis]
        seen.add(tuple(wire.log))
    assert len(seen) > 1 or name == "there and back", "the orders of endings make no difference"


def test_a_chain_goes_on_while_an_older_one_needs_other_axes() -> None:
    wire = Wire()
    wire.submit("u", "ab")
    wire.submit("v", "ca")
    assert wire.log == [("u", "a"), ("v", "c")]
    wire.works[1].over = True  # a is the older chain's until that has begun there
    wire.lane.poll()
    assert wire.log == [("u", "a"), ("v", "c"), ("v", "a")], "u has begun on a, and does not come back to it"


def test_a_units_sums_come_in_the_order_of_its_chains() -> None:
    """A later micro-batch's messages may be under way, but are added when the ones before are."""
    wire = Wire()
    first = wire.submit("u", "a")
    second = wire.submit("u", "b")
    other = wire.submit("v", "c")
    for work in wire.works[1:]:
        work.over = True
    wire.lane.poll()
    assert other.done and not second.done, "only chains of one unit wait for each other"
    wire.works[0].over = True
    wire.lane.poll()
    assert first.done and second.done
    assert [at for at in wire.log if at[1] == "end"] == [("v", "end"), ("u", "end"), ("u", "end")]


def test_a_wait_finishes_older_chains_first() -> None:
    wire = Wire()
    first, second = wire.submit("u", "ab"), wire.submit("v", "ab")
    wire.lane.wait(second)
    assert first.done and second.done and not wire.lane.busy
    assert wire.units_on("a") == wire.units_on("b") == ["u", "v"]


def test_kernels_of_chains_come_before_waiting_ones_of_the_compute(monkeypatch) -> None:
    made: list[int] = []
    monkeypatch.setattr(torch.cuda, "Stream", lambda device, priority=0: made.append(priority))
    Lane("gather", torch.device("cuda", 0), 0, no_timing)
    assert made == [-1, -1]
