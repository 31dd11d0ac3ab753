"""The report on a GPU: the program that runs its pieces one by one, and a rehearsal of all of them on the CPU."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.gpu_report import loops, training
from benchmarks.gpu_report.pieces import BY_NAME, PIECES
from benchmarks.gpu_report.record import REASON, Record, Skip
from benchmarks.gpu_report.setting import ROOT, Setting
from tools import gpu_report as tool


def test_a_failing_row_is_a_row(tmp_path: Path) -> None:
    record = Record(tmp_path / "rows.json")
    with record.attempt(a=1) as row:
        row["b"] = 2
        raise ValueError("what | is\nwrong")
    with record.attempt(a=2):
        raise Skip("no card")
    kept = json.loads((tmp_path / "rows.json").read_text())["rows"]
    assert kept == [{"a": 1, REASON: "ValueError: what / is wrong"}, {"a": 2, REASON: "no card"}]


def test_a_contestant_without_gradients_has_no_figures(tmp_path: Path) -> None:
    def plain(device: torch.device, zeros: bool) -> loops.Step:
        model = loops.decoder(loops.TINY, device)

        def loss(tokens: torch.Tensor) -> torch.Tensor:
            whole = model(tokens, tokens).sum()
            return whole.detach() + 0 * whole if zeros else whole

        return loops.plain(loops.TINY, device, model, loss)

    def contestants(_: loops.Size) -> Iterator[tuple[str, str, Any]]:
        for name in ("plain", "zeros"):
            yield name, "none", partial(plain, zeros=name == "zeros")

    record = Record()
    training.run(loops.TINY, loops.TINY, contestants, Setting(True, tmp_path), record)
    good, bad = record.rows
    assert good["tokens/s"] > 0 and "tokens/s" not in bad and "RuntimeError: zeros" in bad[REASON]


def test_the_program_keeps_results_and_does_what_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A real piece in its own process; then nothing, since it is there; then the one that is missing, too short."""
    page = ROOT / "docs" / "results" / "gpu.md"
    docs = page.stat().st_mtime_ns if page.exists() else None
    ask = ["--rehearsal", "--out", str(tmp_path)]
    assert tool.main([*ask, "--pieces", "deepspeed"]) == 0, capsys.readouterr().out
    text = (tmp_path / "gpu.md").read_text()
    assert "This is a rehearsal, not a measurement" in text and "not run" in text
    assert "deepspeed is not installed" in text or "no CUDA device" in text
    process = tool._process
    monkeypatch.setattr(tool, "_process", lambda *_: pytest.fail("it was there"))
    assert tool.main([*ask, "--pieces", "deepspeed"]) == 0
    monkeypatch.setattr(tool, "_process", process)
    monkeypatch.setattr(tool, "LEAST", 0.0)
    assert tool.main([*ask, "--pieces", "deepspeed,overhead", "--minutes", "0.01"]) == 1
    stored = json.loads((tmp_path / "gpu.json").read_text())["pieces"]
    assert stored["deepspeed"][REASON] == "" and stored["overhead"][REASON].startswith("stopped after")
    now = page.stat().st_mtime_ns if docs is not None else None
    assert now == docs, "a rehearsal leaves docs/results/gpu.md alone"


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
        (["--pieces", "kernel"], "there are tests, nccl"),
        (["--minutes", "0"], "default is 8"),
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
    assert set(stored) == {piece.name for piece in PIECES} and (tmp_path / "gpu-kernels.png").exists()
