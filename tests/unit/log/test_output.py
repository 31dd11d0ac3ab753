"""What people see: console lines with and without a terminal, loggers."""

from __future__ import annotations

import io
import re
import subprocess
import sys
from pathlib import Path

import pytest

from megazero.log.console import TrainConsole, interval_line
from megazero.log.loggers import Loggers, TensorBoardLogger, WandbLogger
from megazero.log.units import human_bytes, human_count, plural
from megazero.train.outputs import shortened
from tests import ROOT
from tests.unit.log.test_metrics import _line


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def _run(stream: io.StringIO, enabled: bool = True) -> str:
    with TrainConsole(total=7, log_interval=3, enabled=enabled, stream=stream) as console:
        console.header("megazero [run]", {"model": "llama [tiny]", "ranks": 4})
        for iteration in range(1, 8):
            console.iteration(_line(iteration))
        console.evaluation(7, 2.0)
        console.warning("a [bracketed] warning")
        console.note("saved")
    return stream.getvalue()


def test_plain_lines_without_a_terminal() -> None:
    text = _run(io.StringIO())
    assert all(c == "\n" or c.isprintable() for c in text), "control characters in a log file"
    lines = text.splitlines()
    assert [line.split("|")[0].strip() for line in lines if "iteration " in line] == [
        "iteration 1/7", "iteration 3/7", "iteration 6/7", "iteration 7/7",
    ]  # fmt: skip
    assert lines[:2] == ["megazero [run]", " model llama [tiny] | ranks 4"]
    assert " evaluation at 7 on validation | loss 2.0000 | perplexity 7.389" in lines
    assert " warning: a [bracketed] warning" in lines


def test_a_start_has_a_few_lines_and_says_where_the_others_are() -> None:
    lines = list("abcdef")
    assert shortened(lines, 6, Path("f")) == lines
    cut = shortened(lines, 4, Path("logs/config.yaml"))
    assert cut[:3] == lines[:3] and len(cut) == 4 and "3 lines" in cut[3] and "logs/config.yaml" in cut[3]


def test_a_log_of_long_iterations_has_a_line_a_minute() -> None:
    stream = io.StringIO()
    with TrainConsole(total=99, log_interval=100, stream=stream) as console:
        for iteration in range(1, 9):
            console.iteration(_line(iteration, iteration_time_s=20.0))
    assert re.findall(r"iteration +(\d+)/99", stream.getvalue()) == ["1", "4", "7", "8"]


def test_other_ranks_and_dumb_terminals(monkeypatch: pytest.MonkeyPatch) -> None:
    assert _run(io.StringIO(), enabled=False) == ""
    assert _run(Terminal(), enabled=False) == ""
    monkeypatch.setenv("TERM", "dumb")
    assert "\x1b" not in _run(Terminal())


def test_an_interrupted_interval_is_still_printed() -> None:
    stream = io.StringIO()
    with (
        pytest.raises(KeyboardInterrupt),
        TrainConsole(total=100, log_interval=10, stream=stream) as console,
    ):
        console.iteration(_line(1))
        raise KeyboardInterrupt
    assert "iteration   1/100" in stream.getvalue()


def test_numbers_for_people() -> None:
    assert [human_count(n) for n in (0, 999, 1000, 12_345, 999_960, 1e9)] == [
        "0", "999", "1.00k", "12.3k", "1.00M", "1.00G",
    ]  # fmt: skip
    assert [human_bytes(n) for n in (0, 1500, 42_000_000)] == ["0 B", "1.50 kB", "42.0 MB"]
    line = interval_line(
        _line(5, extra={"skipped": 2}, sent={"intra_node_bytes": 10, "inter_node_bytes": 4_560_000}),
        1000,
        "07:08:09",
    )
    assert line == (
        " iteration    5/1000 | 07:08:09 | samples 40 | loss 4.0000 | grad norm 1.000 | lr 1.000e-03 | 500 ms/iter | "
        "1.00k tokens/s | 0.1 TFLOP/s per rank | sent 10 B in node, 4.56 MB across | memory 30 B | skipped 2 | "
        "left 8 min 18 s"
    )
    assert interval_line(_line(5, extra={"tokens_left": 2000}), 1000, "").endswith("| left 2.0 s")
    sent = {"intra_node_bytes": 10, "inter_node_bytes": 20, "inter_rack_bytes": 30}
    assert "| sent 10 B in node, 20 B across, 30 B across racks |" in interval_line(
        _line(5, sent=sent), 9, ""
    )
    scaled = interval_line(_line(5, extra={"loss_scale": 65536.0, "mfu": 0.4}), 5, "")
    assert (
        scaled.endswith("| memory 30 B | loss scale 65536") and "0.1 TFLOP/s per rank (40.0% MFU)" in scaled
    )
    assert [plural(count, "rank") for count in (0, 1, 2)] == ["0 ranks", "1 rank", "2 ranks"]


def test_a_long_evaluation_says_how_far_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    stream, clock = io.StringIO(), [0.0]
    monkeypatch.setattr("megazero.log.console.time.monotonic", lambda: clock[0])
    with TrainConsole(total=20, stream=stream) as console:
        for done in range(8):
            console.evaluating("validation", done, 8)
            clock[0] += 12
    assert stream.getvalue().splitlines() == [
        " evaluating on validation: 3 of 8 batches",
        " evaluating on validation: 6 of 8 batches",
    ]


def test_console_and_metrics_leave_torch_out() -> None:
    code = (
        "import sys, megazero.log.console, megazero.log.metrics, megazero.log.time_bill, "
        "megazero.train.schedule.learning_rate, megazero.train.schedule.run_length, megazero.ops.failures, "
        "megazero.log.loggers, megazero.ops.report\n"
        "assert not {'torch', 'numpy', 'matplotlib', 'wandb'} & sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


class Broken:
    def log(self, iteration: int, values: object) -> None:
        raise OSError("disk full")

    def close(self) -> None:
        raise AssertionError("a dropped logger is not used again")


class Kept:
    def __init__(self) -> None:
        self.seen: list[int] = []
        self.closed = False

    def log(self, iteration: int, values: object) -> None:
        self.seen.append(iteration)

    def close(self) -> None:
        self.closed = True


def test_a_failing_logger_is_dropped_once() -> None:
    kept = Kept()
    loggers = Loggers([Broken(), kept])
    with pytest.warns(UserWarning, match="Broken failed.*disk full") as caught:
        loggers.log(1, {})
        loggers.log(2, {})
        loggers.close()
    assert len(caught) == 1
    assert kept.seen == [1, 2] and kept.closed


@pytest.mark.parametrize(
    ("blocked", "make", "message"),
    [
        ("torch.utils.tensorboard", lambda: TensorBoardLogger("x"), "--tensorboard-dir.*pip install tensorb"),
        ("wandb", lambda: WandbLogger("p", run_id="1"), "--wandb-project p.*pip install wandb"),
    ],
)
def test_missing_packages_say_how(monkeypatch: pytest.MonkeyPatch, blocked: str, make, message: str) -> None:
    monkeypatch.setitem(sys.modules, blocked, None)
    with pytest.raises(ValueError, match=message):
        make()
