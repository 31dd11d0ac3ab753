"""compare_commits.py and step_time.py --against: what counts as equal, the tables, and one run beside itself."""

from __future__ import annotations

import json
import math
import tempfile
from pathlib import Path

import pytest
import torch

from benchmarks import commit_trees, compare_commits
from benchmarks.compare_commits import CASES, ITERATIONS, compare
from megazero.config import World, parse

NEXT = float(torch.nextafter(torch.tensor(1.0), torch.tensor(2.0)))


@pytest.mark.parametrize(
    ("other", "elements", "most"),
    [
        (torch.tensor([1.0, 0.0, 2.0]), 0, 0.0),
        (torch.tensor([NEXT, 0.0, 2.0]), 1, 2**-23),
        (torch.tensor([1.0, -0.0, 2.5]), 2, 0.5),  # the zero's sign is another bit
        (torch.tensor([1.0, 0.0, 2.0]).double(), 3, math.inf),
        (torch.tensor([[1.0, 0.0, 2.0]]), 3, math.inf),
        (None, 3, math.inf),
    ],
)
def test_one_bit_is_a_difference(other: torch.Tensor | None, elements: int, most: float) -> None:
    same = torch.zeros(4, dtype=torch.bfloat16)
    one = {"master/w": torch.tensor([1.0, 0.0, 2.0]), "weights/v": same}
    two = {"weights/v": same.clone()} | ({} if other is None else {"master/w": other})
    found = compare(one, two)
    assert [(d.name, d.elements, d.of, d.most) for d in found] == [("master/w", elements, 3, most)] * (
        elements > 0
    )
    assert compare(two, one) == found


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_every_case_is_a_command_line(case: compare_commits.Case) -> None:
    config = parse(case.words("folder"), World(case.ranks, case.ranks))
    assert config.training.train_iters == ITERATIONS and config.checkpoint.save == "folder"


SCRIPT = """
import os, sys, types
import megazero
import torch
if "--fail" in sys.argv and os.environ["RANK"] == "1":
    raise ValueError("no such flag")
if "--mixed" in sys.argv:
    sys.modules["megazero.kernels"] = types.ModuleType("megazero.kernels")
    sys.modules["megazero.kernels"].__file__ = "/elsewhere/kernels/__init__.py"
weight, probe = torch.nn.Parameter(torch.zeros(200, 200)), torch.nn.Parameter(torch.zeros(2))
optimizers = [torch.optim.SGD([each], lr=0.1) for each in (probe, weight)]
for step in range(int(sys.argv[-1])):
    with open(sys.argv[1], "a") as file:
        file.write(".")
    for optimizer in optimizers:
        optimizer.step()
"""


@pytest.fixture
def tree(tmp_path: Path) -> commit_trees.Tree:
    """A checkout whose script takes steps."""
    for file, text in (("megazero/__init__.py", ""), ("pretrain/pretrain_gpt.py", SCRIPT)):
        (tmp_path / file).parent.mkdir()
        (tmp_path / file).write_text(text)
    return commit_trees.Tree("a tree", tmp_path)


def test_a_trees_own_script_runs_and_says_what_went_wrong(tree: commit_trees.Tree) -> None:
    file = tree.path / "steps"
    with commit_trees.TreeRanks(tree) as ranks:

        def ask(*flags: str) -> str:
            return ranks.ask({"ranks": 2, "flags": [str(file), *flags, "1"], "log": f"{tree.path}/said"})

        assert ask() == "" and file.read_text() == ".."
        assert ask("--fail").startswith("rank 1: Traceback") and ask("--fail").endswith("no such flag")
        assert "megazero.kernels from /elsewhere" in ask("--mixed"), "modules of another tree are refused"


@pytest.mark.slow
def test_a_run_pauses_after_the_steps_of_a_turn(tree: commit_trees.Tree) -> None:
    file = tree.path / "steps"
    with commit_trees.TreeRanks(tree) as ranks:
        job = {"ranks": 1, "flags": [str(file), "100"], "log": f"{tree.path}/said", "steps": 3}
        assert ranks.ask(job) == ""
        for turn in (1, 2):
            wall, cpu = ranks.ask("turn")
            assert wall > 0 and cpu > 0 and len(file.read_text()) == 1 + 3 * turn


needs_git = pytest.mark.skipif(
    not (commit_trees.ROOT / ".git").exists(), reason="not a checkout: there is no commit to compare with"
)


@needs_git
@pytest.mark.slow
def test_the_committed_tree_beside_this_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs, reads and removes what it made. Whether they are equal is for the program to say: the tree may have
    changes that are not committed. pytest -m slow tests/unit/benchmarks/test_compare_commits.py"""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    file = tmp_path / "rows.json"
    status = compare_commits.main(["--against", "HEAD", "--cases", "one rank, fp32", "--json", str(file)])
    (row,) = json.loads(file.read_text())
    assert not row["failed"] and row["tensors"] > 80 and (status == 0) == (not row["differences"])
    assert list(tmp_path.iterdir()) == [file] and str(tmp_path) not in commit_trees.git("worktree", "list")
