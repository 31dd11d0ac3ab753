"""Launches that die, freeze, come late and do not belong: real processes, whose anchors must stay the same bits.

The launches are those of benchmarks/links/meetings.py: a vector each, no engine.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from megazero.mesh.starter import free_port
from tests import ROOT
from tests.messages import names

BOUND_S = 90.0  # that a busy machine has for anything


class Started:
    """A process, and the lines of JSON that it says."""

    def __init__(self, file: Path, *words: str, ranks: int = 1) -> None:
        self.file = file
        torchrun = ["torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", "-m"]
        environ = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        with file.open("a") as out:
            self.process = subprocess.Popen(
                [sys.executable, "-m", *(torchrun if ranks > 1 else []), *words],
                stdout=out,
                stderr=subprocess.STDOUT,
                env=environ,
            )

    def said(self, event: str) -> list[dict[str, Any]]:
        lines = [json.loads(line) for line in self.file.read_text().splitlines() if line.startswith("{")]
        return [line for line in lines if line["event"] == event]

    def until(self, ready: Callable[[], Any], what: str) -> Any:
        """Return what is ready, once it is."""
        deadline = time.monotonic() + BOUND_S
        while not (found := ready()):
            assert time.monotonic() < deadline, f"{what}: {self.file.read_text()[-2000:]}"
            time.sleep(0.05)
        return found

    def meets(self, members: str) -> None:
        """Wait for one more meeting, of just these."""
        before = len(self.said("met"))
        self.until(lambda: [1 for met in self.said("met")[before:] if met["names"] == [*members]], members)


class Run:
    """A meeting point and launches of a test. All end with it."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.port, self.all = folder, free_port(), list[Started]()
        self.secret = folder / "secret"
        self.point = self.meeting_point()

    def meeting_point(self) -> Started:
        words = ["megazero", "meet", "--port", f"{self.port}", "--secret-file", f"{self.secret}"]
        self.all.append(point := Started(self.folder / "point", *words))
        return point

    def launch(self, name: str, *words: str, secret: Path | None = None, ranks: int = 1) -> Started:
        known = ["--point", f"127.0.0.1:{self.port}", "--secret", f"{secret or self.secret}"]
        sizes = ["--step-s", "0.05", "--silence-s", "2", "--least", "2"]
        command = ["benchmarks.links.meetings", "--replica", name, *known, *sizes, *words]
        self.all.append(launch := Started(self.folder / name, *command, ranks=ranks))
        return launch

    def end(self) -> None:
        for each in self.all:
            each.process.kill()
        for each in self.all:
            each.process.wait()

    def check_bits(self) -> None:
        """Assert that whoever was in a meeting, or took it up later, has the same anchor after it."""
        hashes: dict[int, set[str]] = {}
        for file in {each.file for each in self.all if each.file.name != "point"}:
            for line in file.read_text().splitlines():
                said = json.loads(line) if line.startswith('{"at"') else {}
                if said.get("event") in ("met", "took"):
                    hashes.setdefault(said["number"], set()).add(said["hash"])
        assert len(hashes) > 3 and all(len(found) == 1 for found in hashes.values()), hashes


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    made = Run(tmp_path)
    try:
        yield made
    finally:
        made.end()


def test_one_dies_in_a_meeting_and_comes_back(run: Run) -> None:
    """b dies in the middle of a message; a, of one rank, and c, of two, go on; b takes the anchor and meets again."""
    a, b, c = run.launch("a"), run.launch("b", "--die", "3:7"), run.launch("c", ranks=2)
    assert b.process.wait(BOUND_S) == -signal.SIGKILL
    a.meets("ac")
    c.meets("ac")
    b = run.launch("b")
    a.meets("abc")
    b.meets("abc")
    assert b.said("took")
    run.check_bits()


def test_one_freezes_and_the_point_is_lost(run: Run) -> None:
    """Frozen for longer than its silence, c is left out, takes what it missed, and meets again. A point that starts
    anew and empty holds the meetings up, and nothing is lost.
    """
    a, b, c = (run.launch(name, "--journal", "50") for name in "abc")
    a.meets("abc")
    c.process.send_signal(signal.SIGSTOP)
    a.meets("ab")
    c.process.send_signal(signal.SIGCONT)
    a.meets("abc")
    assert [each["what"] for each in c.said("took")][-1] == "Met", "its journal reaches so far"
    run.point.process.kill()
    run.point.process.wait()
    a.until(lambda: "meeting point" in (a.said("waits") or [{"missing": ""}])[-1]["missing"], "no wait")
    run.meeting_point()
    for each in (a, b, c):
        each.meets("abc")
    run.check_bits()


def test_who_does_not_belong_is_refused_and_disturbs_nobody(run: Run, tmp_path: Path) -> None:
    a, b = (run.launch(name) for name in "ab")
    a.meets("ab")
    (tmp_path / "old").write_bytes(b"of last week" * 3)
    (tmp_path / "standing").write_text('{"run": "of-last-week", "number": 3, "line": "3.x", "last": []}')
    strangers = {
        "secret": run.launch("x", secret=tmp_path / "old"),
        "model": run.launch("y", "--model", "other"),
        "of-last-week": run.launch("z", "--load", f"{tmp_path / 'standing'}"),
    }
    for word, stranger in strangers.items():
        assert stranger.process.wait(BOUND_S) == 3
        names(stranger.said("Refused")[-1]["why"], word)
    for each in (a, b):
        each.meets("ab")
        assert {tuple(met["names"]) for met in each.said("met")} == {("a", "b")}
    names(run.point.file.read_text(), "refused: ", "127.0.0.1")
    run.point.process.terminate()
    assert run.point.process.wait(BOUND_S) == 0


def test_who_is_slow_is_called_and_who_joins_holds_nobody(run: Run) -> None:
    """c comes to a run that goes on. 50 steps of 0.7 s are too many for the others: it meets when it is called."""
    a, _ = (run.launch(name) for name in "ab")
    a.meets("ab")
    c = run.launch("c", "--step-s", "0.7", "--steps", "50")
    a.meets("abc")
    c.meets("abc")
    assert max(each["steps"] for each in c.said("met")) < 10
    run.check_bits()
