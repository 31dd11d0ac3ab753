"""The lease on a folder: its rule, and thousands of interleavings of simulated starts on a simulated file system."""

from __future__ import annotations

import errno
import os
import random
import shutil
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from megazero.config import make_config
from megazero.mesh.launch import Launch
from megazero.ops import lease as module
from megazero.ops.lease import (
    BEAT_S,
    LOOK_S,
    NOBODY,
    NOTICE_S,
    SIZE,
    FolderInUse,
    Lease,
    Leaseholder,
    Place,
    read_lease,
)
from tests.messages import names, refused
from tests.sizes import SMALL

SILENT_S = module.SILENT_S
FOLDER = Path("/save")
DELAY_S = 0.3  # the longest that a running process takes between two operations
LISTING_S = 30.0  # for which NFS may show a process an old listing


class Gone(BaseException):
    """The process was killed, or the run ended because it lost its lease."""


@dataclass
class Process:
    """A simulated process: threads that pass a baton. Its clock has an offset and a rate of its own."""

    name: str
    job: str
    host: str
    offset: float
    rate: float
    begins: float
    killed: float | None = None
    stopped_until: float = 0.0
    may_stop: bool = True
    outcome: str = ""
    decided: float = 0.0
    stopped_for: float = 0.0  # while it asked for the lease
    longest_stop: float = 0.0


@dataclass
class Thread:
    process: Process
    wakes: float
    baton: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    ended: bool = False


class Simulation:
    """Runs threads one operation at a time, in an order that the seed decides."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.now = 0.0
        self.files: dict[Path, str] = {}
        self.threads: list[Thread] = []
        self.processes: list[Process] = []
        self.back = threading.Semaphore(0)
        self.local = threading.local()
        self.writes: list[str] = []
        self.listings: dict[str, tuple[float, list[int]]] = {}

    def start(self, process: Process, body: Callable[[], None], at: float) -> None:
        thread = Thread(process, at)

        def run() -> None:
            self.local.thread = thread
            thread.baton.acquire()
            try:
                if process.killed is None:
                    body()
            except Gone:
                pass
            thread.ended = True
            self.back.release()

        self.threads.append(thread)
        threading.Thread(target=run, daemon=True).start()

    @property
    def process(self) -> Process:
        return self.local.thread.process

    def pause(self, seconds: float | None = None) -> None:
        """End this operation; the next one comes after a delay, or after a sleep by the process's own clock."""
        thread = self.local.thread
        delay = self.random.uniform(0, DELAY_S) if self.random.random() < 0.2 else 0.001
        thread.wakes = self.now + delay + (seconds or 0.0) / thread.process.rate
        self.back.release()
        thread.baton.acquire()
        if thread.process.killed is not None:
            raise Gone

    def run(self, faults: list[tuple[float, str, Process, float]]) -> None:
        faults = sorted(faults, key=lambda fault: fault[0])
        while any(not thread.ended for thread in self.threads):
            ready = [
                (max(t.wakes, t.process.stopped_until), i) for i, t in enumerate(self.threads) if not t.ended
            ]
            at = min(ready)[0]
            if faults and faults[0][0] <= at:
                self._strike(*faults.pop(0))
                continue
            self.now = max(self.now, at)
            chosen = self.random.choice([i for when, i in ready if when <= self.now])
            self.threads[chosen].baton.release()
            self.back.acquire()

    def _strike(self, at: float, kind: str, process: Process, seconds: float) -> None:
        self.now = max(self.now, at)
        if not process.may_stop and kind == "stop":
            return
        if kind == "stop":
            process.stopped_until = self.now + seconds
            process.longest_stop = max(process.longest_stop, seconds)
            if not process.outcome:
                process.stopped_for += seconds
        elif process.killed is None:
            process.killed = self.now
            for thread in self.threads:  # they end when they get the baton
                if thread.process is process:
                    thread.wakes = min(thread.wakes, self.now)


class Disk(module.Files):
    """Each call is one atomic operation. A listing may be as old as LISTING_S, unless the process wrote since."""

    def __init__(self, world: Simulation) -> None:
        self.world = world

    def is_there(self, folder: Path) -> bool:
        return True

    def numbers(self, folder: Path) -> list[int]:
        self.world.pause()
        world, name = self.world, self.world.process.name
        taken, listing = world.listings.get(name, (-LISTING_S, []))
        if world.now - taken >= LISTING_S or world.random.random() < 0.7:
            listing = [int(path.suffix[1:]) for path in world.files]
            world.listings[name] = (world.now, listing)
        return listing

    def create(self, path: Path, text: str) -> bool:
        self.world.pause()
        self.world.listings.pop(self.world.process.name, None)
        if path in self.world.files:
            return False
        self.world.files[path] = ""
        self.world.pause()
        if path in self.world.files:
            self.world.files[path] = text
        return True

    def read(self, path: Path) -> str | None:
        self.world.pause()
        return self.world.files.get(path)

    def write(self, path: Path, text: str) -> None:
        self.world.pause()
        if path not in self.world.files:
            raise FileNotFoundError
        self.world.files[path] = text

    def remove(self, path: Path) -> None:
        self.world.pause()
        self.world.listings.pop(self.world.process.name, None)
        self.world.files.pop(path, None)


