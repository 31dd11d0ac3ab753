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
