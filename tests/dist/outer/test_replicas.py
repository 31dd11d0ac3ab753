"""Membership of one rank each, as threads with real rooms: which samples they train on, and who comes and goes."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch

from megazero import zero
from megazero.comm.rooms.point import Point
from megazero.config import RunConfig, World, make_config
from megazero.data.blend import blend_order
from megazero.data.sampler import Batches
from megazero.data.shares import Share
from megazero.data.source import DatasetSource, StagedSource
from megazero.mesh.launch import read_launch
from megazero.mesh.mesh import create_mesh
from megazero.train.parallelize import make_outer
from megazero.train.replicas import Membership, Standings
from megazero.train.state.progress import Progress
from tests.messages import refused
from tests.sizes import TINY

SAMPLES, INTERVAL = 480, 5


@dataclass
class Numbers:
    """Samples that are their numbers, from ``begin`` on."""

    begin: int = 0

    def __len__(self) -> int:
        return 2 * SAMPLES

    def __getitem__(self, index: int) -> dict:
        return {"tokens": np.array([self.begin + index])}


@dataclass
class Replica:
    """name: of a replica that meets at ``port``. trained: the samples of each step. stop: tells it to leave, or to
    die (True), before a step."""

    name: str
    port: int
    batch: int = 4
    options: dict = field(default_factory=dict)
    stop: Callable[[Replica], bool | None] = lambda own: None
    begin: Progress = Progress()
    trained: list[list[int]] = field(default_factory=list)
    pause_s: float = 0.0
    met: list[dict] = field(default_factory=list)
    error: Exception | None = None

    def __post_init__(self) -> None:
        self.thread = threading.Thread(target=self.run, daemon=True)
        self.thread.start()

    def run(self) -> None:
        try:
            self._run()
        except Exception as error:
            self.error = error

    def config(self) -> RunConfig:
        values = {"outer_meet": f"127.0.0.1:{self.port}", "outer_name": self.name, "outer_interval": INTERVAL}
        values |= {"outer_silence": 1.0, "outer_call": 0.2, "outer_patience": 3.0, "train_samples": SAMPLES}
        values |= {"micro_batch_size": 1, "global_batch_size": self.batch, **self.options}
        return make_config({**TINY, "train_iters": None, "lr_warmup_iters": None, **values}, World(1, 1))

    def _run(self) -> None:
        config = self.config()
        model = torch.nn.Linear(4, 4, bias=False)
        with torch.no_grad():
            model.weight.zero_()
        policy = zero.Policy(block=64, outer=make_outer(config.outer))
        sgd = lambda groups: torch.optim.SGD(groups, lr=1e-3)  # noqa: E731
        self.engine = zero.shard(model, mesh=create_mesh(), policy=policy, optimizer=sgd)
        stages = {begin: DatasetSource(Numbers(begin)) for begin in (0, 150)}  # shares lie on both sides
        source = Share(StagedSource(stages), 0)
        if self.begin.meeting is not None:
            source.load_state(self.begin.source)
        stand = Standings.of(self.begin)
        replicas = Membership(config, self.engine, read_launch({}), stand, lambda consumed: self.batch)
        with Batches(source, micro_batch_size=1) as batches:
            replicas.join(batches)
            while not replicas.finished and (stopped := self.stop(self)) is None:
                ids = [id_ for micro in batches.sample_ids(self.batch) for id_ in micro]
                step = batches.next_step(self.batch)
                assert [int(each["tokens"]) for each in step] == ids
                self.engine.begin_step(self.batch)
                for id_ in ids:
                    model(torch.full((1, 4), float(id_ % 7 - 3))).sum().backward()
                self.engine.step()
                self.trained.append(ids)
                time.sleep(self.pause_s)
                replicas.stepped(batches, self.batch, replicas.member.called())
                self.met += [told] if (told := replicas.take_told()).get("norm") is not None else []
                self.end = Progress(
                    consumed_samples=replicas.consumed(batches),
                    source=batches.state,
                    meeting=replicas.stand.state(),
                )
            else:
                stopped = False
            replicas.member.close() if stopped else replicas.close()

    def join(self) -> Replica:
        self.thread.join(60)
        assert not self.thread.is_alive(), f"{self.name} hangs"
        if self.error is not None:
            raise self.error
        return self

    @property
    def ids(self) -> list[int]:
        return [id_ for step in self.trained for id_ in step]

    @property
    def anchor(self) -> torch.Tensor:
        (anchor,) = self.engine.outer.anchors.values()
        return anchor.value


@pytest.fixture
def port() -> Iterator[int]:
    with Point(0, b"") as point:
        yield point.port


def test_replicas_of_other_batches_share_all_samples(port: int) -> None:
    """Each sample comes once; both end at the meeting at which all are trained on, with one anchor."""
    one, other = (
        each.join()
        for each in [Replica("a", port, 4, {"outer_least": 2}), Replica("b", port, 8, {"outer_least": 2})]
    )
    assert sorted(one.ids + other.ids) == list(range(SAMPLES))
    assert len(one.trained) == len(other.trained) == SAMPLES // 12
    assert one.ids[:20] == [*range(20)] and other.ids[:40] == [*range(20, 60)]
    assert torch.equal(one.anchor, other.anchor) and one.anchor.any()
    assert [each["norm"] for each in one.met] == [each["norm"] for each in other.met]
    assert one.end.consumed_samples == other.end.consumed_samples == SAMPLES


def after_its_first_meeting(own: Replica) -> bool | None:
    """Die two steps after it."""
    return True if len(own.met) == 1 and len(own.trained) % INTERVAL == 2 else None


def test_one_dies_another_comes_late_and_a_slow_one_is_called(port: int) -> None:
    """Survivors go on; the samples of the dead one's last share are trained on by others."""
    least = {"outer_least": 2}
    one = Replica("a", port, options=least, pause_s=0.02)
    slow = Replica("b", port, options=least, pause_s=0.25)
    dying = Replica("c", port, options=least, pause_s=0.02, stop=after_its_first_meeting)
    while len(one.met) < 3 and one.thread.is_alive():
        time.sleep(0.01)
    late = Replica("d", port, options=least, pause_s=0.02)
    survivors = [each.join() for each in (one, slow, late)]
    dying.join()
    counted = Counter(id_ for each in survivors for id_ in each.ids)
    lost = Counter(dying.ids)
    left_out = set(range(SAMPLES)) - set(counted) - set(lost)
    assert len(left_out) < 3 * 4, "less than a step of all"
    assert max(counted.values()) == 1, "no sample twice among survivors"
    assert late.trained and any(told["replicas"] == 3 for told in late.met)
    assert all(torch.equal(each.anchor, one.anchor) for each in survivors)
    assert len(slow.trained) < len(one.trained), "the slow one came when it was called, with what it had"


