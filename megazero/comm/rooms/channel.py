"""Frames over TCP that only those who know the secret can write: length (4 bytes), payload, HMAC-SHA256 (32 bytes).

Both sides send a nonce first. The key of a connection is made of both and the secret, and each frame is sealed with
its direction and number, so nothing of another connection, place or direction passes. A frame is checked before it is
used, its length before memory is taken. Requests and answers are JSON.
"""

from __future__ import annotations

import hmac
import json
import secrets
import socket
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from typing import Any

from megazero.bounded import load_json

Address = tuple[str, int]
Buffer = bytes | bytearray | memoryview
FRAME = 1 << 18  # bytes of a payload: at 1 Mb/s one takes 2 s, less than anyone's silence
WORDS = 1 << 20  # bytes of a request or an answer
HELLO_S = 5.0  # that a stranger has for the first frame
IDLE_S = 60.0  # after which a server closes a connection on which nothing moves
NONCE, SEAL = 16, 32


class Refused(ValueError):
    """This launch may not take part; the message says why."""


class SealedChannel(AbstractContextManager["SealedChannel"]):
    """One end of a connection. Every wait for a byte ends after the socket's timeout (an OSError)."""

    def __init__(self, sock: socket.socket, secret: bytes, *, asks: bool) -> None:
        """asks: this end sends requests. Raises Refused if the other end has another secret."""
        self.socket = sock
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        nonce = secrets.token_bytes(NONCE)
        sock.sendall(nonce)
        nonces = [nonce, self._read(NONCE)]
        self._key = hmac.digest(secret, b"".join(nonces if asks else reversed(nonces)), "sha256")
        self._ways = (b"ask", b"say") if asks else (b"say", b"ask")
        self._counts = [0, 0]  # frames sent, received
        self.send(b"")
        try:
            self.receive(0)
        except ValueError as error:
            raise Refused("the other end has another secret") from error

    def send(self, payload: Buffer) -> None:
        length = memoryview(payload).nbytes.to_bytes(4, "big")
        self.socket.sendall(length)
        self.socket.sendall(payload)
        self.socket.sendall(self._seal(0, payload))

    def receive(self, most: int) -> bytearray:
        """Return the next frame's payload. Raises ValueError if it is longer than ``most`` or not sealed."""
        length = int.from_bytes(self._read(4), "big")
        if length > most:
            raise ValueError(f"a frame of {length} bytes where at most {most} are due")
        self.receive_into(payload := bytearray(length), length)
        return payload

    def receive_into(self, out: memoryview | bytearray, length: int | None = None) -> None:
        """Receive a frame whose payload has the length of ``out``; ``length``: what has been read of its head."""
        view = memoryview(out)
        if length is None and (length := int.from_bytes(self._read(4), "big")) != len(view):
            raise ValueError(f"a frame of {length} bytes where {len(view)} are due")
        self._fill(view)
        if not hmac.compare_digest(self._read(SEAL), self._seal(1, view)):
            raise ValueError("a frame without our seal")

    def say(self, words: Any) -> None:
        self.send(json.dumps(words).encode())

    def heard(self) -> Any:
        return load_json(bytes(self.receive(WORDS)))

    def ask(self, words: Any) -> Any:
        self.say(words)
        return self.heard()

    def close(self) -> None:
        self.socket.close()

    def __exit__(self, *_: object) -> None:
        self.close()

    def _seal(self, way: int, payload: Buffer) -> bytes:
        seal = hmac.new(self._key, self._ways[way] + self._counts[way].to_bytes(8, "big"), "sha256")
        self._counts[way] += 1
        seal.update(payload)
        return seal.digest()

    def _read(self, count: int) -> bytes:
        self._fill(memoryview(out := bytearray(count)))
        return bytes(out)

    def _fill(self, view: memoryview) -> None:
        while view:
            if not (count := self.socket.recv_into(view)):
                raise ConnectionError("the other end closed the connection")
            view = view[count:]


def reach(address: Address, secret: bytes, silence_s: float) -> SealedChannel:
    """Connect. Raises OSError, within ``silence_s`` for each step, or Refused."""
    sock = socket.create_connection(address, timeout=silence_s)
    try:
        return SealedChannel(sock, secret, asks=True)
    except BaseException as error:
        sock.close()
        if isinstance(error, Refused):
            raise Refused(f"{error}: {address[0]}:{address[1]}") from None
        raise


def own_host(peer: Address) -> str:
    """Return this host's address on the way to ``peer``; nothing is sent."""
    family, kind, *_, address = socket.getaddrinfo(*peer, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as sock:
        sock.connect(address)
        return str(sock.getsockname()[0])


class Listener:
    """Answers requests, each connection in a thread of its own: at every address of this host, or without a secret
    at 127.0.0.1 alone.
    """

    def __init__(
        self,
        port: int,
        secret: bytes,
        answer: Callable[[SealedChannel, Any], None],
        ended: Callable[[SealedChannel], None] = lambda channel: None,
        refused: Callable[[str], None] = lambda host: None,
    ) -> None:
        """port: 0 is a free one. answer: called with a channel and a request. refused: with a stranger's host."""
        self._secret, self._answer, self._ended, self._refused = secret, answer, ended, refused
        both = bool(secret) and socket.has_dualstack_ipv6()
        self._socket = socket.create_server(
            ("" if secret else "127.0.0.1", port),
            family=socket.AF_INET6 if both else socket.AF_INET,
            dualstack_ipv6=both,
            backlog=128,
        )
        self.port: int = self._socket.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True, name="rooms").start()

    def close(self) -> None:
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts
        self._socket.close()

    def _accept(self) -> None:
        while True:
            try:
                sock, (host, *_) = self._socket.accept()
            except OSError:
                if self._socket.fileno() < 0:  # closed; else this process has too many files open
                    return
                time.sleep(0.1)
                continue
            threading.Thread(target=self._serve, args=(sock, host), daemon=True, name="rooms").start()

    def _serve(self, sock: socket.socket, host: str) -> None:
        with sock, suppress(OSError, ValueError):
            sock.settimeout(HELLO_S)
            try:
                channel = SealedChannel(sock, self._secret, asks=False)
            except Refused:
                self._refused(host)
                return
            sock.settimeout(IDLE_S)
            try:
                while True:
                    self._answer(channel, channel.heard())
            finally:
                self._ended(channel)
