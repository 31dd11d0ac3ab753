"""What a lane keeps of the waits on CUDA, with events and streams that only count."""

from __future__ import annotations

import pytest
import torch

from megazero.comm import lane as lane_module
from megazero.comm.lane import Lane, Leg, Ticket


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
    monkeypatch.setattr(torch.cuda, "current_stream", Stream)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    lane = Lane("gather", torch.device("cpu"), 0, timed=lambda name: None)
    lane.streams = [Stream()]
    plan = (Leg("a", "gather_intra"), Leg("b", "gather_inter"))
    for _ in range(3000):
        ticket = Ticket("unit", plan, iter(()), landed=(Event(2.0), Event(5.0)), event=Event(5.0, over=False))
        lane.wait(ticket)
    assert len(lane.stalls) <= lane_module.STALLS
    want = {"exposed_gather_intra": 6.0, "exposed_gather_inter": 9.0}
    assert lane.take_stalls() == pytest.approx(want), "none is lost"
    assert lane.take_stalls() == {}


def test_the_host_does_not_wait_for_waits_that_are_not_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "current_stream", Stream)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    lane = Lane("gather", torch.device("cpu"), 0, timed=lambda name: None)
    lane.streams = [Stream()]
    landed = Event(2.0, over=False)
    lane.wait(Ticket("unit", (Leg("a", "gather_intra"),), iter(()), landed=(landed,), event=landed))
    assert lane.take_stalls() == {}
    landed.over = True
    assert lane.take_stalls() == pytest.approx({"exposed_gather_intra": 2e-3})
