"""A run under fire: ranks killed and stopped, preemptions, node losses, requeues, at random times, on a real SLURM.

    python -m tests.slurm.soak --minutes 20 --seed 1 --out soak.jsonl      # as root; slurm-wlm and munge installed
    python -m tests.slurm.soak --minutes 30 --seed 1 --watch --out soak.jsonl

It ends with 0 if the job came to its end by itself, and its curve is that of an undisturbed run, bit by bit. --watch
adds what a job does not come back from by itself, each repaired when ``tools/status.py --alert`` has told of it, and
counts the alerts that are missing and those that came although all was well.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests import ROOT
from tests.slurm.cluster import OVER, Cluster, until
from tests.slurm.jobs import curve, iterations, log, nodes_of, submit, words

ITERATIONS, SAVE_INTERVAL, SLOWLY = 1400, 25, 0.5  # the last in seconds per iteration
ACT_S = 120.0  # that SLURM has to act, and a start: both take some 30 s here, where nodes share 2 cores
PAUSE = (3.0, 45.0)  # seconds of a running job before the next thing happens


class Soak:
    """One job on 2 of the cluster's 4 nodes, a rank on each, and what happens to it."""

    def __init__(self, slurm: Cluster, folder: Path, seed: int) -> None:
        self.slurm, self.run, self.random = slurm, folder / "run", random.Random(seed)
        self.hands = 0  # how often somebody had to submit the job again
        self.watcher: Watcher | None = None
        self.number = self.submit()

    def submit(self, **flags: Any) -> int:
        environ = {"SLOWLY": str(SLOWLY), "MOST_RESTARTS": "20"}
        flags = {"distributed_timeout_minutes": 0.5, **flags}
        return start(self.slurm, self.run, environ, "--partition=graceful", **flags)

    def state(self) -> str:
        return self.slurm.job(self.number)["JobState"]

    def happen(self) -> str:
        """Do one thing to the job. Returns what."""
        things: list[Callable[[list[int]], str]] = [
            self._kill, self._kill_all, self._stop, self._lose, self._preempt, self._signal, self._requeue
        ]  # fmt: skip
        if self.watcher is not None:
            things += [self._hold, self._freeze, self._end, self._cancel, self._mistake]
        try:
            return self.random.choice(things)(nodes_of(self.slurm, self.number))
        except RuntimeError as error:  # of SLURM: the job has just lost its nodes by itself
            return f"missed: {error}"

    def _inside(self, node: int, *command: str) -> None:
        subprocess.run([*self.slurm.lab.members[node + 1].inside, *command], check=False)

    def _kill(self, nodes: list[int]) -> str:
        which = self.random.randrange(2)
        self._inside(nodes[which], "pkill", "-KILL", "-f", "pausing.py")
        return f"rank {which} killed"

    def _kill_all(self, nodes: list[int]) -> str:
        for node in nodes:
            self._inside(node, "pkill", "-KILL", "-f", "pausing.py")
        return "all ranks killed"

    def _stop(self, nodes: list[int]) -> str:
        which = self.random.randrange(2)
        self._inside(nodes[which], "pkill", "-STOP", "-f", "pausing.py")
        return f"rank {which} stopped"

    def _lose(self, nodes: list[int]) -> str:
        which = self.random.randrange(2)
        self.slurm.lose(nodes[which])
        time.sleep(self.random.uniform(0, 20))  # up to twice as long as SLURM waits for a node
        self.slurm.bring_back(nodes[which])
        return f"node of rank {which} lost"

    def _preempt(self, nodes: list[int]) -> str:
        self.slurm.preempt(self.number, self.run)
        return "preempted"

    def _signal(self, nodes: list[int]) -> str:
        self.slurm.call("scancel", "--signal=USR1", str(self.number))
        return "told to stop"

    def _requeue(self, nodes: list[int]) -> str:
        self.slurm.call("scontrol", "requeue", str(self.number))
        return "requeued"

    # -- what a job does not come back from -----------------------------------------------------------------

    def _hold(self, nodes: list[int]) -> str:
        self.slurm.call("scontrol", "requeuehold", str(self.number))
        self._await("held")
        self.slurm.call("scontrol", "release", str(self.number))
        return "held"

    def _freeze(self, nodes: list[int]) -> str:
        every = range(len(self.slurm.lab.members) - 1)

        def freeze() -> (
            None
        ):  # those, too, that SLURM starts anywhere because it had just lost the ones before
            for node in every:
                self._inside(node, "pkill", "-STOP", "-f", "pausing.py")

        def thaw() -> None:
            at = iterations(self.run)
            for node in every:
                self._inside(node, "pkill", "-CONT", "-f", "pausing.py")
            # Until then the iteration in which they were frozen still lasts, and is rightly said to hang.
            until(
                lambda: iterations(self.run) > at or self.state() != "RUNNING",
                300,
                lambda: "the job did not go on",
            )

        self._await(
            "silent", "hanging", meanwhile=freeze, cure=thaw
        )  # the second, of ranks that have not begun
        return "all ranks frozen"

    def _end(self, nodes: list[int]) -> str:
        for node in nodes:
            self._inside(node, "pkill", "-KILL", "-f", "slurm_script|srun|pausing.py")
        self._await("killed")
        self.number = self.submit()
        return "script and ranks killed"

    def _cancel(self, nodes: list[int]) -> str:
        self.slurm.call("scancel", str(self.number))
        self.slurm.wait(self.number)
        time.sleep(20)
        self.number = self.submit()
        return "cancelled"

    def _mistake(self, nodes: list[int]) -> str:
        self.slurm.call("scancel", str(self.number))
        self.slurm.wait(self.number)
        self.number = self.submit(lr=-1)
        self._await("failed")
        self.number = self.submit()
        return "a mistake in the flags"

    def _await(
        self,
        *states: str,
        meanwhile: Callable[[], None] = lambda: None,
        cure: Callable[[], None] = lambda: None,
    ) -> None:
        """Wait for an alert of one of ``states``, calling ``meanwhile`` all the time, then cure what it tells of."""
        assert self.watcher is not None
        watcher = self.watcher

        def told() -> bool:
            meanwhile()
            return bool({*states} & {*watcher.alerts[watcher.seen :]})

        watcher.expected = states
        try:
            until(told, 300, lambda: f"no alert of {states}")
        except TimeoutError as error:
            watcher.problems.append(f"missed: {error}")
        cure()
        watcher.seen, watcher.expected = len(watcher.alerts), ()


