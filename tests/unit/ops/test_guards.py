"""Exit conditions, signals, non-finite guards, and errors of collectives made readable."""

from __future__ import annotations

import datetime
import math
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from megazero.log.exit_status import ExitStatus
from megazero.ops import exit_conditions, failures
from megazero.ops.exit_conditions import ExitConditions, NotStarted, StopSignals
from megazero.ops.failures import (
    LocalStep,
    NonFiniteGuard,
    NonFiniteLoss,
    RankFailure,
    collective_symptom,
    readable_failures,
)
from tests.messages import names, refused


def alone(conditions: ExitConditions, iteration: int, since: int | None = None) -> str | None:
    """The reason of the only rank."""
    own, since = conditions.own_reason(), iteration - 1 if since is None else since
    return conditions.agreed_reason(own, own is not None) or conditions.planned(since, iteration)


def test_exit_interval_and_duration() -> None:
    conditions = ExitConditions(exit_interval=5)
    assert [i for i in range(1, 16) if alone(conditions, i)] == [5, 10, 15]
    names(alone(conditions, 12, since=8) or "", "iteration 10", "--exit-interval 5")
    assert alone(conditions, 14, since=11) is None and alone(ExitConditions(), 1) is None
    now = [219.9]
    conditions = ExitConditions(exit_duration_in_mins=2, began=100.0, clock=lambda: now[0])
    assert alone(conditions, 2) is None
    now[0] = 220.0
    names(alone(conditions, 3) or "", "--exit-duration-in-mins is 2")


def test_a_kill_switch_is_looked_at_in_every_iteration(tmp_path: Path) -> None:
    file = tmp_path / "kill"
    conditions = ExitConditions(kill_switch=str(file))
    assert alone(conditions, 1) is None
    file.touch()
    assert alone(conditions, 2) == f"--kill-switch-path {file} is there"
    file.unlink()
    assert alone(conditions, 3) is None


def test_one_ranks_signal_stops_all_ranks() -> None:
    quiet, signalled = StopSignals(), StopSignals()
    signalled.received = signal.SIGTERM
    ranks = [ExitConditions(signals=signals, exit_interval=3) for signals in (quiet, signalled)]
    own = [conditions.own_reason() for conditions in ranks]
    assert own == [None, "received SIGTERM"]
    stopped = [c.agreed_reason(mine, any(own)) or "" for c, mine in zip(ranks, own, strict=True)]
    assert "another rank" in stopped[0] and stopped[1] == "received SIGTERM"
    signalled.received = signal.SIGUSR1  # after the ranks told each other: not in this iteration
    assert [c.agreed_reason(None, False) for c in ranks] == [None, None]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGINT])
def test_signals_are_noted_and_handlers_restored(
    number: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = {n: signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)}
    with StopSignals() as signals:
        signals.hold()
        conditions = ExitConditions(signals=signals)
        assert alone(conditions, 1) is None
        os.kill(os.getpid(), number)
        assert alone(conditions, 2) == f"received {number.name}"
        os.kill(os.getpid(), signal.SIGINT)  # Ctrl-C signals all ranks, and torchrun hands it on to them
        monkeypatch.setattr(exit_conditions, "SAME_S", 0.0)
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    assert {n: signal.getsignal(n) for n in before} == before


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGINT])
def test_a_signal_during_the_start_ends_it_at_once(number: signal.Signals) -> None:
    with pytest.raises(NotStarted) as told, StopSignals():
        try:
            os.kill(os.getpid(), number)
        except Exception:  # noqa: BLE001 - a library's way
            pytest.fail("a handler of errors swallowed it")
    names(f"{told.value}", number.name, "during the start")
    assert told.value.exit_status is ExitStatus.STOPPED


def _gathers(*steps: LocalStep) -> Callable[[LocalStep], list[LocalStep]]:
    return lambda mine: list(steps)


