"""Two or three runs on one folder, as processes: never two writers, and none waits longer than stated.

    python -m tests.soak.two_runs --trials 100 --seed 1 --out two_runs.jsonl

The processes take real leases on a real folder; the times of megazero/ops/lease.py are divided by --faster (20 by
default). Each process has a clock with its own offset and rate. They start up to a second apart. The owner is killed,
is stopped for up to two silences and continued, is requeued while it may still live, or ends by itself. Each writes
lines into one file and commits folders by renaming, after the check that a run makes. A trial is wrong if two
processes' lines or folders interleave, if a start waits longer than a silence, a notice and a beat, if a start is
refused in favour of a dead run, or if a living run loses its lease.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

from megazero.ops import lease as module
from megazero.ops.lease import FolderInUse, Lease, Leaseholder, Place

ROOT = Path(__file__).resolve().parents[2]
SLACK_S = 1.0  # for which a busy machine may hold up a process
SECONDS = ("BEAT_S", "SILENT_S", "LOOK_S", "FRESH_S", "NOTICE_S")


def run(
    folder: Path, name: str, job: str, restarts: int, faster: float, lines: int, offset: float, rate: float
) -> int:
    """Take the lease, write, and end. Returns 0, or 73 if the run may not write (any more)."""
    for each in SECONDS:
        setattr(module, each, getattr(module, each) / faster)
    at = f"{offset:+.0f} s"
    holder = Leaseholder(name, job, f"host of {name}", os.getpid(), at, run=job, restarts=restarts)
    events = (folder / f"{name}.events").open("a", buffering=1)  # noqa: SIM115

    def note(event: str) -> None:
        events.write(json.dumps([event, time.monotonic()]) + "\n")

    def lose(text: str) -> None:
        note("lost")
        os._exit(73)

    mine = Lease((Place(folder / "save", "--save"),), holder, clock=lambda: offset + rate * time.monotonic())
    mine.lost = lose
    note("asks")
    try:
        mine.take()
    except FolderInUse as error:
        note(f"refused: {error}")
        return 73
    note("holds")
    with (folder / "lines").open("ab", buffering=0) as file:
        for number in range(lines):
            mine.check(f"{folder}/save")
            file.write(f"{name}\n".encode())
            partial = folder / f".{name}.{number}"
            partial.mkdir()
            time.sleep(0.05)
            mine.check(f"{folder}/save", fresh=True)
            partial.rename(folder / f"iter_{time.monotonic_ns():020d}.{name}")
    mine.release()
    note("released")
    return 0


@dataclass
class Started:
    """A process of a trial, and what was done to it."""

    name: str
    job: str
    process: subprocess.Popen
    killed: float = 0.0
    stops: list[tuple[float, float]] = field(default_factory=list)

    def strike(self, kind: str, seconds: float) -> None:
        if self.process.poll() is not None:
            return
        self.process.send_signal(signal.SIGSTOP if kind == "stop" else signal.SIGKILL)
        if kind == "stop":
            began = time.monotonic()
            time.sleep(seconds)
            self.process.send_signal(signal.SIGCONT)
            self.stops.append((began, time.monotonic()))
        else:
            self.killed = time.monotonic()


def trial(number: int, seed: int, faster: float) -> dict[str, Any]:
    random = Random(f"{seed} {number}")
    silent = module.SILENT_S / faster
    what = ["nothing", "kill", "stop", "requeue", "stop", "kill"][number % 6]
    with tempfile.TemporaryDirectory() as temporary:
        folder, runs = Path(temporary), list[Started]()
        (folder / "save").mkdir()

        def begin(job: str, restarts: int = 0, lines: int = 0) -> None:
            name = f"{job}.{len(runs)}"
            values = (folder, name, job, restarts, faster, lines or random.choice([5, 40, 120]))
            skew = (random.uniform(-1e5, 1e5), random.uniform(0.99, 1.01))
            words = [f"{value}" for value in (*values, *skew)]
            command = [sys.executable, "-m", "tests.soak.two_runs", "run", *words]
            runs.append(Started(name, job, subprocess.Popen(command, cwd=ROOT)))

        begin("a", lines=80)
        time.sleep(random.choice([0.0, random.uniform(0, 1)]))
        begin("b")
        time.sleep(random.uniform(0.3, 2.5))
        if what in ("kill", "stop"):
            runs[0].strike(what, random.choice([0.2, 0.6, 1.3, 2.0]) * silent)
        elif what == "requeue":
            begin("a", restarts=1)
        if random.random() < 0.5:
            begin("c")
        for each in runs:
            each.process.wait(60)
        problems = list(wrong(folder, runs, faster))
        ends = Counter(events(folder, each.name)[-1][0].split(":")[0] for each in runs)
    return {"trial": number, "seed": seed, "what": what, "ends": dict(ends), "problems": problems}


def events(folder: Path, name: str) -> list[tuple[str, float]]:
    file = folder / f"{name}.events"
    rows = [tuple(json.loads(line)) for line in file.read_text().splitlines()] if file.exists() else []
    return rows or [("nothing", 0.0)]


def wrong(folder: Path, runs: list[Started], faster: float) -> list[str]:
    """Return what went wrong, in words."""
    found, waits = [], (module.SILENT_S / 0.99 + module.NOTICE_S + module.BEAT_S) / faster
    lines = (folder / "lines").read_text().split() if (folder / "lines").exists() else []
    for what, order in {
        "lines": lines,
        "folders": [path.name.split(".", 1)[1] for path in sorted(folder.glob("iter_*"))],
    }.items():
        writers = [name for at, name in enumerate(order) if at == 0 or order[at - 1] != name]
        if len(set(writers)) < len(writers):
            found.append(f"two writers of {what}: {writers}")
    for each in runs:
        seen = dict(events(folder, each.name))
        decided = next((at for event, at in seen.items() if event.startswith(("holds", "refused"))), 0.0)
        stopped = sum(end - begin for begin, end in each.stops)
        died = sum(bool(other.killed or other.stops) for other in runs)
        if decided and decided - seen["asks"] > waits * max(1, died) + SLACK_S + stopped:
            found.append(f"{each.name} waited {decided - seen['asks']:.1f} s")
        for event in seen:
            for other in runs:
                named = event.startswith("refused") and f"process {other.process.pid})" in event
                if named and 0 < other.killed < decided - SLACK_S:
                    found.append(f"{each.name} was refused for {other.name}, which was dead")
        again = any(other.job == each.job and other is not each for other in runs)
        longest = max((b - a for a, b in each.stops), default=0.0)
        if "lost" in seen and not again and longest < (module.SILENT_S - module.BEAT_S) / faster:
            found.append(f"{each.name} lost its lease, though it lived")
        if not each.killed and each.process.returncode not in (0, 73):
            found.append(f"{each.name} ended with {each.process.returncode}")
    return found


def main() -> int:
    if sys.argv[1:2] == ["run"]:
        folder, name, job, restarts, faster, lines, offset, rate = sys.argv[2:]
        return run(
            Path(folder), name, job, int(restarts), float(faster), int(lines), float(offset), float(rate)
        )
    from benchmarks import harness  # brings torch, which the runs do without
    from tests.soak.trials import run_trials

    options = harness.parser(
        __doc__,
        trials=100,
        seed=1,
        out=(Path, "file of results, a line of JSON each"),
        faster=(20.0, "by which the seconds of a lease are divided"),
    ).parse_args()
    store = harness.Store(options.out)
    store.claim()
    done = [row for row in store.records() if row["seed"] == options.seed]
    own = partial(trial, seed=options.seed, faster=options.faster)
    rows = run_trials(own, options.trials, store, done)
    ends = sum((Counter(row["ends"]) for row in rows), Counter[str]())
    bad = [row["trial"] for row in rows if row["problems"]]
    print(
        f"{len(rows)} trials, {dict(Counter(row['what'] for row in rows))}, runs that ended as {dict(ends)}; ",
        end="",
    )
    print(f"wrong: {bad or 'none'}")
    return int(bool(bad))


if __name__ == "__main__":
    sys.exit(main())