def start(world: Simulation, process: Process, holder: Leaseholder, iterations: int, leaves: bool) -> None:
    """Start a run that takes the lease, writes a line per iteration, and ends, or hangs on until it is killed."""

    def clock() -> float:
        return process.offset + world.now * process.rate

    lease = Lease((Place(FOLDER, "--save"),), holder, files=Disk(world), clock=clock, sleep=world.pause)

    def lose(text: str) -> None:
        process.outcome, process.killed = "lost", world.now
        raise Gone

    def renew() -> None:
        while not lease._ended.is_set():
            world.pause(BEAT_S)
            if not lease._ended.is_set():
                lease.beat()

    class Renewal:
        def start(self) -> None:
            world.start(process, renew, world.now)

        def is_alive(self) -> bool:
            return False

    def body() -> None:
        try:
            lease.take()
        except FolderInUse as error:
            process.outcome, process.decided = f"refused: {error}", world.now
            return
        process.outcome, process.decided = "holds", world.now
        for _ in range(iterations):
            process.may_stop = False  # between a look and its write: stated as what remains
            lease.check(f"{FOLDER}")
            world.pause()
            world.writes.append(process.name)
            process.may_stop = True
            world.pause(world.random.choice([0.2, 1.0, 7.0]))
        if leaves:
            lease.release()
            process.outcome = "released"
        else:
            process.outcome, process.killed = "killed", world.now

    lease.lost = lose
    lease._thread = Renewal()  # type: ignore[assignment]
    world.start(process, body, process.begins)


def trial(seed: int) -> Simulation:
    """Two to four starts, of two jobs on two hosts, with kills, stops of up to 5 minutes and clocks that differ."""
    world = Simulation(seed)
    rng = world.random
    faults: list[tuple[float, str, Process, float]] = []
    for number in range(1, rng.randint(3, 5)):
        host, job = rng.choice(["a", "b", "c"]), rng.choice(["job 1", "job 2", ""])
        earlier = [p for p in world.processes if job and p.name.startswith(job)]
        begins = rng.choice([0.0, rng.uniform(0, 3), rng.uniform(0, 200)])
        if earlier:  # a job is started again when it has ended; its node may be cut off and still write
            begins = max(begins, *(p.begins for p in earlier)) + rng.uniform(1, 100)
        process = Process(
            f"{job}/{number}", job, host, rng.uniform(-1e6, 1e6), rng.uniform(0.99, 1.01), begins
        )
        world.processes.append(process)
        holder = Leaseholder(f"{number}", job, host, number, "then", run=job, restarts=len(earlier))
        start(world, process, holder, rng.choice([0, 3, 40]), rng.random() < 0.6)
        for _ in range(rng.choice([0, 1, 1, 2])):
            kind = rng.choice(["stop", "stop", "kill"])
            faults.append((rng.uniform(0, 300), kind, process, rng.choice([1, 30, 70, 300])))
    world.run(faults)
    return world


def broken(world: Simulation) -> Iterator[str]:
    """What must never be, and is."""
    order = [name for at, name in enumerate(world.writes) if at == 0 or world.writes[at - 1] != name]
    if len(set(order)) < len(order):
        yield f"two writers at once: {order}"
    dead = sum(each.killed is not None or each.outcome == "" for each in world.processes)
    for each in world.processes:
        waited = each.decided - each.begins - each.stopped_for
        if each.decided and waited > (SILENT_S / 0.99 + NOTICE_S + BEAT_S + LISTING_S + 5) * max(1, dead):
            yield f"{each.name} waited {waited:.0f} s, {dead} others died"
        again = any(p.begins > each.begins and p.job == each.job != "" for p in world.processes)
        if each.outcome == "lost" and each.longest_stop < SILENT_S - BEAT_S - LISTING_S / 10 and not again:
            yield f"{each.name} lost its lease, though it lived"
        if each.killed is None and not each.outcome:
            yield f"{each.name} never ended"
        if each.outcome.startswith("refused"):
            by = next(
                p for p in world.processes if f"process {world.processes.index(p) + 1})" in each.outcome
            )
            # It saw that lease change after it had begun, so its holder lived then.
            if by.killed is not None and by.killed < each.begins and by.outcome != "lost":
                yield f"{each.name} was refused for {by.name}, which was dead"


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("seeds", [range(400), pytest.param(range(400, 10_000), marks=pytest.mark.slow)])
def test_there_are_never_two_writers_and_nobody_waits_longer_than_stated(seeds) -> None:
    worlds = {seed: trial(seed) for seed in seeds}
    assert {seed: found for seed, world in worlds.items() if (found := list(broken(world)))} == {}
    outcomes = [each.outcome.split(":")[0] for world in worlds.values() for each in world.processes]
    for outcome in ("refused", "released", "lost", "killed"):  # the trials do what they are for
        assert outcomes.count(outcome) > len(seeds) / 20, (outcome, outcomes.count(outcome))


