"""Make every call of a save fail, one after the other, and compare with the run whose storage worked.

    python -m tests.soak.storage_faults --out faults.jsonl

Calls on files below the folder of checkpoints (open, read, write, close, fsync, rename, mkdir, unlink, rmdir, stat,
opendir) are made to fail by a library that is loaded before libc (storage_faults.c, LD_PRELOAD; gcc compiles it), in
both ranks of a run and in the process that writes an asynchronous save.

A row is a run that saves after every iteration. In one without ``at``, one call of each save fails: every call of
rank 0, then every call of rank 1 (of the thousands of equal writes of a synchronous save, a sample). With ``at``
every call of a rank fails from that one of the third save on, until the run ends; then the same command goes on with
a storage that works. Losses, and the bytes of every tensor in every checkpoint, must be those of the run without
faults.
"""

from __future__ import annotations

import errno
import json
import mmap
import os
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

from benchmarks import harness
from megazero.checkpoint import saving, store
from megazero.log.exit_status import ExitStatus
from megazero.log.metrics import read_metrics
from megazero.train.state.progress import Progress
from megazero.train.state.saver import Saver
from tests.dist.runs import Processes

HANG, PARTIAL = -1, -2
KINDS = {
    **{name: getattr(errno, name) for name in ("ESTALE", "EROFS", "EACCES", "ENOSPC", "EDQUOT", "EIO")},
    **{"hang": HANG, "partial write": PARTIAL},
}
FOR_A_PERSON = ("EACCES", "ENOSPC", "EDQUOT")  # which end a run with 74, the others with 76
LIMIT_S = 1.2  # of an attempt that does not move (--distributed-timeout-minutes); a hang takes longer
HANG_MS, FOR_GOOD_MS = 3000, 30_000
ENDS = 50, 80  # of a save's calls, which are all tried; of those between, MIDDLE
MIDDLE = 20
FEW = 40  # of those that hang
STATE = struct.Struct("7i4096s")  # as in storage_faults.c
RUN = {"zero_preset": "zero3", "save_interval": 1, "save_keep_last": 2, "eval_iters": 0, "lr_warmup_iters": 0}
RUN |= {"distributed_timeout_minutes": LIMIT_S / 60, "lr_decay_style": "constant", "log_interval": 1000}
FOREVER = 1 << 30


def compiled(folder: Path) -> Path:
    """Return the library, compiled into ``folder``."""
    library = folder / "storage_faults.so"
    source = Path(__file__).with_suffix(".c")
    subprocess.run(["gcc", "-O1", "-shared", "-fPIC", "-o", library, source, "-ldl"], check=True)
    return library


def preload() -> None:
    """Start this program again with the library, which all its processes then have."""
    if "storage_faults" not in os.environ.get("LD_PRELOAD", ""):
        library = compiled(Path(tempfile.mkdtemp(prefix="faults-")))
        os.execve(sys.executable, sys.orig_argv, {**os.environ, "LD_PRELOAD": f"{library}"})


class Faults:
    """The faults of one process and those that it starts, on files below ``folder``."""

    def __init__(self, folder: str) -> None:
        with tempfile.NamedTemporaryFile(delete=False) as file:
            file.write(bytes(STATE.size))
            file.flush()
            self._state = mmap.mmap(file.fileno(), STATE.size)
        self._folder = folder.encode()
        os.environ["FAULTS_STATE"] = file.name

    def arm(self, kind: int, at: int = 0, left: int = 1, hang_ms: int = HANG_MS) -> None:
        """Let calls from number ``at`` on fail, ``left`` times."""
        self._state[:] = STATE.pack(1, at, left, kind, 0, 0, hang_ms, self._folder)

    def disarm(self) -> tuple[int, int]:
        """Return how many calls there were, and how many of them failed."""
        found = STATE.unpack(self._state[:])
        self._state[:4] = bytes(4)
        return found[4:6]


def inject(
    rank: int, kind: int, plan: Sequence[tuple[int, int]], at: int | None, folder: str, log: str
) -> None:
    """Make one call of each save fail in this rank, (rank, number) of ``plan``; with ``at`` all calls of the third
    save.

    Every rank logs how many calls each save had, and what the checkpoint holds.
    """
    saving.FIRST_PAUSE_S = 0.01
    faults, original, complete = Faults(folder), Saver.save, Saver._complete

    def save(self: Saver, progress: Progress) -> None:
        step = progress.iteration
        if at is not None:
            if step == 3 and rank == at % 2:
                faults.arm(kind, at, FOREVER, hang_ms=FOR_GOOD_MS)
        elif kind == PARTIAL:
            faults.arm(kind, left=FOREVER)
        else:
            victim, call = plan[step - 1] if step <= len(plan) else (rank, FOREVER)
            faults.arm(kind, call if victim == rank else FOREVER)
        original(self, progress)
        if at is None:
            self.wait()  # or the next save would take the place of one that waits to be tried again

    def done(self: Saver, path: Path) -> None:
        calls, hits = faults.disarm()
        files = store.verify(path).files
        held = {name: entry.crc32 for name, entry in files.items() if name.startswith(("__", "rank_"))}
        with open(f"{log}{rank}", "a") as file:
            file.write(json.dumps({"path": path.name, "calls": calls, "hits": hits, "held": held}) + "\n")
        complete(self, path)

    Saver.save, Saver._complete = save, done  # type: ignore[method-assign]


