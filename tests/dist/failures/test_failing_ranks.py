"""Ranks that die, hang, diverge or are told to stop: the others end in time, and checkpoints stay whole."""

from __future__ import annotations

import os
import re
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megazero.checkpoint import store
from megazero.checkpoint.directory import TRIAL
from megazero.data.tokenizer import NullTokenizer, TokenizerInfo, write_meta
from megazero.log.exit_status import STATUS_FILE, ExitStatus, read_status
from megazero.mesh import rendezvous
from megazero.mesh.sealed import SECRET
from megazero.train import distributed as start
from megazero.train import setup, supervisor
from tests import ROOT
from tests.dist.pool import run_ranks
from tests.dist.runs import Processes, digest, train_all, write_data
from tests.sizes import TINY

PROGRAM = str(ROOT / "pretrain" / "pretrain_gpt.py")
LONG = {
    "train_iters": 20_000,  # longer than any test waits; ranks that a killed test run leaves do end
    "global_batch_size": 2,
    "micro_batch_size": 1,
    "distributed_timeout_minutes": 2,
}
MESSAGE = re.compile(r"^(\w+): (.*) \(reported by rank \d+\)$", re.MULTILINE)


def errors(text: str) -> list[tuple[str, str]]:
    """(kind, words) of every error line of a rank's log."""
    return MESSAGE.findall(text)


def iterations(log_dir: Path) -> int:
    path = log_dir / "metrics.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