class Watcher(threading.Thread):
    """Runs tools/status.py every few seconds, as cron would. Alerts that are not ``expected`` are problems."""

    def __init__(self, it: Soak, say: Callable[[dict], None]) -> None:
        super().__init__(daemon=True)
        self.it, self.say, self.file = it, say, it.run.parent / "alerts"
        self.alerts: list[str] = []
        self.seen, self.looks, self.problems = 0, 0, list[str]()
        self.expected: tuple[str, ...] = ()
        self.states = Counter[str]()
        self.over = threading.Event()

    def run(self) -> None:
        main = f"from megazero.ops import status; status.ACT_S = status.START_S = {ACT_S}\n"
        main += "import sys; from megazero.cli.status import main; exit(main(sys.argv[1:]))"
        program = [sys.executable, "-c", main, str(self.it.run / "logs"), "--no-chart"]
        command = f'echo "$MEGAZERO_STATE: $MEGAZERO_WHY" >> {self.file}'
        while not self.over.wait(3):
            inside = [*self.it.slurm.lab.members[0].inside, "env", f"--chdir={ROOT}", f"PYTHONPATH={ROOT}"]
            words = [*inside, *program, "--job", str(self.it.number), "--alert", command]
            environ = {**os.environ, **self.it.slurm.environ}
            expected = self.expected
            done = subprocess.run(words, env=environ, capture_output=True, text=True)
            self.looks += 1
            state = next((line for line in done.stdout.splitlines() if line.startswith("state")), done.stderr)
            self.states[state.removeprefix("state").strip().partition(":")[0]] += 1
            told = self.file.read_text().splitlines() if self.file.exists() else []
            for line in told[len(self.alerts) :]:
                self.alerts.append(line.partition(":")[0])
                self.say({"alert": line, "expected": expected or self.expected})
                if self.alerts[-1] not in (*expected, *self.expected):
                    self.problems.append(f"false: {line}")


