"""A plain TCP transfer between two nodes: ``serve`` on one, ``send ADDRESS BYTES`` on the other, which prints
the seconds from the first byte until the receiver has said that it has the last."""

import socket
import sys
import time

PORT = 29501
CHUNK = bytes(1 << 16)


def serve() -> None:
    with socket.create_server(("", PORT)) as server, server.accept()[0] as peer:
        left = int.from_bytes(peer.recv(8, socket.MSG_WAITALL), "little")
        while left > 0:
            left -= len(peer.recv(1 << 20))
        peer.sendall(b"!")


def send(address: str, count: int) -> None:
    for _ in range(100):
        try:
            peer = socket.create_connection((address, PORT), timeout=60)
            break
        except ConnectionRefusedError:  # the other node is still starting
            time.sleep(0.05)
    began = time.perf_counter()
    peer.sendall(count.to_bytes(8, "little"))
    for _ in range(count // len(CHUNK)):
        peer.sendall(CHUNK)
    peer.recv(1)
    print(time.perf_counter() - began)


if __name__ == "__main__":
    serve() if sys.argv[1] == "serve" else send(sys.argv[2], int(sys.argv[3]))
