"""The table of seeded faults fits the code, and the tests for them are found and run."""

from __future__ import annotations

import ast
import time
from pathlib import Path

import pytest

from tests import ROOT
from tests.mutations import Mutation, mutations, nearest_tests, run_tests


@pytest.mark.parametrize("path", sorted({each.path for each in mutations()}))
def test_every_mutation_is_still_one_change(path: str) -> None:
    text = (ROOT / path).read_text()
    for mutation in mutations([path]):
        mutated = mutation.apply(text)
        assert ast.dump(ast.parse(mutated)) != ast.dump(ast.parse(text)), mutation.old
    assert nearest_tests(path), "no test loads it"


def test_a_text_that_is_not_there_once_is_refused() -> None:
    for old in ("gone", "once"):
        with pytest.raises(ValueError, match="times, not once"):
            Mutation("module.py", old, "", "").apply("once, and once more")


def test_the_nearest_tests_come_first() -> None:
    tests = nearest_tests("megazero/comm/lane.py")
    assert tests[0].name == "test_lane.py"
    places = [test.relative_to(ROOT / "tests").parts[0] for test in tests]
    assert places == sorted(places, reverse=True) and set(places) == {"unit", "dist"}, "of one process first"
    assert ROOT / "tests/unit/checkpoint/test_boxes.py" in nearest_tests("megazero/checkpoint/placement.py")


@pytest.mark.slow
def test_what_hangs_is_killed_and_what_fails_is_named(tmp_path: Path) -> None:
    (folder := tmp_path / "tests").mkdir()
    (folder / "test_bad.py").write_text(
        "def test_good(): pass\ndef test_bad(): assert False\ndef test_no(): pass\n"
    )
    outcome = run_tests(tmp_path, ["tests/test_bad.py"], 60)
    assert outcome.failed == "tests/test_bad.py::test_bad" and outcome.last.endswith("test_bad")
    child = folder / "child"
    (folder / "test_hangs.py").write_text(
        "import subprocess, time\n"
        f"def test_hangs():\n    child = subprocess.Popen(['sleep', '600'])\n"
        f"    open({str(child)!r}, 'w').write(str(child.pid))\n    time.sleep(600)\n"
    )
    for limit_s in (4, 16, 64):  # a busy machine may not come to the test in less
        outcome = run_tests(tmp_path, ["tests/test_hangs.py"], limit_s)
        if child.exists():
            break
    assert not outcome.failed and outcome.last == "tests/test_hangs.py::test_hangs"
    pid = int(child.read_text())
    for _ in range(100):
        state = Path(f"/proc/{pid}/stat")
        if not state.exists() or state.read_text().rpartition(")")[2].split()[0] == "Z":
            return
        time.sleep(0.05)
    raise AssertionError("what the test started goes on")
