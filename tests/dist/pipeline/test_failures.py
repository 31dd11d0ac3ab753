"""Pipelines whose stages die, stall, diverge or were started differently: every other rank says which and ends."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from megazero.config import RunConfig, World, make_config
from megazero.log.exit_status import ExitStatus
from megazero.mesh.sealed import SECRET
from megazero.models import Decoder
from megazero.train import setup
from tests.dist.failures.test_failing_ranks import LONG, errors
from tests.dist.runs import Processes, digest
from tests.messages import names

PP4 = {
    **LONG,
    "pipeline_model_parallel_size": 4,
    "num_layers": 4,
    "global_batch_size": 6,
    "lr_warmup_iters": 0,
}
# Who was doing what, and what of whom did not come.
NAMED = re.compile(
    r"rank (\d), pipeline rank (\d) of 4, ([FBIW])\(stage (\d), micro-batch (\d)\): "
    r"the (activation|gradient) did not (?:come from|go to) stage (\d) \(rank (\d)\): "
)


def check_messages(texts: list[str], victim: int) -> None:
    """The ranks whose collectives failed say so, and name the neighbour and the action; one says who is missing.

    The others were waiting for those, and end without a word.
    """
    named = missing = 0
    for rank in {0, 1, 2, 3} - {victim}:
        assert "Traceback" not in texts[rank], texts[rank]
        for kind, words in errors(texts[rank]):
            assert kind == "RankFailure" and re.search(r"in iteration \d+: a collective failed", words), words
            missing += f"missing: rank {victim} " in words
            if found := NAMED.search(words):
                me, stage, action, at, _, tensor, other, peer = found.groups()
                assert me == stage == at == str(rank) and other == peer, words
                assert (tensor == "activation") == (action == "F"), words
                above = (tensor == "activation") == ("did not go to" in found[0])
                assert int(other) == rank + (1 if above else -1), words
                named += 1
    assert named and missing, texts


def at_a_forward(rank: int, victim: int, number: int, act: Callable[[], object]) -> None:
    """Rank ``victim`` acts where it would compute its forward of this number."""
    run_stage, left = Decoder.run_stage, [number]

    def acting(self: Decoder, *arguments: Any, **named: Any) -> torch.Tensor:
        left[0] -= 1
        if not left[0]:
            act()
        return run_stage(self, *arguments, **named)

    if rank == victim:
        Decoder.run_stage = acting  # type: ignore[method-assign]


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize(
    "schedule, victim",
    [("1f1b", 2), *(pytest.param(*each, marks=pytest.mark.slow) for each in (("zb-h1", 0), ("gpipe", 3)))],
)
def test_a_stage_that_is_killed_ends_every_other(tmp_path: Path, schedule: str, victim: int) -> None:
    values = {**PP4, "pipeline_schedule": schedule, "log_dir": str(tmp_path / "logs")}
    # In the third iteration, where its neighbours wait for it: between two they wait in the step's own collectives.
    dying = partial(at_a_forward, victim=victim, number=15, act=die)
    ranks = Processes.start(4, values, tmp_path, prepare=dying)
    ranks.wait_for(lambda: not ranks.ranks[victim].is_alive())
    began = time.monotonic()
    codes = ranks.statuses()
    lost = ExitStatus.RANK_LOST
    assert codes == [-signal.SIGKILL if rank == victim else lost for rank in range(4)], ranks.texts()
    assert time.monotonic() - began < 60  # noticed at once, not at the time-out
    check_messages(ranks.texts(), victim)


def spoil_a_middle_stage(rank: int) -> None:
    """Stage 1's output is NaN from its ninth forward on: the second micro-batch of the third iteration."""
    run_stage, left = Decoder.run_stage, [8]

    def spoiled(self: Decoder, *arguments: Any, **named: Any) -> torch.Tensor:
        left[0] -= 1
        out = run_stage(self, *arguments, **named)
        return out if left[0] >= 0 else out * torch.nan

    if rank == 1:
        Decoder.run_stage = spoiled  # type: ignore[method-assign]


def test_a_nan_of_a_middle_stage_stops_every_rank_and_harms_no_checkpoint(tmp_path: Path) -> None:
    save = {"save": str(tmp_path / "run"), "save_interval": 2, "save_keep_last": 1}
    values = {**PP4, **save, "global_batch_size": 4, "log_dir": str(tmp_path / "logs")}
    ranks = Processes.start(4, values, tmp_path, prepare=spoil_a_middle_stage)
    assert ranks.statuses() == [ExitStatus.NON_FINITE] * 4, ranks.texts()
    for text in ranks.texts():
        ((kind, words),) = errors(text)
        assert kind == "NonFiniteLoss" and "iteration 3: the loss is nan" in words, words
        # The rank that computes the losses, and the step's samples: no other has a loss.
        assert "it came from rank 3 (loss nan, samples 8, 9, 10, 11)" in words and "Traceback" not in text
    assert list(digest(tmp_path / "run")) and sorted(os.listdir(tmp_path / "run")) == [
        f"{SECRET}.{os.getuid()}",
        "iter_0000002",
        "lease",
    ]


# -- ranks that were started differently ---------------------------------------------------------------


def start_differently(rank: int) -> None:
    """Ranks 1 and 3 are started with two other options, and with another folder of logs."""
    prepare, odd = setup.prepare, {"pipeline_schedule": "gpipe", "clip_grad": 0.5, "log_dir": "elsewhere"}

    def other(config: RunConfig, *rest: Any) -> Any:
        return prepare(make_config({**config.values(), **odd}, World(4, 4)), *rest)

    if rank in (1, 3):
        setup.prepare = other


def test_ranks_with_different_options_are_refused_at_the_start(tmp_path: Path) -> None:
    ranks = Processes.start(
        4, {**PP4, "log_dir": str(tmp_path / "logs")}, tmp_path, prepare=start_differently
    )
    assert ranks.statuses() == [ExitStatus.MISTAKE] * 4, ranks.texts()
    ((kind, words),) = [line for text in ranks.texts() for line in errors(text)]
    assert kind == "ValueError" and "log-dir" not in words and "Traceback" not in "".join(ranks.texts())
    names(words, "ranks 1, 3", "--pipeline-schedule gpipe (rank 0: unset)", "--clip-grad 0.5 (rank 0: 1)")
    assert {file.name for file in (tmp_path / "logs").iterdir()} == {"events.jsonl", "exit_status", "lease"}