def _must_not_gather(mine: LocalStep) -> list[LocalStep]:
    raise AssertionError("a collective although all is well")


GOOD = LocalStep(0, 3.0, (0, 1))
BAD = LocalStep(5, math.nan, (40, 41))


def test_non_finite_loss_names_iteration_rank_samples_cure() -> None:
    guard = NonFiniteGuard()
    guard.check_loss(1, 3.0, GOOD, _must_not_gather)
    many = [LocalStep(r, math.inf, tuple(range(40))) for r in range(20)]
    for mine, every, words in (
        (GOOD, [GOOD, BAD], ("iteration 7", "nan", "rank 5 ", "40, 41", "--lr")),
        (BAD, [GOOD, BAD], ("iteration 7", "nan", "rank 5 ", "40, 41", "--lr")),  # all ranks say the same
        (GOOD, [GOOD], ("every rank's own loss is finite",)),
        (GOOD, many, ("and 24 more", "and 12 more ranks")),
    ):
        with refused(*words, by=NonFiniteLoss):
            guard.check_loss(7, math.nan, mine, _gathers(*every))


def test_norms_stop_the_run_after_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that a lower loss scale may cure do not count."""
    monkeypatch.setattr(failures, "MOST_SKIPS", 3)
    guard = NonFiniteGuard()
    for iteration, norm in enumerate([1.0, math.inf, math.nan, 1.0, math.inf, math.inf]):
        guard.check_norm(iteration, norm, GOOD, _must_not_gather)
    with refused("iteration 6", "inf", "3 steps", by=NonFiniteLoss):
        guard.check_norm(6, math.inf, GOOD, _gathers(GOOD))
    for iteration in range(20):
        guard.check_norm(iteration, math.inf, GOOD, _must_not_gather, scale_can_fall=True)
    assert guard.skipped_in_a_row == 0


# Messages as gloo printed them (torch 2.13) when a peer was killed, and when it slept too long.
KILLED = (
    "[/__w/pytorch/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:537] Read error [10.0.0.2]:58601: "
    "Connection reset by peer. This is typically caused by a remote worker hanging\nmore"
)
SLEPT = (
    "[/__w/pytorch/pytorch/third_party/gloo/gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 4000ms "
    "for recv operation to complete"
)


def _failing(error: Exception) -> None:
    with readable_failures(rank=3, host="node1", timeout_s=600, phase=lambda: "backward of iteration 12"):
        raise error


@pytest.mark.parametrize(
    "text, words",
    [
        (KILLED, ("the peer at 10.0.0.2", "its process ended", "rank 3 on node1", "600 s", "--load")),
        (SLEPT, ("another rank", "did not reach", "4000ms")),
    ],
)
def test_failed_collectives_become_readable(text: str, words: tuple[str, ...]) -> None:
    with pytest.raises(RankFailure) as caught:
        _failing(RuntimeError(text))
    names(f"{caught.value}", "in backward of iteration 12", *words)
    assert isinstance(caught.value.__cause__, RuntimeError)


def test_only_failed_collectives_become_rank_failures() -> None:
    lane = pytest.importorskip("megazero.comm.lane").CommunicationError
    with refused("iteration 12", "unit 'head'", by=RankFailure):
        _failing(lane("rank 3: gather of unit 'head' failed on axis 'p', hop 1 of 2: unheard of"))
    for other in (RuntimeError("shape mismatch"), NonFiniteLoss("iteration 1: the loss is nan")):
        with pytest.raises(type(other)) as caught:
            _failing(other)
        assert caught.value is other


def test_a_real_store_time_out_is_recognised() -> None:
    dist = pytest.importorskip("torch.distributed")
    store = dist.TCPStore("127.0.0.1", 0, 1, True, datetime.timedelta(milliseconds=200))
    with pytest.raises(RuntimeError) as caught:
        store.get("never set")
    assert collective_symptom(caught.value) == "it did not reach this point within the time-out"
