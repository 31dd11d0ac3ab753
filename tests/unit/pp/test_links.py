"""Pipeline messages: when receives are posted; an end of one look at a message is not its own time-out."""

from __future__ import annotations

from concurrent.futures import Future
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from megazero.comm.hops import Traffic
from megazero.comm.timing import Waits
from megazero.pp.executor import Pipeline
from megazero.pp.links import Links
from megazero.pp.partition import partition
from megazero.pp.schedules import SCHEDULES, Message, make_evaluation, make_schedule, schedule_problem
from megazero.pp.timeline import post_after
from tests.pipeline_walk import depends, ends, posted
from tests.unit.ops.test_stragglers import FakeEvent


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
    return Links(mesh, torch.float32, Traffic(), poll, Waits())  # type: ignore[arg-type]


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


def test_waits_of_the_stream_are_timed_where_a_message_has_not_come(monkeypatch):
    """On CUDA, between two events."""

    class Work:
        def __init__(self, takes: int) -> None:
            self.takes = takes

        def is_completed(self) -> bool:
            return not self.takes

        def wait(self) -> None:
            FakeEvent.now += self.takes  # in milliseconds here

    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    between = links(lambda: False)
    between.waits = Waits(torch.device("cuda"), lambda name: nullcontext())
    for takes in (3, 0, 4):
        between._wait(Work(takes), 1)
    assert len(between.waits.stalls.waits) == 2
    assert between.waits.stalls.take() == pytest.approx({"exposed_pipeline_intra": 7e-3})


def test_each_direction_has_its_own_communicator(monkeypatch):
    """On NCCL a communicator takes its messages in one order: sends one way would wait for receives of the other."""
    used = []
    for name in ("isend", "irecv"):
        note = partial(lambda name, tensor, peer, group: used.append((name, peer, group)), name)
        monkeypatch.setattr(torch.distributed, name, note)
    monkeypatch.setattr(Links, "_watched", lambda *_: Future())
    between = links(lambda: False)
    between.mesh.pp = SimpleNamespace(ranks=(4, 5, 6), index=1, gather_group="on", reduce_group="back")
    on, back = Message("activation", 0, 1, 0), Message("gradient", 2, 1, 0)
    between.open((1,), {0: [on], 2: [back]}, {on: 0, back: 0})
    for target in (2, 0):
        between.send(torch.zeros(1), target)
    assert used == [("irecv", 4, "on"), ("irecv", 6, "back"), ("isend", 6, "on"), ("isend", 4, "back")]


def test_a_step_that_raises_leaves_nothing_of_itself():
    """Neither graphs nor gradients of weights that were put off: they hold a step's activations."""
    kept, calls = [], []
    noted = {
        name: partial(lambda name, *_: calls.append(name), name)
        for name in ("abort", "open", "connect", "advance")
    }
    mesh = SimpleNamespace(
        device=torch.device("cpu"), rank=1, pp=SimpleNamespace(index=1, size=2, ranks=(0, 1))
    )
    between = SimpleNamespace(mesh=mesh, receive=lambda *_: torch.ones(1), **noted)
    put_off = SimpleNamespace(discard=lambda: calls.append("discard"))
    engine = SimpleNamespace(segment=lambda *_: nullcontext())

    def forward(stage, x, micro_batch):
        if micro_batch == "bad":
            kept.extend(pipeline.saved)
            raise ValueError(micro_batch)
        return x.square().sum()

    carrier = SimpleNamespace(fit=lambda _: (1,), unpack=lambda x: x.clone())
    pipeline = Pipeline(partition(2, 2), "gpipe", forward, engine, between, carrier, put_off)
    with pytest.raises(ValueError, match="bad"):
        pipeline.step(["good", "bad"])
    assert kept == [(1, 0)] and not pipeline.saved
    assert calls == ["connect", "open", "advance", "abort", "discard"]


def early(posts, needed) -> tuple[int, int]:
    """How many messages are posted before all own actions that they depend on are issued; and how many in all."""
    placed = [(needed[message], k) for log in posts for k, some in enumerate(log) for message in some]
    return sum(need > k for need, k in placed), len(placed)


def schedules(pp: int):
    """Steps and evaluations of every legal size with this number of ranks."""
    for name in SCHEDULES:
        for virtual in range(1, 5):
            for m in sorted({1, 2, pp - 1, pp, 2 * pp, 2 * pp + 1}):
                if not schedule_problem(name, pp, virtual, m):
                    yield make_schedule(name, pp, virtual, m)
    for virtual in (1, 2, 3):
        for m in (1, pp, 3 * pp - 1):
            yield make_evaluation(pp, virtual, m)


@pytest.mark.parametrize("pp", range(2, 9))
def test_no_receive_is_posted_before_what_it_depends_on_and_ranks_that_wait_for_all_posted_ones_end(pp):
    for schedule in schedules(pp):
        needed = depends(schedule, pp)
        posts = posted(
            schedule, pp, post_after(schedule, pp)
        )  # raises if what is asked for may not be posted yet
        assert early(posts, needed) == (0, len(needed))
        assert ends(schedule, pp, posts)


@pytest.mark.parametrize("pp, micro_batches, found", [(2, 8, (14, 16)), (8, 32, (392, 448))])
def test_the_walk_finds_receives_that_are_posted_too_early(pp, micro_batches, found):
    schedule = make_schedule("1f1b", pp, 1, micro_batches)
    needed = depends(schedule, pp)
    at_once = posted(schedule, pp, dict.fromkeys(needed, 0))
    assert early(at_once, needed) == found and not ends(schedule, pp, at_once)
    by_own_actions = posted(schedule, pp, needed)  # on one rank enough, but two wait for each other
    assert early(by_own_actions, needed) == (0, found[1]) and not ends(schedule, pp, by_own_actions)