@pytest.mark.parametrize("delay", [0, 2])
def test_all_stop_and_go_on_from_where_they_stood(port: int, delay: int) -> None:
    """Without a message under way to the bit; none is dealt twice."""
    options = {"outer_least": 2, "outer_delay": delay, "outer_bits": 8}
    stop = lambda own: False if len(own.trained) == 7 else None  # noqa: E731
    first = [each.join() for each in [Replica(name, port, options=options, stop=stop) for name in "ab"]]
    with Point(0, b"") as point:
        rest = [each.join() for each in [resumed(own, point.port) for own in first]]
    everything = [id_ for each in (*first, *rest) for id_ in each.ids]
    assert sorted(everything) == list(range(SAMPLES))
    assert torch.equal(rest[0].anchor, rest[1].anchor)


def resumed(own: Replica, port: int) -> Replica:
    return Replica(own.name, port, options=own.options, begin=own.end)


def test_strangers_are_refused(port: int) -> None:
    """Another model's replica, or one of other outer steps, says why it may not come; the others go on."""
    one = Replica("a", port, pause_s=0.02)
    while not one.met:
        time.sleep(0.01)
    for options, word in (
        ({"outer_lr": 0.5}, "outer steps"),
        ({"hidden_size": 64}, "model"),
        ({"seed": 1}, "training"),
    ):
        with refused("may not meet", word, by=Exception):
            Replica("b", port, options=options).join()
    one.join()
    assert one.ids == list(range(SAMPLES))


BLENDS = ((0.5, 0.25, 0.125, 0.125), (0.7, 0.2, 0.05, 0.05), (0.6, 0.3, 0.1))


@pytest.mark.parametrize("weights", BLENDS)
def test_replicas_have_the_same_mixture(port: int, weights: tuple[float, ...]) -> None:
    """Two replicas of one rank with micro-batches of one sample: in turns of single samples one had 50, 32 or 20%
    more of a member than the other; by shares each has every member's weight, to 2 samples in a share."""
    member, _ = blend_order(weights, 2 * SAMPLES).values()
    both = [each.join() for each in [Replica(name, port, options={"outer_least": 2}) for name in "ab"]]
    for each in both:
        shares = len(each.ids) // (INTERVAL * 4)
        found = np.bincount(member[each.ids], minlength=len(weights))
        assert np.abs(found - np.array(weights) * len(each.ids)).max() <= 2 * shares
    turns = [np.bincount(member[at:SAMPLES:2], minlength=len(weights)) for at in range(2)]
    assert np.abs(turns[0] - turns[1]).max() > 0.15 * SAMPLES / 2, "as it was in turns"
