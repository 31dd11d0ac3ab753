"""compare_commits.py and step_time.py --against: what counts as equal, the tables, and one run beside itself."""

from __future__ import annotations

import json
import math
import tempfile
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from benchmarks import commit_trees, compare_commits
from benchmarks.compare_commits import Row, compare, sha256, table
from benchmarks.compare_commits_cases import CASES, ITERATIONS
from benchmarks.step_time_against import Round, Turn, report
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
    if other is not None and other.dtype == torch.float32 and other.dim() == 1:
        assert (sha256(one) == sha256(two)) == (not found)


def test_numbers_that_are_none_are_compared_by_their_bits() -> None:
    nan, scalar = torch.tensor([math.nan, 1.0]), torch.tensor(3)
    assert not compare({"a": nan, "b": scalar}, {"a": nan.clone(), "b": scalar.clone()})
    (found,) = compare({"a": nan}, {"a": torch.ones(2)})
    assert found.elements == 1 and math.isnan(found.most)
    assert "by nan at most (a)" in compare_commits.verdict(Row("case", 8, 1, (found,)))


def test_the_table_says_what_differs_and_what_failed() -> None:
    one = {"master/w": torch.zeros(1000), "curve/lm_loss": torch.zeros(8)}
    two = {"master/w": torch.zeros(1000).index_fill(0, torch.arange(3), 0.25), "curve/lm_loss": torch.ones(8)}
    rows = [
        Row("alike", 8, 2),
        Row("a longer name", 8, 2, compare(one, two)),
        Row("broken", 4, failed="Traceback\nValueError: no"),
    ]
    assert [row.equal for row in rows] == [True, False, False]
    assert table(rows).splitlines() == [
        "case           iterations  tensors  result",
        "alike                   8        2  equal",
        "a longer name           8        2  11 of 1,008 elements differ (2 tensors), by 1 at most (curve/lm_loss)",
        "broken                  4        0  failed: ValueError: no",
    ]


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_every_case_is_a_command_line(case: compare_commits.Case) -> None:
    config = parse(case.words("folder"), World(case.ranks, case.ranks))
    assert config.training.train_iters == ITERATIONS and config.checkpoint.save == "folder"


def test_modules_of_another_tree_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(commit_trees.IMPORTS, "/a")
    own = {"megazero": SimpleNamespace(__file__="/a/megazero/__init__.py"), "sys": SimpleNamespace()}
    commit_trees.refuse_other_code(own)
    kernels = {"megazero.kernels": SimpleNamespace(__file__="/ab/kernels/__init__.py")}
    for modules in (own | kernels, {}):
        with pytest.raises(RuntimeError, match="not of the tree /a/"):
            commit_trees.refuse_other_code(modules)


def test_a_trees_folder_is_laid_out_as_setup_cfg_says(tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    for made in ("megazero/zero", "kernels", "benchmarks", "tests/unit"):
        (tree / made).mkdir(parents=True)
    (tree / "setup.cfg").write_text("[options]\npackage_dir =\n    megazero.kernels = kernels\n")
    for name in ("contestants.py", commit_trees.STARTED[0]):
        (tree / "benchmarks" / name).touch()
    folder = commit_trees.link_imports(tree, tmp_path / "imports")
    started = [f"benchmarks/{name}" for name in commit_trees.STARTED]
    for module, where in (
        ("megazero/kernels", tree / "kernels"),
        ("megazero/zero", tree / "megazero/zero"),
        ("tests/unit", tree / "tests/unit"),
        ("benchmarks/contestants.py", tree / "benchmarks/contestants.py"),
        *((name, commit_trees.ROOT / name) for name in started),
    ):
        assert (folder / module).resolve() == where


def test_step_times_are_compared_within_rounds() -> None:
    walls, cpus = ((1.0, 1.1), (2.0, 2.0), (4.0, 3.6)), ((2.0, 1.0), (2.0, 3.0), (2.0, 2.0))
    rounds = [
        Round(Turn(wall[0], cpu[0]), Turn(wall[1], cpu[1])) for wall, cpu in zip(walls, cpus, strict=True)
    ]
    assert report("HEAD~1", {"zero3": rounds})[1].split() == (
        [
            "zero3",
            "2.000",
            "s",
            "2.000",
            "s",
            "1.000",
            "(0.900",
            "to",
            "1.100)",
            "1.000",
            "(0.500",
            "to",
            "1.500)",
        ]
    )


needs_git = pytest.mark.skipif(
    not (commit_trees.ROOT / ".git").exists(), reason="not a checkout: there is no commit to compare with"
)


@needs_git
def test_an_unknown_commit_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert compare_commits.main(["--against", "no-such-commit"]) == 2
    assert "--against takes a commit of this checkout" in capsys.readouterr().err


@needs_git
def test_the_committed_tree_beside_this_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs, reads and removes what it made. Whether they are equal is for the program to say: the tree may have
    changes that are not committed."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    file = tmp_path / "rows.json"
    status = compare_commits.main(["--against", "HEAD", "--cases", "one rank, fp32", "--json", str(file)])
    (row,) = json.loads(file.read_text())
    assert not row["failed"] and row["tensors"] > 80 and len(row["sha256"]) == 2
    assert (status == 0) == (row["sha256"][0] == row["sha256"][1]) == (not row["differences"])
    assert list(tmp_path.iterdir()) == [file] and str(tmp_path) not in commit_trees.git("worktree", "list")