def run(
    values: Mapping[str, Any],
    folder: Path,
    kind: int = 0,
    plan: Sequence[tuple[int, int]] = (),
    at: int | None = None,
) -> list[int | None]:
    """Run two ranks in ``folder``, and return their statuses."""
    folder.mkdir(parents=True, exist_ok=True)
    place = {"save": f"{folder / 'save'}", "load": f"{folder / 'save'}", "log_dir": f"{folder / 'logs'}"}
    prepare = partial(inject, kind=kind, plan=plan, at=at, folder=place["save"], log=f"{folder / 'held'}")
    return Processes.start(2, {**RUN, **values, **place}, folder, prepare).statuses(900)


def saves(folder: Path, rank: int = 0) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / f"held{rank}").read_text().splitlines()]


def plan_of(counted: Path, few: int) -> list[tuple[int, int]]:
    """Return which call of which rank fails in each save, from a run that only counted them."""
    plan = list[tuple[int, int]]()
    for rank in (0, 1):
        count = max(each["calls"] for each in saves(counted, rank))
        calls = range(count)
        if count > sum(ENDS) + MIDDLE:
            between = range(ENDS[0], count - ENDS[1])
            middle = between[:: max(1, len(between) // MIDDLE)]
            calls = [*range(ENDS[0]), *middle, *range(count - ENDS[1], count)]
        plan += [(rank, call) for call in calls]
    return plan[:: max(1, len(plan) // few)] if few else plan


def losses(folder: Path) -> list[tuple[int, float]]:
    lines = read_metrics(folder / "logs")
    return [(line["iteration"], line["lm_loss"]) for line in lines if "lm_loss" in line]


def problems(folder: Path, reference: Path) -> Iterator[str]:
    """Yield what is not as in the run without faults."""
    ours, theirs = ({each["path"]: each["held"] for each in saves(place)} for place in (folder, reference))
    different = [name for name in ours if ours[name] != theirs.get(name)]
    if different:
        yield f"checkpoints that differ: {different}"
    if losses(folder) != losses(reference)[: len(losses(folder))]:
        yield "losses differ"


def row(
    name: str, behind: bool, at: int | None, counted: Path, reference: Path, folder: Path, few: int
) -> dict[str, Any]:
    """Run with faults of a kind, resume if they were for good, and judge both."""
    began, kind = time.monotonic(), KINDS[name]
    here, asked = folder / f"{name.replace(' ', '-')}-{behind}-{at}", at
    plan = plan_of(counted, few or FEW * (kind in (HANG, PARTIAL)))
    if at is not None:  # a save behind the training has fewer calls
        at = min(at, max(each["calls"] for each in saves(counted, at % 2)) - 1)
    iterations = 8 if at is not None else len(plan)
    values = {"train_iters": iterations, "async_save": behind}
    values |= {"save_retry_minutes": 5 if at is None else 0.02}
    statuses, wanted = run(values, here, kind, plan, at), ExitStatus.FINISHED
    wrong = list[str]()
    if at is not None:
        wanted = ExitStatus.STORAGE if name in FOR_A_PERSON else ExitStatus.RANK_LOST
    if set(statuses) != {wanted}:
        wrong.append(f"statuses {statuses} instead of {int(wanted)}")
    if at is not None and set(run(values, here)) != {0}:
        wrong.append("the resume failed")
    wrong += problems(here, reference)
    rows = saves(here)
    if at is None and len(rows) != iterations or rows[-1]["path"] != f"iter_{iterations:07d}":
        wrong.append(f"{len(rows)} checkpoints, the last is {rows[-1]['path']}")
    hits = sum(each["hits"] for rank in (0, 1) for each in saves(here, rank))
    return {
        **{"fault": name, "async_save": behind, "at": asked, "statuses": statuses, "problems": wrong},
        **{"hits": hits, "checkpoints": len(rows), "calls": max(each["calls"] for each in rows)},
        "seconds": round(time.monotonic() - began, 1),
    }


def main() -> int:
    options = harness.parser(
        __doc__,
        out=(Path, "file of results, a line of JSON each"),
        kinds=list(KINDS),
        at=([0, 5, 20, 41], "calls from which on all fail"),
        few=(0, "try a sample of so many calls (0: all)"),
    ).parse_args()
    folder, results = Path(tempfile.mkdtemp(prefix="faults-")), harness.Store(options.out)
    results.claim()
    done = {(each["fault"], each["async_save"], each["at"]) for each in results.records()}
    counted, reference, bad = [folder / "at-once", folder / "behind"], folder / "reference", 0
    for behind, place in enumerate(counted):
        run({"train_iters": 6, "async_save": bool(behind)}, place)
    run({"train_iters": max(8, *(len(plan_of(place, options.few)) for place in counted))}, reference)
    for name, at, behind in product(options.kinds, (None, *options.at), (False, True)):
        if (name, behind, at) in done or at is not None and KINDS[name] == PARTIAL:
            continue
        found = row(name, behind, at, counted[behind], reference, folder, options.few)
        results.append(found)
        bad += bool(found["problems"])
        print(json.dumps(found), flush=True)
    return int(bad > 0)


if __name__ == "__main__":
    preload()
    harness.start(main)
