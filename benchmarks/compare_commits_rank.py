"""What compare_commits.py runs in each tree: training runs one after the other, on that tree's own local ranks."""

from __future__ import annotations

import io
import json
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack, redirect_stdout
from pathlib import Path

from benchmarks.commit_trees import refuse_other_code

try:
    from megazero.mesh.local_ranks import DIED, TIMEOUT, Answer, LocalRanks
except ModuleNotFoundError:  # the other commit's tree may be older than that module
    from megazero.cli.ranks import DIED, TIMEOUT, Answer  # type: ignore[import-not-found, no-redef]
    from megazero.cli.ranks import Ranks as LocalRanks  # type: ignore[import-not-found, no-redef]

TIMEOUT_S = 300.0  # of one run


def main(file: str) -> None:
    """file: JSON, a list of {name, ranks, flags}. Prints {name: what went wrong, '' if nothing} as JSON.

    A run that fails does not end the others: another commit may not know a flag.
    """
    said: dict[str, str] = {}
    with LocalRanks() as ranks:
        for job in json.loads(Path(file).read_text()):
            began = time.monotonic()
            answers = ranks.ask(train, job["flags"], world=job["ranks"], timeout=TIMEOUT_S)
            said[job["name"]] = why(answers)
            how = "failed" if said[job["name"]] else f"{time.monotonic() - began:.1f} s"
            print(f"  {job['name']}: {how}", file=sys.stderr, flush=True)
    print(json.dumps(said))


def why(answers: Sequence[Answer]) -> str:
    """What went wrong on one rank, in the words of one that raised rather than of one that waited for it."""
    failed = sorted((each.error in (DIED, TIMEOUT), rank) for rank, each in enumerate(answers) if each.error)
    if not failed:
        return ""
    rank = failed[0][1]
    return f"rank {rank}: {answers[rank].trace or answers[rank].text}".strip()


def train(flags: Sequence[str]) -> None:
    """The program of pretrain_gpt.py in a rank of a pool, whose processes and process group outlive the run."""
    import torch.distributed as dist

    from megazero.config import World, parse
    from megazero.mesh.launch import Launch
    from megazero.train import setup

    rank, world = dist.get_rank(), dist.get_world_size()
    with ExitStack() as stack, redirect_stdout(io.StringIO()):
        config = parse(flags, World(world, world))
        trainer = setup.prepare(config, Launch(rank, world, rank, world), stack, time.monotonic())
        with trainer.outputs.console:
            trainer.run()
    refuse_other_code()
