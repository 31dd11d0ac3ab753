"""metrics.jsonl and the time bill: what must survive kills, resumes and numbers JSON cannot hold."""

from __future__ import annotations

import json
import math
import os
import random
from dataclasses import replace
from datetime import datetime
from pathlib import Path

import numpy as np
import pytest

from megazero.log.metrics import (
    SUPERSEDED_FILE,
    IterationMetrics,
    MetricsWriter,
    average,
    perplexity,
    read_metrics,
)
from megazero.log.time_bill import TimeBill, items_over
from megazero.mesh.levels import links_of
from tests.messages import refused


def _line(iteration: int, **changes) -> IterationMetrics:
    bill = dict.fromkeys(items_over(), 0.1) | {"other": 0.0}
    base = IterationMetrics(
        iteration=iteration, consumed_samples=8 * iteration, lm_loss=4.0, grad_norm=1.0, learning_rate=1e-3,
        iteration_time_s=0.5, tokens_per_s=1000.0, tflops_per_rank=0.1,
        sent={"intra_node_bytes": 10, "inter_node_bytes": 20}, memory_bytes=30, time_bill=bill,
    )  # fmt: skip
    return replace(base, **changes)


def _strict(path: Path) -> list[dict]:
    def refuse(constant: str) -> float:
        raise ValueError(f"{constant} is not JSON")

    return [json.loads(line, parse_constant=refuse) for line in path.read_text().splitlines()]


def test_lines_are_strict_json_and_read_back(tmp_path: Path) -> None:
    writer = MetricsWriter(tmp_path / "logs", iteration=0)
    writer.iteration(_line(1, lm_loss=math.nan, grad_norm=math.inf, extra={"batch_size": np.int64(8)}))
    writer.evaluation(1, 8, 2.0, batches=np.float32(4.0))
    writer.close()
    first, evaluation = _strict(writer.path)
    assert first["lm_loss"] == "NaN"
    assert first["grad_norm"] == "Infinity"
    assert first["batch_size"] == 8 and isinstance(first["batch_size"], int)
    assert set(first) == {
        "iteration", "consumed_samples", "lm_loss", "grad_norm", "learning_rate", "iteration_time_s",
        "tokens_per_s", "tflops_per_rank", "intra_node_bytes", "inter_node_bytes", "memory_bytes",
        "time_bill", "batch_size", "time",
    }  # fmt: skip
    assert datetime.fromisoformat(evaluation.pop("time")) >= datetime.fromisoformat(first["time"])
    assert evaluation == {
        "iteration": 1, "consumed_samples": 8, "eval_lm_loss": 2.0, "eval_ppl": math.exp(2.0), "batches": 4,
    }  # fmt: skip
    back = read_metrics(tmp_path / "logs")
    assert math.isnan(back[0]["lm_loss"]) and back[0]["grad_norm"] == math.inf
    assert perplexity(1e9) == math.inf and math.isnan(perplexity(math.nan))


def test_resume_supersedes_later_lines_and_loses_nothing(tmp_path: Path) -> None:
    writer = MetricsWriter(tmp_path, iteration=0)
    for iteration in range(1, 8):
        writer.iteration(_line(iteration))
        if iteration % 2 == 0:
            writer.evaluation(iteration, 8 * iteration, 3.0)
    writer.close()
    before = writer.path.read_text().splitlines()

    for _ in range(2):  # the second resume finds nothing more to move
        writer = MetricsWriter(tmp_path, iteration=4)
        writer.close()
    writer = MetricsWriter(tmp_path, iteration=4)
    writer.iteration(_line(5))
    writer.iteration(_line(6))
    writer.close()

    lines = read_metrics(tmp_path)
    assert [m["iteration"] for m in lines if "lm_loss" in m] == [1, 2, 3, 4, 5, 6]
    assert [m["iteration"] for m in lines if "eval_lm_loss" in m] == [2, 4]
    assert [m.get("resumed_from") for m in lines if "lm_loss" in m] == [None] * 4 + [4, None]
    moved = (tmp_path / SUPERSEDED_FILE).read_text().splitlines()
    assert moved == [line for line in before if json.loads(line)["iteration"] > 4]


def test_killed_between_moving_and_replacing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = MetricsWriter(tmp_path, iteration=0)
    for iteration in (1, 2, 3):
        writer.iteration(_line(iteration))
    writer.close()
    whole = writer.path.read_bytes()
    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            MetricsWriter(tmp_path, iteration=1)
    assert writer.path.read_bytes() == whole
    MetricsWriter(tmp_path, iteration=1).close()
    assert [m["iteration"] for m in read_metrics(tmp_path)] == [1]
    assert [m["iteration"] for m in _strict(tmp_path / SUPERSEDED_FILE)] == [2, 3]


