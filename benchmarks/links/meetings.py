"""Meetings over bare rooms: seconds that launches lose where others die, freeze or are cut off.

    python -m benchmarks.links.meetings --rate 100mbit --kills 30

Three launches of two ranks and the meeting point lie in namespaces of their own. A launch is a vector; between
meetings it sleeps, in a meeting it brings random numbers and takes the mean. Each scenario prints what the survivors'
meetings took above a usual one, and all launches' anchors must have the same bits after every meeting.
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
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megazero.comm.rooms import channel
from megazero.comm.rooms.channel import Refused
from megazero.comm.rooms.member import Fetched, Member, Met, Offer, RoomLost, RoomSettings, Standing
from megazero.comm.rooms.shelf import Shown
from megazero.mesh.objects import gather_objects
from tests import ROOT
from tests.netlab.lab import SOCKETS, Lab

TWO_RANKS = "torch.distributed.run --nproc-per-node 2 --nnodes 1 --master-addr 127.0.0.1 --master-port 29500"
# Its name; does it, and returns the seconds that others lose, and after which its victim is back; how often.
Fault = tuple[str, Callable[[], tuple[float, float]], int]
SETTINGS = ("least", "call_s", "patience_s", "silence_s", "give_up_s", "journal")


class BareLaunch:
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
        return Offer(digests, b"about", {wire: Shown.of(view) for wire, view in views.items()})

    def take(self, step: Met | Fetched) -> None:
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
        """Meet for ever; between meetings come steps of ``step_s`` seconds, fewer after a call."""
        load = self.options.load
        self.member.join(Standing(**json.loads(Path(load).read_text())) if load else Standing(), self.offer())
        self.catch_up()
        while True:
            for steps in range(1, self.options.steps + 1):  # noqa: B007
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
    plain, count = channel.SealedChannel.receive_into, 0

    def counted(self: channel.SealedChannel, *arguments: Any) -> None:
        nonlocal count
        count += len(arguments[0]) > 10_000
        if count > int(where.partition(":")[2]):
            os.kill(os.getpid(), signal.SIGKILL)
        plain(self, *arguments)

    if where and number >= int(where.partition(":")[0]):
        channel.SealedChannel.receive_into = counted  # type: ignore[method-assign]
    try:
        yield
    finally:
        channel.SealedChannel.receive_into = plain  # type: ignore[method-assign]


def parser() -> argparse.ArgumentParser:
    words = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    texts = {"replica": "", "point": "", "secret": "", "model": "m", "load": "", "die": "", "rate": "100mbit"}
    numbers = {"bytes": 1_000_000, "wires": 2, "steps": 10, "least": 0, "journal": 4, "kills": 30}
    seconds = {"step-s": 0.1, "call-s": 0.5, "patience-s": 5.0, "silence-s": 2.0, "give-up-s": 120.0}
    for name, default in {**texts, **numbers, **seconds}.items():
        words.add_argument(f"--{name}", type=type(default), default=default)
    return words


class Site:
    """A namespace with one program, whose lines of JSON are kept."""

    def __init__(self, lab: Lab, index: int) -> None:
        self.lab, self.index, self.node = lab, index, lab.members[index + 1]
        self.address = lab.address(index)
        self.said: list[dict[str, Any]] = []

    def start(self, *words: str) -> None:
        environ = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", **SOCKETS}
        self.process = self.node.start([sys.executable, "-m", *words], environ)
        threading.Thread(target=self._read, args=(self.process,), daemon=True).start()

    def _read(self, process: subprocess.Popen) -> None:
        for line in process.stdout:
            self.said.append(json.loads(line) if line.startswith("{") else {"event": "says", "words": line})

    def signal(self, name: str) -> None:
        subprocess.run([*self.node.inside, "sh", "-c", f"kill -{name} -1"], check=False)
        if name == "CONT":
            self.process.send_signal(signal.SIGCONT)  # nsenter stops itself with its child

    def link(self, way: str) -> None:
        """Cut the link, or bring it back: up, down."""
        self.lab.members[0].call(f"ip link set port{self.index} {way}")

    def met(self, members: str, since: float) -> dict[str, Any]:
        """Wait for the first meeting of just these that ends after ``since``."""
        deadline = time.time() + 120
        while time.time() < deadline:
            for line in list(self.said):
                if line["event"] == "met" and line["at"] > since and line["names"] == [*members]:
                    return line
            time.sleep(0.02)
        raise RuntimeError(f"no meeting of {members}: {self.said[-5:]}")


class Stage:
    """The meeting point and three launches of two ranks in a lab."""

    def __init__(self, lab: Lab, options: argparse.Namespace, folder: Path) -> None:
        self.options, self.secret = options, folder / "secret"
        self.point = Site(lab, 0)
        self.sites = {name: Site(lab, index) for index, name in enumerate("abc", 1)}
        self.meet()
        for name in self.sites:
            self.launch(name)
        self.sites["a"].met("abc", 0)

    def meet(self) -> None:
        self.point.start("megazero", "meet", "--port", "29600", "--secret-file", f"{self.secret}")

    def launch(self, name: str, *flags: str) -> None:
        site = self.sites[name]
        site.start(*TWO_RANKS.split(), *self.program(name), *flags)

    def program(self, name: str) -> list[str]:
        own = {key: getattr(self.options, key) for key in ("bytes", "steps", "step_s", "silence_s", "call_s")}
        words = [word for key, value in own.items() for word in (f"--{key.replace('_', '-')}", f"{value}")]
        program = f"-m benchmarks.links.meetings --replica {name} --point {self.point.address}:29600"
        return [*program.split(), "--secret", f"{self.secret}", *words]

    def usual(self) -> float:
        """Return the median seconds of a meeting of all, from sitting down to the new anchor."""
        met = [line for site in self.sites.values() for line in site.said if line["event"] == "met"]
        return statistics.median(line["seconds"] for line in met if len(line["names"]) == 3)

    def lost(self, victim: str, moment: float) -> float:
        """Return the seconds that the others lost: of their first meeting without the victim, above a usual one."""
        others = "abc".replace(victim, "")
        return max(self.sites[name].met(others, moment)["seconds"] for name in others) - self.usual()

    def back(self, since: float) -> float:
        """Wait until all three have met again. Returns the seconds since."""
        return max(site.met("abc", since)["at"] for site in self.sites.values()) - since

    def in_a_meeting(self, victim: str) -> float:
        """Wait until the victim sits, and a random part of a meeting. Returns the time."""
        said = self.sites[victim].said
        before = len(said)
        while not any(line["event"] == "sits" for line in said[before:]):
            time.sleep(0.001)
        time.sleep(random.random() * self.usual())
        return time.time()

    def kill(self) -> tuple[float, float]:
        victim = random.choice("abc")
        moment = self.in_a_meeting(victim)
        self.sites[victim].signal("KILL")
        lost, again = self.lost(victim, moment), time.time()
        self.launch(victim)
        return lost, self.back(again)

    def freeze(self, seconds: float = 20.0) -> tuple[float, float]:
        moment = self.in_a_meeting("b")
        self.sites["b"].signal("STOP")
        lost = self.lost("b", moment)
        time.sleep(max(0.0, moment + seconds - time.time()))
        again = time.time()
        self.sites["b"].signal("CONT")
        return lost, self.back(again)

    def cut(self, seconds: float = 15.0) -> tuple[float, float]:
        moment = self.in_a_meeting("c")
        self.sites["c"].link("down")
        lost = self.lost("c", moment)
        time.sleep(max(0.0, moment + seconds - time.time()))
        since = [line for line in self.sites["c"].said if line["event"] == "met" and line["at"] > moment]
        alone = [line for line in since if line["names"] == ["c"]]
        again = time.time()
        self.sites["c"].link("up")
        assert not alone, "a fork"
        return lost, self.back(again)

    def point_lost(self, seconds: float = 5.0) -> tuple[float, float]:
        self.point.signal("KILL")
        time.sleep(seconds)
        again = time.time()
        self.meet()
        met = [site.met("abc", again) for site in self.sites.values()]
        return max(line["seconds"] for line in met) - self.usual(), max(line["at"] for line in met) - again

    def faults(self, kills: int) -> list[Fault]:
        return [
            ("SIGKILL in a meeting", self.kill, kills),
            ("SIGSTOP for 20 s, in a meeting", self.freeze, 3),
            ("link cut for 15 s, in a meeting", self.cut, 3),
            ("meeting point killed, started anew after 5 s", self.point_lost, 3),
        ]

    def check_bits(self) -> int:
        """Return in how many meetings anchors were compared. Raises AssertionError if any differ."""
        hashes: dict[int, set[str]] = {}
        for site in self.sites.values():
            for line in site.said:
                if "hash" in line:
                    hashes.setdefault(line["number"], set()).add(line["hash"])
        assert all(len(found) == 1 for found in hashes.values()), hashes
        return len(hashes)


def measure(stage: Stage, kills: int) -> None:
    """Print a row for each kind of fault."""
    print("| | others lose, s | it is back after, s |\n|---|---|---|")
    for name, event, times in stage.faults(kills):
        seconds = []
        for _ in range(times):
            seconds.append(event())
            print(name, *seconds[-1], stage.check_bits(), file=sys.stderr, flush=True)
        cells = (
            f"{statistics.median(each):.2f} ({min(each):.2f} to {max(each):.2f})"
            for each in zip(*seconds, strict=True)
        )
        print(f"| {name}, {times} times | {' | '.join(cells)} |", flush=True)
    print(
        f"a usual meeting takes {stage.usual():.2f} s; anchors had the same bits in {stage.check_bits()} meetings"
    )


def main() -> int:
    options = parser().parse_args()
    if options.replica:
        try:
            BareLaunch(options).train()
        except (Refused, RoomLost) as error:
            told = {"at": time.time(), "event": type(error).__name__, "why": f"{error}"}
            print(json.dumps(told), flush=True)
            os._exit(3)
    with Lab(4, options.rate) as lab, tempfile.TemporaryDirectory() as folder:
        print(f"{options.rate}, {2 * options.bytes:,} bytes a launch")
        measure(Stage(lab, options, Path(folder)), options.kills)
    return 0


if __name__ == "__main__":
    sys.exit(main())
