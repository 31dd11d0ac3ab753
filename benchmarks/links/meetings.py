"""Meetings over bare rooms: seconds that launches lose where others die, freeze or are cut off.

    python -m benchmarks.links.meetings --rate 100mbit --kills 30

Three launches of two ranks and the meeting point lie in namespaces of their own. A launch is a vector; between meetings it
sleeps, in a meeting it brings random numbers and takes the mean. Each scenario prints what the survivors' meetings took
beside those before, and checks that all launches' anchors have the same bits in every meeting.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megazero.comm.rooms import channel
from megazero.comm.rooms.channel import Refused
from megazero.comm.rooms.member import Anchor, Member, Met, Offer, RoomLost, RoomSettings, Standing
from megazero.comm.rooms.shelf import Piece
from megazero.mesh.objects import gather_objects

SECRET = b"of a benchmark" * 3


class Launch:
    """A rank of a launch whose anchor is one vector a rank. Tells what happens in lines of JSON."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options, self.anchor = options, torch.zeros(options.bytes // 4)
        self.rank = int(os.environ.get("RANK", "0"))
        if int(os.environ.get("WORLD_SIZE", "1")) > 1:
            dist.init_process_group("gloo")
        host, _, port = options.point.rpartition(":")
        names = ("least", "call_s", "patience_s", "silence_s", "give_up_s", "journal")
        settings = RoomSettings(
            (host, int(port)),
            options.replica,
            options.secret.encode() or SECRET,
            {"model": options.model},
            **{name: getattr(options, name) for name in names},
        )
        self.member = Member(
            settings,
            {self.rank: options.bytes},
            gather=gather_objects,
            leader=self.rank == 0,
            on_wait=lambda missing: self.say("waits", missing=missing),
        )

    def say(self, event: str, **words: Any) -> None:
        if self.rank == 0:
            number = self.member.standing.number
            print(json.dumps({"at": time.time(), "event": event, "number": number, **words}), flush=True)

    def offer(self) -> Offer:
        view = memoryview(self.anchor.numpy()).cast("B")
        self.hash = hashlib.sha256(view).hexdigest()[:12]
        return Offer(
            {self.rank: self.hash}, b"about", {self.rank: Piece(len(view), lambda at, n: view[at : at + n])}
        )

    def take(self, step: Met | Anchor) -> None:
        with self.member.changing():
            if isinstance(step, Anchor):
                self.anchor.copy_(self.memory.view(torch.float32))
            else:
                total = torch.zeros_like(self.anchor)
                for seat in step.seats:
                    total += seat.messages[self.rank].view(torch.float32)
                self.anchor -= total / len(step.seats)
        self.member.commit(step, self.offer())

    def buffers(self) -> dict[int, torch.Tensor]:
        self.memory = torch.empty(self.options.bytes, dtype=torch.uint8)
        return {self.rank: self.memory}

    def catch_up(self) -> None:
        began = time.time()
        while step := self.member.missed(self.buffers):
            self.take(step)
            self.say("took", what=type(step).__name__, seconds=time.time() - began)

    def train(self) -> None:
        """Meet ``rounds`` times, or for ever; between meetings come steps of ``step_s`` each."""
        file = Path(self.options.load) if self.options.load else None
        standing = Standing(**json.loads(file.read_text())) if file and file.exists() else Standing()
        self.member.join(standing, self.offer())
        self.catch_up()
        while not self.options.rounds or self.member.standing.number < self.options.rounds:
            for _ in range(self.options.steps):
                time.sleep(self.options.step_s)
                if gather_objects(self.member.called())[0]:
                    break
            generator = torch.Generator().manual_seed(
                hash(self.options.replica) + self.member.standing.number
            )
            moved = torch.randn(len(self.anchor), generator=generator).view(torch.uint8)
            self.say("sits")
            began = time.time()
            with dying(self.options.die, self.member.standing.number):
                met = self.member.meet(self.options.replica.encode(), {self.rank: moved})
            if met is None:
                self.say("late")
                self.catch_up()
                continue
            self.take(met)
            names = [seat.name for seat in met.seats]
            self.say("met", met=met.number, names=names, hash=self.hash, seconds=time.time() - began)
        self.member.leave()
        self.say("left")


@contextmanager
def dying(where: str, number: int) -> Iterator[None]:
    """Kill this process at a frame of a meeting: 'NUMBER:FRAME'."""
    plain, count = channel.Channel.receive_into, 0

    def counted(self: channel.Channel, *arguments: Any) -> None:
        nonlocal count
        count += len(arguments[0]) > 10_000
        if count > int(where.partition(":")[2]):
            os.kill(os.getpid(), signal.SIGKILL)
        plain(self, *arguments)

    if where and int(where.partition(":")[0]) == number:
        channel.Channel.receive_into = counted  # type: ignore[method-assign]
    try:
        yield
    finally:
        channel.Channel.receive_into = plain  # type: ignore[method-assign]


def parser() -> argparse.ArgumentParser:
    words = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    words.add_argument("--replica", help="be a rank of this launch")
    for name, default in {
        "point": "",
        "secret": "",
        "model": "m",
        "load": "",
        "die": "",
        "rate": "100mbit",
    }.items():
        words.add_argument(f"--{name}", default=default)
    for name, default in {
        "bytes": 4_000_000,
        "rounds": 0,
        "steps": 4,
        "least": 0,
        "journal": 4,
        "kills": 30,
    }.items():
        words.add_argument(f"--{name}", type=int, default=default)
    for name, seconds in {
        "step": 0.1,
        "call": 0.5,
        "patience": 5.0,
        "silence": 2.0,
        "give-up": 120.0,
    }.items():
        words.add_argument(f"--{name}-s", type=float, default=seconds)
    return words


def main() -> int:
    options = parser().parse_args()
    if options.replica:
        try:
            Launch(options).train()
        except (Refused, RoomLost) as error:
            print(
                json.dumps({"at": time.time(), "event": type(error).__name__, "why": f"{error}"}), flush=True
            )
            os._exit(3)
        os._exit(0)
    return 0


if __name__ == "__main__":
    sys.exit(main())
