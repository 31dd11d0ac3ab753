"""tools/status.py: what the files of a run say, in words, as a curve of text and as a page without a network."""

from __future__ import annotations

import html.parser
import json
import os
import re
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from megazero.charts import text_chart
from megazero.log import status
from megazero.log.status import facts, read_run, restarts, state
from megazero.log.status_page import POINTS, page
from tests.unit.test_train_metrics import _line

ROOT = Path(__file__).parents[2]
NOON = datetime(2026, 5, 4, 12, tzinfo=UTC)


def at(seconds: float) -> str:
    return (NOON + timedelta(seconds=seconds)).isoformat(timespec="milliseconds")


def write_run(folder: Path, iterations: int = 300, end: dict[str, Any] | None = None) -> Path:
    """A run of 1000 iterations that was stopped after 150, killed after 220 and started from 200."""
    folder.mkdir(parents=True, exist_ok=True)
    start = {"event": "start", "run_id": "a1", "last_iteration": 1000, "job_id": "77", "hosts": ["n1", "n2"]}
    events: list[dict[str, Any]] = [
        {
            "event": "start",
            "run_id": "older",
            "last_iteration": 5,
            "restarts": 0,
            "iteration": 0,
            "hosts": [],
        },
        {**start, "time": at(0), "iteration": 0, "restarts": 0},
        {"event": "save", "time": at(150), "iteration": 150, "path": "run/iter_0000150", "seconds": 1.5},
        {"event": "end", "time": at(151), "status": 75, "why": "received SIGUSR1 <b>"},
        {**start, "time": at(400), "iteration": 150, "restarts": 1},
        {"event": "save", "time": at(450), "iteration": 200, "path": "run/iter_0000200", "seconds": 2.0},
        {**start, "time": at(500), "iteration": 200, "restarts": 2},
        {"event": "rollback", "time": at(600), "why": "the loss rose", "first": 181, "last": 201},
    ]
    lines: list[dict[str, Any]] = []
    for i in range(1, iterations + 1):
        ranks = {"least_s": 0.4, "most_s": 0.6, "slowest_rank": 3 if i % 4 else 1, "slowest_host": "n2"}
        extra: dict[str, Any] = {"time": at(1000 + 2 * i), "bytes": {"gather_inter_node_bytes": 40 + i}}
        extra |= {"rank_times": ranks} | ({"restarts": 2, "resumed_from": 200} if i == 201 else {})
        lines.append(_line(i, lm_loss=8 - i / 100, extra=extra).as_dict())
    lines.insert(200, {"iteration": 200, "eval_lm_loss": 5.5, "eval_ppl": 1.0})
    events += [end] if end else []
    for name, rows in (("events", events), ("metrics", lines)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def test_facts_of_a_run_under_way(tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path / "logs"), NOON + timedelta(seconds=1610))
    said = facts(run)
    assert said["state"] == "under way, last heard of 10.0 s ago"
    assert said["position"] == "iteration 300 of 1,000 (30.0%), 2,400 samples"
    assert said["speed"].startswith("0.5 s per iteration, 1,000 tokens/s")
    assert said["loss"] == "5.0000, evaluation 5.5000 at iteration 200"
    assert said["done"].startswith("in 23 min 20 s")  # 700 iterations of 2 s by the clock
    assert said["checkpoint"] == "run/iter_0000200, 19 min 20 s ago, written in 2.0 s"
    assert said["slowest rank"].startswith(
        "3 on n2, in 75 of the last 100 iterations; the slowest works 0.6 s"
    )
    assert (said["restarts"], said["runs as"]) == ("2", "job 77 on n1, n2")
    first, second, third = restarts(run)
    assert third.endswith("back to iteration 180  (the loss rose)")
    assert "after iteration 150  (status 75: received SIGUSR1 <b>)" in first
    assert "after iteration 200  (it said nothing: killed, or its node lost)" in second


def test_iterations_that_were_left_out_took_no_time(tmp_path: Path) -> None:
    lines = [_line(i, extra={"time": at(2 * place)}).as_dict() for place, i in enumerate((10, 11, 512, 513))]
    out = {"iterations": [12, 511], "samples": [0, 1]}
    lines[2] |= {"left_out": [out]}
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert read_run(tmp_path).seconds_per_iteration == 2.0


def test_states(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "logs")
    assert state(read_run(folder, NOON + timedelta(hours=3))).startswith(
        "silent for 2 h 33 min: killed, hung"
    )
    end = {"event": "end", "time": at(1700), "status": 76, "why": "missing: rank 5 on n1"}
    ended = read_run(write_run(tmp_path / "logs", end=end), NOON + timedelta(hours=3))
    assert state(ended) == "rank lost: missing: rank 5 on n1" and "done" not in facts(ended)


