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

SETTINGS = ("least", "call_s", "patience_s", "silence_s", "give_up_s", "journal")


class Launch:
    """A rank of a launch whose anchor is a vector for each wire. Tells what happens in lines of JSON."""

    def __init__(self, options: argparse.Namespace) -> None:
        rank, ranks = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
        if ranks > 1:
            dist.init_process_group("gloo")
        self.options, self.leads = options, rank == 0
        self.wires = range(rank * options.wires // ranks, (rank + 1) * options.wires // ranks)
        self.anchors = {wire: torch.zeros(options.bytes // 4) for wire in self.wires}
        host, _, port = options.point.rpartition(":")
        self.member = Member(
            RoomSettings(
                (host, int(port)),
                options.replica,
                Path(options.secret).read_bytes(),
                {"model": options.model},
                **{key: getattr(options, key) for key in SETTINGS},
            ),
            dict.fromkeys(self.wires, options.bytes),
            gather=gather_objects,
            leader=self.leads,
            on_wait=lambda missing: self.say("waits", missing=missing),
        )

    def say(self, event: str, **words: Any) -> None:
        if self.leads:
            number = self.member.standing.number
            print(json.dumps({"at": time.time(), "event": event, "number": number, **words}), flush=True)

    def offer(self) -> Offer:
        views = {wire: memoryview(anchor.numpy()).cast("B") for wire, anchor in self.anchors.items()}
        digests = {wire: hashlib.sha256(view).hexdigest() for wire, view in views.items()}
        parts = sorted(part for rank in gather_objects([*digests.items()]) for part in rank)
        self.hash = hashlib.sha256(f"{parts}".encode()).hexdigest()[:8]
        return Offer(digests, b"about", {wire: Piece.of(view) for wire, view in views.items()})

    def take(self, step: Met | Anchor) -> None:
        with self.member.changing():
            for wire, anchor in self.anchors.items():
                if isinstance(step, Met):
                    for seat in step.seats:
                        anchor -= seat.messages[wire].view(torch.float32) / len(step.seats)
                else:
                    anchor.copy_(self.memory[wire].view(torch.float32))
        self.member.commit(step, self.offer())

    def buffers(self) -> dict[int, torch.Tensor]:
        self.memory = {wire: torch.empty(self.options.bytes, dtype=torch.uint8) for wire in self.wires}
        return self.memory

    def catch_up(self) -> None:
        began = time.time()
        while step := self.member.missed(self.buffers):
            self.take(step)
            self.say("took", what=type(step).__name__, hash=self.hash, seconds=time.time() - began)

    def moved(self) -> dict[int, torch.Tensor]:
        """Return random messages, the same whenever this launch brings them to this meeting."""
        number = self.member.standing.number
        seeds = {wire: hash((*self.options.replica.encode(), number, wire)) for wire in self.wires}
        makers = {wire: torch.Generator().manual_seed(seed) for wire, seed in seeds.items()}
        count = self.options.bytes // 4
        return {wire: torch.randn(count, generator=maker).view(torch.uint8) for wire, maker in makers.items()}

    def train(self) -> None:
        """Meet for ever; between meetings come steps of ``step_s`` seconds, as many as are not cut short by a call."""
        load = self.options.load
        self.member.join(Standing(**json.loads(Path(load).read_text())) if load else Standing(), self.offer())
        self.catch_up()
        while True:
            for steps in range(1, self.options.steps + 1):
                time.sleep(self.options.step_s)
                if gather_objects(self.member.called())[0]:
                    break
            messages = self.moved()
            self.say("sits")
            began = time.time()
            with dying(self.options.die, self.member.standing.number):
                met = self.member.meet(self.options.replica.encode(), messages)
            if met is None:
                self.say("late")
                self.catch_up()
                continue
            self.take(met)
            names = [seat.name for seat in met.seats]
            self.say("met", names=names, hash=self.hash, steps=steps, seconds=time.time() - began)


@contextmanager
def dying(where: str, number: int) -> Iterator[None]:
    """Kill this process at a frame of a message, in a meeting of this number or more: 'NUMBER:FRAME'."""
    plain, count = channel.Channel.receive_into, 0

    def counted(self: channel.Channel, *arguments: Any) -> None:
        nonlocal count
        count += len(arguments[0]) > 10_000
        if count > int(where.partition(":")[2]):
            os.kill(os.getpid(), signal.SIGKILL)
        plain(self, *arguments)

    if where and number >= int(where.partition(":")[0]):
        channel.Channel.receive_into = counted  # type: ignore[method-assign]
    try:
        yield
    finally:
        channel.Channel.receive_into = plain  # type: ignore[method-assign]


def parser() -> argparse.ArgumentParser:
    words = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    texts = {"replica": "", "point": "", "secret": "", "model": "m", "load": "", "die": "", "rate": "100mbit"}
    numbers = {"bytes": 1_000_000, "wires": 2, "steps": 10, "least": 0, "journal": 4, "kills": 30}
    seconds = {"step-s": 0.1, "call-s": 0.5, "patience-s": 5.0, "silence-s": 2.0, "give-up-s": 120.0}
    for name, default in {**texts, **numbers, **seconds}.items():
        words.add_argument(f"--{name}", type=type(default), default=default)
    return words


def main() -> int:
    options = parser().parse_args()
    if options.replica:
        try:
            Launch(options).train()
        except (Refused, RoomLost) as error:
            told = {"at": time.time(), "event": type(error).__name__, "why": f"{error}"}
            print(json.dumps(told), flush=True)
            os._exit(3)
    return 0


if __name__ == "__main__":
    sys.exit(main())