def test_every_torn_end_is_repaired(tmp_path: Path) -> None:
    """Cut the file after any byte: whole lines stay, the cut one goes, and appending stays valid."""
    writer = MetricsWriter(tmp_path, iteration=0)
    writer.iteration(_line(1))
    writer.iteration(_line(2))
    writer.close()
    whole = writer.path.read_bytes()
    first = whole.index(b"\n")
    for cut in [0, 1, first, first + 1, first + 2, *random.Random(0).sample(range(len(whole)), 25)]:
        for file in tmp_path.iterdir():
            file.unlink()
        writer.path.write_bytes(whole[:cut])
        again = MetricsWriter(tmp_path, iteration=2)
        again.iteration(_line(3))
        again.close()
        expected = [1] * (cut >= first) + [2] * (cut >= len(whole) - 1) + [3]
        assert [line["iteration"] for line in _strict(writer.path)] == expected, cut


def test_torn_line_in_the_middle(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    file.write_bytes(b'{"iteration": 1}\n{"iterat\xff\x00\n{"iteration": 2}\n')
    with pytest.warns(UserWarning, match="1 torn line"):
        assert [m["iteration"] for m in read_metrics(file)] == [1, 2]
    MetricsWriter(tmp_path, iteration=2).close()
    assert [m["iteration"] for m in _strict(file)] == [1, 2]
    assert "torn" in _strict(tmp_path / SUPERSEDED_FILE)[0]
    file.write_text("hello\nworld\n")
    with pytest.raises(ValueError, match="not a metrics file"):
        read_metrics(file)


def test_average_of_an_interval() -> None:
    slow = _line(2, lm_loss=2.0, iteration_time_s=1.5, tokens_per_s=200.0, memory_bytes=99)
    skipped = _line(3, grad_norm=math.nan, extra={"skipped": 1, "batch_size": 8})
    lost = replace(skipped, lm_loss=math.inf)
    assert average([_line(1), slow, lost]).lm_loss == 3.0 and average([lost]).lm_loss == math.inf
    mean = average([_line(1), slow, skipped])
    assert (mean.iteration, mean.consumed_samples, mean.memory_bytes) == (3, 24, 99)
    assert mean.lm_loss == pytest.approx(10 / 3)
    assert mean.grad_norm == 1.0
    assert mean.iteration_time_s == pytest.approx(2.5 / 3)
    assert mean.tokens_per_s == pytest.approx((500 + 300 + 500) / 2.5)
    assert mean.extra == {"skipped": 1, "batch_size": 8}


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now

    def tick(self, seconds: float) -> None:
        self.now += seconds


def test_time_bill_is_exclusive_and_adds_up() -> None:
    clock = Clock()
    bill = TimeBill(clock)
    with bill.span("data"):
        clock.tick(1.0)
    with bill.span("compute"):
        clock.tick(2.0)
        with bill.span("exposed_gather_intra"):
            clock.tick(4.0)
            with bill.span("compute"):
                clock.tick(8.0)
        clock.tick(16.0)
        bill.add("exposed_reduce_inter", 3.0)
    clock.tick(32.0)
    assert bill.close(63.0) == dict.fromkeys(items_over(), 0.0) | {
        "compute": 23.0, "exposed_gather_intra": 4.0, "exposed_reduce_inter": 3.0, "data": 1.0, "other": 32.0,
    }  # fmt: skip
    assert bill.close(5.0)["other"] == 5.0  # a new iteration starts empty


def test_a_bill_tells_the_links_of_every_level_apart() -> None:
    bill = TimeBill(Clock(), links_of(1))
    bill.add("exposed_reduce_inter_rack", 3.0)
    found = bill.close(4.0)
    assert found["exposed_reduce_inter_rack"] == 3.0 and tuple(found) == items_over(links_of(1))
    assert {*items_over(links_of(1))} - {*items_over()} == {n for n in found if n.endswith("_rack")}
    assert "exposed_outer" in found and "exposed_tp_inter_rack" not in found


def test_time_bill_refuses_what_does_not_add_up() -> None:
    clock = Clock()
    bill = TimeBill(clock)
    with bill.span("compute"):
        clock.tick(2.0)
    with pytest.raises(RuntimeError, match="other"):
        bill.close(1.0)
    with bill.span("compute"):
        clock.tick(2.0)
        bill.add("exposed_gather_intra", 0.5)
    with pytest.raises(RuntimeError, match="other"):
        bill.close(1.0)
    with refused("gather", "exposed_gather_intra"):
        bill.span("gather")
    with pytest.raises(ZeroDivisionError), bill.span("data"):
        _ = 1 / 0
    assert bill.close(0.0)["data"] == 0.0
    bill.add("data", 3.0)
    bill.reset()
    assert bill.close(1.0)["other"] == 1.0


def test_a_stall_of_the_device_that_passed_in_other_spans_of_the_host_ends_no_training() -> None:
    """A pause of Python's in the update: the device waits meanwhile, and both have measured these seconds."""
    clock = Clock()
    bill = TimeBill(clock)
    with bill.span("compute"):
        clock.tick(1.0)
        with bill.span("optimizer"):
            clock.tick(3.0)
        bill.add("exposed_reduce_inter", 2.4)
        bill.add("exposed_gather_inter", 0.6)
    seconds = bill.close(4.0)
    assert seconds["compute"] == seconds["other"] == 0.0 and seconds["optimizer"] == 3.0
    assert seconds["exposed_reduce_inter"] == pytest.approx(0.8)
    assert seconds["exposed_gather_inter"] == pytest.approx(0.2)
    assert sum(seconds.values()) == pytest.approx(4.0)
