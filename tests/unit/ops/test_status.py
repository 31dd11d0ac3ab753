"""megazero status: what the files of a run say, in words, as a curve of text and as a page without a network."""

from __future__ import annotations

import html.parser
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from megazero.charts import text_chart
from megazero.cli import status
from megazero.config.run import all_options
from megazero.ops import vitals
from megazero.ops.lease import Leaseholder
from megazero.ops.status import State, facts, judge, restarts
from megazero.ops.status_page import POINTS, page
from megazero.ops.vitals import SlurmJob, read_run
from tests import ROOT
from tests.unit.log.test_metrics import _line

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
        {**start, "time": at(500), "iteration": 200, "restarts": 2, "lease": "o2"},
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


def seen(monkeypatch: pytest.MonkeyPatch, folder: Path, seconds: float) -> None:
    """Let the file system's clock say NOON and so many seconds. Files are as old as what they say."""
    monkeypatch.setattr(vitals, "_clock_of", lambda _: NOON.timestamp() + seconds)
    for name in ("events", "metrics"):
        if (file := folder / f"{name}.jsonl").exists():
            last = json.loads(file.read_text().splitlines()[-1])["time"]
            os.utime(file, (0, datetime.fromisoformat(last).timestamp()))


def test_facts_of_a_run_under_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen(monkeypatch, write_run(tmp_path / "logs"), 1610)
    run = read_run(tmp_path / "logs")
    said = facts(run)
    assert said["state"] == "under way: last heard of 10.0 s ago"
    assert said["position"] == "iteration 300 of 1,000 (30.0%), 2,400 samples"
    assert said["speed"].startswith("0.5 s per iteration, 1,000 tokens/s")
    assert said["loss"] == "5.0000, evaluation 5.5000 at iteration 200"
    assert said["done"].startswith("in 23 min 20 s")  # 700 iterations of 2 s by the clock
    assert said["checkpoint"] == "run/iter_0000200, 19 min 20 s ago, written in 2.0 s"
    assert said["slowest rank"].startswith(
        "3 on n2, in 75 of the last 100 iterations; the slowest works 0.6 s"
    )
    assert (said["restarts"], said["runs as"]) == ("2", "job 77 on n1, n2")
    first, second = restarts(run)
    assert "after iteration 150  (status 75: received SIGUSR1 <b>)" in first
    assert "after iteration 200  (it said nothing: killed, or its node lost)" in second


# -- states ----------------------------------------------------------------------------------------------

