"""A few trials of the soak. More of them: python -m tests.soak.random_kills --help."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests import ROOT

SOAKS = (
    "random_kills --trials 2",
    "random_kills --trials 2 --experts",
)


@pytest.mark.slow
@pytest.mark.parametrize("words", SOAKS)
def test_nothing_goes_wrong(words: str, tmp_path: Path) -> None:
    out = tmp_path / "rows.jsonl"
    name, *rest = words.split()
    command = [sys.executable, "-m", f"tests.soak.{name}", *rest, "--out", str(out)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1200)
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert rows and not [row["problems"] for row in rows if row["problems"]]
    assert done.returncode == 0, done.stdout + done.stderr
