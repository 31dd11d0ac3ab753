"""Replicas of a run: when this one meets the others, what it takes from a meeting, and which samples it trains on
then.

A replica is a launch (--outer-meet). Who meets and how bytes cross is comm/rooms's affair; what becomes of the
weights zero/outer.py's. A meeting counts what each replica has trained on, and deals shares of the samples that
follow (data/shares.py), all as functions of the seats' headers, so that every replica comes to the same. A share
lasts for --outer-interval steps; who is called meets before its end. With --outer-delay T the message leaves T steps
before the end, and is taken up there; what is learned meanwhile is dropped.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Self, TypeVar

import torch
import torch.distributed as dist

from megazero.bounded import load_json
from megazero.comm.rooms.member import Fetched, Member, Met, Offer, RoomSettings, Standing
from megazero.comm.rooms.shelf import Shown
from megazero.config import RunConfig
from megazero.config.layout.outer import meeting_point, outer_rate
from megazero.data.sampler import Batches
from megazero.data.shares import Dealt, Ranges, size
from megazero.mesh.launch import Launch
from megazero.mesh.objects import gather_beside, gather_objects
from megazero.mesh.waiting import waiting
from megazero.train.state.progress import Progress
from megazero.zero import DataAxes, Engine
from megazero.zero.outer import Packed

LOOK_S = 0.5

T = TypeVar("T")


@dataclass(frozen=True)
class Standings:
    """Where a replica stands; a checkpoint holds it. trained: samples since its weights were the anchor's."""

    room: Standing = Standing()
    dealt: Dealt = Dealt()
    trained: int = 0

    def state(self) -> dict[str, Any]:
        """Return it in JSON types."""
        return {"room": asdict(self.room), "dealt": self.dealt.state(), "trained": self.trained}

    @classmethod
    def of(cls, progress: Progress) -> Self:
        """Return where a run stands that begins at ``progress``. A run without others had all samples up to there."""
        if (state := progress.meeting) is None:
            return cls(dealt=Dealt(progress.consumed_samples))
        room = {**state["room"], "last": tuple(state["room"]["last"])}
        return cls(Standing(**room), Dealt.of_state(state["dealt"]), int(state["trained"]))


