"""Mistakes under start-up skew: whichever rank dies first, the run ends with the mistake's status and message.

    python -m tests.soak.start_skew --trials 200 --seed 1 --out skew.jsonl

A trial starts 2 to 12 ranks with one mistake, each rank after its own delay of 0 to 60 s, times --scale: a slow node
or a slow disk. The launcher here ends all ranks, even those that have not begun, with the first that fails, as srun
--kill-on-bad-exit does. The status is then what a batch script finds: the one in its folder, else that ranks were
killed. It must be the mistake's, and the log must have the mistake's message. Ranks are forked with torch loaded, and
run pretrain/pretrain_gpt.py.

Mistakes of one node are in a mount namespace of their own (as root; without, they are left out).
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import re
import runpy
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

from benchmarks import harness
from megazero.log.exit_status import END_FOLDER, STATUS_FILE, ExitStatus
from megazero.mesh.launch import rank_variables
from tests.dist.runs import free_port, write_data
from tests.sizes import TINY, words
from tests.soak.trials import run_trials

SKEW_S = 60.0
KILL_S = 1.0  # from SIGTERM to SIGKILL (SLURM's KillWait, shorter)
LIMIT_S = 120.0
PRELOADED = ["megazero.train.setup", "megazero.train.entry_point"]


@dataclass(frozen=True)
class Mistake:
    """changes: of the flags; TMP is the trial's folder. hidden: what one node does not see there. joined: whether it
    is found when all ranks have joined."""

    changes: Mapping[str, Any]
    message: str
    hidden: str = ""
    status: ExitStatus = ExitStatus.MISTAKE
    joined: bool = True


DATA = {"mock_data": False, "data_path": ["TMP/data/corpus"], "tokenizer_type": "NullTokenizer"}
MISTAKES = {
    "a flag's value": Mistake({"lr": -1}, r"--lr.*-1", joined=False),
    "an unknown flag": Mistake({"learning_rage": 1}, r"--learning-rage", joined=False),
    "the batch": Mistake(
        {"global_batch_size": 1, "micro_batch_size": 3}, r"--global-batch-size", joined=False
    ),
    "data": Mistake({**DATA, "data_path": ["TMP/nothing"]}, r"TMP/nothing"),
    "checkpoint": Mistake(
        {"load": "TMP/nothing", "exit_on_missing_checkpoint": True}, r"exit-on-missing-checkpoint|TMP/nothing"
    ),
    "data, on one node": Mistake(DATA, r"TMP/data/corpus", hidden="data"),
    "torch, on one node": Mistake(
        {}, r"No module named|ModuleNotFoundError", "torch", ExitStatus.UNEXPECTED, False
    ),
}


def rank(number: int, world: int, port: int, delay: float, folder: str, name: str) -> None:
    """Sleep, then run the program as one rank."""
    log = os.open(f"{folder}/log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    mistake = MISTAKES[name]
    os.environ.update(rank_variables(number, world, port), OMP_NUM_THREADS="1")
    os.environ[END_FOLDER] = f"{folder}/end"
    time.sleep(delay)
    if mistake.hidden and number >= world - max(1, world // 3):  # the last node
        if mistake.hidden == "torch":
            sys.modules["megazero.train.setup"] = None  # type: ignore[assignment]
        else:
            hide(f"{folder}/{mistake.hidden}")
    program = harness.ROOT / "pretrain" / "pretrain_gpt.py"
    sys.argv = [str(program), *flags(folder, mistake)]
    runpy.run_path(str(program), run_name="__main__")


def flags(folder: str, mistake: Mistake) -> list[str]:
    values = {
        **TINY,
        "train_iters": 6,
        "global_batch_size": 24,
        "log_dir": f"{folder}/logs",
        **mistake.changes,
    }
    return [word.replace("TMP", folder) for word in words(values)]


def hide(path: str) -> None:
    """Mount an empty folder over this one, for this process alone."""
    libc = ctypes.CDLL(None, use_errno=True)
    for call in (
        lambda: libc.unshare(0x00020000),  # CLONE_NEWNS
        lambda: libc.mount(b"none", b"/", None, 0x4000 | 0x40000, None),  # MS_REC | MS_PRIVATE
        lambda: libc.mount(b"none", path.encode(), b"tmpfs", 0, None),
    ):
        if call():
            raise OSError(ctypes.get_errno(), path)


def trial(number: int, seed: int, scale: float) -> dict[str, Any]:
    """Start the ranks of one trial, end them as srun does, and judge what they left."""
    random = Random(f"{seed} {number}")
    names = [name for name in MISTAKES if os.getuid() == 0 or MISTAKES[name].hidden in ("", "torch")]
    name, world = names[number % len(names)], random.choice([2, 3, 4, 6, 8, 12])
    slow = random.choice([0.0, 0.3, 1.0])  # of the ranks; the others come at once
    delays = [
        random.uniform(0, SKEW_S) if random.random() < slow else random.uniform(0, 1) for _ in range(world)
    ]
    if random.random() < 0.5:
        delays[0] = max(delays)  # the first rank comes last
    context = multiprocessing.get_context("forkserver")
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        os.mkdir(f"{folder}/end")
        (Path(folder) / "data").mkdir()
        write_data(Path(folder) / "data" / "corpus")
        port = free_port()
        ranks = [
            context.Process(target=rank, args=(each, world, port, delay * scale, folder, name), daemon=True)
            for each, delay in enumerate(delays)
        ]
        for process in ranks:
            process.start()
        codes = end_as_srun(ranks)
        text = (Path(folder) / "log").read_text(errors="replace")
        places = (Path(folder) / "end" / STATUS_FILE, Path(folder) / "logs" / STATUS_FILE)
        said = next(
            (int(place.read_text()) for place in places if place.exists() and place.stat().st_size), None
        )
        message = MISTAKES[name].message.replace("TMP", re.escape(folder))
    status = said if said is not None else int(ExitStatus.RANK_LOST) if min(codes) < 0 else max(codes)
    lines = [line for line in text.splitlines() if re.search(message, line)]
    wanted, problems = MISTAKES[name].status, []
    if status != wanted:
        problems.append(f"status {status} instead of {wanted:d}")
    if not lines:
        problems.append(f"no message: {text[-300:]}")
    return {
        **{"trial": number, "seed": seed, "mistake": name, "ranks": world, "skew": max(delays) - min(delays)},
        **{
            "first_is_last": delays[0] == max(delays),
            "codes": codes,
            "lines": len(lines),
            "problems": problems,
        },
        "seconds": time.monotonic() - began,
    }


def end_as_srun(ranks: list[Any]) -> list[int]:
    """Wait for all; end them with the first that fails. Returns their statuses."""
    deadline, told = time.monotonic() + LIMIT_S, 0.0
    while any(each.exitcode is None for each in ranks):
        now = time.monotonic()
        if not told and (any(each.exitcode for each in ranks) or now > deadline):
            told = now
            for each in ranks:
                each.terminate()
        if told and now > told + KILL_S:
            for each in ranks:
                each.kill()
        time.sleep(0.01)
    return [-signal.SIGKILL if each.exitcode is None else each.exitcode for each in ranks]


def summary(rows: list[dict[str, Any]]) -> str:
    kinds, world = Counter(row["mistake"] for row in rows), Counter(row["ranks"] for row in rows)
    wrong = [row["trial"] for row in rows if row["problems"]]
    said = Counter(row["lines"] for row in rows)
    return (
        f"{len(rows)} trials, {dict(kinds)}, by ranks {dict(sorted(world.items()))}; the first rank came last in "
        f"{sum(row['first_is_last'] for row in rows)}; lines with the message {dict(sorted(said.items()))}; "
        f"wrong: {wrong or 'none'}"
    )


def main() -> int:
    options = harness.parser(
        __doc__,
        trials=200,
        seed=1,
        out=(Path, "file of results, a line of JSON each"),
        scale=(0.05, "real seconds for each second of skew"),
        seconds=(1e9, "begin no trial after these"),
    ).parse_args()
    multiprocessing.get_context("forkserver").set_forkserver_preload(PRELOADED)
    store = harness.Store(options.out)
    store.claim()
    done = [row for row in store.records() if row["seed"] == options.seed]
    own = partial(trial, seed=options.seed, scale=options.scale)
    rows = run_trials(own, options.trials, store, done, options.seconds)
    print(summary(rows))
    return int(any(row["problems"] for row in rows))


if __name__ == "__main__":
    harness.start(main)
