"""Every program of the benchmarks can be asked for its options: what it imports and names is there."""

from __future__ import annotations

import importlib
import sys

import pytest

from tests import ROOT

PROGRAMS = [
    ".".join(file.relative_to(ROOT).with_suffix("").parts)
    for file in sorted((ROOT / "benchmarks").rglob("*.py"))
    if "harness.start(main)" in file.read_text()
]


@pytest.mark.parametrize("name", PROGRAMS)
def test_it_says_its_options(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    program = importlib.import_module(name)
    monkeypatch.setattr(sys, "argv", [name, "--help"])
    with pytest.raises(SystemExit) as ended:
        program.main()
    assert not ended.value.code and "usage:" in capsys.readouterr().out
