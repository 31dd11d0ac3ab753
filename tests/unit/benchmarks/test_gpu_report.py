"""The report on a GPU: the program that runs its pieces one by one, and a rehearsal of all of them on the CPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.gpu_report import __main__ as tool
from benchmarks.gpu_report.pieces import PIECES
from benchmarks.gpu_report.record import REASON, Record, Skip
from tests.messages import names


def test_a_failing_row_is_a_row(tmp_path: Path) -> None:
    record = Record(tmp_path / "rows.json")
    with record.attempt(a=1) as row:
        row["b"] = 2
        raise ValueError("what | is\nwrong")
    with record.attempt(a=2):
        raise Skip("no card")
    kept = json.loads((tmp_path / "rows.json").read_text())["rows"]
    assert kept == [{"a": 1, REASON: "ValueError: what / is wrong"}, {"a": 2, REASON: "no card"}]


def test_the_program_keeps_results_and_does_what_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A real piece in its own process; then nothing, since it is there; then the one that is missing, too short."""
    ask = ["--rehearsal", "--out", str(tmp_path)]
    assert tool.main([*ask, "--pieces", "memory"]) == 0, capsys.readouterr().out
    names(
        (tmp_path / "gpu.md").read_text(), "rehearsal, not a measurement", "Not run", "| zero3 | 4 | 4 | 4 |"
    )
    process = tool._process
    monkeypatch.setattr(tool, "_process", lambda *_: pytest.fail("it was there"))
    assert tool.main([*ask, "--pieces", "memory"]) == 0
    monkeypatch.setattr(tool, "_process", process)
    monkeypatch.setattr(tool, "LEAST", 0.0)
    assert tool.main([*ask, "--pieces", "memory,race", "--minutes", "0.01"]) == 1
    stored = json.loads((tmp_path / "gpu.json").read_text())["pieces"]
    assert stored["memory"][REASON] == "" and stored["race"][REASON].startswith("stopped after")


@pytest.mark.slow
def test_the_whole_rehearsal(tmp_path: Path) -> None:
    """Every piece in its own process; what has no figures on a CPU is only what needs a card or a package."""
    assert tool.main(["--rehearsal", "--out", str(tmp_path), "--minutes", "30"]) == 0
    stored = json.loads((tmp_path / "gpu.json").read_text())["pieces"]
    reasons = {row[REASON] for result in stored.values() for row in result["rows"] if REASON in row}
    allowed = ("a race needs CUDA streams", "is not installed", "there is no CUDA device", "runs on CUDA")
    assert all(any(word in reason for word in allowed) for reason in reasons), reasons
    assert set(stored) == {piece.name for piece in PIECES}
