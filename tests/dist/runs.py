"""Whole training runs in the tests' ranks, through setup.prepare and Trainer, on a tiny model."""

from __future__ import annotations

import hashlib
import io
import os
import sys
import time
import zlib
from collections.abc import Callable, Mapping
from contextlib import ExitStack, redirect_stdout, suppress
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from megazero.checkpoint import store
from megazero.config import RunConfig, World, make_config, parse
from megazero.data.indexed import IndexedWriter
from megazero.data.source import Dataset, DatasetSource, SampleSource
from megazero.mesh.launch import Launch, read_launch
from megazero.mesh.sealed import SECRET
from megazero.mesh.starter import free_port
from megazero.train import command, setup
from megazero.train.callbacks.callback import TrainedStep
from megazero.train.data import feeding
from tests.dist.pool import RankError, run_ranks
from tests.sizes import TINY

Values = Mapping[str, Any]
LINKS = ("intra_node", "inter_node")


@dataclass(frozen=True)
class Seen:
    """What one rank saw of a run. losses: (iteration, loss), ids: samples of each iteration by micro-batch.

    texts: a checksum of the tokens of each sample, in the order of ids. sent: bytes by hop and link of iterations.
    """

    start: int
    losses: tuple[tuple[int, float], ...]
    ids: tuple[tuple[tuple[int, ...], ...], ...]
    texts: tuple[int, ...]
    dp_rank: int
    notes: tuple[str, ...]
    evaluations: tuple[float, ...] = ()
    sent: tuple[Mapping[str, int], ...] = ()


class _Recorder:
    """Makes Batches that note what they hand out: ids by step and micro-batch, checksums of the tokens."""

    def __init__(self, batches: type) -> None:
        self.batches = batches
        self.ids: list = []
        self.texts: list[int] = []

    def __call__(self, source: SampleSource, **options: Any) -> Any:
        made = self.batches(source, **options)
        if "consumed" in options:  # training, not evaluation
            sample_ids, next_step = made.sample_ids, made.next_step
            made.sample_ids = lambda count: self._note_ids(sample_ids(count))
            made.next_step = lambda count: self._note_texts(next_step(count))
        return made

    def _note_ids(self, ids: list) -> list:
        self.ids.append(tuple(map(tuple, ids)))
        return ids

    def _note_texts(self, step: list) -> list:
        self.texts += [zlib.crc32(row.numpy().tobytes()) for batch in step for row in batch["tokens"]]
        return step


def train(values: Values) -> Seen:
    """One run in this rank, with ``values`` over TINY."""
    return _train(lambda world: make_config({**TINY, **values}, world))


def train_flags(words: list[str]) -> Seen:
    """One run in this rank, of a command line."""
    return _train(lambda world: parse(words, world))


def _train(configure: Callable[[World], RunConfig]) -> Seen:
    launch = Launch(dist.get_rank(), dist.get_world_size(), local_world_size=dist.get_world_size())
    config = configure(World(launch.world_size, launch.world_size))
    losses: list = []
    evaluations: list = []
    sent: list = []
    original = feeding.Batches
    feeding.Batches = recorder = _Recorder(original)
    try:
        with ExitStack() as stack, redirect_stdout(io.StringIO()):
            run = setup.prepare(config, launch, stack)
            start, notes, log = run.progress.iteration, run.progress.notes, run._log

            def note(step: TrainedStep, *rest: Any) -> None:
                losses.append((step.iteration, step.loss))
                by_hop = {name.removesuffix("_bytes"): n for name, n in step.traffic.items()}
                sent.append({name: n for name, n in by_hop.items() if name not in LINKS})
                log(step, *rest)

            run._log = note  # type: ignore[method-assign]
            run.outputs.console.evaluation = lambda _, loss, *name: evaluations.append(loss)
            run.run()
    finally:
        feeding.Batches = original
    ids, texts = tuple(recorder.ids), tuple(recorder.texts)
    return Seen(start, tuple(losses), ids, texts, run.mesh.batch_rank, notes, tuple(evaluations), tuple(sent))


def train_all(jobs: list[Values]) -> list[Seen]:
    """Runs one after the other, in one process group."""
    return [train(job) for job in jobs]