def start(slurm: Cluster, run: Path, environ: dict[str, str], *options: str, **flags: Any) -> int:
    """Submit the job. ``run``'s folder has the program that stands for python."""
    flags = {"train_iters": ITERATIONS, "lr_decay_iters": ITERATIONS, "save_interval": SAVE_INTERVAL, **flags}
    path = {"PATH": f"{run.parent}:{Path(sys.executable).parent}:{os.environ['PATH']}"}
    sizes = ("--ntasks-per-node=1", "--time=2:00:00")
    return submit(
        slurm, run, *sizes, *options, flags=words(**flags, save_keep_last=3), environ={**path, **environ}
    )


def soak(
    slurm: Cluster, folder: Path, minutes: float, seed: int, say: Callable[[dict], None], watch: bool = False
) -> bool:
    """Run it. Returns whether the run came to its end by itself with the curve of an undisturbed one."""
    (folder / "python").write_text(f'#!/bin/sh\nexec {sys.executable} {ROOT}/tests/slurm/pausing.py "$@"\n')
    (folder / "python").chmod(0o755)
    slurm.wait(start(slurm, folder / "whole", {}), timeout=1800)
    whole = curve(folder / "whole")
    say({"undisturbed": len(whole)})
    began, seen, it = time.monotonic(), Counter[str](), Soak(slurm, folder, seed)
    if watch:
        it.watcher = Watcher(it, say)
        it.watcher.start()
    while True:
        state = it.state()
        if state == "RUNNING" and time.monotonic() - began < 60 * minutes:
            time.sleep(it.random.uniform(*PAUSE))
            if it.state() == "RUNNING":
                at = iterations(it.run)
                what = it.happen()
                seen[what] += 1
                say({"minute": round((time.monotonic() - began) / 60, 1), "lines": at, "what": what})
        elif state == "COMPLETED":
            break
        elif state in OVER:
            it.hands += 1
            say({"over": state, "log": log(it.run)[-3000:]})
            if it.hands > 3:
                return False
            it.number = it.submit()
        if time.monotonic() - began > 60 * minutes:
            (it.run / "hurry").touch()
        time.sleep(0.5)
    found = curve(it.run)
    same = found == whole
    say(
        {
            "minutes": round((time.monotonic() - began) / 60, 1),
            "happened": dict(seen),
            "restarts": int(slurm.job(it.number)["Restarts"]),
            "hands": it.hands,
            "iterations": len(found),
            "same bits": same,
        }
    )
    if it.watcher is not None:
        time.sleep(10)  # it sees the end
        watcher = it.watcher
        watcher.over.set()
        watcher.join()
        say({"looks": watcher.looks, "states": dict(watcher.states), "alerts": dict(Counter(watcher.alerts))})
        say({"problems": watcher.problems})
        return same and it.hands == 0 and not watcher.problems
    return same and it.hands == 0


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="JSON lines of what happened")
    parser.add_argument("--watch", action="store_true", help="with alerts, and what needs a person")
    options = parser.parse_args()

    def say(line: dict) -> None:
        text = json.dumps(line)
        print(text, flush=True)
        if options.out is not None:
            with options.out.open("a") as file:
                file.write(text + "\n")

    with tempfile.TemporaryDirectory() as folder, Cluster(Path(folder) / "slurm", nodes=4, grace=30) as slurm:
        jobs = Path(folder) / "jobs"
        jobs.mkdir()
        return 0 if soak(slurm, jobs, options.minutes, options.seed, say, options.watch) else 1


if __name__ == "__main__":
    sys.exit(main())
