"""Ranks meet within one time limit, and who does not come is named: by rank, and by host as far as it is known.

The ranks are threads here. tests/dist/failures/test_failing_ranks.py has a run whose rank does not come.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Sequence
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from megazero.mesh import rendezvous
from megazero.mesh.launch import Launch
from megazero.mesh.rendezvous import RanksMissing, _listen, connect, in_ranges, meet, missing_ranks
from megazero.mesh.starter import free_port

HERE = socket.gethostname()


def outcome(launch: Launch, seconds: float) -> Any:
    try:
        return meet(launch, seconds)
    except (RanksMissing, ValueError) as error:
        return error


def come(world: int, ranks: Sequence[int], seconds: float = 1.0, **launch: Any) -> list[Any]:
    """What ``meet`` returned or raised for each of these ranks, which come at once, in their order."""
    base = Launch(world_size=world, local_world_size=world, master_port=free_port(), **launch)
    out: list[Any] = [None] * len(ranks)

    def one(place: int) -> None:
        out[place] = outcome(replace(base, rank=ranks[place]), seconds)

    threads = [threading.Thread(target=one, args=(place,)) for place in range(len(ranks))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return out


def test_all_come_and_have_one_store() -> None:
    stores = come(3, [0, 1, 2], seconds=60)
    stores[1].set("word", "said")
    assert stores[2].get("word") == b"said"


@pytest.mark.parametrize("missing", [1, 2])
def test_a_rank_that_does_not_come_is_named_once(missing: int) -> None:
    there = [rank for rank in range(3) if rank != missing]
    errors = come(3, there)
    assert [type(error) for error in errors] == [RanksMissing] * 2
    assert {str(error) for error in errors} == {f"1 of 3 ranks did not come: rank {missing} on {HERE}"}
    assert sorted(error.told for error in errors) == [False, True]


def test_the_rank_that_holds_the_store_is_named() -> None:
    began = time.monotonic()
    errors = come(3, [1, 2], seconds=0.5)
    assert time.monotonic() - began < 30  # not a multiple of torch's own limits
    for rank, error in zip((1, 2), errors, strict=True):
        words = f"rank {rank} on {HERE} did not reach rank 0, which holds the store"
        assert isinstance(error, RanksMissing) and words in str(error) and "Connection refused" in str(error)


class Between:
    """Stands between ranks and the store at ``port``. From ``frozen`` on it hands nothing on, as a stopped store."""

    def __init__(self, port: int) -> None:
        self.listener, self.store = socket.create_server(("127.0.0.1", 0)), ("127.0.0.1", port)
        self.port, self.frozen, self.ends = self.listener.getsockname()[1], False, list[socket.socket]()
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with suppress(OSError):  # closed
            while True:
                pair = self.listener.accept()[0], socket.create_connection(self.store)
                self.ends += pair
                for ends in (pair, pair[::-1]):
                    threading.Thread(target=self._hand_on, args=ends, daemon=True).start()

    def _hand_on(self, one: socket.socket, other: socket.socket) -> None:
        with suppress(OSError):
            while data := one.recv(4096):
                if not self.frozen:
                    other.sendall(data)

    def close(self) -> None:
        for each in (self.listener, *self.ends):
            each.close()


@pytest.mark.parametrize("waited", [0.0, 0.5])
def test_a_store_that_stops_is_named_within_the_limit(waited, monkeypatch) -> None:
    """Before the rank has joined, and while it waits for others. torch's calls wait for an answer for ever."""
    monkeypatch.setattr(rendezvous, "ANSWER_S", 0.2)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with closing(Between(store.port)) as between:
        between.frozen = not waited
        rank = Launch(rank=1, world_size=3, master_port=between.port)
        heard = list[Any]()
        asking = threading.Thread(target=lambda: heard.append(outcome(rank, 1.5)), daemon=True)
        asking.start()
        time.sleep(waited)
        between.frozen = True
        asking.join(20)
    assert [type(error) for error in heard] == [RanksMissing]
    words = f"rank 0, which holds the store at which ranks meet, at 127.0.0.1:{between.port}, gives rank 1 on"
    assert words in str(heard[0]) and "no answer: its process is stopped or lost" in str(heard[0])