END = {"event": "end", "lease": "o2", "time": at(1601)}
STOP = {**END, "status": 75, "why": "received SIGUSR1"}
LOST = {**END, "status": 76, "why": "missing: rank 5"}
DONE = {**END, "status": 0, "why": "done"}
SCRIPT = {"event": "job", "time": at(1602), "job_id": "77", "status": 75, "then": "queue"}
SCRIPT |= {"why": "back into the queue"}
SAVES, ITERATION, OVER, TOOK = "saving iteration 300", "iteration 301", {"released": at(0)}, "took 2.0 s"
CHAIN = {**SCRIPT, "then": "chain"}
NEW = {"owner": "o3", "phase": "x"}
# what is true: (the state that is said, words of the sentence, the lease's fields, events, SLURM's state of the job,
# seconds since the last heartbeat)
TRUE_STATES: dict[str, tuple[State, str, dict[str, Any] | None, list[dict[str, Any]], str, float]] = {
    "trains": (State.UNDER_WAY, "2.0 s ago", {}, [], "RUNNING 2", 2),
    "trains, no SLURM": (State.UNDER_WAY, "", {}, [], "", 59),
    "trains, SLURM forgot it": (State.UNDER_WAY, "", {}, [], "GONE", 2),
    "saves": (State.SAVING, "for 20.0 s", {"phase": SAVES, "phase_s": 20.0}, [], "RUNNING 2", 2),
    "saves for long": (State.SAVING_LONG, TOOK, {"phase": SAVES, "phase_s": 601.0}, [], "RUNNING 2", 2),
    "evaluates": (State.UNDER_WAY, "", {"phase": "evaluation at 300", "phase_s": 900.0}, [], "RUNNING 2", 2),
    "hangs": (State.HANGING, "not moved for 2 min 01 s", {"phase": ITERATION, "still_s": 121.0}, [], "RUNNING 2", 2),
    "one iteration lasts": (State.HANGING, "takes 0.5 s", {"phase": ITERATION, "phase_s": 121.0}, [], "", 2),
    "starts again": (State.STARTING, "for 1 min", NEW, [STOP, SCRIPT], "RUNNING 3", 2),
    "hangs at the start": (State.HANGING, "has been in x", {**NEW, "started": -400}, [], "", 2),
    "is cancelled at the start": (State.STOPPED, "", {"owner": "o3"}, [STOP, SCRIPT], "CANCELLED 3", 100),
    "was requeued, no rank yet": (State.STARTING, "no rank", OVER, [STOP, SCRIPT], "RUNNING 3", 100),
    "was requeued, ranks hang": (State.HANGING, "no rank", OVER, [STOP, SCRIPT], "RUNNING 3 None 1801", 100),
    "was told to stop": (State.STOPPING, "RUNNING", OVER, [STOP], "RUNNING 2", 10),
    "was told to stop; its script hangs": (State.GAVE_UP, "RUNNING", OVER, [STOP], "RUNNING 2", 400),
    "waits after a stop": (State.REQUEUED, "SIGUSR1", OVER, [STOP, SCRIPT], "PENDING 3", 4000),
    "waits after a stop, no SLURM": (State.REQUEUED, "back into", OVER, [STOP, SCRIPT], "", 4000),
    "waits after its node was lost": (State.REQUEUED, "nothing", {}, [], "PENDING 3", 4000),
    "is held": (State.HELD, "JobHeldUser", OVER, [LOST], "PENDING 3 JobHeldUser", 4000),
    "is suspended": (State.PAUSED, "SUSPENDED", {}, [], "SUSPENDED 2", 4000),
    "is just suspended": (State.PAUSED, "SUSPENDED", {}, [], "SUSPENDED 2", 2),
    "was cancelled": (State.STOPPED, "CANCELLED", OVER, [STOP], "CANCELLED 2", 100),
    "was cancelled, no SLURM": (
        State.STOPPED, "cancelled", OVER,
        [STOP, {**SCRIPT, "then": "end", "why": "not again: it was cancelled"}], "", 100,
    ),
    "was cancelled and killed": (State.STOPPED, "before it could save", {}, [], "CANCELLED 2", 100),
    "was cancelled in the queue": (State.STOPPED, "", OVER, [STOP, SCRIPT], "CANCELLED 3", 100),
    "was stopped by hand, no SLURM": (State.STOPPED, "SIGUSR1", OVER, [STOP], "", 100),
    "found the kill switch": (State.STOPPED, "", OVER, [{**LOST, "status": 77}], "FAILED 2", 100),
    "ranks were killed": (State.KILLED, "on n1 for 1 min 40 s", {}, [], "", 100),
    "ranks were killed, job over": (State.KILLED, "FAILED", {}, [], "FAILED 2", 100),
    "ranks were killed, SLURM has yet to act": (State.LOST, "RUNNING", {}, [], "RUNNING 2", 299),
    "ranks were killed, SLURM does not act": (State.SILENT, "RUNNING", {}, [], "RUNNING 2", 301),
    "was killed before its new start began": (State.KILLED, "said nothing", OVER, [STOP, SCRIPT], "FAILED 3", 100),
    "lost a rank, its job is over": (State.GAVE_UP, "FAILED", {}, [LOST], "FAILED 2", 100),
    "lost a rank, no SLURM": (State.GAVE_UP, "rank 5", {}, [LOST], "", 3),
    "got no new checkpoint": (
        State.GAVE_UP, "3 restarts", OVER, [LOST, {**SCRIPT, "then": "end", "why": "3 restarts"}], "", 100,
    ),
    "goes on in a chain": (State.REQUEUED, "", OVER, [STOP, CHAIN], "FAILED 2", 9),
    "made a mistake": (State.FAILED, "mistake", OVER, [{**LOST, "status": 2}], "FAILED 2", 100),
    "made a mistake before its lease": (
        State.FAILED, "exit status 2", OVER,
        [STOP, SCRIPT, {**SCRIPT, "status": 2, "then": "end", "why": "exit status 2"}], "FAILED 3", 100,
    ),
    "has a loss that is not finite": (State.FAILED, "non finite", {}, [{**LOST, "status": 65}], "FAILED 2", 3),
    "has no disk": (State.FAILED, "storage", OVER, [{**LOST, "status": 74}], "", 100),
    "lost its folder": (State.SUPERSEDED, "", {"owner": "o9"}, [{**LOST, "lease": "o9", "status": 73}], "", 3),
    "has finished": (State.FINISHED, "done", OVER, [DONE], "COMPLETED 2", 9),
    "has finished, SLURM forgot it": (State.FINISHED, "", None, [DONE], "GONE", 9),
    "wrote no lease, and trains": (State.UNDER_WAY, "", None, [], "", 500),
    "wrote no lease, and is silent": (State.KILLED, "", None, [], "", 700),
}  # fmt: skip


