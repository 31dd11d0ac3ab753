"""Kill a run at random moments, start it again, and compare with the run that nobody killed.

    python -m tests.soak.random_kills --trials 100 --seed 1 --out kills.jsonl

A trial is one run of a small model. One to three times one rank, half of the ranks or all are killed; then the run
may finish. A kill comes at a random time after the start (some starts are of a new Python, so that imports are
killed, too), or at or shortly after the n-th operation on the folder of checkpoints. Every start must continue from
the newest complete checkpoint. In the end losses, gradient norms and all tensors must have the bits of the
uninterrupted run, and metrics.jsonl must have every iteration once. Every second trial saves with --async-save.

With --experts ranks share experts, whose states lie on other ranks than the rest.

Each result is appended to the file at once. The same command continues with the missing trials and prints a summary
at the end. Seed and number determine a trial, up to the machine's speed.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

from benchmarks import harness
from megazero.checkpoint import store
from megazero.checkpoint.directory import complete
from megazero.log.metrics import read_metrics
from megazero.mesh.launch import rank_variables
from megazero.ops import lease
from tests.dist.runs import Processes, checkpoint_of, differences, free_port
from tests.sizes import TINY, words
from tests.soak.trials import run_trials

Layouts = Mapping[str, tuple[int, Mapping[str, Any]]]  # by name: ranks and options
PLAIN: Layouts = {
    "zero3": (2, {"zero_preset": "zero3"}),
    "zero1, bf16": (2, {"zero_preset": "zero1", "params_dtype": "bf16"}),
    "pp 2": (2, {"pipeline_model_parallel_size": 2}),
    "hpz, bf16": (4, {"zero_preset": "hpz", "params_dtype": "bf16", "ranks_per_node": 2}),
    "tp 2 x zero2": (4, {"tensor_model_parallel_size": 2, "zero_preset": "zero2"}),
}
# Biases of experts are state besides the tensors' own.
ROUTED = {"num_experts": 8, "moe_ffn_hidden_size": 12, "ranks_per_node": 2}
BIASED = {"moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True}
CODED = {"zero_preset": "zeropp", "zero_exact_numel": 64, "zero_block_size": 8}
EXPERTS: Layouts = {
    "experts, zeropp": (4, {**ROUTED, **BIASED, **CODED, "expert_model_parallel_size": 2}),
    "experts of two nodes, 8 bits, zero3": (
        4,
        {
            **{**ROUTED, **BIASED, "expert_model_parallel_size": 4, "zero_preset": "zero3"},
            "moe_dispatch_across_nodes": "int8",
        },
    ),
}
LAYOUTS: Layouts = {**PLAIN, **EXPERTS}
RUN = {
    "train_iters": 12,
    "save_interval": 2,
    "save_keep_last": 2,
    "distributed_timeout_minutes": 1,
    "eval_interval": 5,
    "eval_iters": 1,
}
KEYS = (
    "lm_loss",
    "grad_norm",
    "learning_rate",
    "consumed_samples",
)
HIDDEN = re.compile(r"\.iter_\d+\.(partial|replaced|removed)-")
LAUNCHER_S = 15.0
FORKED_S, REAL_S = 5.0, 12.0  # longer than a run that is forked, or a real start with its imports, takes


@dataclass(frozen=True)
class Kill:
    """victims: ranks. real: Python starts anew. seconds: when, since the start, or after the operation number
    ``operation`` on the folder of checkpoints if that is given."""

    victims: tuple[int, ...]
    real: bool
    seconds: float
    operation: int | None = None


def draw(random: Random, ranks: int) -> Kill:
    """Return one kill of a run of so many ranks."""
    order = random.sample(range(ranks), ranks)
    victims = tuple(order[: random.choice((1, ranks // 2, ranks))])
    kind = random.choice(("real", "seconds", "operation", "operation"))
    if kind == "operation":
        return Kill(victims, False, random.choice((0.0, random.uniform(0, 0.05))), random.randrange(150))
    return Kill(victims, kind == "real", random.uniform(0, REAL_S if kind == "real" else FORKED_S))


def die(rank: int, kill: Kill, folder: str) -> None:
    """Make the first victim kill itself at the operation that ``kill`` names, or so many seconds after it."""
    if rank != kill.victims[0] or kill.operation is None:
        return
    left = [kill.operation]
    end = partial(os.kill, os.getpid(), signal.SIGKILL)

    def count() -> None:
        left[0] -= 1
        if left[0] == -1:
            end() if not kill.seconds else threading.Timer(kill.seconds, end).start()

    def audit(event: str, arguments: tuple[Any, ...]) -> None:
        on_files = event in ("open", "os.rename", "os.mkdir", "os.remove", "os.rmdir", "subprocess.Popen")
        if on_files and (event == "subprocess.Popen" or str(arguments[0]).startswith(folder)):
            count()

    fsync = os.fsync

    def counted(descriptor: int) -> None:
        count()
        fsync(descriptor)

    os.fsync = counted
    sys.addaudithook(audit)


def prepare(rank: int, folder: str, job: Mapping[str, str], kill: Kill | None) -> None:
    """Prepare a forked rank: the variables of its job, and its death."""
    os.environ |= job
    lease.NOTICE_S = 0.1
    if kill is not None:
        die(rank, kill, folder)


class Started:
    """A rank in a Python of its own, with the methods of a multiprocessing.Process."""

    def __init__(
        self, rank: int, world: int, port: int, job: Mapping[str, str], values: Mapping[str, Any], log: Path
    ) -> None:
        launcher = {**rank_variables(rank, world, port), **job, "OMP_NUM_THREADS": "1"}
        with open(log, "wb") as file:
            self._popen = subprocess.Popen(
                [sys.executable, str(harness.ROOT / "pretrain" / "pretrain_gpt.py"), *words(values)],
                env={**os.environ, "PYTHONPATH": str(harness.ROOT), **launcher},
                stdout=file,
                stderr=subprocess.STDOUT,
            )

    @property
    def pid(self) -> int:
        return self._popen.pid

    @property
    def exitcode(self) -> int | None:
        return self._popen.poll()

    def is_alive(self) -> bool:
        return self._popen.poll() is None

    def kill(self) -> None:
        self._popen.kill()

    def join(self, timeout: float | None = None) -> None:
        with suppress(subprocess.TimeoutExpired):
            self._popen.wait(timeout)


def start(ranks: int, values: Mapping[str, Any], folder: Path, turn: int, kill: Kill | None) -> Processes:
    """Start all ranks; logs go to ``folder``, which is made.

    turn: how often the job was started before. As a requeued one it takes its folder at once.
    """
    folder.mkdir(parents=True)
    job = {"SLURM_JOB_ID": "1", "SLURM_RESTART_COUNT": f"{turn}"}
    if kill is None or not kill.real:
        own = partial(prepare, folder=values["save"], job=job, kill=kill)
        return Processes.start(ranks, values, folder, own)
    logs, port = [folder / f"rank{rank}.log" for rank in range(ranks)], free_port()
    whole = {**TINY, **values}
    return Processes([Started(rank, ranks, port, job, whole, logs[rank]) for rank in range(ranks)], logs)


def attempt(
    ranks: int, values: Mapping[str, Any], folder: Path, turn: int, kill: Kill | None
) -> dict[str, Any]:
    """Run until it ends or is killed and the survivors have ended. Return what became of it."""
    save = Path(values["save"])
    newest = store.latest(save)
    before = 0 if newest is None else store.read_manifest(newest).step
    left = unfinished(save)
    began, running = time.monotonic(), start(ranks, values, folder, turn, kill)
    if kill is not None:
        first = running.ranks[kill.victims[0]]
        while first.is_alive() and any(each.is_alive() for each in running.ranks):
            if kill.operation is None and time.monotonic() - began >= kill.seconds:
                break
            time.sleep(0.005)
        done = all(not each.is_alive() and each.exitcode == 0 for each in running.ranks)
        for victim in kill.victims if not done else ():
            running.ranks[victim].kill()
    # Who waits for a rank that never joined is ended after a while, as launchers do.
    statuses = running.statuses(300 if kill is None else LAUNCHER_S)
    text = running.texts()[0]
    begun = re.search(r"starts after\W+iteration (\d+)", text)
    importing = kill is not None and kill.real and not text.strip()
    during = "imports" if importing else "steps" if begun else "start"
    during = "save" if unfinished(save) - left else during
    return {
        "statuses": statuses,
        "newest": before,
        "from": int(begun[1]) if begun else None,
        "during": "after the end" if set(statuses) == {0} else during,
    }


def unfinished(save: Path) -> set[str]:
    """Return the names of the directories that a save was at when it was killed."""
    return {path.name for path in save.iterdir() if HIDDEN.match(path.name)} if save.is_dir() else set()


def problems(
    values: Mapping[str, Any], reference: Path, attempts: Sequence[Mapping[str, Any]]
) -> Iterator[str]:
    """Yield what is not as in the uninterrupted run."""
    for number, each in enumerate(attempts):
        if each["from"] is not None and each["from"] != each["newest"]:
            yield f"attempt {number} went on from {each['from']}, the newest was {each['newest']}"
    if set(attempts[-1]["statuses"]) != {0}:
        yield f"the last attempt ended with {attempts[-1]['statuses']}"
        return  # its folder, with the logs, is kept
    ours, theirs = read_metrics(values["log_dir"]), read_metrics(reference / "logs")
    for kind in ("lm_loss", "eval_lm_loss"):
        keys = ("iteration", *(KEYS if kind == "lm_loss" else (kind,)))
        rows, wanted = (
            [[line.get(k) for k in keys] for line in lines if kind in line] for lines in (ours, theirs)
        )
        if rows != wanted:
            yield f"metrics ({kind}): {rows} instead of {wanted}"
    different = differences(checkpoint_of(values["save"]), checkpoint_of(reference / "save"))
    if different:
        yield f"tensors differ: {different[:3]}"


def make_values(layout: str, folder: Path, behind: bool) -> dict[str, Any]:
    save = {"save": str(folder / "save"), "load": str(folder / "save"), "log_dir": str(folder / "logs")}
    return {**RUN, **LAYOUTS[layout][1], **save, **({"async_save": True} if behind else {})}


def reference_of(layout: str, folder: Path) -> Path:
    """Return the folder of the uninterrupted run, which is made unless it is there."""
    place = folder / re.sub(r"\W+", "-", layout)
    newest = store.latest(place / "save")
    if newest is None or store.read_manifest(newest).step < RUN["train_iters"]:
        shutil.rmtree(place, ignore_errors=True)
        done = attempt(LAYOUTS[layout][0], make_values(layout, place, False), place / "out", 0, None)
        if set(done["statuses"]) != {0}:
            raise RuntimeError(f"the uninterrupted run of {layout} ended with {done}")
    return place


def trial(
    number: int,
    seed: int,
    references: Path,
    kills: Sequence[Kill] = (),
    layouts: Sequence[str] = tuple(PLAIN),
) -> dict[str, Any]:
    """Kill and restart one run, and judge it. kills: instead of random ones. layouts: one is drawn."""
    random = Random(f"{seed}/{number}")
    layout, behind = random.choice(layouts), number % 2 == 1
    ranks = LAYOUTS[layout][0]
    drawn = list(kills) if kills else [draw(random, ranks) for _ in range(random.randint(1, 3))]
    began, folder = time.monotonic(), Path(tempfile.mkdtemp(prefix="kills-"))
    values, attempts = make_values(layout, folder, behind), list[dict[str, Any]]()
    for turn, kill in enumerate([*drawn, None]):
        attempts.append(attempt(ranks, values, folder / f"out{turn}", turn, kill))
    wrong = list(problems(values, reference_of(layout, references), attempts))
    whole = [path.name for path in Path(values["save"]).iterdir() if complete(path)]
    if not wrong:
        shutil.rmtree(folder)
    said: dict[str, Any] = {"seed": seed, "trial": number, "layout": layout}
    said |= {"async_save": behind, "kept": sorted(whole)}
    said |= {"kills": [asdict(kill) for kill in drawn], "attempts": attempts, "problems": wrong}
    return {**said, "folder": str(folder) if wrong else None, "seconds": time.monotonic() - began}


def summary(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return a few lines: how many were right, and what was killed when."""
    moments: Counter[str] = Counter()
    sizes: Counter[int] = Counter()
    for row in rows:
        for kill, each in zip(row["kills"], row["attempts"], strict=False):
            if each["during"] != "after the end":  # else it had ended before
                moments[each["during"]] += 1
                sizes[len(kill["victims"])] += 1
    wrong = [row["trial"] for row in rows if row["problems"]]
    behind = sum(row["async_save"] for row in rows)
    return (
        f"{len(rows)} trials, {behind} of them with --async-save; kills: {sum(moments.values())}, "
        f"in {dict(moments)}, by the number of ranks {dict(sorted(sizes.items()))}; "
        f"wrong: {wrong or 'none'}"
    )


def main() -> int:
    options = harness.parser(
        __doc__,
        trials=100,
        seed=1,
        out=(Path, "file of results, a line of JSON each"),
        jobs=(2, "trials at a time"),
        seconds=(1e9, "begin no trial after these"),
        experts=(False, "of runs whose ranks share experts"),
    ).parse_args()
    chosen = EXPERTS if options.experts else PLAIN
    store, layouts = harness.Store(options.out), tuple(chosen)
    store.claim()
    references, began = options.out.with_suffix(".references"), time.monotonic()
    for layout in layouts:
        reference_of(layout, references)
    done = [row for row in store.records() if row["seed"] == options.seed and row["layout"] in layouts]
    own = partial(trial, seed=options.seed, references=references, layouts=layouts)
    left = options.seconds - (time.monotonic() - began)
    rows = run_trials(own, options.trials, store, done, left, options.jobs)
    print(summary(rows))
    return int(any(row["problems"] for row in rows))


if __name__ == "__main__":
    harness.start(main)
