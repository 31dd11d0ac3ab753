"""benchmarks/harness.py: what its programs rely on."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from benchmarks import harness
from tests.messages import refused
from tests.soak.trials import run_trials


def test_turns_rotate_and_rounds_that_warm_up_are_left_out() -> None:
    order: list[str] = []

    def turn(name: str) -> int:
        order.append(name)
        return len(order)

    taken = harness.take_turns({name: lambda name=name: turn(name) for name in "abc"}, rounds=2, warm_up=1)
    assert "".join(order) == "abcbcacab"
    assert taken == {"a": [6, 8], "b": [4, 9], "c": [5, 7]}


def test_times_of_who_does_not_learn_do_not_count() -> None:
    def contestant(scale: float) -> harness.Learned:
        """Of a loss that is the same for all, with the gradient times ``scale``."""
        own, taken = torch.ones(4), []
        for _ in range(3):
            loss = own.square().sum()
            grad = 2 * own * scale
            own -= 0.1 * grad
            taken.append(harness.Taken(loss, grad.norm()))
        return harness.learned(taken)

    good = {"ours": contestant(1), "plain": contestant(1.05)}
    harness.require_training(good)
    for scale in (0, 0.5, 2, math.nan):  # no gradients, a mean over too many, a sum
        with refused("scaled", by=RuntimeError):
            harness.require_training({**good, "scaled": contestant(scale)})
    with refused("b ", "norm 0", by=RuntimeError):
        harness.require_gradients({"a": 4.0, "b": 0.0})


def test_trials_that_are_missing_run_until_one_raises(tmp_path: Path) -> None:
    def trial(number: int) -> dict[str, object]:
        if number == 5:
            raise RuntimeError("trial 5")
        return {"trial": number, "problems": []}

    store = harness.Store(tmp_path / "trials.jsonl")
    rows = run_trials(trial, 4, store, [{"trial": 1, "problems": ["known"]}], jobs=2)
    assert sorted(row["trial"] for row in rows) == [0, 1, 2, 3] and len(store.records()) == 3
    assert run_trials(trial, 9, store, rows, seconds=0) == rows
    with refused("trial 5", by=RuntimeError):
        run_trials(trial, 9, store, rows)
    assert [row["trial"] for row in store.records()][3:] == [4]


def test_a_section_is_replaced_and_the_others_stay(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# Page\n\n## One\n\nold\n\n## Two\n\nkept\n")
    harness.write_section(page, "One", "    new\n\n")
    assert page.read_text() == "# Page\n\n## One\n\n    new\n\n## Two\n\nkept\n"
    harness.write_section(page, "Two", "last")
    assert page.read_text() == "# Page\n\n## One\n\n    new\n\n## Two\n\nlast\n"
    assert harness.section(page, "One") == "    new"
    with refused("page.md", "Three"):
        harness.write_section(page, "Three", "text")


def sums(factor: int) -> list[int]:
    """On each of two ranks."""
    import torch
    import torch.distributed as dist

    if not factor:
        raise ValueError("no factor")
    row = torch.tensor(factor * (dist.get_rank() + 1))
    dist.all_reduce(row)
    return [int(row), harness.ranks_per_node()]


@pytest.mark.slow
def test_ranks_run_a_function_and_say_why_it_failed() -> None:
    assert harness.run(sums, 5) == [15, 2]
    with refused("no factor", by=RuntimeError):
        harness.run(sums, 0)