class Membership:
    """This replica's part in the meetings, as one of its ranks sees it. Its methods are collective in the replica.

    batch: returns the samples of this replica's steps after so many of all. stand: the place at the last step's end.
    say: told what is waited for. told: of the last meeting, for the metrics, until somebody takes it.
    """

    def __init__(
        self,
        config: RunConfig,
        engine: Engine,
        launch: Launch,
        stand: Standings,
        batch: Callable[[int], int],
    ) -> None:
        assert engine.outer is not None and config.training.train_samples is not None
        self.config, self.steps, self.stand = config.outer, engine.outer, stand
        self.samples, self.batch = config.training.train_samples, batch
        self.say: Callable[[str], None] = lambda text: None
        self.name: str = gather_objects(config.outer.outer_name or launch.host)[0]
        count, mesh = engine.outer.outer.wires, engine.mesh
        first = (mesh.pp.index * mesh.tp.size + mesh.tp.index) * mesh.dp_size + DataAxes.of(mesh).place
        self.wires = range(first * count, (first + 1) * count)  # the same slices in replicas of fewer ranks
        self.missing, self.told = "", dict[str, Any]()
        group = dist.new_group(backend="gloo") if dist.is_initialized() else None  # a thread's own
        self.member = Member(
            room_settings(config, engine, self.name),
            dict.fromkeys(self.wires, engine.outer.message_bytes),
            gather=partial(gather_beside, group=group),
            leader=mesh.rank == 0,
            on_wait=partial(setattr, self, "missing"),
        )
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="meeting")
        self._packed: Packed | None = None  # what left last
        self._met: Future[Met | None] | None = None  # of what is under way
        self._lands = 0  # samples of the share after which that is taken up

    # -- what a run asks ---------------------------------------------------------------------------------

    @property
    def share(self) -> Ranges:
        return self.stand.dealt.shares.get(self.name, ())

    @property
    def finished(self) -> bool:
        """Whether all samples of the run are trained on."""
        return self.stand.room.number > 0 and not self.stand.dealt.shares

    def used(self, batches: Batches) -> int:
        """Return how many samples of its share this replica has consumed."""
        return size(self.share) - size(batches.state["left"])

    def consumed(self, batches: Batches) -> int:
        """Return how many samples all replicas together have consumed, if all are as far as this one."""
        dealt, own = self.stand.dealt, size(self.share)
        together = sum(map(size, dealt.shares.values()))
        return dealt.consumed + (together * self.used(batches) // own if own else 0)

    def step_size(self) -> int:
        """Return the samples of a step of this interval."""
        return self.batch(self.stand.dealt.consumed)

    def join(self, batches: Batches) -> None:
        """Come to the others, take up what they have met without this one, and get a share."""
        self._wait(self._thread.submit(self.member.join, self.stand.room, self._offer()))
        self.stand = replace(self.stand, room=self.member.standing)
        if self._catch_up() or not self.share:
            self._meet(batches)

    def stepped(self, batches: Batches, trained: int, called: bool) -> None:
        """Note the end of a step of so many samples, and meet if that is due. called: others wait in the room."""
        self.stand = replace(self.stand, trained=self.stand.trained + trained)
        left, late = size(batches.state["left"]), self.config.outer_delay * self.step_size()
        if self._met is None and (called or left <= late):
            self._lands = self.used(batches) + min(left, late)
            self._leave()
        if self._met is not None and self.used(batches) >= self._lands:
            self._land(batches)

    def take_told(self) -> dict[str, Any]:
        """Return the last meeting's metrics, once."""
        told, self.told = self.told, {}
        return told

    def close(self) -> None:
        """End in good order: the others do not wait for this one."""
        if self._met is not None:
            self._wait(self._met)
        self._wait(self._thread.submit(self.member.leave))
        self._thread.shutdown()

    # -- a meeting ---------------------------------------------------------------------------------------

    def _meet(self, batches: Batches) -> None:
        self._lands = self.used(batches) if self.share else 0
        self._leave()
        self._land(batches)

    def _leave(self) -> None:
        """Send what the weights have moved by. It is on its way from here on."""
        header = {"trained": self.stand.trained, "used": self._lands, "batch": self.step_size()}
        self._packed = self.steps.pack()
        messages = dict(zip(self.wires, self._packed.messages, strict=True))
        self._met = self._thread.submit(self.member.meet, json.dumps(header).encode(), messages)

    def _land(self, batches: Batches) -> None:
        """Take up what has arrived, until this replica has a share or nothing is left to share."""
        while True:
            assert self._met is not None
            began, met = time.monotonic(), self._wait(self._met)
            self._met = None
            if met is not None:
                self._take(met)
                self.told |= {"wait_s": round(time.monotonic() - began, 3)}
                if self.share or self.finished:
                    break
            self._catch_up()
            self._lands = 0
            self._leave()
        batches.go_to({**batches.state, "left": self.share})

    def _catch_up(self) -> bool:
        """Take up the meetings of others, or their anchor, until this replica is where they are. Whether it was
        not."""
        behind = False

        def memory() -> dict[int, torch.Tensor]:
            sizes = (self.steps.anchor_bytes(wire) for wire in range(len(self.wires)))
            taken = (torch.empty(size, dtype=torch.uint8) for size in sizes)
            return buffers.setdefault("anchor", dict(zip(self.wires, taken, strict=True)))

        while True:
            buffers = dict[str, dict[int, torch.Tensor]]()
            step = self._wait(self._thread.submit(self.member.missed, memory))
            if step is None:
                return behind
            behind = True
            if isinstance(step, Met):
                self._take(step)
            else:
                self._adopt(step, buffers["anchor"])

    def _take(self, met: Met) -> None:
        """Take up a meeting: its outer step, and what it deals."""
        told = {seat.name: _header(seat.header) for seat in met.seats}
        weights = [each["trained"] for each in told.values()]
        counts = self.name in told  # what an earlier start of this replica sent counts, too
        messages = [[seat.messages[wire] for wire in self.wires] for seat in met.seats]
        with self.member.changing():
            if any(weights):
                rate = outer_rate(self.config, self.stand.dealt.consumed, self.samples)
                own = self._packed if met.own is not None else None
                moved = self.steps.take_up(messages, weights, rate, own, keep=not counts)
                received = (len(told) - 1) * len(self.wires) * self.steps.message_bytes
                self.told = {**moved._asdict(), "replicas": len(told), "rank_bytes": received}
        dealt = self.stand.dealt.settled({name: each["used"] for name, each in told.items()})
        batches = {name: each["batch"] for name, each in told.items()}
        dealt = dealt.dealt(batches, self.config.outer_interval, self.samples)
        self._commit(met, dealt, 0 if counts else self.stand.trained)

    def _adopt(self, anchor: Fetched, received: Mapping[int, torch.Tensor]) -> None:
        """Take another replica's anchor. What was learned since this one's is dropped."""
        with self.member.changing():
            self.steps.adopt([received[wire] for wire in self.wires])
        self._commit(anchor, Dealt.of_state(load_json(anchor.about)), 0)

    def _commit(self, step: Met | Fetched, dealt: Dealt, trained: int) -> None:
        self.stand = replace(self.stand, dealt=dealt, trained=trained)
        self._wait(self._thread.submit(self.member.commit, step, self._offer()))
        self.stand = replace(self.stand, room=self.member.standing)

    def _offer(self) -> Offer:
        digests, pieces = dict[int, str](), dict[int, Shown]()
        for place, wire in enumerate(self.wires):
            digests[wire] = f"{self.steps.digest(place):x}"
            pieces[wire] = Shown(self.steps.anchor_bytes(place), partial(self.steps.read_anchor, place))
        return Offer(digests, json.dumps(self.stand.dealt.state()).encode(), pieces)

    def _wait(self, found: Future[T]) -> T:
        """Return what the thread finds, and say meanwhile what it waits for: so the watchdog sees that it does."""
        began = time.monotonic()
        with waiting:
            while wait([found], LOOK_S).not_done:
                self.say(
                    f"meeting {self.stand.room.number}, {time.monotonic() - began:.0f} s: {self.missing}"
                )
        return found.result()


def _header(text: bytes) -> dict[str, int]:
    """Return a seat's header. Raises ValueError for one that no replica has written."""
    header = load_json(text)
    found = {name: header.get(name) for name in ("trained", "used", "batch")}
    if not all(type(value) is int and value >= 0 for value in found.values()) or not found["batch"]:
        raise ValueError(f"a replica's header is {found}")
    return found


def room_settings(config: RunConfig, engine: Engine, name: str) -> RoomSettings:
    """Return where this replica meets, and what must be the same in all. Raises ValueError or OSError."""
    outer, grid, policy = config.outer, engine.mesh.grid, engine.policy
    assert engine.outer is not None
    secret = Path(outer.outer_secret_file).read_bytes().strip() if outer.outer_secret_file else b""
    layout = {"tp": grid.tp, "pp": grid.pp, "d": grid.dp * engine.outer.outer.wires, "ep": grid.ep}
    layout |= {"block": policy.block, "exact": policy.exact_numel, "chunk": policy.chunk_numel}
    layout |= {"layers": config.zero.zero_unit_layers, "quantised": not policy.codecs.exact}
    own = (
        "meet",
        "name",
        "secret_file",
        "ranks",
        "least",
        "call",
        "patience",
        "silence",
        "delay",
        "evaluation",
    )
    steps = {key: value for key, value in vars(outer).items() if key.removeprefix("outer_") not in own}
    training: dict[str, Any] = {"samples": config.training.train_samples, "seed": config.training.seed}
    training |= {"optimizer": config.optimizer.optimizer, "dtype": config.precision.params_dtype}
    same = {"model": vars(config.model), "layout": layout, "outer steps": steps, "training": training}
    words = {word: json.dumps(values, sort_keys=True, default=str) for word, values in same.items()}
    words["model"] = hashlib.sha256(words["model"].encode()).hexdigest()[:16]
    return RoomSettings(
        point=meeting_point(outer),
        name=name,
        secret=secret,
        same=words,
        least=outer.outer_least,
        call_s=outer.outer_call,
        patience_s=outer.outer_patience,
        silence_s=outer.outer_silence,
    )
