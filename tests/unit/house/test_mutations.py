"""The table of seeded faults fits the code, and their tests are run."""

from __future__ import annotations

import ast
import time
from pathlib import Path

import pytest

from tests import ROOT
from tests.mutations import FAILED, PASSED, Mutation, mutations, run_test


def test_every_mutation_is_still_one_change_and_its_test_is_there() -> None:
    for each in mutations():
        text = (ROOT / each.path).read_text()
        assert ast.dump(ast.parse(each.apply(text))) != ast.dump(ast.parse(text)), each.old
        file, _, name = each.test.partition("::")
        assert f"def {name}(" in (ROOT / file).read_text(), each.test


def test_a_text_that_is_not_there_once_is_refused() -> None:
    for old in ("gone", "once"):
        with pytest.raises(ValueError, match="times, not once"):
            Mutation("module.py", old, "", "", "").apply("once, and once more")


@pytest.mark.slow
def test_what_hangs_is_killed_and_what_fails_has_failed(tmp_path: Path) -> None:
    file, child = tmp_path / "test_all.py", tmp_path / "child"
    file.write_text(
        "import subprocess, time\n"
        "def test_good(): pass\n"
        "def test_bad(): assert False\n"
        f"def test_hangs():\n    child = subprocess.Popen(['sleep', '600'])\n"
        f"    open({str(child)!r}, 'w').write(str(child.pid))\n    time.sleep(600)\n"
    )
    assert (
        run_test(tmp_path, f"{file}::test_good") == PASSED
        and run_test(tmp_path, f"{file}::test_bad") == FAILED
    )
    for limit_s in (4, 16, 64):  # a busy machine may not come to the test in less
        status = run_test(tmp_path, f"{file}::test_hangs", limit_s)
        if child.exists():
            break
    assert status is None
    pid = int(child.read_text())
    for _ in range(100):
        state = Path(f"/proc/{pid}/stat")
        if not state.exists() or state.read_text().rpartition(")")[2].split()[0] == "Z":
            return
        time.sleep(0.05)
    raise AssertionError("what the test started goes on")
