"""The tests marked gpu, by file: how many pass."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from xml.etree import ElementTree

from benchmarks.gpu_report.record import Record
from benchmarks.gpu_report.setting import ROOT, Setting

COUNTS = ("passed", "failed", "skipped")


def run(setting: Setting, record: Record) -> None:
    if importlib.util.find_spec("pytest") is None:
        record.row(file="tests/gpu", reason="pytest is not installed (pip install pytest)")
        return
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "junit.xml"
        command = [sys.executable, "-m", "pytest", "-m", "gpu", "tests/gpu", "-p", "no:cacheprovider"]
        try:
            done = subprocess.run(
                [*command, f"--junitxml={report}"], cwd=ROOT, timeout=max(1.0, setting.left - 5)
            )
        except subprocess.TimeoutExpired:
            record.row(file="tests/gpu", reason="not done in the time of this piece")
            return
        if not report.exists():
            record.row(file="tests/gpu", reason=f"pytest ended with status {done.returncode} before any test")
            return
        tell(ElementTree.parse(report).getroot(), record)


def tell(report: ElementTree.Element, record: Record) -> None:
    """Write rows from a JUnit report, and as notes what failed and why tests were skipped."""
    counts: dict[str, Counter[str]] = {}
    for case in report.iter("testcase"):
        file = case.get("classname", "").replace(".", "/") + ".py"
        outcome = "passed"
        for kind, word in (("failure", "failed"), ("error", "failed"), ("skipped", "skipped")):
            found = case.find(kind)
            if found is None:
                continue
            outcome = word
            why = " ".join((found.get("message") or "").split())[:200].replace("|", "/")
            record.note(f"{word}{': ' + case.get('name', '') if word == 'failed' else ''}: {why}")
        counts.setdefault(file, Counter())[outcome] += 1
    for file, found in sorted(counts.items()):
        record.row(file=file, **{word: found[word] for word in COUNTS})