def slurms(number: str, words: str) -> SlurmJob | None:
    """What SLURM says: a state, a number of restarts and a reason; nothing where there is no SLURM."""
    state, restarts, reason, used = [*words.split(), *["", "0", "None", "9"][len(words.split()) :]]
    return SlurmJob(number, state, int(restarts), reason, float(used)) if words else None


def true_state(
    folder: Path, monkeypatch: pytest.MonkeyPatch, what: str, skew_s: float = 0.0
) -> Callable[[str], SlurmJob | None]:
    """Write the files of a run in this state, whose hosts' clocks are ahead. Returns what asks SLURM."""
    _, _, fields, events, job, heard = TRUE_STATES[what]
    write_run(folder)
    with (folder / "events.jsonl").open("a") as file:
        file.writelines(json.dumps(event) + "\n" for event in events)
    seen(monkeypatch, folder, 1602 + heard)
    monkeypatch.setattr(vitals.time, "sleep", lambda _: None)
    monkeypatch.setattr(vitals.time, "monotonic", iter(range(0, 10**6, 5)).__next__)
    if fields is not None:
        usual = {"owner": "o2", "job": "77", "host": "n1", "restarts": 2, "phase": ITERATION}
        times = {"started": at(fields.get("started", 1540) + skew_s), "at": at(1602 + skew_s)}
        holder = Leaseholder(**{**usual, **fields, **times})
        (folder / "lease.3").write_text(holder.write())
        os.utime(folder / "lease.3", (0, NOON.timestamp() + 1602))
    return lambda number: slurms(number, job)


@pytest.mark.parametrize("what", TRUE_STATES)
def test_the_state_is_true(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    wanted, words = TRUE_STATES[what][:2]
    for skew_s in (0.0, -3600.0, 3600.0) if TRUE_STATES[what][2] is not None else (0.0,):
        ask = true_state(tmp_path / f"{skew_s:g}", monkeypatch, what, skew_s)
        run = read_run(tmp_path / f"{skew_s:g}", ask=ask)
        found = judge(run)
        assert found.state is wanted and words in found.why, found
        progresses = wanted in (State.UNDER_WAY, State.SAVING, State.SAVING_LONG)
        assert ("done" in facts(run)) == progresses and facts(run)["state"].startswith(wanted.words)
        assert ("clock" in facts(run)) == bool(skew_s)


@pytest.mark.parametrize(
    "job, wanted",
    [
        ("PENDING", State.QUEUED),
        ("PENDING 0 JobHeldAdmin", State.HELD),
        ("RUNNING", State.STARTING),
        ("CANCELLED", State.STOPPED),
        ("FAILED", State.FAILED),
        ("GONE", None),
        ("", None),
    ],
)
def test_a_run_that_has_written_nothing_is_known_by_its_job(
    tmp_path: Path, job: str, wanted: State | None
) -> None:
    """The default folder of a batch script names it."""
    asked: list[str] = []

    def ask(number: str) -> SlurmJob | None:
        asked.append(number)
        return slurms(number, job)

    folder = tmp_path / "tiny-12_3" / "logs"
    if wanted is None:
        with pytest.raises(ValueError, match="or the job"):
            read_run(folder, ask=ask)
    else:
        assert judge(read_run(folder, ask=ask)).state is wanted
    assert asked == ["12_3"]


@pytest.mark.parametrize(
    "queue, account, found",
    [
        ("echo 'RUNNING   2   1-02:03:04  None   '", "", SlurmJob("12_3", "RUNNING", 2, "None", 93784.0)),
        ("echo 'PENDING 0 0:00 Nodes are DOWN'", "", SlurmJob("12_3", "PENDING", 0, "Nodes are DOWN")),
        ("echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1", "", SlurmJob("12_3", "GONE")),
        ("exit 0", "echo ' CANCELLED+ '", SlurmJob("12_3", "CANCELLED")),
        ("echo 'Unable to contact slurm controller' >&2; exit 1", "", None),
    ],
)
def test_slurm_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, queue, account, found) -> None:
    """Of a job that squeue has forgotten, the accounting may know. A controller that is away says nothing."""
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    for name, text in (("squeue", queue), ("sacct", account)):
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    assert vitals.ask_slurm("12_3") == found
    assert vitals.ask_slurm("name-of-torchrun") is None