# -- the rule, case by case, on a real folder ------------------------------------------------------------------


def holder(identity: str = "", **changes: object) -> Leaseholder:
    return replace(Leaseholder.of(Launch(node="gpu01", identity=identity)), **changes)


def lease(
    folder: Path, own: Leaseholder, during: Callable[[float], None] = lambda now: None
) -> tuple[Lease, list[float]]:
    """A lease on ``folder``, and its clock, which sleeps move on. during: called in every sleep."""
    clock = [random.uniform(0, 1e6)]
    began = clock[0]

    def sleep(seconds: float) -> None:
        clock[0] += seconds
        during(clock[0] - began)

    return Lease((Place(folder, "--save"),), own, clock=lambda: clock[0], sleep=sleep), clock


# what the folder has, who asks, and for how long that waits
CASES = {
    "none": (None, holder(), 0.0),
    "released": (holder(released="2026"), holder(), 0.0),
    "a requeue of its job": (holder(identity="c 7"), holder(identity="c 7", restarts=1), NOTICE_S),
    "another step of its job": (holder(identity="c 7"), holder(identity="c 7"), SILENT_S + NOTICE_S),
    "another job that was requeued": (
        holder(identity="c 7"), holder(identity="d 7", restarts=1), SILENT_S + NOTICE_S,
    ),
    "silent, on this host, too": (holder(), holder(), SILENT_S + NOTICE_S),
    "nothing yet": ("", holder(), SILENT_S + NOTICE_S),  # it died between two calls
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_a_lease_is_taken_at_once_or_when_its_holder_was_silent(case, tmp_path) -> None:
    before, own, waits = CASES[case]
    if before is not None:
        (tmp_path / "lease.4").write_text(before if isinstance(before, str) else before.write())
    notes: list[str] = []
    taken, clock = lease(tmp_path, own)
    began = clock[0]
    taken.take(notes.append)
    assert clock[0] - began == pytest.approx(waits, abs=LOOK_S)
    assert len(notes) == (waits > SILENT_S)
    assert [path.name for path in tmp_path.iterdir()] == ["lease.1" if before is None else "lease.5"]
    file = next(tmp_path.iterdir())
    assert file.stat().st_size == SIZE and read_lease(tmp_path) == own and taken.taker(f"{tmp_path}") is None
    taken.release()
    found = read_lease(tmp_path)
    assert found is not None and found.released and found.owner == own.owner


def beats(path: Path, text: str) -> Callable[[float], None]:
    """What another process does meanwhile: it is stopped for 40 s, and then writes its lease."""

    def write(now: float) -> None:
        path.write_text(text % (now > 40))

    return write


@pytest.mark.parametrize(
    "text, words",
    [
        # Its clock is a year behind.
        (
            replace(holder(job="4711", host="gpu07", pid=12, started="2025-05-04"), owner="x", beat=-7)
            .write()
            .replace("-7", "%d"),
            ("job 4711 on gpu07", "process 12", "2025-05-04"),
        ),
        ('{"owner": "x", "later": 1, "beat": %d}', ("cannot be read",)),  # another release wrote it
        ("no JSON %d", ("cannot be read",)),
    ],
)
def test_what_changes_is_alive_and_is_named(text: str, words: tuple[str, ...], tmp_path) -> None:
    path = tmp_path / "lease.9"
    path.write_text(text % 0)
    asking, clock = lease(tmp_path, holder(), beats(path, text))
    began = clock[0]
    with refused("--save", *words, by=FolderInUse):
        asking.take()
    assert 40 <= clock[0] - began < 41 and [path.name for path in tmp_path.iterdir()] == ["lease.9"]


def test_of_two_folders_none_is_kept_when_one_is_in_use(tmp_path) -> None:
    (tmp_path / "logs").mkdir()
    path, text = tmp_path / "logs" / "lease.1", '{"owner": "x", "beat": %d}'
    path.write_text(text % 0)
    asking, _ = lease(tmp_path, holder(), beats(path, text))
    asking.places = (*asking.places, Place(tmp_path / "logs", "--log-dir"))
    with refused("--log-dir", by=FolderInUse):
        asking.take()
    free = read_lease(tmp_path)
    assert free is not None and free.released and asking.numbers == {}


def test_one_wait_is_enough_for_the_folders_of_one_dead_run(tmp_path) -> None:
    dead, folders = holder(), [tmp_path / name for name in ("save", "copy", "logs")]
    for folder in folders:
        folder.mkdir()
        (folder / "lease.1").write_text(dead.write())
    asking, clock = lease(tmp_path, holder())
    asking.places, began, notes = tuple(Place(folder, "--save") for folder in folders), clock[0], list[str]()
    asking.take(notes.append)
    assert 0 <= clock[0] - began - SILENT_S - NOTICE_S <= LOOK_S
    assert len(asking.numbers) == 3 and len(notes) == 1
    asking.release()


def test_who_learns_from_its_own_beat_that_one_folder_is_lost_frees_the_others(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(module, "BEAT_S", 0.01)
    mine = Lease((Place(tmp_path / "a", "--save"), Place(tmp_path / "b", "--log-dir")), holder())
    mine.lost = lambda text: mine.release()
    mine.take()
    (tmp_path / "a" / "lease.2").write_text(holder().write())
    (tmp_path / "a" / "lease.1").unlink()
    mine._thread.join(10)
    free, taken = read_lease(tmp_path / "b"), read_lease(tmp_path / "a")
    assert free is not None and free.released and taken is not None and not taken.released


def test_a_lease_that_was_deleted_by_hand_is_written_again(tmp_path) -> None:
    mine, _ = lease(tmp_path, holder())
    mine.take()
    (tmp_path / "lease.1").unlink()
    mine.check(f"{tmp_path}", fresh=True)
    mine.beat()
    assert (found := read_lease(tmp_path)) is not None and found.beat == 1
    other, _ = lease(tmp_path, holder(), lambda now: mine.beat())
    with pytest.raises(FolderInUse):
        other.take()
    (tmp_path / "lease.2").write_text(replace(other.holder, host="gpu02").write())
    (tmp_path / "lease.1").unlink()
    with refused("gpu02", by=FolderInUse):
        mine.check(f"{tmp_path}", fresh=True)
    mine.release()
    assert (found := read_lease(tmp_path)) is not None and not found.released


def test_a_run_whose_save_was_moved_ends_and_makes_no_new_one(tmp_path) -> None:
    """A start that found an empty folder there would begin again."""
    save, logs = tmp_path / "run", tmp_path / "run" / "logs"
    mine = Lease((Place(save, "--save"), Place(logs, "--log-dir")), holder())
    mine.take()
    lost: list[str] = []
    mine.lost = lost.append
    shutil.rmtree(logs)
    mine.beat()
    assert lost == [] and mine.taker(f"{logs}") is NOBODY and not logs.exists()
    save.rename(tmp_path / "aside")
    mine.beat()
    (text,) = lost
    names(text, f"--save {save}", "moved or deleted")
    mine.release()
    assert [path.name for path in tmp_path.iterdir()] == ["aside"]


def test_a_folder_of_checkpoints_and_logs_has_the_rules_of_save(tmp_path) -> None:
    same = tmp_path / "run"
    mine = Lease.of(make_config({**SMALL, "save": f"{same}", "log_dir": f"{same}"}), Launch())
    assert mine.places == (Place(same, "--save"),)


def test_a_full_log_disk_takes_no_lease_and_ends_no_run(tmp_path, monkeypatch) -> None:
    for name in ("run", "logs"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "lease.1").write_text(holder(released="2026").write())

    class Full(module.Files):
        def create(self, path: Path, text: str) -> bool:
            if path.parent == tmp_path / "logs":
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return super().create(path, text)

    places = Place(tmp_path / "run", "--save"), Place(tmp_path / "logs", "--log-dir")
    mine = Lease(places, Leaseholder.of(Launch()))
    mine._files, notes = Full(), list[str]()
    mine.take(notes.append)
    (note,) = notes
    names(note, f"--log-dir {tmp_path}/logs", "no lease")
    for folder in ("run", "logs"):
        mine.check(f"{tmp_path}/{folder}", fresh=True)
    mine.release()
    found = read_lease(tmp_path / "run")
    assert found is not None and found.released and not mine._thread.is_alive()
