"""Numbered datagrams between two nodes, of which the network may lose or swap each: ``receive COUNT`` on one, ``send
ADDRESS COUNT`` on the other. The receiver prints the seconds that each was on its way, in the order of arrival; it
fails if one is missing or changed, or comes before one that was sent earlier."""

import hashlib
import socket
import struct
import sys
import time

PORT = 29502
PAYLOAD = 100  # bytes: some 250 such datagrams fit into a socket's buffer, should the receiver be late


def payload(number: int) -> bytes:
    return hashlib.shake_128(struct.pack("<q", number)).digest(PAYLOAD)


def receive(count: int) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as here:
        here.bind(("", PORT))
        here.settimeout(30)
        with (
            socket.create_server(("", PORT)) as server,
            server.accept()[0],
        ):  # so the sender knows it is there
            for expected in range(count):
                got = here.recv(1 << 16)
                now = time.monotonic()  # all nodes have this clock
                number, sent = struct.unpack_from("<qd", got)
                assert number == expected and got[16:] == payload(number), (number, expected)
                print(now - sent)


def send(address: str, count: int) -> None:
    deadline = time.monotonic() + 20
    while True:
        try:
            peer = socket.create_connection((address, PORT), timeout=60)
            break
        except ConnectionRefusedError:  # the other node is still starting
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)
    with peer, socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as here:
        for number in range(count):
            data = payload(number)
            here.sendto(struct.pack("<qd", number, time.monotonic()) + data, (address, PORT))
            time.sleep(0.001)
        peer.recv(1)  # until the receiver has them all


if __name__ == "__main__":
    receive(int(sys.argv[2])) if sys.argv[1] == "receive" else send(sys.argv[2], int(sys.argv[3]))