def test_another_jobs_run_is_not_this_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ask = true_state(tmp_path, monkeypatch, "trains")
    found = judge(read_run(tmp_path, "78", ask))
    assert found.state is State.SUPERSEDED and "job 77 on n1" in found.why and "not job 78" in found.why
    assert judge(read_run(tmp_path, "77", ask)).state is State.UNDER_WAY


def test_a_heartbeat_that_looks_old_is_watched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its file's time may be another clock's. One that lies in the future says nothing either."""
    for written in (-3600, 3600):
        ask = true_state(tmp_path / f"{written}", monkeypatch, "trains")
        file = tmp_path / f"{written}" / "lease.3"
        os.utime(file, (0, NOON.timestamp() + 1602 + written))
        assert judge(read_run(file.parent, ask=ask)).state in (State.LOST, State.SILENT)
        holder = Leaseholder.read(file.read_text())
        assert holder is not None
        beats = replace(holder, beat=holder.beat + 1).write()
        monkeypatch.setattr(vitals.time, "sleep", lambda _, file=file, beats=beats: file.write_text(beats))
        monkeypatch.setattr(vitals.time, "monotonic", iter(range(10**6)).__next__)
        os.utime(file, (0, NOON.timestamp() + 1602 + written))
        assert judge(read_run(file.parent, ask=ask)).state is State.UNDER_WAY


def test_a_run_at_half_its_pace_is_slow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for share, wanted in ((0.6, State.UNDER_WAY), (0.4, State.SLOW)):
        ask = true_state(tmp_path / f"{share}", monkeypatch, "trains")
        file = tmp_path / f"{share}" / "metrics.jsonl"
        rows = [json.loads(line) for line in file.read_text().splitlines()]
        for row in rows[-10:]:
            row["tokens_per_s"] *= share
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        assert judge(read_run(file.parent, ask=ask)).state is wanted


def test_an_alert_comes_once_for_each_state_of_a_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    told = tmp_path / "told"
    command = (
        f'read line; echo "$line | $MEGAZERO_STATE | $MEGAZERO_WHY" >> {told}; exit $(cat {tmp_path}/ends)'
    )
    monkeypatch.setattr(status, "read_run", lambda folder, job: read_run(folder, job, ask))
    cases = [("trains", 0, 0), ("hangs", 1, 1), ("hangs", 1, 0), ("ranks were killed", 1, 1), ("trains", 0, 0),
             ("hangs", 1, 1), ("is cancelled at the start", 0, 0), ("has no disk", 1, 1)]  # fmt: skip
    for number, (what, wanted, alerts) in enumerate(cases):
        folder = tmp_path / "run"
        before = (folder / ".alerted").read_text() if (folder / ".alerted").exists() else None
        shutil.rmtree(folder, ignore_errors=True)
        ask = true_state(folder, monkeypatch, what)
        if before:
            (folder / ".alerted").write_text(before)
        (tmp_path / "ends").write_text("0")
        lines = told.read_text().count("\n") if told.exists() else 0
        if alerts and number == 1:  # a command that fails is tried again
            (tmp_path / "ends").write_text("3")
            assert status.main([str(folder), "--quiet", "--alert", command]) == 2
            assert "ended with 3, so it is tried again" in capsys.readouterr().err
            (tmp_path / "ends").write_text("0")
            lines += 1
            ask = true_state(folder, monkeypatch, what)
        assert status.main([str(folder), "--quiet", "--alert", command]) == wanted
        assert told.exists() == (number > 0) and (
            not told.exists() or told.read_text().count("\n") == lines + alerts
        )
        assert capsys.readouterr().out.count("\n") == wanted
    assert told.read_text().splitlines()[0].startswith(f"{tmp_path}/run: hanging: iteration 301 has lasted")


def test_the_page_has_every_state() -> None:
    rows = {
        row.split(" | ")[0].removeprefix("| ")
        for row in (ROOT / "docs" / "guide" / "slurm.md").read_text().splitlines()
    }
    assert {f"`{state.words}`" for state in State} <= rows


def test_iterations_that_were_left_out_took_no_time(tmp_path: Path) -> None:
    lines = [_line(i, extra={"time": at(2 * place)}).as_dict() for place, i in enumerate((10, 11, 512, 513))]
    out = {"iterations": [12, 511], "samples": [0, 1]}
    lines[2] |= {"left_out": [out]}
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert read_run(tmp_path).seconds_per_iteration == 2.0


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
    foreign = {"metrics.jsonl": '{"step": 1, "loss": 2.0}\n', "events.jsonl": '{"level": "info"}\n'}
    for name in (None, *foreign):
        if name is not None:
            (tmp_path / name).write_text(foreign[name])
        with pytest.raises(
            ValueError, match="has neither metrics.jsonl nor events.jsonl of a run: name the --log"
        ):
            read_run(tmp_path)


def test_a_long_file_is_read_in_part_with_its_end_and_its_evaluations(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_run(tmp_path / "logs")
    monkeypatch.setattr(vitals, "MOST_LINES", 30)
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


@pytest.mark.slow
@pytest.mark.long
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
    name, *lines = text_chart(falling, "step", "loss", width=26, height=4)
    assert name.strip() == "loss" and len(lines) == 5 and all(len(line) <= 26 for line in lines)
    assert (
        lines[0].startswith("10 │")
        and lines[3].startswith(" 0 │")
        and lines[4].split() == ["0", "step", "10"]
    )
    places = [line.index(next(c for c in line[4:] if c != " "), 4) for line in lines[:4]]
    assert places == sorted(places) and places[0] == 4  # from the upper left to the lower right
    plain = text_chart(falling, "", "", 26, 4, braille=False)
    assert all(c in " 01|*" for line in plain for c in line)
    assert text_chart([(1.0, float("nan"))], "", "") == ["no finite value"]
    assert len(text_chart([(1.0, 2.0)], "", "", height=3)) == 5  # one point has no range


def test_without_a_folder_it_reports_the_run_of_the_default_log_dir(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert status.main([]) == 2 and "--log-dir" in capsys.readouterr().err
    write_run(tmp_path / all_options()["log_dir"].default, 2)
    assert status.main(["--quiet"]) in (0, 1)


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


def test_several_runs_are_compared_in_a_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one, other = write_run(tmp_path / "one"), write_run(tmp_path / "other", iterations=100)
    assert status.main([f"{one}", f"{other}", "--no-chart"]) in (0, 1)
    table = capsys.readouterr().out.rstrip("\n").split("\n\n")[-1].splitlines()
    assert table[0].split()[:3] == ["run", "state", "iteration"] and len(table) == 3
    assert table[1].startswith(f"{one} ") and "300/1,000" in table[1] and "100/1,000" in table[2]
    assert (
        len({line.find(word) for line, word in zip(table, ("iteration", "300/", "100/"), strict=True)}) == 1
    )
    status.main([f"{one}", "--no-chart"])
    assert "run     state" not in capsys.readouterr().out
