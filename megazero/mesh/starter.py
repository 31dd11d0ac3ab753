"""Starts a program as ranks of this machine, without a launcher, and returns their exit status.

It needs no torch. The ranks read torchrun's variables and meet at a store of rank 0.
"""

from __future__ import annotations

import ctypes
import math
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from types import FrameType
from typing import Any

from megazero.mesh.launch import FIRST_PORT, PORTS, allocator_settings, computes_on_host, rank_variables

GRACE_S = 20.0  # that the other ranks have once one has failed, and again once they were sent SIGTERM
LOOK_S = 0.05
PR_SET_PDEATHSIG = 1  # linux/prctl.h
HANDED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)


def start_again(argv: Sequence[str], flags: Sequence[str], count: int, **options: Any) -> int:
    """Start this command, whose last words are ``argv``, as ``count`` ranks whose last words are ``flags``.

    Returns the exit status. ``options`` are those of ``start_ranks``. Raises ValueError if another program has called
    the command: it would be started in its place.
    """
    return start_ranks([*own_command(argv), *flags], count, **options)


def own_command(argv: Sequence[str]) -> list[str]:
    """Return this process's command without its last words, ``argv``. Raises ValueError if these are others'."""
    words, own = sys.orig_argv, len(sys.orig_argv) - len(argv)
    if words[own:] != list(argv):
        raise ValueError(
            "--nproc-per-node starts this process's own command again: write megazero COMMAND and its flags there"
        )
    return [sys.executable, *words[1:own]]


def start_ranks(
    command: Sequence[str],
    count: int,
    *,
    device: str = "auto",
    good: Collection[int] = (0,),
    grace: float = GRACE_S,
) -> int:
    """Run ``command`` as ``count`` ranks, wait for all of them and return the exit status. ``device`` is their
    --device. The rest: ``start_all``.
    """
    ours = {"OMP_NUM_THREADS": "1", **(allocator_settings(os.environ) if computes_on_host(device) else {})}
    port = free_port()
    environs = [{**ours, **os.environ, **rank_variables(rank, count, port)} for rank in range(count)]
    return start_all([(command, environ) for environ in environs], good=good, grace=grace)


def start_all(
    commands: Sequence[tuple[Sequence[str], Mapping[str, str]]],
    *,
    good: Collection[int] = (0,),
    grace: float = GRACE_S,
) -> int:
    """Run commands with their environments, as ranks, wait for all of them and return the exit status.

    Signals are forwarded to every rank once: ranks have their own process groups, so the terminal's Ctrl-C does not
    reach them a second time. If this process is killed, the kernel kills them, too (Linux). ``good`` are the statuses
    of ranks that did not fail. Once a rank has failed, the others have ``grace`` seconds to report what they know of
    it; then they are ended.

    The status is the first that is not 0. A rank's own status precedes the signal of a killed one, which counts as
    128 plus its number, as in a shell.
    """
    heard = list[int]()

    def hear(number: int, _: FrameType | None) -> None:
        heard.append(number)

    for number in HANDED_ON:
        if signal.getsignal(number) is not signal.SIG_IGN:  # nohup's: the ranks ignore it, too
            signal.signal(number, hear)
    ranks, tie = list[subprocess.Popen[bytes]](), _tied_to_this_process()
    try:
        for command, environ in commands:
            ranks.append(
                subprocess.Popen(
                    command, env=environ, stdin=subprocess.DEVNULL, process_group=0, preexec_fn=tie
                )
            )
        statuses = _wait(ranks, heard, good, grace)
    finally:
        for process in ranks:
            process.kill()
            process.wait()
    first = next((status for status in statuses if status > 0), next(filter(None, statuses), 0))
    return first if first >= 0 else 128 - first


def _tied_to_this_process() -> Callable[[], None] | None:
    """Return what a rank calls before it becomes the command: from then on it is killed when this process ends."""
    prctl, starter = getattr(ctypes.CDLL(None), "prctl", None), os.getpid()
    if prctl is None:  # not on Linux
        return None

    def tie() -> None:
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != starter:  # it has ended before
            os.kill(os.getpid(), signal.SIGKILL)

    return tie


def _wait(
    ranks: Sequence[subprocess.Popen[bytes]], heard: list[int], good: Collection[int], grace: float
) -> list[int]:
    """Wait until all have ended. Returns their statuses in the order in which they ended, as Popen's.

    heard: the signals that came to this process, to which new ones are added.
    """
    ended, handed, deadline = dict[int, int](), 0, math.inf
    ends = iter((signal.SIGTERM, signal.SIGKILL))
    while len(ended) < len(ranks):
        time.sleep(LOOK_S)
        while handed < len(heard):
            _send(ranks, heard[handed])
            handed += 1
        for rank, process in enumerate(ranks):
            status = process.poll()
            if status is None or rank in ended:
                continue
            ended[rank] = status
            if status < 0 and -status not in heard:
                how = signal.Signals(-status).name
                print(f"rank {rank} (process {process.pid}) was ended by {how}", file=sys.stderr, flush=True)
            if status not in good:
                deadline = min(deadline, time.monotonic() + grace)
        if time.monotonic() > deadline:
            _send(ranks, next(ends, signal.SIGKILL))
            deadline = time.monotonic() + grace
    return list(ended.values())


def _send(ranks: Sequence[subprocess.Popen[bytes]], number: int) -> None:
    for process in ranks:
        process.send_signal(number)  # nothing happens to one that has ended


def free_port() -> int:
    """Return a port that nothing listens on, of those that no system gives to a connection meanwhile."""
    draw = random.SystemRandom()
    while True:
        port = draw.randrange(FIRST_PORT, FIRST_PORT + PORTS)
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
