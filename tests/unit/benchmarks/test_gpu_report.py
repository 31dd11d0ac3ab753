"""The report on a GPU: the program that runs its pieces one by one, and a rehearsal of all of them on the CPU."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
import torch

from benchmarks.gpu_report import __main__ as tool
from benchmarks.gpu_report import training
from benchmarks.gpu_report.pieces import BY_NAME, PIECES
from benchmarks.gpu_report.record import REASON, Record, Skip
from benchmarks.gpu_report.setting import TINY, Setting
from benchmarks.steps import Shape, Step
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


def test_a_contestant_without_gradients_has_no_figures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def zeros(shape: Shape, device: torch.device, recompute: str) -> Step:
        model = training.decoder(shape, device)

        def loss(tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            whole = model(tokens, labels)
            return whole.detach() + 0 * whole

        return training.looped(shape, model, device, loss)

    monkeypatch.setitem(training.BUILDS, "zeros", zeros)
    record, one = Record(), {"plain torch": ("none",), "zeros": ("none",)}
    training.run(TINY, TINY, (one,), Setting(True, tmp_path), record)
    good, bad = record.rows
    assert good["tokens/s"] > 0 and "tokens/s" not in bad and "RuntimeError: zeros" in bad[REASON]


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


def test_a_piece_that_ends_leaves_no_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that it started, and did not wait for, would be on the card beside the next piece."""
    package = tmp_path / "benchmarks" / "gpu_report"
    package.mkdir(parents=True)
    started = "import subprocess; print(subprocess.Popen(['sleep', '60']).pid)"
    (package / "pieces.py").write_text(started)
    monkeypatch.delenv("PYTHONPATH", raising=False)
    monkeypatch.setattr(tool, "ROOT", tmp_path)
    log = tmp_path / "log"
    assert tool._process(BY_NAME["race"], tmp_path / "rows", log, True, 60.0) == 0
    left = Path("/proc", log.read_text().strip(), "stat")
    for _ in range(100):
        if not left.exists() or left.read_text().split()[2] == "Z":
            return
        time.sleep(0.05)
    pytest.fail("it runs on")


def test_a_piece_that_dies_has_its_last_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTHONPATH", raising=False)
    facts = {"device": "d", "torch": "t", "commit": "c"}
    monkeypatch.setattr(tool, "ROOT", tmp_path)  # where there are no pieces
    found = tool.run(BY_NAME["race"], tmp_path, True, 60.0, facts)
    assert "ended with status 1" in found[REASON] and "No module named" in found[REASON], found


@pytest.mark.parametrize(
    "changed, good",
    [({}, True), ({REASON: "x"}, False), ({"device": "other"}, False), ({"commit": "other"}, True)],
)
def test_which_results_stand(changed: dict[str, str], good: bool) -> None:
    facts = {"device": "d", "torch": "t", "commit": "c"}
    assert tool.still_good({**facts, REASON: "", **changed}, facts) is good
    assert not tool.still_good(None, facts)


def test_wrong_options_name_the_cure(capsys: pytest.CaptureFixture[str]) -> None:
    for argv, said in (
        (["--pieces", "kernel"], "nccl"),
        (["--minutes", "0"], "8"),
    ):
        with pytest.raises(SystemExit):
            tool.main(argv)
        assert said in capsys.readouterr().err


@pytest.mark.slow
def test_the_whole_rehearsal(tmp_path: Path) -> None:
    """Every piece in its own process; what has no figures on a CPU is only what needs a card or a package."""
    assert tool.main(["--rehearsal", "--out", str(tmp_path), "--minutes", "30"]) == 0
    stored = json.loads((tmp_path / "gpu.json").read_text())["pieces"]
    reasons = {row[REASON] for result in stored.values() for row in result["rows"] if REASON in row}
    allowed = ("a race needs CUDA streams", "is not installed", "there is no CUDA device", "runs on CUDA")
    assert all(any(word in reason for word in allowed) for reason in reasons), reasons
    assert set(stored) == {piece.name for piece in PIECES}