def test_a_run_at_its_start_and_one_of_before_there_were_events(tmp_path: Path) -> None:
    begun = write_run(tmp_path / "begun", iterations=0)
    (begun / "metrics.jsonl").unlink()
    assert facts(read_run(begun))["position"] == "no iteration yet"
    old = write_run(tmp_path / "old")
    (old / "events.jsonl").unlink()
    for row in (rows := [json.loads(line) for line in (old / "metrics.jsonl").read_text().splitlines()]):
        for name in ("time", "restarts", "rank_times"):
            row.pop(name, None)
    (old / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows) + '{"torn')
    said = facts(read_run(old))
    assert said["position"].startswith("iteration 300,") and "done" not in said and "slowest rank" not in said
    assert page([read_run(old)]).count("<figure>") > 4
    with pytest.raises(ValueError, match="has neither metrics.jsonl nor events.jsonl: name the --log-dir"):
        read_run(tmp_path)


def test_a_long_file_is_read_in_part_with_its_end_and_its_evaluations(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_run(tmp_path / "logs")
    monkeypatch.setattr(status, "MOST_LINES", 30)
    run = read_run(folder)
    assert [line["iteration"] for line in run.iterations[-100:]] == list(range(201, 301))
    assert len(run.iterations) < 130 and len(run.evaluations) == 1


class Page(html.parser.HTMLParser):
    """Notes what a page asks of a network, and the text of it."""

    def __init__(self) -> None:
        super().__init__()
        self.fetched: list[str] = []
        self.tags: list[str] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.fetched += [
            f"{name}={value}" for name, value in attrs if name in ("src", "href", "data", "action")
        ]

    def handle_data(self, data: str) -> None:
        self.text += data


def test_the_page_is_whole_escaped_and_needs_no_network(tmp_path: Path) -> None:
    runs = [read_run(write_run(tmp_path / name, iterations=10 * POINTS)) for name in ("a", "b&c")]
    text, seen = page(runs), Page()
    seen.feed(text)
    assert all(link.startswith("src=data:image/png;base64,") for link in seen.fetched) and not re.search(
        r"url\(|@import|https?:|<script", text
    )
    assert seen.tags.count("h2") == 2 and "received SIGUSR1 <b>" in seen.text and "b&c" in seen.text
    for part in (
        "loss, nats per token",
        "time bill",
        "gradient norm",
        "that a rank works",
    ):
        assert seen.text.count(part) == 2, part
    assert len(seen.fetched) > 8


def test_a_chart_of_text_has_the_curve_between_its_ends() -> None:
    falling = [(float(i), 10.0 - i) for i in range(11)]
    lines = text_chart(falling, width=26, height=4)
    assert len(lines) == 5 and all(len(line) <= 26 for line in lines)
    assert lines[0].startswith("10 │") and lines[3].startswith(" 0 │") and lines[4].split() == ["0", "10"]
    places = [line.index(next(c for c in line[4:] if c != " "), 4) for line in lines[:4]]
    assert places == sorted(places) and places[0] == 4  # from the upper left to the lower right
    assert all(c in " 01|*" for line in text_chart(falling, 26, 4, braille=False) for c in line)
    assert text_chart([(1.0, float("nan"))]) == ["no finite value"]
    assert len(text_chart([(1.0, 2.0)], height=3)) == 4  # one point has no range


def test_the_program_prints_writes_and_loads_no_torch(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "logs")
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("raise AssertionError('torch was imported')")
    done = subprocess.run(
        [
            sys.executable,
            "tools/status.py",
            str(folder),
            str(tmp_path / "none"),
            "--html",
            str(tmp_path / "p.html"),
        ],
        cwd=ROOT,
        env={
            **os.environ,
            "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}",
            "PYTHONIOENCODING": "ascii",
            "COLUMNS": "80",
        },
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 2 and "none has neither" in done.stderr  # the other one is told all the same
    assert "iteration 300 of 1,000" in done.stdout and "*" in done.stdout
    assert (tmp_path / "p.html").read_text().startswith("<!doctype html>")
    assert not (tmp_path / "p.html.partial").exists()


def test_a_checkpoint_that_a_later_start_left_behind_is_not_the_last(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "logs")
    save = {"event": "save", "time": at(10), "seconds": 1.0}
    events = [
        {**save, "iteration": 20, "path": "iter_0000020"},
        {**save, "iteration": 40, "path": "iter_0000040"},
    ]
    begun = {
        "event": "start",
        "time": at(20),
        "iteration": 20,
        "last_iteration": 50,
        "restarts": 0,
        "hosts": [],
        "job_id": "",
    }
    for lines, last in ((events, "iter_0000040"), ([*events, begun], "iter_0000020")):
        (folder / "events.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        assert facts(read_run(folder))["checkpoint"].startswith(last)
