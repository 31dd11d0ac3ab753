"""Hangs of every kind in a training of three ranks: the culprit is named, and every rank ends, that one included.

    pytest -m slow -s tests/dist/failures/test_hangs.py

It prints how long after the limit each was named, and all had ended.

A rank in an endless loop is tried before every kind of wait for other ranks: it alone is named. One of these runs
always. Others are in test_failing_ranks.py and tests/dist/pipeline/test_failures.py. A link that is cut is in
tests/netlab/test_hangs.py.
"""

from __future__ import annotations

import os
import pickle
import re
import signal
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from megazero.checkpoint.saving import Part
from megazero.comm.peers import Peers, Pending
from megazero.log.exit_status import ExitStatus
from megazero.models import Decoder
from megazero.ops.watchdog import REQUEST
from megazero.pp.executor import Pipeline
from megazero.pp.links import Links
from megazero.train.callbacks.exits import Exits
from megazero.train.data import feeding
from megazero.zero.reduce import Reducer
from megazero.zero.scalars import StepScalars
from tests.dist.failures.test_failing_ranks import LONG, errors, iterations
from tests.dist.runs import Processes

LIMIT, CALLS = 6.0, 8  # seconds; what is called so often hangs
TRAINING = {**LONG, "global_batch_size": 3, "distributed_timeout_minutes": LIMIT / 60, "lr_warmup_iters": 0}
PAIR = {**TRAINING, "global_batch_size": 2, "zero_preset": "ddp"}
EXPERTS = {
    **{**PAIR, "model_family": "qwen3_moe", "num_experts": 4, "moe_router_topk": 2},
    **{"moe_ffn_hidden_size": 12, "expert_model_parallel_size": 2},
}
GATHERED = {**PAIR, "context_parallel_size": 2, "cp_comm_type": ("all_gather",), "ranks_per_node": 1}
BUSY = "not in a collective but at "


def at_call(owner: Any, name: str, began: Path, action: Callable[[], Any]) -> None:
    """Replace a method by one that does something else at its CALLS-th call, of which ``began`` keeps the time."""
    call, left = getattr(owner, name), [CALLS]

    def counted(*arguments: Any, **options: Any) -> Any:
        left[0] -= 1
        if not left[0]:
            began.touch()
            return action()
        return call(*arguments, **options)

    setattr(owner, name, counted)


def endless() -> None:
    while True:
        pass


def in_data(began: Path, rank: int) -> None:
    fifo = began.with_name("fifo")
    if rank == 1:
        os.mkfifo(fifo)
        at_call(feeding.Batches, "next_step", began, fifo.read_bytes)


def in_a_loop(owner: Any, name: str, began: Path, rank: int) -> None:
    if rank == 1:
        at_call(owner, name, began, endless)


def before(owner: Any, name: str, values: dict[str, Any], world: int = 2) -> tuple[Any, ...]:
    """Rank 1 loops where it would call this, for which the others then wait."""
    return 1, partial(in_a_loop, owner, name), values, BUSY, world


def written(stacks: Path) -> int:
    """How many files of ranks there are."""
    return len(list(stacks.glob("*/*rank_*")))


def stop(pid: int) -> None:
    os.kill(pid, signal.SIGSTOP)


# name -> (the rank, what it or the test does, the run, what is said of it, the number of ranks)
KINDS: dict[str, tuple[Any, ...]] = {
    "stopped, first rank": (0, stop, TRAINING, "which holds the store: it is stopped or lost", 3),
    "stopped, middle rank": (1, stop, TRAINING, "no answer, so its process is stopped or lost", 3),
    "stopped, last rank": (2, stop, TRAINING, "no answer, so its process is stopped or lost", 3),
    "reads a FIFO nobody writes": (1, in_data, TRAINING, BUSY, 3),
    "loops before a gather": before(Decoder, "run_stage", {**TRAINING, "zero_preset": "zero3"}, 3),
    "loops before a reduction": before(Reducer, "_submit", {**TRAINING, "zero_preset": "zero2"}, 3),
    "loops before the step's exchange": before(
        StepScalars, "exchange", {**TRAINING, "zero_preset": "ddp"}, 3
    ),
    "loops before experts' rows": before(Peers, "start_route", EXPERTS),
    "loops in a callback, EP 4": before(
        Exits, "before_step", {**EXPERTS, "expert_model_parallel_size": 4, "global_batch_size": 4}, 4
    ),
    "loops before a swap of heads": before(
        Peers, "start_swap", {**PAIR, "context_parallel_size": 2, "cp_comm_type": ("a2a",)}
    ),
    "loops before a gather of keys": before(Peers, "start_gather", GATHERED),
    "loops before a stage's message": before(
        Links, "send", {**TRAINING, "pipeline_model_parallel_size": 3, "num_layers": 3}, 3
    ),
    "loops before a tensor-parallel sum": before(Pending, "wait", {**PAIR, "tensor_model_parallel_size": 2}),
    "loops before a part of a save": before(Part, "wait_for_all", {**PAIR, "save_interval": 1}),
    "loops in an evaluation": before(Pipeline, "evaluate", {**PAIR, "eval_interval": 1, "eval_iters": 3}),
    "loops before the ranks agree to stop": before(
        Exits, "ask", {**PAIR, "eval_interval": 1, "eval_iters": 3}
    ),
}
ALWAYS = "loops before experts' rows"


@pytest.mark.parametrize(
    "kind", [ALWAYS, *(pytest.param(kind, marks=pytest.mark.slow) for kind in KINDS if kind != ALWAYS)]
)
def test_a_hang_is_named_and_all_end(tmp_path: Path, kind: str) -> None:
    victim, act, values, words, world = KINDS[kind]
    began = tmp_path / "began"
    outside, logs = act is stop, tmp_path / "logs"
    if "save_interval" in values:
        values = {**values, "save": str(tmp_path / "run"), "save_keep_last": 1}
    values = {**values, "log_dir": str(logs)}
    ranks = Processes.start(world, values, tmp_path, None if outside else partial(act, began))
    if outside:
        ranks.wait_for(lambda: iterations(logs) > 2)
        (logs / REQUEST).touch()  # all ranks write their stacks, and the run goes on
        before = iterations(logs)
        ranks.wait_for(lambda: iterations(logs) > before + 2 and written(logs / "stacks") == 2 * world)
        began.touch()
        act(ranks.ranks[victim].pid)
    codes, ended = ranks.statuses(), time.time()
    texts = ranks.texts()
    assert codes[victim] in (-signal.SIGKILL, ExitStatus.RANK_LOST), texts
    assert [codes[rank] for rank in range(world) if rank != victim] == [ExitStatus.RANK_LOST] * (world - 1), (
        texts
    )
    said = errors("\n".join(texts))
    assert said and all(
        words in line and re.findall(r"[:;] rank (\d+) ", line) == [f"{victim}"] for _, line in said
    ), texts
    assert not (logs / REQUEST).exists()
    for folder in (logs / "hang", *(logs / "stacks").glob("*")):
        waiting = (victim + 1) % world
        assert "trainer.py" in (folder / f"rank_{waiting}.txt").read_text()
        record = pickle.loads((folder / f"nccl_trace_rank_{waiting}").read_bytes())
        assert record["entries"][-1]["profiling_name"].startswith("gloo:")
    late = [log.stat().st_mtime for log, text in zip(ranks.logs, texts, strict=True) if "missing: " in text]
    named, all_ended = (at - began.stat().st_mtime - LIMIT for at in (min(late), ended))
    print(f"\n| {kind} | {named:.1f} s | {all_ended:.1f} s |")
