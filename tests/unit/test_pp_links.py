"""Waiting for a pipeline message: an end of one look at it is not its own time-out."""

from __future__ import annotations

from concurrent.futures import Future
from types import SimpleNamespace

import pytest
import torch

from megazero.comm.lane import no_timing
from megazero.comm.traffic import Traffic
from megazero.pp.links import Links


class JustLate(Future):
    """Completes at the very end of a look at it, as a message may."""

    def result(self, timeout=None):
        if timeout is not None and not self.done():
            self.set_result(None)
            raise TimeoutError
        return super().result(timeout)


def links(poll) -> Links:
    mesh = SimpleNamespace(
        device=torch.device("cpu"),
        rank=0,
        grid=SimpleNamespace(link=lambda a, b: "intra_node"),
        pp=SimpleNamespace(ranks=(0, 1)),
    )
    return Links(mesh, (1,), torch.float32, Traffic(), poll, no_timing)  # type: ignore[arg-type]


def after(looks: int, act):
    """A poll that acts at its n-th call, and always has more to move on."""
    left = iter(range(looks))

    def poll() -> bool:
        if next(left, None) is None and not done:
            done.append(True)
            act()
        return True

    done: list[bool] = []
    return poll


def test_a_message_that_comes_as_a_look_ends_is_received():
    work = JustLate()
    links(after(3, lambda: work.done() or work.set_result(None)))._wait(work, 1)
    assert work.done()


def test_the_messages_own_failure_is_raised_even_if_it_is_a_time_out():
    for error in (TimeoutError("gloo waited 30 minutes"), RuntimeError("connection closed by peer")):
        work: Future = Future()
        with pytest.raises(type(error), match=str(error)):
            links(after(3, lambda work=work, error=error: work.set_exception(error)))._wait(work, 1)


def test_when_nothing_else_moves_it_waits_for_the_message_alone():
    work: Future = Future()
    polls = []

    def poll() -> bool:
        polls.append(True)
        work.set_result(None)
        return False

    links(poll)._wait(work, 1)
    assert polls == [True]
