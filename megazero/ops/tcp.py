"""The link meter: how busy this process's connections to other hosts are, from the kernel's counters (Linux, TCP)."""

from __future__ import annotations

import os
import socket
import struct
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import NamedTuple

INTERVAL = 1.0  # seconds between two readings, or more:
COST = 1000  # a reading takes at most this fraction of the time: 1 / COST
ACTIVE = 0.01  # connections that sent less than this fraction of the most active one carry no gradients
# Fields of struct tcp_info (linux/tcp.h): byte offsets of three u64.
BYTES_ACKED, BUSY_TIME, RWND_LIMITED, SIZE = 120, 168, 176, 184


class Sent(NamedTuple):
    """What a connection has sent: bytes that the other side acknowledged, and seconds with bytes in flight.

    ``busy`` excludes the time in which the other side had no room, because its process was not reading.
    """

    bytes: int
    busy: float


class LinkMeter:
    """Reads the connections' counters in its own thread, about once a second.

    share: the fraction of the last interval in which connections to other hosts were busy sending, on average over
    those that sent. 0 if there are none (InfiniBand, one host), or before the second reading.
    """

    def __init__(self) -> None:
        self.share = 0.0
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True, name="link meter")

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stopped.set()
        self._thread.join()

    def _run(self) -> None:
        before, at, pause = connections(), time.monotonic(), INTERVAL
        while not self._stopped.wait(pause):
            began = time.thread_time()
            now, when = connections(), time.monotonic()
            self.share = busy_share(before, now, when - at)
            before, at = now, when
            pause = max(INTERVAL, COST * (time.thread_time() - began))


def busy_share(before: Mapping[object, Sent], now: Mapping[object, Sent], seconds: float) -> float:
    """Return the busy fraction of ``seconds`` between two readings, on average over the connections that sent."""
    known = [(now[key], before[key]) for key in now.keys() & before.keys()]
    most = max((new.bytes - old.bytes for new, old in known), default=0)
    if not most or seconds <= 0:
        return 0.0
    shares = [(new.busy - old.busy) / seconds for new, old in known if new.bytes - old.bytes >= ACTIVE * most]
    return min(1.0, max(0.0, sum(shares) / len(shares)))


def connections() -> dict[object, Sent]:
    """Return this process's TCP connections to other hosts, by their two ends."""
    return dict(_connections())


def is_here(own: str, other: str) -> bool:
    """Tell whether the other end of a connection, by its address, is on this host."""
    return own == other or other.rpartition(":")[2].startswith("127.")


def _connections() -> Iterator[tuple[object, Sent]]:
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # closed meanwhile, or no connected socket
            if not os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(name))) as link:
                if link.family not in (socket.AF_INET, socket.AF_INET6) or link.type != socket.SOCK_STREAM:
                    continue
                here, there = link.getsockname(), link.getpeername()
                info = link.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, SIZE)
            if is_here(here[0], there[0]) or len(info) < SIZE:
                continue
            acked, busy, limited = (
                struct.unpack_from("=Q", info, at)[0] for at in (BYTES_ACKED, BUSY_TIME, RWND_LIMITED)
            )
            yield (here, there), Sent(acked, (busy - limited) / 1e6)