def test_a_rank_that_comes_too_late_hears_the_same() -> None:
    launch = Launch(world_size=3, local_world_size=3, master_port=free_port())
    with pytest.raises(RanksMissing, match="2 of 3 ranks did not come: ranks 1-2 on") as early:
        meet(launch, 0.1)
    # The store goes with the rank that made it, which waits a little: here its exception holds it.
    with pytest.raises(RanksMissing) as late:
        meet(replace(launch, rank=1), 60)
    assert late.value.told and str(late.value) == str(early.value)


def test_two_runs_at_one_port_are_told_so() -> None:
    outcomes = come(3, [0, 1, 1], seconds=1)
    (refused,) = [each for each in outcomes if isinstance(each, ValueError)]
    assert "two processes came as rank 1 to 127.0.0.1:" in str(refused) and "MASTER_PORT" in str(refused)
    with closing(socket.socket()) as other:
        other.bind(("", 0))
        other.listen()
        with pytest.raises(
            ValueError, match=f"port {other.getsockname()[1]} on .* is in use.*set MASTER_PORT"
        ):
            meet(Launch(world_size=2, master_port=other.getsockname()[1]), 1)


EVERYWHERE, LOOPBACK, OTHER_LOOPBACK = "00000000", "0100007F", "0101007F"


@pytest.mark.parametrize(
    ("named", "ranks_here", "listens"),
    [
        ("127.0.0.1", 2, LOOPBACK),
        ("127.0.1.1", 2, OTHER_LOOPBACK),
        (
            "127.0.1.1",
            1,
            EVERYWHERE,
        ),  # a host's own name on Debian: the other node has another address for it
        ("127.0.0.1", None, EVERYWHERE),
    ],
)
def test_the_store_listens_where_the_address_says_alone(
    named: str, ranks_here: int | None, listens: str
) -> None:
    launch = Launch(world_size=2, local_world_size=ranks_here, master_addr=named, master_port=free_port())
    store = connect(launch, 5.0, serve=True)
    store.set("word", "said")
    assert connect(launch, 5.0).get("word") == b"said"
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    listening = [row[1] for row in rows if row[3] == "0A"]
    assert [at for at in listening if at.endswith(f":{launch.master_port:04X}")] == [
        f"{listens}:{launch.master_port:04X}"
    ]


def test_an_address_that_is_forwarded_to_this_host_has_every_interface() -> None:
    there = socket.getaddrinfo("192.0.2.1", 0, type=socket.SOCK_STREAM)  # nobody's, for documents
    with closing(_listen(there, 0)) as listening:
        assert listening.getsockname()[0] == "0.0.0.0"


NODES = ("gpu03", "gpu04")
# hosts of the ranks that came (None: it did not), ranks per node, the launcher's hosts -> where to look
PLACES = {
    "a rank whose neighbours came": (["a", None, "b", "b"], 2, (), "1 of 4 ranks did not come: rank 1 on a"),
    "a node of SLURM's list": (["a", "a", None, None], 2, NODES, "ranks 2-3 on gpu04, which is all of it"),
    "a node without a name": (["a", "a", None, None], 2, (), "ranks 2-3 on node 1, which is all of it"),
    "ranks of two nodes": (
        [None, "a", None, "b"],
        2,
        NODES,
        "2 of 4 ranks did not come: rank 0 on a; rank 2 on b",
    ),
    "ranks of unknown nodes": (["a", None, None, None], None, (), "3 of 4 ranks did not come: ranks 1-3"),
}


@pytest.mark.parametrize("case", PLACES)
def test_where_a_missing_rank_is_to_be_looked_for(case: str) -> None:
    came, per_node, hosts, words = PLACES[case]
    text = missing_ranks(came, Launch(world_size=4, local_world_size=per_node, hosts=hosts))
    assert text.endswith(words)


def test_ranks_in_short() -> None:
    assert in_ranges([0, 1, 2, 5, 7, 8]) == "0-2, 5, 7-8"
