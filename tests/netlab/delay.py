"""Delays what comes in at an interface, where the kernel has no netem:

    python tests/netlab/delay.py INTERFACE MILLISECONDS

Says "up" when it holds packets, and ends with its standard input; what it set up ends with it. Needs CAP_NET_ADMIN
in its network namespace. It fails if it was so late that the kernel had to drop a packet (ENOBUFS; at root's buffer
of 64 MB some 80,000 have to come meanwhile, at a user's of 200 kB 250).

A rule of nftables hands incoming packets to a netfilter queue. The kernel keeps them there, large segments whole,
and tells this process only their numbers; it lets them go in order, each no sooner than asked after it came. No
payload is copied, and at 1 Gb/s there are some 2,000 packets of 64 KB in a second.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import struct
import sys
import time
from collections import deque

NETFILTER = 12  # of netlink
TABLES, QUEUES = 10 << 8, 3 << 8  # its subsystems; constants are those of linux/netfilter/nf*netlink*.h
REQUEST, ACK, CREATE_AT_END = 0x1, 0x4, 0x400 | 0x800
OWNER = 2  # a table that ends with the socket that made it
NESTED = 0x8000
INFINITE = 1 << 20  # packets that a queue holds, and bytes for its messages: what does not fit would be lost
ACCEPT = 1


def attribute(kind: int, value: bytes) -> bytes:
    """One netlink attribute, filled up to 4 bytes."""
    return struct.pack("=HH", 4 + len(value), kind) + value + bytes(-len(value) % 4)


def nested(kind: int, *attributes: bytes) -> bytes:
    return attribute(kind | NESTED, b"".join(attributes))


def number(kind: int, value: int) -> bytes:
    return attribute(kind, struct.pack(">I", value))


def text(kind: int, value: str) -> bytes:
    return attribute(kind, value.encode() + b"\0")


def message(kind: int, flags: int, family: int, body: bytes, resource: int = 0) -> bytes:
    whole = struct.pack("=BBH", family, 0, socket.htons(resource)) + body
    return struct.pack("=IHHII", 16 + len(whole), kind, REQUEST | flags, 0, 0) + whole


def expression(name: str, *attributes: bytes) -> bytes:
    return nested(1, text(1, name), nested(2, *attributes))


def rule_to_queue(interface: str) -> bytes:
    """The batch that makes: table ip delay { chain in { type filter hook prerouting; iifname INTERFACE queue } }"""
    name, ipv4 = "delay", socket.AF_INET
    hook = nested(4, number(1, 0), number(2, 0))
    loaded = expression("meta", number(1, 1), number(2, 6))
    compared = expression("cmp", number(1, 1), number(2, 0), nested(3, text(1, interface)))
    # Its target of iptables: not every kernel has nftables' own expression.
    queued = expression(
        "target", text(1, "NFQUEUE"), number(2, 1), attribute(3, struct.pack("=HHI", 0, 1, 0))
    )
    return b"".join(
        (
            message(16, 0, 0, b"", TABLES >> 8),  # begin
            message(TABLES | 0, CREATE_AT_END | ACK, ipv4, text(1, name) + number(2, OWNER)),
            message(
                TABLES | 3,
                CREATE_AT_END | ACK,
                ipv4,
                text(1, name) + text(3, "in") + hook + text(7, "filter"),
            ),
            message(
                TABLES | 6,
                CREATE_AT_END | ACK,
                ipv4,
                text(1, name) + text(2, "in") + nested(4, loaded, compared, queued),
            ),
            message(17, 0, 0, b"", TABLES >> 8),  # end
        )
    )


def bound_queue() -> bytes:
    """The message that binds queue 0 to this socket: numbers only, segments whole."""
    bind = attribute(1, struct.pack(">BBH", 1, 0, socket.AF_INET))
    params = attribute(2, struct.pack(">IB", 0, 1))
    gso = 1 << 2
    return message(QUEUES | 2, ACK, 0, bind + params + number(3, INFINITE) + number(4, gso) + number(5, gso))


def set_up(interface: str) -> socket.socket:
    """Raises OSError, with the kernel's reason."""
    queue = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, NETFILTER)
    queue.bind((0, 0))
    for option in (33, socket.SO_RCVBUF):  # SO_RCVBUFFORCE where it is allowed
        try:
            queue.setsockopt(socket.SOL_SOCKET, option, 64 * INFINITE)
            break
        except PermissionError:
            pass
    for sent, answers in ((bound_queue(), 1), (rule_to_queue(interface), 3)):
        queue.send(sent)
        while answers:
            answer = queue.recv(1 << 16)
            at = 0
            while at < len(answer):
                size, kind = struct.unpack_from("=IH", answer, at)
                error = struct.unpack_from("=i", answer, at + 16)[0] if kind == 2 else 0
                if error:
                    raise OSError(-error, os.strerror(-error))
                answers -= kind == 2
                at += size + -size % 4
    return queue


def hold(queue: socket.socket, seconds: float) -> None:
    """Let packets go when they are due, until standard input ends."""
    held: deque[tuple[float, int]] = deque()
    queue.setblocking(False)
    while True:
        wait = None if not held else max(0.0, held[0][0] - time.monotonic())
        ready = select.select([queue, sys.stdin], [], [], wait)[0]
        if sys.stdin in ready:
            return
        if ready:
            take(queue, held, seconds)
        now, last = time.monotonic(), None
        while held and held[0][0] <= now:
            last = held.popleft()[1]
        if last is not None:  # one verdict for all up to this one
            queue.send(message(QUEUES | 3, 0, 0, attribute(2, struct.pack(">II", ACCEPT, last))))


def take(queue: socket.socket, held: deque[tuple[float, int]], seconds: float) -> None:
    """Note the packets that came, by number, with the time when they are due."""
    while True:
        try:
            arrived = queue.recv(4096)
        except BlockingIOError:
            return
        # The first attribute is NFQA_PACKET_HDR, and its first word the packet's number.
        held.append((time.monotonic() + seconds, struct.unpack_from(">I", arrived, 24)[0]))


def main() -> None:
    interface, milliseconds = sys.argv[1:]
    queue = set_up(interface)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    print("up", flush=True)
    hold(queue, float(milliseconds) / 1e3)


if __name__ == "__main__":
    main()
