"""Rendezvous: ranks meet at a store within one time limit before they form a process group. Missing ranks are named.

By itself torch waits for a missing rank in several places in turn, each for its whole time limit, and does not say
which rank is missing. Once it has reached the store, it waits for an answer without any limit: rank 0 may be stopped.
Here waits are short sleeps, or for a thread that asks the store, so that signals are handled during them.
"""

from __future__ import annotations

import errno
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from datetime import timedelta
from functools import partial
from ipaddress import ip_address
from itertools import groupby
from typing import Any, TypeVar

import torch.distributed as dist

from megazero.mesh.launch import Launch

SHORTEST, LONGEST = 0.02, 0.5  # seconds between two looks
ALL = "all came"
BACKLOG = 4096  # connections that wait to be taken: every rank comes at once
ANSWER_S = 5.0  # that a store which has been reached has for one answer, however late the rank came

T = TypeVar("T")


class RanksMissing(RuntimeError):
    """Not all ranks came. ``told`` is True on a rank that heard it from another one, which reports it too."""

    def __init__(self, text: str, told: bool = False) -> None:
        super().__init__(text)
        self.told = told


def meet(launch: Launch, timeout_s: float, patience_s: float = 0.0) -> dist.Store:
    """Wait until all ranks are there, at most ``timeout_s`` seconds in all. Returns the store at which they met.

    patience_s: that rank 0 may be later than the others. Once it has come it has to answer as without it.
    Raises RanksMissing, which names who did not come, with hosts as far as they are known. Raises ValueError if the
    port is taken, or if two processes come as the same rank.
    """
    deadline = time.monotonic() + timeout_s + patience_s
    store = _reach(launch, _looks(timeout_s + patience_s), timeout_s)
    if not launch.agent_store:  # else rank 0 may be still to come
        deadline = min(deadline, time.monotonic() + timeout_s)
    asked = Answering(store, launch, deadline)
    try:
        verdict = _wait_for_all(asked, launch, _looks(deadline - time.monotonic()))
        told = True
        if verdict is None:
            hosts = [_host(asked, rank) for rank in range(launch.world_size)]
            own = missing_ranks(hosts, launch)
            # Whose time is out first speaks for all. The others leave with its words, also those that come later.
            verdict = asked.compare_set("met", "", own).decode()
            told = asked.add("told", 1) > 1
    except dist.DistError as error:
        raise RanksMissing(f"rank 0 left while ranks were joining ({_first_line(error)})") from error
    if verdict != ALL:
        raise RanksMissing(verdict, told)
    return store


def connect(launch: Launch, timeout_s: float, *, serve: bool = False) -> dist.Store:
    """Return a new connection to the store at which the ranks of this launch meet; ``serve`` makes it here.

    Raises ValueError if the port is taken on this host, RuntimeError if the store does not answer in time.
    """
    host, port = launch.address
    make = partial(dist.TCPStore, host, port, wait_for_workers=False, timeout=timedelta(seconds=timeout_s))
    made = partial(_serve, make, launch) if serve else partial(make, is_master=False)
    try:
        store = answered(made, timeout_s, launch)
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise
        raise ValueError(
            f"port {port} on {launch.host} is in use, by another run or program, or by another process of this run "
            "with RANK=0: the ranks cannot meet there; set MASTER_PORT to a free port, the same on all ranks"
        ) from error  # of which the exit status is made
    return dist.PrefixStore(f"megazero/{launch.attempt}", store)


def _serve(make: Callable[..., dist.TCPStore], launch: Launch) -> dist.TCPStore:
    """Make the store, on the interface that the launch's address names: torch's own would listen on every one.

    An address that other hosts cannot reach, or that is not this host's (a forwarded one), names none.
    """
    host, port = launch.address
    alone = launch.local_world_size == launch.world_size
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    named = [each for each in found if alone or not ip_address(each[4][0]).is_loopback]
    with _listen(named, port) as listening:
        store = make(is_master=True, master_listen_fd=listening.fileno())
        listening.detach()  # it is the store's now
    return store


def _listen(named: Sequence[Any], port: int) -> socket.socket:
    for family, _, _, _, address in named:
        try:
            return socket.create_server(address, family=family, backlog=BACKLOG)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise
    return socket.create_server(("", port), backlog=BACKLOG)