def train_each(jobs: Mapping[Any, tuple[int, Values]], timeout: float = 300) -> dict[Any, list[Seen]]:
    """jobs: key -> (ranks, values). What every rank of each saw.

    A call of the pool takes a few: each run's groups have threads that poll, and stay until the call ends.
    """
    out: dict[Any, list[Seen]] = {}
    for world in sorted({ranks for ranks, _ in jobs.values()}):
        keys = [key for key, (ranks, _) in jobs.items() if ranks == world]
        count = max(1, 24 // world)
        for some in (keys[i : i + count] for i in range(0, len(keys), count)):
            every = run_ranks(world, train_all, [jobs[key][1] for key in some], timeout=timeout)
            out.update({key: [rank[place] for rank in every] for place, key in enumerate(some)})
    return out


def refusal(values: Values) -> str | None:
    """The message of the error that ends a run in this rank; None if it ends well."""
    try:
        train(values)
    except ValueError as error:
        return f"{type(error).__name__}: {error}"
    return None


def refusals(jobs: list[Values]) -> list[str | None]:
    return [refusal(job) for job in jobs]


def checkpoint_of(root: str | os.PathLike) -> dict[str, dict[str, torch.Tensor]]:
    """Everything in the newest checkpoint: kind -> name -> whole tensor."""
    path = store.latest(root)
    assert path is not None, f"nothing complete in {root}"
    return store.load_kinds(path)


def differences(one: Any, two: Any) -> list[str]:
    """Tensors of two checkpoint_of that are not the same bits."""
    names = {(kind, name) for tree in (one, two) for kind in tree for name in tree[kind]}
    return [
        f"{kind}/{name}"
        for kind, name in sorted(names)
        if name not in one.get(kind, {})
        or name not in two.get(kind, {})
        or not torch.equal(one[kind][name], two[kind][name])
    ]


def samples(seen: list[Seen]) -> list[tuple[int, int]]:
    """(id, checksum) of a whole run in the order of the stream: step, micro-batch, data-parallel rank.

    Tensor-parallel and pipeline ranks must have seen the same.
    """
    ranks: dict[int, Seen] = {}
    for each in seen:
        known = ranks.setdefault(each.dp_rank, each)
        assert (known.ids, known.texts) == (each.ids, each.texts)
    order = [ranks[rank] for rank in sorted(ranks)]
    texts = [iter(each.texts) for each in order]
    out = []
    for step in range(len(order[0].ids)):
        for micro in range(len(order[0].ids[step])):
            for each, text in zip(order, texts, strict=True):
                out += [(sample, next(text)) for sample in each.ids[step][micro]]
    return out


def digest(root: str | os.PathLike) -> dict[str, str]:
    """sha256 of every file below a folder but leases and secrets, by its path in it."""
    own = ("lease", SECRET)
    files = sorted(path for path in Path(root).rglob("*") if path.is_file() and path.stem not in own)
    return {str(p.relative_to(root)): hashlib.sha256(p.read_bytes()).hexdigest() for p in files}


def batches_of(other: Callable[[Dataset], Dataset]) -> Any:
    """Stands for feeding.Batches: it makes those of the data set that ``other`` makes of a run's."""
    original = feeding.Batches

    def made(source: DatasetSource, **options: Any) -> Any:
        changed = DatasetSource(other(source.data_set))
        changed.load_state(source.state())
        return original(changed, **options)

    return made


def write_data(
    prefix: Path, documents: int = 40, seed: int = 0, top: int = 50, end: int | None = None, longest: int = 40
) -> str:
    """An indexed dataset of random tokens below ``top``; its prefix. end: the token that each document ends with."""
    random = np.random.default_rng(seed)
    with IndexedWriter(prefix, dtype=np.uint16) as writer:
        for _ in range(documents):
            tokens = random.integers(0, top, random.integers(5, longest))
            writer.add_document(tokens if end is None else np.append(tokens, end))
    return str(prefix)


# -- processes of their own, for what is about processes ---------------------------------------------


def _process(rank: int, world: int, port: int, values: Values, log: str, prepare: Callable | None) -> None:
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(file, 1)
    os.dup2(file, 2)
    torch.set_num_threads(1)
    launcher = {"RANK": rank, "WORLD_SIZE": world, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": world}
    launcher |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in launcher.items()})
    if prepare is not None:
        prepare(rank)
    status = command.run(make_config({**TINY, **values}, World(world, world)), read_launch())
    sys.stdout.flush()
    os._exit(status)


def _is_stopped(pid: int) -> bool:
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
    return False


@dataclass(frozen=True)
class Processes:
    """Ranks that run as the program does. They are forked from a server that has only loaded modules."""

    ranks: list[Any]
    logs: list[Path]

    @classmethod
    def start(cls, world: int, values: Values, folder: Path, prepare: Callable | None = None) -> Processes:
        """prepare(rank): a top-level function called in each process before it begins."""
        context = get_context("forkserver")
        # torch._dynamo: the first optimizer of a process imports it, 2.6 s. This module brings the trainer.
        context.set_forkserver_preload(["torch._dynamo", __name__])
        port, logs = free_port(), [folder / f"rank{rank}.log" for rank in range(world)]
        ranks = [
            context.Process(
                target=_process, args=(rank, world, port, dict(values), str(logs[rank]), prepare), daemon=True
            )
            for rank in range(world)
        ]
        for each in ranks:
            each.start()
        return cls(ranks, logs)

    def wait_for(self, ready: Callable[[], bool], seconds: float = 300) -> None:
        end = time.monotonic() + seconds
        while not ready():
            if time.monotonic() > end or not any(each.is_alive() for each in self.ranks):
                self.stop()
                raise RankError(f"never became ready: {self.texts()}")
            time.sleep(0.02)

    def statuses(self, seconds: float = 300) -> list[int | None]:
        """Exit status of each rank (negative: signal); those that did not end in time are killed, None.

        When all others have ended, stopped ranks are killed, as by launchers.
        """
        end = time.monotonic() + seconds
        while (alive := [each for each in self.ranks if each.is_alive()]) and time.monotonic() < end:
            if all(_is_stopped(each.pid) for each in alive):
                for each in alive:
                    each.kill()
            alive[0].join(0.05)
        codes = [each.exitcode for each in self.ranks]
        self.stop()
        return codes

    def stop(self) -> None:
        for each in self.ranks:
            if each.is_alive():
                each.kill()
            each.join()

    def texts(self) -> list[str]:
        return [log.read_text() if log.exists() else "" for log in self.logs]
