"""What a stranger puts into the store names no file and ends nothing: the ranks of a job know each other's words by
a secret."""

from __future__ import annotations

import json
import socket
import time
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from megazero.mesh.launch import Launch
from megazero.mesh.sealed import BYTES, SealedStore, job_secret
from megazero.ops import heartbeat
from megazero.ops.watchdog import INTERVAL, Limit, Watchdog

BEAT = {
    "count": 1,
    "host": socket.gethostname(),
    "pid": 1,
    "since": 0.0,
    "waiting": True,
    "where": {},
    "stack": "",
}


class Idle:
    """A rank that moves on."""

    ended = False

    def where(self) -> dict[str, str]:
        return {"phase": "iteration 1"}

    def progress(self) -> float:
        return time.monotonic()

    def limit(self) -> Limit:
        return Limit(60.0, "--limit")

    def report(self, line: str) -> None:
        raise AssertionError(line)

    def end(self) -> None:
        self.ended = True


def forged(store: dist.Store, folder: Path) -> None:
    """Write what names a folder, as it is and with a guessed secret."""
    for secret in (None, b"guessed", b""):
        name = SealedStore(store, secret).set if secret is not None else store.set
        name("stacks/0", f"{folder}")
        name("heartbeat/1", json.dumps({**BEAT, "rank": 1}))
        name("reported", "")
        name("hang", "1")


@pytest.mark.parametrize("known", [False, True], ids=["a stranger", "one that knows the secret"])
def test_forged_keys_write_nothing_and_end_nothing(tmp_path: Path, known: bool) -> None:
    """One that knows the secret ends the job, and still names no file."""
    store, rank, secret = dist.HashStore(), Idle(), b"" if known else b"only the job's"
    watchdog = Watchdog(store, Launch(0, 2, 0, 2), rank, tmp_path / "logs", secret)
    forged(store, tmp_path / "forged")
    watchdog.start()
    try:
        SealedStore(store, secret).set("stacks/0", f"{tmp_path / 'forged'}")  # not even from a rank: no time
        while not (rank.ended if known else watchdog._requests):
            time.sleep(INTERVAL / 10)
    finally:
        watchdog.stop()
    assert rank.ended == known and not (tmp_path / "forged").exists()
    if not known:
        assert list(tmp_path.iterdir()) == [], "no stack was written"
        assert watchdog._heartbeats(range(2)).keys() == {0}


def test_a_value_counts_under_its_own_key_and_secret() -> None:
    store = dist.HashStore()
    ours, theirs = SealedStore(store, b"ours"), SealedStore(store, b"theirs")
    theirs.set("a", "1")
    assert ours.get(["a", "b"]) == {} and ours.wait("a") is None
    assert ours.claim("a", "2") == "2" and ours.claim("a", "3") == "2" and ours.get(["a"]) == {"a": "2"}
    store.set("b", store.get("a").decode())
    assert ours.get(["b"]) == {}


def test_the_secret_is_one_file_that_only_the_user_reads(tmp_path: Path) -> None:
    first = job_secret(f"{tmp_path}", 0)
    (file,) = tmp_path.iterdir()
    assert len(first) == BYTES and file.stat().st_mode & 0o777 == 0o600
    assert job_secret(f"{tmp_path}", 1) == job_secret(f"{tmp_path}", 0) == first
    file.write_bytes(b"torn")
    assert len(job_secret(f"{tmp_path}", 0)) == BYTES
    assert job_secret(None, 0) == b""


FAULTY: tuple[dict[str, Any], ...] = (
    {"count": "1"},
    {"where": [1]},
    {"since": None},
    {"waiting": 1},
    {"evil": 1},
)


@pytest.mark.parametrize("fault", FAULTY)
def test_a_heartbeat_of_other_fields_is_none(fault: dict[str, Any]) -> None:
    good = heartbeat.read(json.dumps({**BEAT, "rank": 9}), 3)
    assert good is not None and good.rank == 3
    assert heartbeat.read(json.dumps({**BEAT, **fault}), 3) is None
    assert heartbeat.read("[" * 100_000, 3) is None