@pytest.mark.parametrize("victim", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_a_killed_rank_ends_the_other_with_one_message(tmp_path: Path, victim: int) -> None:
    save = {"save": str(tmp_path / "run"), "save_interval": 2, "save_keep_last": 2}
    values = {**LONG, **save, "zero_preset": "zero3", "log_dir": str(tmp_path / "logs")}
    ranks = Processes.start(2, values, tmp_path)
    ranks.wait_for(lambda: iterations(tmp_path / "logs") > 5)
    os.kill(ranks.ranks[victim].pid, signal.SIGKILL)
    began = time.monotonic()
    codes = ranks.statuses()
    assert codes[victim] == -signal.SIGKILL and codes[1 - victim] == ExitStatus.RANK_LOST, ranks.texts()
    assert time.monotonic() - began < 60  # noticed at once, not at the time-out
    ((kind, words),) = errors(ranks.texts()[1 - victim])
    assert kind == "RankFailure" and f"rank {1 - victim} on " in words
    assert re.search(r"in (iteration|saving iteration) \d+: a collective failed because of", words), words
    assert "--load" in words and "killed process" in words
    assert "Traceback" not in ranks.texts()[1 - victim] and "always_call" not in ranks.texts()[1 - victim]
    latest = store.latest(tmp_path / "run")
    assert latest is not None and store.verify(latest).step >= 4


def miss_the_meeting(rank: int) -> None:
    """Rank 1 dies before it comes."""
    if rank == 1:
        os._exit(9)


def stop_after_the_meeting(rank: int) -> None:
    """Rank 1 comes and is stopped before the first collective."""
    if rank == 1:
        start.init_distributed = lambda *_: os.kill(os.getpid(), signal.SIGSTOP)


@pytest.mark.slow
@pytest.mark.parametrize("what", [miss_the_meeting, stop_after_the_meeting])
def test_a_rank_that_is_missing_at_the_start_is_named_within_its_own_limit(
    tmp_path: Path, what: Callable[[int], None]
) -> None:
    """The start has 6 s here, a collective 10 minutes."""
    values = {
        **LONG,
        "global_batch_size": 3,
        "distributed_timeout_minutes": 10,
        "log_dir": str(tmp_path / "logs"),
    }
    values["distributed_init_timeout_minutes"] = 0.1
    started = Processes.start(3, values, tmp_path, prepare=what)
    codes = started.statuses(300)  # else None: less than the limit of a collective
    gone = 9 if what is miss_the_meeting else -signal.SIGKILL
    assert codes == [ExitStatus.RANK_LOST, gone, ExitStatus.RANK_LOST], started.texts()
    ((kind, words),) = [line for text in started.texts() for line in errors(text)]
    assert kind == "RankFailure" and "6 s (--distributed-init-timeout-minutes)" in words, words
    if what is miss_the_meeting:
        assert f"1 of 3 ranks did not come: rank 1 on {socket.gethostname()}" in words
    else:
        assert "missing: rank 1 on " in words and "in waiting for 2 other ranks: no answer" in words
    assert read_status(tmp_path / "logs" / STATUS_FILE) == ExitStatus.RANK_LOST


def stop_first(rank: int, what: Any, name: str, ready: Callable[..., bool] = lambda *_: True) -> None:
    """Rank 0 is stopped where it calls ``what.name``, once ``ready`` says so of the arguments. It prints when."""
    call = getattr(what, name)

    def stopping(*arguments: Any) -> Any:
        while not ready(*arguments):
            time.sleep(0.02)
        print(time.time(), flush=True)
        os.kill(os.getpid(), signal.SIGSTOP)
        return call(*arguments)

    if rank == 0:
        setattr(what, name, stopping)


def while_another_waits(rank: int) -> None:
    """Rank 2 does not come, so rank 1 waits."""
    stop_first(rank, rendezvous, "_wait_for_all", lambda store, *_: store.add("ranks", 0) == 1)
    if rank == 2:
        os._exit(9)


def when_all_have_met(rank: int) -> None:
    stop_first(rank, supervisor, "connect")


@pytest.mark.slow
@pytest.mark.parametrize("what", [while_another_waits, when_all_have_met])
def test_a_first_rank_that_is_stopped_before_it_has_a_watchdog_is_named(
    tmp_path: Path, what: Callable[[int], None]
) -> None:
    """The start has 6 s here. torch's calls wait for an answer of the store, which that rank holds, for ever."""
    values = {**LONG, "global_batch_size": 3, "log_dir": str(tmp_path / "logs")}
    values["distributed_init_timeout_minutes"] = 0.1
    started = Processes.start(3, values, tmp_path, prepare=what)
    for each in started.ranks[1:]:
        each.join(60)
    _, *codes = started.statuses(0)
    stopped, *others = started.texts()
    left = 1 if what is while_another_waits else 2
    assert codes == [ExitStatus.RANK_LOST] * left + [9] * (2 - left), others
    for rank, text in enumerate(others[:left], 1):
        seconds = started.logs[rank].stat().st_mtime - float(stopped.splitlines()[-1])
        print(f"stopped {what.__name__}: rank {rank} named it {seconds:.1f} s after that")
        ((kind, words),) = errors(text)
        assert kind == "RankFailure" and "rank 0" in words and "6 s (--distributed-init-timeout" in words, (
            words
        )


def be_signalled_while_leaving(rank: int) -> None:
    """In rank 0, the signal that launchers send to all ranks when another one has left."""
    if rank == 0:
        status_of = setup.status_of

        def signalled(error: BaseException) -> ExitStatus:
            os.kill(os.getpid(), signal.SIGTERM)
            return status_of(error)

        setup.status_of = signalled


def test_a_signal_does_not_change_the_status_of_a_start_that_failed(tmp_path: Path) -> None:
    """Else a mistake would be tried again, and a bad node's place would not be taken by a spare."""
    values = {**LONG, "exit_signal_handler": True, "log_dir": str(tmp_path / "logs")}
    values |= {"load": str(tmp_path / "run"), "exit_on_missing_checkpoint": True}
    started = Processes.start(2, values, tmp_path, prepare=be_signalled_while_leaving)
    assert started.statuses(60) == [ExitStatus.MISTAKE] * 2, started.texts()
    assert read_status(tmp_path / "logs" / STATUS_FILE) == ExitStatus.MISTAKE


def die_at_the_second_sync(rank: int) -> None:
    """In rank 1, SIGKILL in the middle of writing a checkpoint."""
    sync, left = os.fsync, [1]

    def counted(descriptor: int) -> None:
        left[0] -= TRIAL not in os.readlink(f"/proc/self/fd/{descriptor}")
        if left[0] < 0:
            os.kill(os.getpid(), signal.SIGKILL)
        sync(descriptor)

    if rank == 1:
        os.fsync = counted


def test_a_rank_killed_while_saving_leaves_the_checkpoint_before(tmp_path: Path) -> None:
    save = {"save": str(tmp_path / "run"), "save_interval": 1, "save_keep_last": 1}
    values = {**LONG, **save, "log_dir": str(tmp_path / "logs")}
    run_ranks(2, train_all, [{**values, "train_iters": 3}], timeout=300)
    before = digest(tmp_path / "run")
    ranks = Processes.start(2, {**values, "load": save["save"]}, tmp_path, prepare=die_at_the_second_sync)
    codes = ranks.statuses()
    assert codes == [ExitStatus.RANK_LOST, -signal.SIGKILL], ranks.texts()
    ((kind, words),) = errors(ranks.texts()[0])
    assert kind == "RankFailure" and "saving iteration 4" in words, words
    latest = store.latest(tmp_path / "run")
    assert latest is not None and latest.name == "iter_0000003"
    after = digest(tmp_path / "run")
    assert {name: after[name] for name in before} == before
    assert any(".partial-" in name for name in after)
    resumed, _ = run_ranks(2, train_all, [{**values, "load": save["save"], "train_iters": 4}], timeout=300)
    left = sorted(os.listdir(tmp_path / "run"))
    assert resumed[0].start == 3 and left == [f"{SECRET}.{os.getuid()}", "iter_0000004", "lease"]


def test_a_loss_that_is_nan_stops_every_rank_and_harms_no_checkpoint(tmp_path: Path) -> None:
    common = {"log_dir": str(tmp_path / "logs"), "global_batch_size": 4, "clip_grad": 0}
    common |= {"lr_decay_style": "constant", "lr_warmup_iters": 0}
    run_ranks(2, train_all, [{**common, "train_iters": 2, "save": str(tmp_path / "run")}], timeout=300)
    before = digest(tmp_path / "run")
    values = {**common, "load": str(tmp_path / "run"), "save": str(tmp_path / "run"), "lr": 1e38}
    ranks = Processes.start(2, values, tmp_path)
    assert ranks.statuses() == [ExitStatus.NON_FINITE] * 2, ranks.texts()
    for rank in range(2):
        ((kind, words),) = errors(ranks.texts()[rank])
        assert kind == "NonFiniteLoss" and "iteration 4: the loss is nan" in words, words
        assert "rank 0 (loss nan, samples 12, 14)" in words and "rank 1 (loss nan, samples 13, 15)" in words
        assert "resume from it with a lower --lr" in words and "Traceback" not in ranks.texts()[rank]
    assert digest(tmp_path / "run") == before
    resumed, _ = run_ranks(
        2, train_all, [{**common, "train_iters": 3, "load": str(tmp_path / "run")}], timeout=300
    )
    assert resumed[0].start == 2 and np.isfinite(resumed[0].losses[0][1])


def test_sigterm_saves_and_ends_well(tmp_path: Path) -> None:
    values = {**LONG, "save": str(tmp_path / "run"), "log_dir": str(tmp_path / "logs")}
    ranks = Processes.start(2, {**values, "exit_signal_handler": True}, tmp_path)
    ranks.wait_for(lambda: iterations(tmp_path / "logs") > 2)
    os.kill(ranks.ranks[1].pid, signal.SIGTERM)  # one rank is told, both stop at the same iteration
    assert ranks.statuses() == [ExitStatus.STOPPED] * 2, ranks.texts()
    done = iterations(tmp_path / "logs")
    assert f"stopping after iteration {done}: another rank received a signal" in ranks.texts()[0]
    latest = store.latest(tmp_path / "run")
    assert latest is not None and store.verify(latest).step == done


def blind(rank: int) -> None:
    """Rank 1 sees another tokenizer than the data's, as on a node with an older copy."""
    if rank == 1:
        setup.tokenizer_info = lambda config: TokenizerInfo("0" * 64, 51, 50)


def test_a_mistake_of_one_rank_alone_is_said_by_it(tmp_path: Path) -> None:
    prefix = tmp_path / "data"
    write_data(prefix)
    write_meta(prefix, NullTokenizer(50).info)
    values = {**LONG, "mock_data": None, "data_path": (str(prefix),), "log_dir": str(tmp_path / "logs")}
    ranks = Processes.start(2, {**values, "train_iters": 3}, tmp_path, prepare=blind)
    assert ranks.statuses() == [ExitStatus.RANK_LOST, ExitStatus.MISTAKE], ranks.texts()
    ((kind, words),) = errors(ranks.texts()[1])
    assert kind == "ValueError" and "was made with another tokenizer" in words
    ((kind, words),) = errors(ranks.texts()[0])
    assert kind == "RankFailure" and "in the preparation" in words, words


def test_a_mistake_of_all_ranks_is_said_once(tmp_path: Path) -> None:
    values = {**TINY, "load": str(tmp_path / "nowhere"), "log_dir": str(tmp_path / "logs")}
    ranks = Processes.start(2, values, tmp_path)
    assert ranks.statuses() == [ExitStatus.MISTAKE] * 2, ranks.texts()
    (line,) = [line for text in ranks.texts() for line in errors(text)]
    assert line[0] == "CheckpointError" and "nowhere holds no complete checkpoint" in line[1]