def answered(call: Callable[[], T], seconds: float, launch: Launch) -> T:
    """Return what a call of the store returns. It is made in a thread, which is left to itself if no answer comes.

    Raises what it raises, and RanksMissing after so many seconds.
    """
    answer = Future[T]()

    def ask() -> None:
        try:
            answer.set_result(call())
        except BaseException as error:
            answer.set_exception(error)

    threading.Thread(target=ask, daemon=True, name="store").start()
    try:
        return answer.result(seconds)
    except TimeoutError as error:
        raise RanksMissing(
            f"{_holder(launch)}, at {_place(launch)}, gives rank {launch.rank} on {launch.host} no answer: its "
            "process is stopped or lost, the link to it is, or another program listens there"
        ) from error


class Answering:
    """A store whose calls are ``answered`` before ``deadline`` (by time.monotonic()), or in ANSWER_S after it."""

    def __init__(self, store: dist.Store, launch: Launch, deadline: float) -> None:
        self._store, self._launch, self._deadline = store, launch, deadline

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            seconds = max(ANSWER_S, self._deadline - time.monotonic())
            return answered(partial(getattr(self._store, name), *arguments), seconds, self._launch)

        return call


def _reach(launch: Launch, looks: Iterator[float], answer_s: float) -> dist.Store:
    """Connect as soon as the store is up. torch's own attempts take twice its limit and print traces.

    answer_s: that a store which is up has to answer.
    """
    if launch.rank == 0 and not launch.agent_store:
        return connect(launch, max(ANSWER_S, next(looks)), serve=True)
    why = OSError("no answer")
    for left in looks:
        try:
            socket.create_connection(launch.address, timeout=left).close()
            return connect(launch, max(ANSWER_S, min(answer_s, left)))
        except OSError as error:
            why = error
        except dist.DistNetworkError as error:
            why = OSError(_first_line(error))
    raise RanksMissing(
        f"rank {launch.rank} on {launch.host} did not reach {_holder(launch)}, at {_place(launch)} ({why}): it did "
        "not come, MASTER_ADDR or MASTER_PORT are another's, or there is no way to it"
    )


def _wait_for_all(store: Answering, launch: Launch, looks: Iterator[float]) -> str | None:
    """Announce this rank and wait for the others. None if the time is over."""
    rank = launch.rank
    store.set(f"host/{rank}", launch.host)
    if store.add(f"rank/{rank}", 1) > 1:
        raise ValueError(
            f"two processes came as rank {rank} to {_place(launch)}: two runs meet at one port; "
            "give one of them another MASTER_PORT, the same on all of its ranks"
        )
    if store.add("ranks", 1) == launch.world_size:
        store.compare_set("met", "", ALL)
    for _ in looks:
        if store.check(["met"]):
            return store.get("met").decode()
    return None


def _looks(seconds: float) -> Iterator[float]:
    """Sleep between looks, which are further and further apart. Yields the seconds that are left, at least once."""
    deadline, pause = time.monotonic() + seconds, SHORTEST
    yield seconds
    while (left := deadline - time.monotonic()) > 0:
        time.sleep(min(pause, left))
        pause = min(1.2 * pause, LONGEST)
        yield max(SHORTEST, deadline - time.monotonic())


def _holder(launch: Launch) -> str:
    return (
        "the launcher's store" if launch.agent_store else "rank 0, which holds the store at which ranks meet"
    )


def _place(launch: Launch) -> str:
    return ":".join(map(str, launch.address))


def _host(store: Answering, rank: int) -> str | None:
    return store.get(f"host/{rank}").decode() if store.check([f"host/{rank}"]) else None


def missing_ranks(came: Sequence[str | None], launch: Launch) -> str:
    """Name the missing ranks and the hosts to look at.

    came: by rank, the host that it came from, or None. A missing rank's host is that of the others of its node,
    or comes from the launcher.
    """
    per_node = launch.local_world_size
    parts = []
    for node, ranks in groupby(range(len(came)), key=lambda rank: rank // per_node if per_node else 0):
        members = list(ranks)
        missing = [rank for rank in members if came[rank] is None]
        if not missing:
            continue
        known = next((came[rank] for rank in members if came[rank]), None) if per_node else None
        named = launch.hosts[node] if per_node and len(launch.hosts) * per_node == len(came) else None
        words = f"{'rank' if len(missing) == 1 else 'ranks'} {in_ranges(missing)}"
        host = known or named or (f"node {node}" if per_node else None)
        every = ", which is all of it" if host and len(missing) == len(members) > 1 else ""
        parts.append(words + (f" on {host}{every}" if host else ""))
    absent = sum(host is None for host in came)
    return f"{absent} of {len(came)} ranks did not come: {'; '.join(parts)}"


def in_ranges(numbers: Sequence[int]) -> str:
    """Return ascending numbers in short: 1, 4-7, 9."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else f"{run[0]}" for run in runs)


def _first_line(error: BaseException) -> str:
    return f"{error}".splitlines()[0][:120]
